"""Sample calls for every row of the opset, as data: row name -> calls, with tensors described by `T`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten
F64, F32, BF16, I64, BOOL = torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool
FLOATS = (F64, F32, BF16)
NUMBERS = (*FLOATS, I64)
ALL = (*NUMBERS, BOOL)
INTEGERS = (I64, BOOL)
ANY = (F32,)  # for ops whose values depend on no input


class NotFinite(Exception):
    """The values of a sample do not exist in the dtype under test."""


@dataclass(frozen=True)
class T:
    """A tensor to be made: `dtype` None means the dtype under test. `low`/`high` bound uniform values, else normal ones."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    low: float | None = None
    high: float | None = None
    values: Sequence[Any] | None = None
    channels_last: bool = False

    def make(self, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
        d = self.dtype or dtype
        if self.values is not None:
            if not d.is_floating_point and any(v in (math.inf, -math.inf) or v != v for v in self.values):
                raise NotFinite
            return torch.tensor(self.values, dtype=d).reshape(self.shape)
        if d == torch.bool:
            return torch.rand(self.shape, generator=g) > 0.5
        if not d.is_floating_point and not d.is_complex:
            low, high = (-5, 6) if self.low is None else (int(self.low), int(self.high or 6))
            return torch.randint(low, max(high, low + 1), self.shape, generator=g).to(d)
        if self.low is not None and self.high is not None:
            x = torch.rand(self.shape, generator=g, dtype=F64) * (self.high - self.low) + self.low
        else:
            x = torch.randn(self.shape, generator=g, dtype=F64)
        x = x.to(d)
        return x.to(memory_format=torch.channels_last) if self.channels_last else x


def t(*shape: int, low: float | None = None, high: float | None = None, **kw: Any) -> T:
    return T(shape, low=low, high=high, **kw)


def index(*shape: int, size: int) -> T:
    """Indices below `size`."""
    return T(shape, I64, 0, size)


def mask(*shape: int) -> T:
    return T(shape, BOOL)


def given(*values: Any, dtype: torch.dtype | None = None) -> T:
    return T((len(values),), dtype, values=values)


DTYPE = object()
"""Stands for the dtype under test among the arguments of a call."""


@dataclass(frozen=True)
class Case:
    """One call. `finish` makes the final arguments out of the made ones: what a forward op saves for its backward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    finish: Callable[..., list[Any]] | None = None

    def make(self, dtype: torch.dtype, seed: int = 0) -> tuple[list[Any], dict[str, Any]]:
        g = torch.Generator().manual_seed(seed)
        args, kwargs = [_made(a, dtype, g) for a in self.args], {k: _made(v, dtype, g) for k, v in self.kwargs.items()}
        return (args if self.finish is None else self.finish(*args)), kwargs


def _made(x: Any, dtype: torch.dtype, g: torch.Generator) -> Any:
    if isinstance(x, T):
        return x.make(dtype, g)
    if x is DTYPE:
        return dtype
    return [_made(y, dtype, g) for y in x] if isinstance(x, list) else x


def c(*args: Any, **kwargs: Any) -> Case:
    return Case(args, kwargs)


def saved(finish: Callable[..., list[Any]], *args: Any) -> Case:
    return Case(args, {}, finish)


def _group_norm(grad: Any, x: Any, w: Any) -> list[Any]:
    _, mean, rstd = aten.native_group_norm(x, w, None, 2, 4, 36, 2, 1e-5)
    return [grad, x, mean, rstd, w, 2, 4, 36, 2, [True, True, True]]


def _batch_norm(train: bool) -> Callable[..., list[Any]]:
    def finish(grad: Any, x: Any, w: Any, mean: Any, var: Any) -> list[Any]:
        _, m, r, *_ = aten._native_batch_norm_legit_functional(x, w, None, mean, var, train, 0.1, 1e-5)
        return [grad, x, w, mean, var, m, r, train, 1e-5, [True, True, True]]

    return finish


def _attention(grad: Any, q: Any, k: Any, v: Any, causal: bool) -> list[Any]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return [grad, q, k, v, out, lse, 0.0, causal]


def _weight_norm(grad: Any, v: Any, g: Any, dim: int) -> list[Any]:
    return [grad, v, g, aten._weight_norm_interface(v, g, dim)[1], dim]


def _max_pool(grad: Any, x: Any, *window: Any) -> list[Any]:
    return [grad, x, *window, aten.max_pool2d_with_indices(x, *window)[1]]


X, Y, V = t(3, 4), t(3, 4), t(4)
POS = t(3, 4, low=1, high=4)
UNIT = t(3, 4, low=-0.9, high=0.9)
SPECIAL = given(0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.5, 2.5)
IMAGE = t(2, 4, 6, 6)
LAST = t(2, 4, 6, 6, channels_last=True)
HEADS = (t(2, 4, 5, 8), t(2, 4, 7, 8), t(2, 4, 7, 8))

UNARY = {name: (c(X), c(SPECIAL), c(t())) for name in (
    "abs neg sign sgn ceil floor round trunc frac exp exp2 expm1 sin cos tan asinh atan sinh cosh tanh sigmoid erf erfc "
    "relu isnan isinf signbit logical_not silu mish hardswish hardsigmoid leaky_relu elu softplus alias"
).split()}  # fmt: skip
UNARY |= {name: (c(POS),) for name in "sqrt rsqrt reciprocal log log2 log10 log1p acosh lgamma digamma".split()}
UNARY["acosh"] = (c(t(3, 4, low=1.1, high=3)),)
UNARY |= {name: (c(UNIT),) for name in "asin acos atanh erfinv".split()}
UNARY["bitwise_not"] = (c(X),)

BINARY = {name: (c(X, Y), c(X, V), c(t(), Y), c(X, t(3, 4, dtype=F64))) for name in (
    "add sub mul eq ne lt le gt ge"
).split()}  # fmt: skip
for name in ("add", "sub", "mul"):
    BINARY[name] += (c(X, 2), c(X, 2.5, alpha=3) if name != "mul" else c(X, 2.5))
BINARY |= {f"{name}_scalar": (c(X, 2), c(X, 0.1)) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
BINARY |= {name: (c(X, Y), c(X, V)) for name in (
    "maximum minimum fmax fmin atan2 hypot logaddexp logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor"
).split()}  # fmt: skip
BINARY |= {f"bitwise_{name}_scalar": (c(X, 5),) for name in ("and", "or", "xor")}
BINARY |= {name: (c(X, POS), c(POS, t(4, low=1, high=5))) for name in ("div", "fmod", "remainder", "copysign")}
BINARY["div"] += (c(X, 2), c(X, 2.5))
BINARY |= {f"{name}_scalar": (c(X, 2), c(X, -3)) for name in ("fmod", "remainder", "copysign")}
BINARY |= {f"bitwise_{d}_shift": (c(t(3, 4, low=0, high=9), t(4, low=0, high=4)),) for d in ("left", "right")}
BINARY |= {f"bitwise_{d}_shift_scalar": (c(t(3, 4, low=0, high=9), 2),) for d in ("left", "right")}

REDUCTIONS = {name: (c(X, [1], False), c(t(2, 3, 4), [0, 2], True), c(X, [], False)) for name in (
    "sum mean amax amin"
).split()}  # fmt: skip
REDUCTIONS["sum"] += (c(X, None), c(X, [0], dtype=F32))
ONE_DIM = {name: (c(X, 1), c(t(2, 3, 4), -2, True)) for name in (
    "max_with_indices min_with_indices argmax argmin prod"
).split()}  # fmt: skip
ALONG = {name: (c(X, 1), c(t(2, 3, 4), 0), c(t(), 0)) for name in ("cumsum", "cumprod", "cummax", "logcumsumexp")}
MOMENTS = {name: (c(X), c(t(2, 3, 4), [1, 2], correction=0, keepdim=True), c(X, [0], correction=1)) for name in (
    "var std var_mean"
).split()}  # fmt: skip

CASES: dict[str, tuple[Case, ...]] = {
    # Eager's fp32 kernel of gelu gives NaN at infinity where its fp64 kernel gives infinity: the row leaves it open.
    "gelu": (c(X), c(X, approximate="tanh"), c(given(0.0, -0.0, math.nan, 9.0, -9.0))),
    **UNARY,
    **BINARY,
    **REDUCTIONS,
    **ONE_DIM,
    **ALONG,
    **MOMENTS,
    # pointwise
    "rsub": (c(X, 2), c(X, 1.5, 2)),
    "div_rounded": (c(X, POS, rounding_mode="floor"), c(X, 2, rounding_mode="trunc"), c(X, POS, rounding_mode="trunc")),
    "pow": (c(POS, t(4, low=0, high=3)),),
    "pow_scalar": (c(POS, 2), c(POS, 3)),
    "scalar_pow": (c(2, t(3, 4, low=0, high=3)),),
    "clamp": (c(X, -1, 1), c(X, None, 0), c(SPECIAL, -1, 1)),
    "clamp_tensor": (c(X, t(4, low=-2, high=0), t(4, low=0, high=2)), c(X, None, V)),
    "addcmul": (c(X, Y, V), c(X, Y, Y, value=2)),
    "addcdiv": (c(X, Y, POS), c(X, Y, POS, value=2)),
    "lerp": (c(X, Y, t(4, low=0, high=1)),),
    "lerp_scalar": (c(X, Y, 0.3), c(X, Y, 0.7)),
    "where": (c(mask(3, 4), X, V), c(mask(4), X, t(dtype=F64))),
    "masked_fill": (c(X, mask(3, 4), 2), c(V, mask(3, 4), 1)),
    "masked_fill_tensor": (c(X, mask(4), t()),),
    "cast": (c(X, dtype=F32), c(t(3, 4, low=-9, high=9), dtype=I64), c(X, dtype=BOOL), c(X, dtype=BF16), c(X)),
    "clone": (c(X), c(LAST), c(LAST, memory_format=torch.contiguous_format)),
    "copy": (c(X, V), c(X, t(3, 4, dtype=I64))),
    # reductions and scans
    "prod_all": (c(POS),),
    "any": (c(X), c(t(2, 3, 4), [1], True), c(X, None, True), c(X, [])),
    "all": (c(X), c(t(2, 3, 4), [0, 1]), c(t(2, 3, 4), [1], True), c(X, [])),
    "vector_norm": (c(X), c(X, 1, [1], True), c(X, 2, [0])),
    "logsumexp": (c(X, [1]), c(t(2, 3, 4), [0, 2], True)),
    "sort": (c(X, stable=True), c(X, stable=True, dim=0, descending=True)),
    "topk": (c(X, 2), c(X, 1, 0, False)),
    # views
    "view": (c(X, [2, 6]), c(X, [-1]), c(t(2, 3, 4), [2, -1, 2])),
    "reshape": (c(X, [2, 6]), c(X, [4, -1])),
    "expand": (c(t(3, 1), [2, 3, 4]), c(t(3, 1), [-1, 5])),
    "permute": (c(t(2, 3, 4), [2, 0, 1]), c(t(2, 3, 4), [-1, 0, 1])),
    "transpose": (c(t(2, 3, 4), 0, -1),),
    "t": (c(X), c(V)),
    "squeeze": (c(t(2, 1, 3, 1), [1, 2, -1]), c(t(1, 3), [0])),
    "unsqueeze": (c(X, 0), c(X, -1)),
    "slice": (c(X, 1, 1, 3), c(X, 0, 0, 2**63 - 1, 2), c(X, 1, -3, -1), c(X), c(X, 1, 3, 1), c(X, 0, 1, 99)),
    "select": (c(X, 0, 1), c(t(2, 3, 4), -1, -2)),
    "split": (c(X, 2, 1), c(X, 2)),
    "split_with_sizes": (c(X, [1, 3], 1), c(X, [1, 0, 2])),
    "unbind": (c(X), c(X, 1)),
    "diagonal": (c(X), c(t(2, 3, 4), 1, 0, 2), c(t(3, 5), -1)),
    "unfold": (c(X, 1, 2, 1), c(t(2, 7), -1, 3, 2)),
    "as_strided": (c(X, [2, 2], [4, 1], 1),),
    "view_dtype": (c(t(3, 4, dtype=F32), torch.int32), c(t(3, 4, dtype=F32), torch.int16), c(t(3, 4, dtype=BF16), F32)),
    "view_as_real": (c(t(3, 4, dtype=torch.complex64)),),
    "view_as_complex": (c(t(3, 2, dtype=F32)),),
    # contractions
    "mm": (c(t(3, 5), t(5, 4)),),
    "bmm": (c(t(2, 3, 5), t(2, 5, 4)),),
    "addmm": (c(V, t(3, 5), t(5, 4)), c(X, t(3, 5), t(5, 4), beta=2, alpha=3), c(X, t(3, 5), t(5, 4), beta=0)),
    "baddbmm": (c(t(2, 3, 4), t(2, 3, 5), t(2, 5, 4), beta=2), c(t(1, 3, 4), t(2, 3, 5), t(2, 5, 4))),
    "addbmm": (c(X, t(2, 3, 5), t(2, 5, 4), alpha=2),),
    "mv": (c(X, V),),
    "addmv": (c(t(3), X, V, beta=2),),
    "dot": (c(V, V),),
    "conv": (
        c(IMAGE, t(8, 4, 3, 3), t(8), [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
        c(LAST, t(8, 2, 3, 3), None, [1, 1], [1, 1], [2, 2], False, [0, 0], 2),
        c(t(2, 4, 9), t(6, 4, 3), t(6), [1], [0], [1], False, [0], 1),
        c(t(2, 4, 5, 5), t(4, 6, 3, 3), t(6), [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    ),
    # gather and scatter
    "gather": (c(X, 1, index(3, 2, size=4)), c(X, 0, index(2, 4, size=3))),
    "index": (
        c(X, [index(2, size=3)]), c(t(2, 3, 4), [None, index(2, 2, size=3)]), c(X, [index(2, 1, size=3), index(5, size=4)]),
        c(t(2, 3, 4), [index(2, size=2), None, index(2, size=4)]),
    ),
    "index_select": (c(X, 1, index(6, size=4)), c(X, 0, index(2, size=3))),
    "cat": (c([X, t(2, 4)]), c([X, t(3, 2)], -1), c([X, t(3, 4, dtype=F64)], 0), c([t(0), X])),
    "stack": (c([X, Y]), c([X, Y], -1)),
    "constant_pad_nd": (c(X, [1, 2]), c(X, [1, -1, 2, 0], 3)),
    "reflection_pad2d": (c(IMAGE, [1, 2, 0, 1]),),
    "replication_pad2d": (c(IMAGE, [1, 2, 0, 1]),),
    "roll": (c(X, [1], [1]), c(X, [1, 2], [0, 1]), c(X, [3])),
    "flip": (c(X, [0]), c(X, [0, -1])),
    "repeat": (c(X, [2, 1, 3]),),
    "tril": (c(X), c(t(2, 3, 4), 1)),
    "triu": (c(X), c(X, -1)),
    "bucketize": (c(X, given(-1.0, 0.0, 1.0)), c(X, given(-1.0, 0.0, 1.0), out_int32=True, right=True)),
    "scatter": (c(X, 1, T((3, 2), I64, values=[0, 1, 1, 2, 3, 0]), t(3, 2)),),
    "scatter_value": (c(X, 1, index(3, 2, size=4), 2),),
    "scatter_add": (c(X, 1, index(3, 2, size=4), t(3, 2)),),
    "scatter_reduce": tuple(
        c(X, 1, index(3, 5, size=4), t(3, 5), reduce, include_self=own)
        for reduce in ("sum", "prod", "mean", "amax", "amin") for own in (True, False)
    ),
    "index_put": (
        c(X, [given(2, 0, dtype=I64)], t(2, 4)), c(X, [given(2, 0, 2, dtype=I64)], t(4), True),
        c(t(2, 3, 4), [None, given(2, 0, dtype=I64)], t(2, 2, 4)), c(X, [mask(3, 4)], t()),
    ),
    "index_add": (c(X, 0, given(2, 0, 2, dtype=I64), t(3, 4)), c(X, 1, given(1, dtype=I64), t(3, 1), alpha=2)),
    "index_copy": (c(X, 0, given(2, 0, dtype=I64), t(2, 4)),),
    "index_fill": (c(X, 1, given(2, 0, dtype=I64), 1),),
    "slice_scatter": (c(X, t(3, 2), 1, 1, 3), c(X, t(2, 4), 0, 0, 3, 2)),
    "select_scatter": (c(X, t(4), 0, 1),),
    "diagonal_scatter": (c(X, t(3)), c(X, t(2), -1)),
    "as_strided_scatter": (c(X, t(2, 2), [2, 2], [4, 1], 1),),
    "masked_scatter": (c(X, mask(3, 4), t(12)), c(X, mask(4), t(12))),
    # creation and random
    "arange": (c(0, 5), c(1, 9, 3), c(0.0, 2.0, 0.5), c(5, 0, -2), c(0, 4, dtype=F32)),
    "full": (c([2, 3], 1.5), c([2], 3), c([2], True), c([2], 3, dtype=F32)),
    "full_like": (c(X, 2), c(LAST, 1), c(X, 2, dtype=I64)),
    "fill": (c(X, 2),),
    "fill_tensor": (c(X, t()),),
    "new_full": (c(X, [2, 3], 1), c(X, [2], 2, dtype=F32)),
    "empty": (c([2, 3]), c([2], dtype=I64)),
    "empty_like": (c(X), c(X, dtype=I64)),
    "empty_strided": (c([2, 3], [1, 2]),),
    "new_empty": (c(X, [2, 3]),),
    "new_empty_strided": (c(X, [2, 3], [1, 2]),),
    "scalar_tensor": (c(1.5), c(2, dtype=I64)),
    "linspace": (c(0, 1, 5), c(-1.0, 1.0, 3, dtype=F64)),
    "eye": (c(3, 4),),
    "rand": (c([2, 3]), c([2], dtype=F64)),
    "randn": (c([2, 3]),),
    "rand_like": (c(t(3, 4, dtype=F32)),),
    "randn_like": (c(t(3, 4, dtype=F32)), c(t(3, 4, dtype=F32), dtype=F64)),
    "randint": (c(2, 9, [3]), c(0, 2, [3], dtype=F32)),
    "randperm": (c(5),),
    "bernoulli": (c(t(3, 4, dtype=F32, low=0, high=1)),),
    "bernoulli_p": (c(t(3, 4, dtype=F32), 0.3),),
    "uniform": (c(t(3, 4, dtype=F32)), c(t(3, 4, dtype=BF16), -1.0, 1.0)),
    "normal": (c(t(3, 4, dtype=F32), 1.0, 2.0),),
    "exponential": (c(t(3, 4, dtype=F32)),),
    "multinomial": (c(t(3, 4, dtype=F32, low=0.1, high=1), 2),),
    "dropout": (c(t(3, 4, dtype=F32), 0.3, True), c(t(3, 4, dtype=F32), 0.3, False)),
    # composites
    "linear": (c(t(2, 3, 5), t(4, 5), t(4)), c(t(3, 5), t(4, 5)), c(t(5), t(4, 5), t(4)), c(t(2, 3, 5), t(5))),
    "matmul": (
        c(t(3, 5), t(5, 4)), c(t(2, 3, 5), t(5, 4)), c(t(2, 1, 3, 5), t(4, 5, 6)), c(t(5), t(5)), c(t(5), t(2, 5, 3)),
        c(t(2, 3, 5), t(5)),
    ),
    "sdpa": (
        c(*HEADS), c(*HEADS, mask(2, 1, 5, 7)), c(*HEADS, t(5, 7)), c(*HEADS, None, 0.0, True), c(*HEADS, scale=0.5),
        c(t(2, 4, 5, 8), t(2, 2, 5, 8), t(2, 2, 5, 8), None, 0.0, True, enable_gqa=True),
        c(*HEADS, T((5, 7), BOOL, values=[[i != 2] * 7 for i in range(5)])),
    ),
    "sdpa_with_lse": (c(*HEADS), c(*HEADS, 0.0, True), c(*HEADS, attn_mask=t(2, 1, 5, 7), scale=0.5),
                      c(t(2, 4, 5, 8), t(2, 2, 5, 8), t(2, 2, 5, 8))),
    "softmax": (c(X, -1, False), c(t(2, 3, 4), 1, False)),
    "safe_softmax": (c(X, -1), c(given(-math.inf, -math.inf), 0)),
    "log_softmax": (c(X, -1, False), c(t(2, 3, 4), 0, False)),
    "layer_norm": (c(X, [4], V, t(4), 1e-5), c(t(2, 3, 4), [3, 4], None, None, 1e-5), c(X, [4], V, None, 1e-5)),
    "rms_norm": (c(X, [4], V, 1e-6), c(t(2, 3, 4), [4], None, 1e-5)),
    "group_norm": (c(IMAGE, t(4), t(4), 2, 4, 36, 2, 1e-5), c(IMAGE, None, None, 2, 4, 36, 4, 1e-5)),
    "batch_norm": (c(IMAGE, t(4), t(4), t(4), t(4, low=0.5, high=2), 0.1, 1e-5),
                   c(LAST, t(4), t(4), t(4), t(4, low=0.5, high=2), 0.1, 1e-5)),
    "batch_norm_train": (c(IMAGE, t(4), t(4), t(4), t(4, low=0.5, high=2), True, 0.1, 1e-5),),
    "weight_norm": (c(t(3, 4, 5), t(3, 1, 1), 0), c(t(3, 4, 5), t(1, 1, 5), 2)),
    "log_sigmoid": (c(X),),
    "threshold": (c(X, 0.5, 2),),
    "prelu": (c(X, t(1, 4)),),
    "glu": (c(X), c(t(4, 3), 0)),
    "embedding": (c(t(7, 4), index(2, 3, size=7)), c(t(7, 4), index(5, size=7), 1)),
    "max_pool2d": (c(IMAGE, [2, 2]), c(LAST, [3, 3], [2, 2], [1, 1]), c(IMAGE, [3, 3], [2, 2], [0, 0], [1, 1], True)),
    "avg_pool2d": (c(IMAGE, [2, 2]), c(LAST, [3, 3], [2, 2], [1, 1], True, False), c(IMAGE, [2, 2], [], [0, 0], False, True, 3)),
    "avg_pool1d": (c(t(2, 4, 9), [2]), c(t(2, 4, 9), [3], [2], [1])),
    "adaptive_avg_pool2d": (c(IMAGE, [1, 1]), c(IMAGE, [4, 3])),
    "adaptive_max_pool2d": (c(IMAGE, [1, 1]), c(IMAGE, [3, 2])),
    "upsample_nearest2d": (c(IMAGE, [12, 9]), c(IMAGE, [12, 12], 2.0, 2.0)),
    "upsample_bilinear2d": (c(IMAGE, [12, 9], False), c(IMAGE, [9, 9], True)),
    "upsample_bicubic2d": (c(IMAGE, [12, 9], False),),
    "pixel_shuffle": (c(IMAGE, 2),),
    "nll_loss": tuple(c(X, given(0, 3, -100, dtype=I64), w, red, -100) for w in (None, t(4, low=0.5, high=1)) for red in (0, 1, 2)),
    "mse_loss": tuple(c(X, Y, red) for red in (0, 1, 2)),
    "smooth_l1_loss": tuple(c(X, Y, red, 0.5) for red in (0, 1, 2)),
    "bce_with_logits": (c(X, t(3, 4, low=0, high=1)), c(X, t(3, 4, low=0, high=1), V, t(4, low=0.5, high=2), 0)),
    # backward
    **{name: (c(X, Y),) for name in (
        "gelu_backward silu_backward mish_backward tanh_backward sigmoid_backward hardswish_backward hardsigmoid_backward"
    ).split()},
    "threshold_backward": (c(X, Y, 0),),
    "hardtanh_backward": (c(X, Y, -0.5, 0.5),),
    "leaky_relu_backward": (c(X, Y, 0.1, False),),
    "elu_backward": (c(X, 1.0, 1.0, 1.0, False, Y), c(X, 1.0, 1.0, 1.0, True, UNIT)),
    "softplus_backward": (c(X, Y, 1, 20),),
    "glu_backward": (c(t(3, 2), X, -1),),
    "dropout_backward": (c(X, mask(3, 4), 1.5),),
    "softmax_backward": (c(X, t(3, 4, low=0, high=1), -1, DTYPE),),
    "log_softmax_backward": (c(X, t(3, 4, low=-3, high=0), -1, DTYPE),),
    "layer_norm_backward": (c(X, Y, [4], t(3, 1), t(3, 1, low=0.5, high=2), V, t(4), [True, True, True]),
                            c(X, Y, [4], t(3, 1), t(3, 1, low=0.5, high=2), None, None, [True, False, False])),
    "rms_norm_backward": (c(X, Y, [4], t(3, 1, low=0.5, high=2), V, [True, True]),),
    "group_norm_backward": (saved(_group_norm, IMAGE, IMAGE, t(4)),),
    "batch_norm_backward": tuple(
        saved(_batch_norm(train), IMAGE, IMAGE, t(4), t(4), t(4, low=0.5, high=2)) for train in (True, False)
    ),
    "conv_backward": (
        c(t(2, 8, 3, 3), IMAGE, t(8, 4, 3, 3), [8], [2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]),
        c(t(2, 8, 6, 6), IMAGE, t(8, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 2, [False, True, False]),
    ),
    "embedding_backward": (c(t(2, 3, 4), index(2, 3, size=7), 7, -1, False), c(t(5, 4), index(5, size=3), 7, 1, True)),
    "sdpa_backward": tuple(saved(_attention, t(2, 4, 5, 8), *HEADS, causal) for causal in (False, True)),
    "nll_loss_backward": (c(t(), X, given(0, 3, -100, dtype=I64), None, 1, -100, T((), values=[2.0])),),
    "mse_loss_backward": (c(t(), X, Y, 1), c(X, X, Y, 0)),
    "smooth_l1_loss_backward": (c(t(), X, Y, 1, 0.5),),
    "weight_norm_backward": (saved(_weight_norm, t(3, 4, 5), t(3, 4, 5), t(3, 1, 1, low=0.5, high=2), 0),),
    "max_pool2d_backward": (saved(_max_pool, t(2, 4, 3, 3), IMAGE, [3, 3], [2, 2], [1, 1], [1, 1], False),),
    "avg_pool2d_backward": (c(t(2, 4, 3, 3), IMAGE, [2, 2], [2, 2], [0, 0], False, True, None),),
    "adaptive_avg_pool2d_backward": (c(t(2, 4, 4, 3), IMAGE),),
    "upsample_nearest2d_backward": (c(t(2, 4, 12, 12), [12, 12], [2, 4, 6, 6], None, None),),
    "upsample_bilinear2d_backward": (c(t(2, 4, 12, 12), [12, 12], [2, 4, 6, 6], False, None, None),),
    "upsample_bicubic2d_backward": (c(t(2, 4, 12, 12), [12, 12], [2, 4, 6, 6], False, None, None),),
    "select_backward": (c(V, [3, 4], 0, 1),),
    "slice_backward": (c(t(3, 2), [3, 4], 1, 0, 4, 2),),
    "unfold_backward": (c(t(3, 3, 2), [3, 4], 1, 2, 1),),
}  # fmt: skip

_EVERY = (
    "add mul eq ne lt le gt ge eq_scalar ne_scalar where masked_fill masked_fill_tensor cast clone copy maximum minimum any all cat stack gather index index_select "
    "view reshape expand permute transpose t squeeze unsqueeze slice select split split_with_sizes unbind diagonal unfold "
    "as_strided alias constant_pad_nd roll flip repeat tril triu embedding logical_not logical_and logical_or logical_xor "
    "sum full_like fill new_full empty_like new_empty new_empty_strided scatter scatter_value scatter_add index_put index_copy "
    "slice_scatter select_scatter diagonal_scatter as_strided_scatter masked_scatter div exp sin sqrt tanh sigmoid erf "
    "amax amin cumsum"
)
_NUMBERS = (
    "lt_scalar le_scalar gt_scalar ge_scalar fmod_scalar remainder_scalar copysign_scalar abs sub rsub neg sign sgn div_rounded fmod remainder copysign pow_scalar scalar_pow pow clamp clamp_tensor relu ceil floor trunc "
    "round isnan isinf signbit cumprod cummax sort topk prod prod_all max_with_indices min_with_indices addcmul mm bmm addmm baddbmm "
    "dot mv scatter_reduce index_add index_fill fill_tensor matmul fmax fmin bucketize exp2 expm1 log log2 rsqrt reciprocal atan2"
)
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "hardsigmoid_backward": (F32, BF16),  # eager's sixth is an fp32 constant, in fp64 too
    **dict.fromkeys(_EVERY.split(), ALL),
    **dict.fromkeys(_NUMBERS.split(), NUMBERS),
    **dict.fromkeys([f"bitwise_{n}" for n in ("not", "and", "or", "xor", "and_scalar", "or_scalar", "xor_scalar")], INTEGERS),
    **dict.fromkeys([f"bitwise_{d}_shift{s}" for d in ("left", "right") for s in ("", "_scalar")], (I64,)),
}
"""Dtypes under test by row; the floating ones for every other row."""
