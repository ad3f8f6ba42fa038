"""Reduction and scan rows: one or more dimensions are reduced, or scanned."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusewright.ops import dtype_rules as dt
from fusewright.ops import shape_rules as sh
from fusewright.ops.core import Kind, Op, row
from fusewright.ops.semantics import coupled, steps
from fusewright.ops.semantics.recurrence import in_steps, linear_scan
from fusewright.ops.semantics.steps import pointwise_scan
from fusewright.ops.table.pointwise import wide

_op = partial(row, Kind.REDUCTION)
_scan = partial(row, Kind.SCAN)


def sum_ref(x: Any, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return torch.sum(x, dim, keepdim, dtype=wide(dtype))


def mean_ref(x: Any, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return torch.mean(x, dim, keepdim, dtype=wide(dtype))


def prod_ref(x: Any, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return torch.prod(x, dim, keepdim, dtype=wide(dtype))


def prod_all_ref(x: Any, *, dtype: torch.dtype | None = None) -> Any:
    return torch.prod(x, dtype=wide(dtype))


def var_ref(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return torch.var(x, dim, correction=1 if correction is None else correction, keepdim=keepdim)


def std_ref(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return var_ref(x, dim, correction=correction, keepdim=keepdim).sqrt()


def var_mean_ref(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return var_ref(x, dim, correction=correction, keepdim=keepdim), torch.mean(x, dim, keepdim)


def norm_ref(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return torch.linalg.vector_norm(x, ord, dim, keepdim, dtype=wide(dtype))


def any_ref(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return torch.any(x, dim, keepdim) if dim is not None else _all_dims(torch.any(x), x, keepdim)


def all_ref(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return torch.all(x, dim, keepdim) if dim is not None else _all_dims(torch.all(x), x, keepdim)


def _all_dims(out: Any, x: Any, keepdim: bool) -> Any:
    return out.reshape((1,) * x.dim()) if keepdim else out


def cumsum_ref(x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    return torch.cumsum(x, dim, dtype=wide(dtype))


def cumprod_ref(x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    return torch.cumprod(x, dim, dtype=wide(dtype))


def sort_ref(x: Any, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
    return torch.sort(x, stable=bool(stable), dim=dim, descending=descending)




def _per_result(rule: Any) -> Any:
    """A rule of one output, for as many as a step has results."""
    def each(a: Any) -> tuple[Any, ...]:
        return tuple(rule(a)) * coupled.results(a["step"])

    each.__name__ = f"{rule.__name__}, per result of step"
    return each


_VALUES_INDICES = dt.dtypes(dt.SELF, dt.INT64)

# fmt: off
ROWS: tuple[Op, ...] = (
    _op("sum", "aten::sum.dim_IntList", dt.accumulated, sh.reduced(), sum_ref, "sum over dim"),
    _op("mean", "aten::mean.dim", dt.attr_or_self, sh.reduced(), mean_ref, "sum over dim / count"),
    _op("prod", "aten::prod.dim_int", dt.accumulated, sh.reduced(), prod_ref, "product over one dim"),
    _op("prod_all", "aten::prod", dt.accumulated, sh.scalar_shape, prod_all_ref, "product of all elements"),
    _op("amax", "aten::amax", dt.SELF, sh.reduced(), torch.amax, "largest over dim; NaN wins"),
    _op("amin", "aten::amin", dt.SELF, sh.reduced(), torch.amin, "smallest over dim; NaN wins"),
    _op("max_with_indices", "aten::max.dim", _VALUES_INDICES, sh.reduced(2), torch.max,
        "largest over one dim, and where"),
    _op("min_with_indices", "aten::min.dim", _VALUES_INDICES, sh.reduced(2), torch.min,
        "smallest over one dim, and where"),
    _op("argmax", "aten::argmax", dt.INT64, sh.reduced(), torch.argmax,
        "index of the largest; of the flattened input without dim"),
    _op("argmin", "aten::argmin", dt.INT64, sh.reduced(), torch.argmin,
        "index of the smallest; of the flattened input without dim"),
    _op("any", "aten::any.dims", dt.truth, sh.all_any_dims, any_ref, "whether some element over dim is true"),
    _op("all", "aten::all.dims", dt.truth, sh.all_any_dims, all_ref, "whether every element over dim is true"),
    _op("var", "aten::var.correction", dt.magnitude, sh.reduced(), var_ref,
        "sum((self - mean)^2) / (count - correction)"),
    _op("std", "aten::std.correction", dt.magnitude, sh.reduced(), std_ref, "square root of var"),
    _op("var_mean", "aten::var_mean.correction", dt.dtypes(dt.magnitude, dt.SELF), sh.reduced(2), var_mean_ref,
        "var and mean"),
    _op("vector_norm", "aten::linalg_vector_norm", dt.magnitude_or_attr, sh.reduced(), norm_ref,
        "(sum |self|^ord)^(1/ord) over dim"),
    _op("logsumexp", "aten::logsumexp", dt.FLOAT, sh.reduced(), torch.logsumexp,
        "log(sum(exp(self))) over dim"),
    _scan("cumsum", "aten::cumsum", dt.accumulated, sh.SAME, cumsum_ref, "running sum along dim"),
    _scan("cumprod", "aten::cumprod", dt.accumulated, sh.SAME, cumprod_ref, "running product along dim"),
    _scan("linear_scan", "fusewright::linear_scan", dt.dtype_of("b"), sh.shape_of("b"), linear_scan,
        "h[t] = a[t] * h[t - 1] + b[t] along dim, from initial, or from h[0] = b[0] if that is none",
        "Blelloch, Prefix Sums and Their Applications, 1990, section 1.4", in_steps),
    _scan("pointwise_scan", "fusewright::pointwise_scan", dt.dtype_of("initial"), sh.shape_of("x"), pointwise_scan,
        "h[t] = step(h[t - 1], x[t], ...) along dim, from initial; step is an expression of pointwise rows",
        "Python itertools.accumulate", steps.in_steps),
    _scan("coupled_scan", "fusewright::coupled_scan", _per_result(dt.dtype_of("initial")), _per_result(sh.shape_of("x")),
        coupled.coupled_scan, "n[t] = step(h[t], x[t], ...) along dim of several states h, the first results of t - 1, or initial",
        "JAX lax.scan", coupled.in_steps),
    _scan("cummax", "aten::cummax", _VALUES_INDICES, sh.shape_of("self", 2), torch.cummax,
        "running maximum along dim, and where"),
    _scan("logcumsumexp", "aten::logcumsumexp", dt.SELF, sh.SAME, torch.logcumsumexp,
        "log of the running sum of exponentials"),
    _scan("sort", "aten::sort.stable", _VALUES_INDICES, sh.shape_of("self", 2), sort_ref,
        "sorted along dim, and from where"),
    _scan("topk", "aten::topk", _VALUES_INDICES, sh.top_k, torch.topk,
        "the k largest (or smallest) along dim, and where"),
)
# fmt: on
