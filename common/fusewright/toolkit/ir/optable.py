"""The pointwise ops of kernels: one row each, with the reference that the interpreter runs (torch's own
semantics).

All operands of an op have the same type (except the bool condition of `where`). `kinds` lists the kinds of type
for which the op exists; math on half types takes explicit casts to f32. `cost` is a rough count of vector
instructions that only drives scheduling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

F, N, B = "float", "int", "bool"


@dataclass(frozen=True, slots=True)
class OpRow:
    """One op. `result` is "same" (the operands' type) or "bool". `ref` takes and returns torch tensors."""

    name: str
    arity: int
    kinds: tuple[str, ...]
    ref: Callable[..., Any]
    result: Literal["same", "bool"] = "same"
    cost: int = 1


_ROWS = [
    OpRow("add", 2, (F, N), torch.add),
    OpRow("sub", 2, (F, N), torch.sub),
    OpRow("mul", 2, (F, N), torch.mul),
    OpRow("div", 2, (F,), torch.div, cost=4),
    OpRow("floordiv", 2, (F, N), lambda a, b: torch.div(a, b, rounding_mode="floor"), cost=10),
    OpRow("truncdiv", 2, (F, N), lambda a, b: torch.div(a, b, rounding_mode="trunc"), cost=8),
    OpRow("remainder", 2, (F, N), torch.remainder, cost=12),
    OpRow("fmod", 2, (F, N), torch.fmod, cost=12),
    OpRow("neg", 1, (F, N), torch.neg),
    OpRow("abs", 1, (F, N), torch.abs),
    OpRow("sign", 1, (F, N), torch.sign, cost=2),
    OpRow("minimum", 2, (F, N), torch.minimum, cost=3),
    OpRow("maximum", 2, (F, N), torch.maximum, cost=3),
    OpRow("fmin", 2, (F,), torch.fmin, cost=3),
    OpRow("fmax", 2, (F,), torch.fmax, cost=3),
    OpRow("sqrt", 1, (F,), torch.sqrt, cost=6),
    OpRow("rsqrt", 1, (F,), torch.rsqrt, cost=10),
    OpRow("reciprocal", 1, (F,), torch.reciprocal, cost=4),
    OpRow("exp", 1, (F,), torch.exp, cost=16),
    OpRow("exp2", 1, (F,), torch.exp2, cost=14),
    OpRow("expm1", 1, (F,), torch.expm1, cost=24),
    OpRow("log", 1, (F,), torch.log, cost=20),
    OpRow("log2", 1, (F,), torch.log2, cost=22),
    OpRow("log10", 1, (F,), torch.log10, cost=22),
    OpRow("log1p", 1, (F,), torch.log1p, cost=26),
    OpRow("tanh", 1, (F,), torch.tanh, cost=26),
    OpRow("sigmoid", 1, (F,), torch.sigmoid, cost=22),
    OpRow("erf", 1, (F,), torch.erf, cost=28),
    OpRow("erfc", 1, (F,), torch.erfc, cost=40),
    OpRow("sin", 1, (F,), torch.sin, cost=30),
    OpRow("cos", 1, (F,), torch.cos, cost=30),
    OpRow("tan", 1, (F,), torch.tan, cost=40),
    OpRow("asin", 1, (F,), torch.asin, cost=30),
    OpRow("acos", 1, (F,), torch.acos, cost=30),
    OpRow("atan", 1, (F,), torch.atan, cost=30),
    OpRow("atan2", 2, (F,), torch.atan2, cost=40),
    OpRow("sinh", 1, (F,), torch.sinh, cost=30),
    OpRow("cosh", 1, (F,), torch.cosh, cost=30),
    OpRow("asinh", 1, (F,), torch.asinh, cost=40),
    OpRow("acosh", 1, (F,), torch.acosh, cost=40),
    OpRow("atanh", 1, (F,), torch.atanh, cost=40),
    OpRow("lgamma", 1, (F,), torch.lgamma, cost=100),
    OpRow("hypot", 2, (F,), torch.hypot, cost=20),
    OpRow("pow", 2, (F, N), torch.pow, cost=60),
    OpRow("copysign", 2, (F,), torch.copysign, cost=2),
    OpRow("floor", 1, (F,), torch.floor),
    OpRow("ceil", 1, (F,), torch.ceil),
    OpRow("round", 1, (F,), torch.round),
    OpRow("trunc", 1, (F,), torch.trunc),
    OpRow("isnan", 1, (F,), torch.isnan, "bool"),
    OpRow("isinf", 1, (F,), torch.isinf, "bool", cost=2),
    OpRow("signbit", 1, (F, N), torch.signbit, "bool"),
    OpRow("eq", 2, (F, N, B), torch.eq, "bool"),
    OpRow("ne", 2, (F, N, B), torch.ne, "bool"),
    OpRow("lt", 2, (F, N, B), torch.lt, "bool"),
    OpRow("le", 2, (F, N, B), torch.le, "bool"),
    OpRow("gt", 2, (F, N, B), torch.gt, "bool"),
    OpRow("ge", 2, (F, N, B), torch.ge, "bool"),
    OpRow("and", 2, (N, B), torch.bitwise_and),
    OpRow("or", 2, (N, B), torch.bitwise_or),
    OpRow("xor", 2, (N, B), torch.bitwise_xor),
    OpRow("not", 1, (N, B), torch.bitwise_not),
    OpRow("shl", 2, (N,), torch.bitwise_left_shift, cost=3),
    OpRow("shr", 2, (N,), torch.bitwise_right_shift, cost=3),
    OpRow("where", 3, (F, N, B), torch.where),
]

OPS: dict[str, OpRow] = {r.name: r for r in _ROWS}
"""Pointwise ops by name."""

REDUCTIONS: dict[str, tuple[str, ...]] = {
    "sum": (F, N),
    "prod": (F, N),
    "max": (F, N),
    "min": (F, N),
    "argmax": (F, N),
    "argmin": (F, N),
    "any": (B,),
    "all": (B,),
    "mean": (F,),
    "m2": (F,),
}
"""Reductions and the kinds of their operand. `mean` and `m2` (sum of squared deviations from the mean) use
Welford's update, so they need one pass. `argmax`/`argmin` return an i64 position in the row: the first of equal
elements; NaN wins."""

SCANS: tuple[str, ...] = ("sum", "prod", "max", "min", "step")
"""Inclusive scans along the (single) row axis. `step` is a recurrence, whose steps run in order."""

ACCUMULATE: tuple[str, ...] = ("", "add", "mul", "max", "min")
"""How a store combines with the buffer's content; "" overwrites it."""
