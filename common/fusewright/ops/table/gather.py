"""Gather and scatter rows: elements are read from or written to positions given by indices; joins and layout copies."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fusewright.ops import dtype_rules as dt
from fusewright.ops import shape_rules as sh
from fusewright.ops.core import Kind, Op, row

_op = partial(row, Kind.GATHER)
_scatter = partial(row, Kind.SCATTER)
_OUT_DTYPE = dt.promote("tensors")


def gather_ref(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    return torch.gather(x, dim, index)


def index_ref(x: Any, indices: Any) -> Any:
    return x[tuple(slice(None) if i is None else i for i in indices)]


def index_put_ref(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    dims = [i for i, t in enumerate(indices) if t is not None]
    moved = torch.movedim(x, dims, list(range(len(dims)))) if dims == sorted(dims) and dims[-1] != len(dims) - 1 else x
    given = [t for t in indices if t is not None]
    if moved is x:
        return torch.index_put(x, given, values.to(x.dtype), accumulate)
    spread = values.expand(index_ref(x, indices).shape)
    lead = given[0].dim() if len(given) == 1 else len(sh.broadcast_shapes([tuple(t.shape) for t in given]))
    at = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    spread = torch.movedim(spread, list(range(at, at + lead)), list(range(lead)))
    out = torch.index_put(moved, given, spread.to(x.dtype), accumulate)
    return torch.movedim(out, list(range(len(dims))), dims)


def index_add_ref(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    return torch.index_add(x, dim, index, alpha * source)


def scatter_ref(x: Any, dim: int, index: Any, src: Any) -> Any:
    return torch.scatter(x, dim, index, src)


def scatter_value_ref(x: Any, dim: int, index: Any, value: Any) -> Any:
    return torch.scatter(x, dim, index, value)


def scatter_reduce_ref(x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    return torch.scatter_reduce(x, dim, index, src, reduce, include_self=include_self)


def index_reduce_ref(x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    return torch.index_reduce(x, dim, index, source, reduce, include_self=include_self)


def slice_scatter_ref(x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    out = x.clone()
    out[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)] = src.to(x.dtype)
    return out


def select_scatter_ref(x: Any, src: Any, dim: int, index: Any) -> Any:
    out = x.clone()
    out.select(dim, index).copy_(src)
    return out


def diagonal_scatter_ref(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    out = x.clone()
    out.diagonal(offset, dim1, dim2).copy_(src)
    return out


def as_strided_scatter_ref(x: Any, src: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    out = x.clone(memory_format=torch.preserve_format)
    torch.as_strided(out, size, stride, storage_offset).copy_(src)
    return out


def masked_scatter_ref(x: Any, mask: Any, source: Any) -> Any:
    out, hits = x.clone().expand(torch.broadcast_shapes(x.shape, mask.shape)).clone(), mask.expand_as(x)
    out[hits] = source.flatten()[: int(hits.sum())]
    return out


def pad_ref(x: Any, pad: Any, value: Any = 0) -> Any:
    return F.pad(x, list(pad), value=value)


def reflect_ref(x: Any, padding: Any) -> Any:
    return F.pad(x, list(padding), mode="reflect")


def replicate_ref(x: Any, padding: Any) -> Any:
    return F.pad(x, list(padding), mode="replicate")


def im2col_ref(x: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    return F.unfold(x, kernel_size, dilation, padding, stride)


def col2im_ref(x: Any, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    return F.fold(x, tuple(output_size), kernel_size, dilation, padding, stride)


def cat_ref(tensors: Any, dim: int = 0) -> Any:
    return torch.cat(list(tensors), dim)


def stack_ref(tensors: Any, dim: int = 0) -> Any:
    return torch.stack(list(tensors), dim)


def roll_ref(x: Any, shifts: Any, dims: Any = ()) -> Any:
    return torch.roll(x, tuple(shifts), tuple(dims))


# fmt: off
ROWS: tuple[Op, ...] = (
    _op("gather", "aten::gather", dt.SELF, sh.shape_of("index"), gather_ref, "self[i][index[i][j]] along dim",
        "ONNX GatherElements"),
    _op("index", "aten::index.Tensor", dt.SELF, sh.indexed, index_ref,
        "self[indices], as NumPy's advanced indexing"),
    _op("index_select", "aten::index_select", dt.SELF, sh.index_selected, torch.index_select,
        "listed indices of dim", "ONNX Gather"),
    _op("cat", "aten::cat", _OUT_DTYPE, sh.concatenated, cat_ref, "joined along dim"),
    _op("stack", "aten::stack", _OUT_DTYPE, sh.stacked, stack_ref, "joined along a new dim"),
    _op("constant_pad_nd", "aten::constant_pad_nd", dt.SELF, sh.padded("pad"), pad_ref,
        "padded with a value; negative pads cut", "ONNX Pad"),
    *(_op(f"reflection_pad{n}d", f"aten::reflection_pad{n}d", dt.SELF, sh.padded("padding"), reflect_ref,
        "padded by mirroring, the edge not repeated") for n in (1, 2, 3)),
    *(_op(f"replication_pad{n}d", f"aten::replication_pad{n}d", dt.SELF, sh.padded("padding"), replicate_ref,
        "padded by repeating the edge") for n in (1, 2, 3)),
    _op("roll", "aten::roll", dt.SELF, sh.SAME, roll_ref, "shifted around dims"),
    _op("flip", "aten::flip", dt.SELF, sh.SAME, torch.flip, "dims reversed"),
    _op("repeat", "aten::repeat", dt.SELF, sh.repeated, lambda x, repeats: x.repeat(*repeats), "tiled",
        "ONNX Tile"),
    _op("im2col", "aten::im2col", dt.SELF, sh.columns, im2col_ref,
        "windows of an image as columns, with zeros around the image", "Chellapilla et al., 2006"),
    _op("tril", "aten::tril", dt.SELF, sh.SAME, torch.tril, "zero above a diagonal"),
    _op("triu", "aten::triu", dt.SELF, sh.SAME, torch.triu, "zero below a diagonal"),
    _op("bucketize", "aten::bucketize.Tensor", dt.index_dtype, sh.SAME, torch.bucketize,
        "which interval of sorted boundaries each element falls in"),
    _scatter("scatter", "aten::scatter.src", dt.SELF, sh.SAME, scatter_ref,
        "out[index[i][j]] = src[i][j] along dim", "ONNX ScatterElements"),
    _scatter("scatter_value", "aten::scatter.value", dt.SELF, sh.SAME, scatter_value_ref,
        "out[index[i][j]] = value along dim"),
    _scatter("scatter_add", "aten::scatter_add", dt.SELF, sh.SAME, torch.scatter_add,
        "out[index[i][j]] += src[i][j] along dim"),
    _scatter("scatter_reduce", "aten::scatter_reduce.two", dt.SELF, sh.SAME, scatter_reduce_ref,
             "scatter that folds by sum, prod, mean, amax or amin"),
    _scatter("col2im", "aten::col2im", dt.SELF, sh.from_columns, col2im_ref,
        "columns added up where an image has the windows: gradient of im2col"),
    _scatter("index_put", "aten::index_put", dt.SELF, sh.SAME, index_put_ref,
        "out[indices] = values, or += when accumulate"),
    _scatter("index_add", "aten::index_add", dt.SELF, sh.SAME, index_add_ref,
        "out[index] += alpha * source along dim"),
    _scatter("index_reduce", "aten::index_reduce", dt.SELF, sh.SAME, index_reduce_ref,
        "index_add that folds by prod, mean, amax or amin"),
    _scatter("index_copy", "aten::index_copy", dt.SELF, sh.SAME, torch.index_copy,
        "out[index] = source along dim"),
    _scatter("index_fill", "aten::index_fill.int_Scalar", dt.SELF, sh.SAME, torch.index_fill,
        "out[index] = value along dim"),
    _scatter("slice_scatter", "aten::slice_scatter", dt.SELF, sh.SAME, slice_scatter_ref,
        "a copy with src at start:end:step of dim"),
    _scatter("select_scatter", "aten::select_scatter", dt.SELF, sh.SAME, select_scatter_ref,
        "a copy with src at one index of dim"),
    _scatter("as_strided_scatter", "aten::as_strided_scatter", dt.SELF, sh.SAME, as_strided_scatter_ref,
             "a copy with src at given sizes, strides and offset"),
    _scatter("diagonal_scatter", "aten::diagonal_scatter", dt.SELF, sh.SAME, diagonal_scatter_ref,
        "a copy with src on a diagonal"),
    _scatter("masked_scatter", "aten::masked_scatter", dt.SELF, sh.broadcast("self", "mask"),
        masked_scatter_ref, "a copy with the next element of source at every hit of mask"),
)
# fmt: on
