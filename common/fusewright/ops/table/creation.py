"""Creation and random rows: outputs that do not depend on tensor values. Random rows draw from torch's generator in eager's
order."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusewright.ops import dtype_rules as dt
from fusewright.ops import shape_rules as sh
from fusewright.ops.core import Kind, Op, resolve, row
from fusewright.ops.table.pointwise import wide

_op = partial(row, Kind.CREATION)


def arange_ref(start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return torch.arange(start, end, step, dtype=wide(dtype))


def full_ref(size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return torch.full(tuple(size), fill_value, dtype=wide(dtype))


def full_like_ref(x: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return torch.full(tuple(x.shape), fill_value, dtype=wide(dtype or x.dtype))


def new_full_ref(x: Any, size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return torch.full(tuple(size), fill_value, dtype=wide(dtype or x.dtype))


def empty_ref(size: Any, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Any:
    return torch.zeros(tuple(size), dtype=wide(dtype or torch.get_default_dtype()))


def empty_like_ref(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return torch.zeros(tuple(x.shape), dtype=wide(dtype or x.dtype))


def new_empty_ref(x: Any, size: Any, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Any:
    return torch.zeros(tuple(size), dtype=wide(dtype or x.dtype))


def fill_ref(x: Any, value: Any) -> Any:
    return torch.full_like(x, value.item() if isinstance(value, torch.Tensor) else value)


def scalar_tensor_ref(s: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return torch.tensor(s, dtype=wide(dtype or torch.get_default_dtype()))


def linspace_ref(start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return torch.linspace(start, end, steps, dtype=wide(dtype))


def eye_ref(n: Any, m: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return torch.eye(n, m, dtype=wide(dtype))


def _drawn(name: str, qualname: str, dtype_rule: Any, shape_rule: Any, doc: str, source: str = "") -> Op:
    # The reference of a random op is the op itself: only its draws from the generator define its values.
    def reference(*args: Any, **kwargs: Any) -> Any:
        target: Any = resolve(qualname)
        return target(*args, **kwargs)

    return row(Kind.RANDOM, name, qualname, dtype_rule, shape_rule, reference, doc, source)


_UNDEFINED = "values undefined; the reference has zeros"
_DROPOUT = dt.dtypes(dt.INPUT, dt.BOOL)

# fmt: off
ROWS: tuple[Op, ...] = (
    _op("arange", "aten::arange.start_step", dt.range_dtype, sh.range_length, arange_ref,
        "start, start + step, ... below end"),
    _op("full", "aten::full", dt.fill_dtype, sh.attr_shape(), full_ref, "filled with a number"),
    _op("full_like", "aten::full_like", dt.attr_or_self, sh.SAME, full_like_ref,
        "filled with a number, shaped and laid out as self"),
    _op("fill", "aten::fill.Scalar", dt.SELF, sh.SAME, fill_ref, "filled with a number, shaped as self"),
    _op("fill_tensor", "aten::fill.Tensor", dt.SELF, sh.SAME, fill_ref,
        "filled with a 0-dim tensor, shaped as self"),
    _op("new_full", "aten::new_full", dt.attr_or_self, sh.attr_shape(), new_full_ref,
        "filled with a number, dtype and device of self"),
    _op("empty", "aten::empty.memory_format", dt.attr_or_default, sh.attr_shape(), empty_ref, _UNDEFINED),
    _op("empty_like", "aten::empty_like", dt.attr_or_self, sh.SAME, empty_like_ref, _UNDEFINED),
    _op("empty_strided", "aten::empty_strided", dt.attr_or_default, sh.attr_shape(), empty_ref, _UNDEFINED),
    _op("new_empty", "aten::new_empty", dt.attr_or_self, sh.attr_shape(), new_empty_ref, _UNDEFINED),
    _op("new_empty_strided", "aten::new_empty_strided", dt.attr_or_self, sh.attr_shape(), new_empty_ref,
        _UNDEFINED),
    _op("scalar_tensor", "aten::scalar_tensor", dt.attr_or_default, sh.scalar_shape, scalar_tensor_ref,
        "a number as a 0-dim tensor"),
    _op("linspace", "aten::linspace", dt.attr_or_default, sh.attr_sizes("steps"), linspace_ref,
        "steps numbers from start to end"),
    _op("eye", "aten::eye.m", dt.attr_or_default, sh.attr_sizes("n", "m"), eye_ref, "ones on the diagonal"),
    _drawn("rand", "aten::rand", dt.attr_or_default, sh.attr_shape(), "uniform in [0, 1)"),
    _drawn("randn", "aten::randn", dt.attr_or_default, sh.attr_shape(), "standard normal"),
    _drawn("rand_like", "aten::rand_like", dt.attr_or_self, sh.SAME, "uniform in [0, 1), shaped as self"),
    _drawn("randn_like", "aten::randn_like", dt.attr_or_self, sh.SAME, "standard normal, shaped as self"),
    _drawn("randint", "aten::randint.low", dt.attr_or_int64, sh.attr_shape(), "integers in [low, high)"),
    _drawn("randperm", "aten::randperm", dt.attr_or_int64, sh.attr_sizes("n"), "0..n-1 shuffled"),
    _drawn("bernoulli", "aten::bernoulli", dt.SELF, sh.SAME, "one with the probability that self gives"),
    _drawn("bernoulli_p", "aten::bernoulli.p", dt.SELF, sh.SAME, "one with probability p, shaped as self"),
    _drawn("uniform", "aten::uniform", dt.SELF, sh.SAME, "uniform in [from, to), shaped as self"),
    _drawn("normal", "aten::normal_functional", dt.SELF, sh.SAME, "normal with mean and std, shaped as self"),
    _drawn("exponential", "aten::exponential", dt.SELF, sh.SAME, "exponential with rate lambd, shaped as self"),
    _drawn("multinomial", "aten::multinomial", dt.INT64, sh.drawn,
        "indices drawn with the weights that self gives"),
    _drawn("dropout", "aten::native_dropout", _DROPOUT, sh.shape_of("input", 2),
        "zero with probability p, else input / (1 - p); and the mask", "Srivastava et al., JMLR 15 (2014)"),
)
# fmt: on
