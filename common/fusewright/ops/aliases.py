"""Overloads that are bitwise equivalent to a row: argument adapters to the canonical schema.

An adapter maps the alias's arguments by name to the canonical ones (missing ones take their defaults), or returns None if this
call is outside the opset. An alias of a row's own overload takes the calls that are another row's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fusewright.ops.core import Args

Adapter = Callable[[Args], dict[str, Any] | None]


@dataclass(frozen=True)
class Alias:
    """`qualname` is the row `op` after `adapter`."""

    qualname: str
    op: str
    adapter: Adapter = field(compare=False)


def alias(qualname: str, op: str, adapter: Adapter | None = None, **constants: Any) -> Alias:
    """An alias whose arguments have the canonical names, plus `constants`; or one with an adapter."""
    return Alias(qualname if "::" in qualname else f"aten::{qualname}", op, adapter or (lambda a: {**a, **constants}))


def _swap(a: Args) -> dict[str, Any]:
    return {"self": a["other"], "other": a["self"], "alpha": a["alpha"]}


def _rounded(a: Args) -> dict[str, Any] | None:
    return None if a["rounding_mode"] is None else {**a}


def _unrounded(a: Args) -> dict[str, Any] | None:
    return {"self": a["self"], "other": a["other"]} if a["rounding_mode"] is None else None


def _correction(a: Args) -> dict[str, Any]:
    return {
        "self": a["self"],
        "dim": a.get("dim"),
        "correction": int(a["unbiased"]),
        "keepdim": a.get("keepdim", False),
    }


def _softmax(a: Args) -> dict[str, Any] | None:
    return None if a["dtype"] is not None else {"self": a["self"], "dim": a["dim"], "half_to_float": False}


def _inference_batch_norm(a: Args) -> dict[str, Any] | None:
    if a["training"] or a["running_mean"] is None or a["running_var"] is None:
        return None
    return {k: v for k, v in a.items() if k != "training"}


def _batch_norm_without_statistics(a: Args) -> dict[str, Any] | None:
    if not a["training"] or a["running_mean"] is not None or a["running_var"] is not None:
        return None
    return {k: v for k, v in a.items() if k not in ("running_mean", "running_var")}


def _celu(a: Args) -> dict[str, Any] | None:
    if not a["alpha"] or _is_symbolic(a["alpha"]):
        return None  # eager refuses zero; a symbol's reciprocal would be a node of its own
    return {"self": a["self"], "alpha": a["alpha"], "scale": 1, "input_scale": 1.0 / a["alpha"]}


def _norm(a: Args) -> dict[str, Any]:
    return {"self": a["self"], "ord": 2 if a["p"] is None else a["p"], "dim": a["dim"], "keepdim": a["keepdim"]}


def _conv(a: Args) -> dict[str, Any] | None:
    if isinstance(a["padding"], str):
        return None
    zeros = [0] * len(a["stride"])
    return {**a, "transposed": False, "output_padding": zeros}


def _conv_transpose(a: Args) -> dict[str, Any]:
    return {**a, "transposed": True}


def _one_dim(a: Args) -> dict[str, Any]:
    return {**a, "dim": [a["dim"]]}


def _with_default_dtype(a: Args, **constants: Any) -> dict[str, Any]:
    return {**a, **constants, "dtype": a["dtype"] or torch.get_default_dtype()}


def _sort(a: Args) -> dict[str, Any]:
    return {**a, "stable": False}


def _hardtanh(a: Args) -> dict[str, Any] | None:
    # With float limits, hardtanh of integers returns integers and clamp floats.
    if not _is_floating(a["self"]):
        return None
    return {"self": a["self"], "min": a["min_val"], "max": a["max_val"]}


def _some_elements(a: Args) -> dict[str, Any] | None:
    # For an empty tensor, the two raise different errors.
    shape = getattr(_traced(a["self"]), "shape", ())
    return None if any(isinstance(s, int) and s == 0 for s in shape) else {**a}


def _all_dims(a: Args) -> dict[str, Any] | None:
    shape = getattr(_traced(a["self"]), "shape", None)
    return None if shape is None else {**a, "dim": list(range(len(shape)))}


def _is_floating(x: Any) -> bool:
    """Whether a tensor, or an fx node with traced metadata, is known to be floating-point."""
    dtype = getattr(_traced(x), "dtype", None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _traced(x: Any) -> Any:
    """A tensor, or the traced value of an fx node."""
    return x.meta.get("val") if isinstance(x, torch.fx.Node) else x


def _is_symbolic(x: Any) -> bool:
    """Whether a number is only known when the graph runs: an fx node, with which an adapter cannot compute."""
    return isinstance(x, torch.fx.Node)


def _narrow(a: Args) -> dict[str, Any] | None:
    if _is_symbolic(a["start"]) or _is_symbolic(a["length"]):
        return None
    return {"self": a["self"], "dim": a["dim"], "start": a["start"], "end": a["start"] + a["length"]}


def _square(a: Args) -> dict[str, Any]:
    return {"self": a["self"], "exponent": 2}


# fmt: off
ALIASES: tuple[Alias, ...] = (
    # a Python number where the canonical overload has a tensor
    *(alias(f"{n}.Scalar", n) for n in ("add", "sub", "mul", "div")),
    alias("rsub.Tensor", "sub", _swap),
    alias("div.Scalar_mode", "div_rounded", _rounded),
    *(alias(f"div.{n}_mode", "div", _unrounded) for n in ("Scalar", "Tensor")),
    alias("floor_divide", "div_rounded", rounding_mode="floor"),
    alias("floor_divide.Scalar", "div_rounded", rounding_mode="floor"),
    alias("true_divide.Tensor", "div"),
    alias("__lshift__.Tensor", "bitwise_left_shift"),
    alias("__lshift__.Scalar", "bitwise_left_shift_scalar"),
    alias("__rshift__.Tensor", "bitwise_right_shift"),
    alias("__rshift__.Scalar", "bitwise_right_shift_scalar"),
    alias("max.other", "maximum"),
    alias("min.other", "minimum"),
    alias("clamp_min", "clamp", max=None),
    alias("clamp_max", "clamp", min=None),
    alias("clamp_min.Tensor", "clamp_tensor", max=None),
    alias("clamp_max.Tensor", "clamp_tensor", min=None),
    alias("hardtanh", "clamp", _hardtanh),
    alias("relu6", "clamp", min=0, max=6),
    alias("square", "pow_scalar", _square),
    alias("special_erf", "erf"),
    alias("celu", "elu", _celu),
    alias("norm.ScalarOpt_dim", "vector_norm", _norm),
    alias("special_expit", "sigmoid"),
    alias("lift_fresh_copy", "clone"),
    alias("prims::convert_element_type", "cast", lambda a: {"self": a["a"], "dtype": a["dtype"]}),
    alias("detach", "alias"),
    # reductions over everything
    alias("sum", "sum", dim=None),
    alias("mean", "mean", dim=None),
    alias("max", "amax", _some_elements),
    alias("min", "amin", _some_elements),
    alias("any", "any"),
    alias("all", "all"),
    alias("any.dim", "any", _one_dim),
    alias("all.dim", "all", _one_dim),
    *(alias(f"{n}{o}", n, _correction) for n in ("var", "std", "var_mean") for o in ("", ".dim")),
    alias("sort", "sort", _sort),
    # softmax, convolutions, pads
    alias("softmax.int", "softmax", _softmax),
    alias("log_softmax.int", "log_softmax", _softmax),
    alias("native_batch_norm", "batch_norm", _inference_batch_norm),
    alias("native_batch_norm", "batch_norm_no_stats", _batch_norm_without_statistics),
    *(alias(f"conv{n}d", "conv", _conv) for n in (1, 2, 3)),
    alias("conv_transpose1d", "conv", _conv_transpose),
    alias("conv_transpose2d.input", "conv", _conv_transpose),
    # views
    alias("_unsafe_view", "reshape", lambda a: {"self": a["self"], "shape": a["size"]}),
    alias("unsafe_split.Tensor", "split"),
    alias("unsafe_split_with_sizes", "split_with_sizes"),
    alias("squeeze", "squeeze", _all_dims),
    alias("squeeze.dim", "squeeze", _one_dim),
    alias("swapaxes", "transpose", lambda a: {"self": a["self"], "dim0": a["axis0"], "dim1": a["axis1"]}),
    alias("narrow", "slice", _narrow),
    # creation
    alias("arange", "arange", start=0),
    alias("arange.start", "arange"),
    alias("zeros", "full", lambda a: _with_default_dtype(a, fill_value=0)),
    alias("ones", "full", lambda a: _with_default_dtype(a, fill_value=1)),
    alias("zeros_like", "full_like", fill_value=0),
    alias("ones_like", "full_like", fill_value=1),
    alias("zero", "fill", value=0),
    alias("new_zeros", "new_full", fill_value=0),
    alias("new_ones", "new_full", fill_value=1),
    alias("eye", "eye", lambda a: {**a, "m": a["n"]}),
    alias("randint", "randint", low=0),
    # indexing
    alias("_unsafe_index.Tensor", "index"),
    alias("_unsafe_index_put", "index_put"),
)
# fmt: on
