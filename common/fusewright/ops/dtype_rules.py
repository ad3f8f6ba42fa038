"""Dtype rules: small named functions from a call to the dtypes of its outputs.

Factories take argument names of the op's schema (their parameters end in an underscore).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusewright.ops.core import Args, DtypeRule, ShapeRule
from fusewright.ops.rules import device_type, is_tensor, masked_by, named, tensors, times


def scalar_dtype(x: Any) -> torch.dtype:
    """The dtype of a Python number in type promotion."""
    if isinstance(x, bool | torch.SymBool):
        return torch.bool
    if isinstance(x, int | torch.SymInt):
        return torch.int64
    return torch.complex64 if isinstance(x, complex) else torch.get_default_dtype()


def _combine(high: torch.dtype | None, low: torch.dtype | None) -> torch.dtype | None:
    if high is None or low is None:
        return high or low
    if high.is_complex or (high.is_floating_point and not low.is_complex):
        return high
    if high.is_floating_point:
        return torch.promote_types(high, torch.complex32)  # a complex number takes the precision of the float
    if high == torch.bool or low.is_floating_point or low.is_complex:
        return torch.promote_types(high, low)
    return high


def result_type(values: Sequence[Any]) -> torch.dtype:
    """Return the dtype of torch's promotion: tensors with dimensions outrank 0-dim tensors, which outrank numbers. A lower rank
    counts only if its dtype is of a higher kind, e.g. complex beside float (torch docs, "tensor attributes")."""
    ranks: list[torch.dtype | None] = [None, None, None]
    for v in values:
        if v is None:
            continue
        rank, dtype = (0 if len(v.shape) else 1, v.dtype) if is_tensor(v) else (2, scalar_dtype(v))
        held = ranks[rank]
        ranks[rank] = dtype if held is None else torch.promote_types(held, dtype)
    out = _combine(_combine(ranks[0], ranks[1]), ranks[2])
    if out is None:
        raise TypeError("promotion needs at least one tensor or number")
    return out


def _floating(d: torch.dtype) -> torch.dtype:
    return d if d.is_floating_point or d.is_complex else torch.get_default_dtype()


def promote(*args_: str) -> DtypeRule:
    """The promoted dtype of these arguments."""
    return named(lambda a: (result_type(_given(a, args_)),), f"promote({', '.join(args_)})")


def promote_float(*args_: str) -> DtypeRule:
    """As `promote`; integers become the default float."""
    return named(lambda a: (_floating(result_type(_given(a, args_))),), f"promote_float({', '.join(args_)})")


def _given(a: Args, names: Sequence[str]) -> list[Any]:
    out: list[Any] = []
    for n in names:
        out.extend(a[n] if isinstance(a[n], list | tuple) else [a[n]])
    return out


def dtype_of(arg_: str, outputs: int = 1) -> DtypeRule:
    """The dtype of one argument, for every output."""
    return named(lambda a: (next(tensors(a[arg_])).dtype,) * outputs, f"dtype_of({arg_})" + times(outputs))


def dtype_per_piece(pieces: ShapeRule) -> DtypeRule:
    """The dtype of `self`, for as many outputs as the shape rule gives."""
    return named(lambda a: (a["self"].dtype,) * len(pieces(a)), "dtype_of(self), each")


def dtypes(*parts: DtypeRule) -> DtypeRule:
    """One rule per output, side by side."""
    return named(lambda a: tuple(d for p in parts for d in p(a)), ", ".join(p.__name__ for p in parts))


def fixed(dtype: torch.dtype) -> DtypeRule:
    """Always this dtype."""
    return named(lambda a: (dtype,), str(dtype).removeprefix("torch."))


BOOL = fixed(torch.bool)
INT64 = fixed(torch.int64)
SELF = dtype_of("self")
INPUT = dtype_of("input")
PROMOTE = promote("self", "other")
FLOAT = promote_float("self")


def attr(arg_: str) -> DtypeRule:
    """The dtype that an argument names."""
    return named(lambda a: (a[arg_],), arg_)


def attr_or_int64(a: Args) -> tuple[torch.dtype]:
    """The `dtype` argument, else int64."""
    return (a["dtype"] or torch.int64,)


def index_dtype(a: Args) -> tuple[torch.dtype]:
    """int64, or int32 when `out_int32`."""
    return (torch.int32 if a["out_int32"] else torch.int64,)


def attr_or_self(a: Args) -> tuple[torch.dtype]:
    """The `dtype` argument, else the dtype of `self`."""
    return (a["dtype"] or a["self"].dtype,)


def attr_or_default(a: Args) -> tuple[torch.dtype]:
    """The `dtype` argument, else the default float."""
    return (a["dtype"] or torch.get_default_dtype(),)


def accumulated(a: Args) -> tuple[torch.dtype]:
    """The `dtype` argument, else the dtype of `self` with integers and bool widened to int64."""
    d = a["self"].dtype
    return (a["dtype"] or (d if d.is_floating_point or d.is_complex else torch.int64),)


def magnitude(a: Args) -> tuple[torch.dtype]:
    """The dtype of `self`; its real part's dtype when complex."""
    d = a["self"].dtype
    return (d.to_real() if d.is_complex else d,)


def magnitude_or_attr(a: Args) -> tuple[torch.dtype]:
    """The `dtype` argument, else the dtype of `self`; its real part's dtype when complex."""
    d = a["dtype"] or a["self"].dtype
    return (d.to_real() if d.is_complex else d,)


def truth(a: Args) -> tuple[torch.dtype]:
    """bool, except that uint8 stays uint8 (ATen any and all)."""
    return (torch.uint8 if a["self"].dtype == torch.uint8 else torch.bool,)


def fill_dtype(a: Args) -> tuple[torch.dtype]:
    """The `dtype` argument, else the dtype of the fill value."""
    return (a["dtype"] or scalar_dtype(a["fill_value"]),)


def range_dtype(a: Args) -> tuple[torch.dtype]:
    """The `dtype` argument, else int64 when start, end and step are integers, else the default float."""
    whole = all(isinstance(a[n], int | torch.SymInt) for n in ("start", "end", "step"))
    return (a["dtype"] or (torch.int64 if whole else torch.get_default_dtype()),)


def norm_stats(*weights: str, wide: bool = True) -> DtypeRule:
    """The dtypes of a norm's mean and reciprocal standard deviation: on a CPU that of its weights (the first given), elsewhere that
    of its input, or with `wide` fp32 for half types."""
    names = weights or ("weight",)

    def rule(a: Args) -> tuple[torch.dtype, torch.dtype]:
        x, w = a["input"], next((a[n] for n in names if a[n] is not None), None)
        if device_type(x) == "cpu":
            d = x.dtype if w is None else w.dtype
        else:
            d = torch.float32 if wide and x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        return d, d

    return named(rule, "norm_stats")


def masked(rule: DtypeRule) -> DtypeRule:
    """Outputs that `output_mask` turns off are absent."""
    return named(lambda a: masked_by(rule(a), a["output_mask"]), rule.__name__)
