"""View rows: the output shares the input's memory; only shape, strides and offset change."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusewright.ops import dtype_rules as dt
from fusewright.ops import shape_rules as sh
from fusewright.ops.core import Args, Kind, Op, Shape, row

_op = partial(row, Kind.VIEW)


def _view(name: str, qualname: str, shape_rule: Any, reference: Any, doc: str) -> Op:
    return _op(name, f"aten::{qualname}", dt.SELF, shape_rule, reference, doc)


def _pieces(name: str, qualname: str, shape_rule: Any, reference: Any, doc: str) -> Op:
    return _op(name, f"aten::{qualname}", dt.dtype_per_piece(shape_rule), shape_rule, reference, doc)


def view_dtype_shape(a: Args) -> tuple[Shape]:
    """The last size scaled by the ratio of the element sizes."""
    s = tuple(a["self"].shape)
    old, new = a["self"].dtype.itemsize, a["dtype"].itemsize
    return (s if old == new else (*s[:-1], s[-1] * old // new),)


def view_as_real_shape(a: Args) -> tuple[Shape]:
    """A last dimension of two."""
    return ((*a["self"].shape, 2),)


def view_as_complex_shape(a: Args) -> tuple[Shape]:
    """Without the last dimension."""
    return (tuple(a["self"].shape[:-1]),)


def complex_dtype(a: Args) -> tuple[torch.dtype]:
    """The complex dtype with parts of the dtype of `self`."""
    return (a["self"].dtype.to_complex(),)


def view_ref(x: Any, size: Any) -> Any:
    return x.reshape(size)


def expand_ref(x: Any, size: Any, *, implicit: bool = False) -> Any:
    return x.expand(size)


def unfold_ref(x: Any, dimension: int, size: int, step: int) -> Any:
    return x.unfold(dimension, size, step)


def slice_ref(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    return x[(slice(None),) * (dim % max(x.dim(), 1)) + (slice(start, end, step),)]


# fmt: off
ROWS: tuple[Op, ...] = (
    _view("view", "view", sh.viewed, view_ref, "same elements in another shape; one size may be -1"),
    _view("reshape", "reshape", sh.viewed, torch.reshape, "as view; a copy where no view exists"),
    _view("expand", "expand", sh.expanded, expand_ref, "sizes of one repeated by a stride of 0"),
    _view("permute", "permute", sh.permuted, torch.permute, "dimensions reordered"),
    _view("transpose", "transpose.int", sh.transposed, torch.transpose, "two dimensions swapped"),
    _view("t", "t", sh.reversed_dims, torch.t, "matrix transpose; vectors stay"),
    _view("squeeze", "squeeze.dims", sh.squeezed, torch.squeeze, "listed dimensions of size one removed"),
    _view("unsqueeze", "unsqueeze", sh.unsqueezed, torch.unsqueeze, "a dimension of size one added"),
    _view("slice", "slice.Tensor", sh.sliced, slice_ref, "start:end:step of dim"),
    _view("select", "select.int", sh.without_dim, torch.select, "one index of dim"),
    _pieces("split", "split.Tensor", sh.split_even, torch.split, "pieces of split_size along dim"),
    _pieces("split_with_sizes", "split_with_sizes", sh.split_sizes, torch.split,
        "pieces of the listed sizes along dim"),
    _pieces("unbind", "unbind.int", sh.unbound, torch.unbind, "every index of dim"),
    _view("diagonal", "diagonal", sh.diagonal, torch.diagonal, "a diagonal of two dimensions, put last"),
    _view("unfold", "unfold", sh.unfolded, unfold_ref, "sliding windows of dim"),
    _view("as_strided", "as_strided", sh.attr_shape(), torch.as_strided,
        "given sizes, strides and offset into the storage"),
    _view("alias", "alias", sh.SAME, lambda x: x, "the same tensor"),
    _op("view_dtype", "aten::view.dtype", dt.attr("dtype"), view_dtype_shape, lambda x, dtype: x.view(dtype),
        "the same bits as another dtype"),
    _op("view_as_real", "aten::view_as_real", dt.magnitude, view_as_real_shape, torch.view_as_real,
        "complex as pairs"),
    _op("view_as_complex", "aten::view_as_complex", complex_dtype, view_as_complex_shape,
        torch.view_as_complex, "pairs as complex"),
)
# fmt: on
