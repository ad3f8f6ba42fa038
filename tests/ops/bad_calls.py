"""Calls that eager refuses: indices out of bounds, numbers that do not fit, invalid dims and types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TORCH = ".".join(torch.__version__.split(".")[:2])
HALF, BYTE, INT8, LONG = torch.float16, torch.uint8, torch.int8, torch.int64


@dataclass(frozen=True)
class BadCall:
    """A call of `fn` with `args`; `text` is part of eager's message."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    text: str


def index(*values: int, dtype: torch.dtype = LONG) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def table(rows: int = 3, columns: int = 4) -> Tensor:
    return torch.arange(float(rows * columns)).view(rows, columns)


LATE = index(0, 1, 0, 1, 9)
"""Indices of which only the last is out of bounds."""
ONE = table(1)

_INDICES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "embedding": (lambda w, i: F.embedding(i, w) * 2, (table(), index(0, 7)), "index out of range in self"),
    "embedding_negative": (lambda w, i: F.embedding(i, w) * 2, (table(), index(0, -1)), "index out of range in self"),
    "embedding_int32": (
        lambda w, i: F.embedding(i, w) * 2, (table(), index(0, 7, dtype=torch.int32)), "index out of range in self"
    ),
    "embedding_padding": (lambda w, i: F.embedding(i, w, padding_idx=0) * 2, (ONE, index(0, 7)), "out of range in self"),
    "embedding_norm": (lambda w, i: F.layer_norm(F.embedding(i, w), (4,)), (ONE, index(0, 7)), "out of range in self"),
    "gather": (lambda x, i: x.gather(1, i) + 1, (table(), index(9).expand(3, 1)), "index 9 is out of bounds for dimension 1"),
    "gather_number": (lambda x, i: x.gather(0, i) + 1, (torch.ones(()), index(5)), "for dimension 0 with size 1"),
    "index": (lambda x, i: x[:, i] + 1, (table(), index(0, 4)), "index 4 is out of bounds for dimension 0 with size 4"),
    "index_negative": (lambda x, i: x[i] + 1, (table(), index(0, -4)), "index -4 is out of bounds"),
    "index_pair": (lambda x, i: x[i, i] + 1, (table(), index(0, 3)), "index 3 is out of bounds for dimension 0"),
    "index_select": (lambda x, i: x.index_select(0, i) + 1, (table(), index(0, 3)), "index out of range in self"),
    "index_select_second": (lambda x, i: x.index_select(1, i) + 1, (table(), index(4)), "id=4 axis_dim=4"),
    "index_put": (lambda x, i: x.index_put((i,), torch.ones(())) + 1, (table(), index(3)), "index 3 is out of bounds"),
    "index_add": (lambda x, i: x.index_add(0, i, x[:2]) + 1, (table(), index(0, 3)), "index 3 is out of bounds"),
    "index_add_scaled": (
        lambda x, i: x.index_add(0, i, x[:2], alpha=2) + 1, (table(), index(0, 3)), "index out of range in self"
    ),
    "index_reduce": (
        lambda x, i: x.index_reduce(0, i, x[:2], "amax") + 1, (table(), index(0, 3)), "index out of range in self"
    ),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:2]) + 1, (table(), index(0, 3)), "index_copy_(): index 3"),
    "index_fill": (lambda x, i: x.index_fill(1, i, 2.0) + 1, (table(), index(4)), "index 4 is out of bounds"),
    "index_fill_negative": (lambda x, i: x.index_fill(0, i, 2.0) + 1, (table(), index(-1, -4)), "index -4 is out of bounds"),
    "scatter": (lambda x, i: x.scatter(1, i, x) + 1, (table(), index(4).expand(3, 4)), "index 4 is out of bounds"),
    "scatter_value": (lambda x, i: x.scatter(1, i, 2.0) + 1, (table(), index(-1).expand(3, 4)), "index -1 is out of"),
    "one_hot": (lambda i: torch.zeros(2, 3).scatter(1, i, 1.0) + 1, (index(0, 3).view(2, 1),), "index 3 is out of bounds"),
    "one_hot_negative": (lambda i: torch.zeros(2, 3).scatter(1, i, 1.0) + 1, (index(0, -1).view(2, 1),), "index -1 is out of"),
    "one_hot_uint16": (
        lambda i: torch.zeros(2, 3, dtype=torch.uint16).scatter(1, i, 1).int(), (index(0, 1).view(2, 1),),
        "not implemented for 'UInt16'",
    ),
    "scatter_add": (lambda x, i: x.scatter_add(0, i, x) + 1, (table(), index(3).expand(3, 4)), "index 3 is out of bounds"),
    "scatter_mean": (
        lambda x, i: x.scatter_reduce(0, i, x, "mean"), (table(), index(3).expand(3, 4)), "index 3 is out of bounds"
    ),
    "nll_loss": (lambda x, i: F.nll_loss(x, i) + 1, (table(), index(0, 4, 0)), "Target 4 is out of bounds."),
    "cross_entropy": (lambda x, i: F.cross_entropy(x, i), (table(), index(0, -1, 0)), "Target -1 is out of bounds."),
    "embedding_bag": (lambda w, i: F.embedding_bag(i.view(1, -1), w) + 1, (table(), index(0, 4)), "not in the valid range"),
    "bincount": (lambda i: torch.bincount(i) + 1, (index(0, -1),), "non-negative"),
    "take": (lambda x, i: torch.take(x, i) + 1, (table(), index(12)), "out of range"),
    "put": (lambda x, i: x.put(i, x[0, :1]) + 1, (table(), index(12)), "out of range"),
    "masked_scatter": (lambda x: x.masked_scatter(x > 1, x[0]) + 1, (table(),), "Number of elements of source"),
    # sources that are no slice: tracing lets their shapes pass
    "slice_scatter": (lambda x: x.slice_scatter(x[:1], 0, 0, 2) + 1, (table(),), "expected src to have a size equal"),
    "select_scatter": (lambda x: x.select_scatter(x[0, :1], 0, 1) + 1, (table(),), "expected src to have a size equal"),
    "diagonal_scatter": (lambda x: x.diagonal_scatter(x[0]) + 1, (table(),), "expected src to have a size equal"),
    "empty_dim": (lambda x, i: x[:0].index_select(0, i) + 1, (table(), index(0, 0)), "should be positive"),
    # along a dim of size 1 the index affects only the bounds check
    "one_embedding": (lambda w, i: F.embedding(i, w), (ONE, index(0, 7)), "index out of range in self"),
    "one_gather": (lambda x, i: x.gather(0, i) + 1, (ONE, index(0, 3, 0, 0).view(1, 4)), "index 3 is out of bounds"),
    "one_gather_sum": (lambda x, i: x.gather(0, i).sum(), (ONE, index(0, 3, 0, 0).view(1, 4)), "index 3 is out of bounds"),
    "one_index": (lambda x, i: x[i] + 1, (ONE, index(0, 1)), "index 1 is out of bounds for dimension 0 with size 1"),
    "one_index_select": (lambda x, i: x.index_select(0, i) + 1, (ONE, index(0, 1)), "index out of range in self"),
    "one_index_put": (lambda x, i: x.index_put((i,), torch.ones(())), (ONE, index(0, 1)), "index 1 is out of bounds"),
    "one_index_add": (lambda x, i: x.index_add(0, i, x.expand(2, 4)), (ONE, index(0, 1)), "index 1 is out of bounds"),
    "one_scatter": (lambda x, i: x.scatter(0, i, x) + 1, (ONE, index(2).expand(1, 4)), "index 2 is out of bounds"),
    "one_scatter_add": (lambda x, i: x.scatter_add(0, i, x), (ONE, index(2).expand(1, 4)), "index 2 is out of bounds"),
    "one_class": (lambda x, i: F.nll_loss(x, i) + 1, (torch.ones(3, 1), index(0, 1, 0)), "Target 1 is out of bounds."),
    "one_class_entropy": (lambda x, i: F.cross_entropy(x, i), (torch.ones(3, 1), index(0, 1, 0)), "Target 1 is out of"),
    # the part of the result that is read has no bad index
    "part_rows": (lambda w, i: F.embedding(i, w)[:2].exp(), (table(), LATE), "index out of range in self"),
    "part_chain": (lambda w, i: ((F.embedding(i, w) + 1) * 2)[0], (table(), LATE), "index out of range in self"),
    "part_sum": (lambda w, i: F.embedding(i, w)[1:3].sum(1), (ONE, LATE * 0 + LATE // 9), "index out of range in self"),
    "part_gathered": (lambda w, i: F.embedding(i, w)[index(0, 1)] + 1, (table(), LATE), "index out of range in self"),
    "part_padded": (lambda w, i: F.pad(F.embedding(i, w), (0, 0, 0, -2)) + 1, (table(), LATE), "out of range in self"),
    "part_cat": (lambda w, i: torch.cat([F.embedding(i, w)[:2], w]) + 1, (table(), LATE), "index out of range in self"),
    "part_where": (lambda w, i: torch.where(i[:, None] < 3, F.embedding(i, w), 0.0), (table(), LATE), "out of range"),
    "part_index": (lambda x, i: x[i][:2] + 1, (table(), LATE), "index 9 is out of bounds"),
    "part_select": (lambda x, i: x.index_select(0, i)[0] * 2, (table(), LATE), "index out of range in self"),
    "part_scatter": (lambda x, i: x.index_put((i,), torch.ones(4))[:1] + 1, (table(), LATE), "index 9 is out of bounds"),
    "part_division": (lambda i: (i.expand(5, 3) // i)[0], (index(0, 1, 1),), "ZeroDivisionError"),
    "times_zero": (lambda w, i: (F.embedding(i, w) * 0).sum(), (ONE, index(0, 3)), "index out of range in self"),
}  # fmt: skip

MASK = torch.tensor([True, False, True])


def _of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.ones(shape or (3,), dtype=dtype)


_HALF = "value cannot be converted to type"
_LIMIT = _HALF if TORCH in ("2.10", "2.11", "2.12", "2.13", "2.14") else "outside the representable range"

_NUMBERS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "masked_fill_half": (lambda x, m: x.masked_fill(m, -1e9) + 1, (_of(HALF), MASK), _HALF),
    "masked_fill_int8": (lambda x, m: x.masked_fill(m, 1000) + 1, (_of(INT8), MASK), _HALF),
    "masked_fill_nan": (lambda x, m: x.masked_fill(m, float("nan")) + 1, (_of(INT8), MASK), _HALF),
    "masked_fill_tensor": (lambda x, m, v: x.masked_fill(m, v) + 1, (_of(HALF), MASK, torch.tensor(-1e9)), _HALF),
    "full_half": (lambda x: torch.full((3,), 1e9, dtype=HALF) + x, (_of(HALF),), _HALF),
    "full_uint8": (lambda x: torch.full((3,), 300, dtype=BYTE) + x, (_of(BYTE),), _HALF),
    "full_like": (lambda x: torch.full_like(x, 1e9) + x, (_of(HALF),), _HALF),
    "new_full": (lambda x: x.new_full((3, 4), 1e39), (_of(HALF),), _HALF),
    "fill": (lambda x: torch.fill(x, -129) + x, (_of(INT8),), _HALF),
    "pad": (lambda x: F.pad(x, (1, 1), value=1e9) + 1, (_of(HALF),), _HALF),
    "clamp": (lambda x: x.clamp(max=1e9) + 1, (_of(HALF),), _HALF),
    "clamp_min": (lambda x: x.clamp_min(1000) + 1, (_of(INT8),), _LIMIT),
    "hardtanh": (lambda x: F.hardtanh(x, -1e9, 1e9) + 1, (_of(HALF),), _HALF),
    "threshold_value": (lambda x: F.threshold(x, 2, 1000) + 1, (_of(INT8),), _HALF),
    "add_alpha": (lambda x: torch.add(x, x, alpha=1000) + 1, (_of(INT8),), _HALF),
    "sub_alpha": (lambda x: torch.sub(x, x, alpha=300) + 1, (_of(BYTE),), _HALF),
    "addcmul": (lambda x: torch.addcmul(x, x, x, value=1000) + 1, (_of(INT8),), _HALF),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1e9) + 1, (_of(HALF), index(0)), _HALF),
    "scatter": (lambda x, i: x.scatter(0, i, 1000) + 1, (_of(INT8), index(0)), _HALF),
    "negative_power": (lambda x: x ** -1, (_of(LONG),), "negative integer powers"),
    "float32": (lambda x, m: x.masked_fill(m, 1e39) + 1, (_of(torch.float32), MASK), _HALF),
}  # fmt: skip

_DIMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "softmax": (lambda x: torch.softmax(x, 10) + 1, (_of(torch.float32),), "but got 10"),
    "softmax_number": (lambda x: torch.softmax(x, 1) + 1, (torch.ones(()),), "but got 1"),
    "softmin": (lambda x: F.softmin(x, -3) + 1, (_of(torch.float32),), "but got -3"),
    "log_softmax": (lambda x: torch.log_softmax(x, 10) + 1, (_of(torch.float32),), "but got 10"),
    "max_of_nothing": (lambda x: x[:0].max() + 1, (table(),), "max(): Expected reduction dim"),
    "min_of_nothing": (lambda x: x[:0].min() + 1, (table(),), "min(): Expected reduction dim"),
    "bits_of_floats": (lambda x: torch.ops.aten.bitwise_and.Scalar(x, 1), (_of(torch.float32),), "not implemented"),
}

_BYTES = index(0, 1, dtype=BYTE)

_INDEX_TYPES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "index_select": (lambda x, i: x.index_select(0, i) + 1, (table(), _BYTES), "Expected dtype int32 or int64 for index"),
    "index_select_float": (lambda x, i: x.index_select(0, i) + 1, (table(), _BYTES.float()), "Expected dtype int32 or int64"),
    "index_add": (lambda x, i: x.index_add(0, i, x[:2]) + 1, (table(), _BYTES.short()), "but got: Short"),
    "index_put": (lambda x, i: x.index_put((i,), x[:2]) + 1, (table(), _BYTES.short()), "tensors used as indices must be"),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0) + 1, (table(), _BYTES.int()), "Expected dtype int64 for index"),
}

_SIZES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    f"{mode}_resize": (
        lambda x, mode=mode: F.interpolate(x.relu(), scale_factor=0.01, mode=mode) * 2, (torch.ones(1, 2, 8, 8),),
        "output sizes should be greater than 0",
    )
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
}

_PROBABILITY = "all elements of input should be between 0 and 1"

_VALUES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "bce": (lambda x: F.binary_cross_entropy(x * 1, x.clamp(0, 1)) + 1, (torch.tensor([0.5, 0.0, 1.5]),), _PROBABILITY),
    "bce_of_nan": (lambda x: F.binary_cross_entropy(x * 1, x * 0) + 1, (torch.tensor([0.5, float("nan")]),), _PROBABILITY),
    "bce_of_part": (
        lambda x: F.binary_cross_entropy(x * 1, x.clamp(0, 1), reduction="none")[:1] + 1, (torch.tensor([0.5, -1.0]),), _PROBABILITY
    ),
}

_TARGETS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    f"bce_target_{v}": (
        lambda y: F.binary_cross_entropy(torch.full_like(y, 0.5), y * 1) + 1, (torch.tensor([0.5, v]),),
        _PROBABILITY.replace("input", "target"),
    )
    for v in (1.5, float("nan"))
}
try:  # older releases compute the loss
    F.binary_cross_entropy(torch.zeros(1), torch.full((1,), 2.0))
except RuntimeError:
    _VALUES |= _TARGETS

_DTYPES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "complex": (lambda x: torch.complex(x * 1, x.double()) * 2, (torch.ones(3),), "but got scalar type Double"),
    "adaptive_avg_pool2d": (
        lambda x: F.adaptive_avg_pool2d(x * 1, 2) + 1, (torch.ones(1, 1, 4, 4, dtype=LONG),), "not implemented for 'Long'"
    ),
}

try:  # torch 2.14 and later compute it
    torch.polar(torch.ones(3).half(), torch.ones(3).half())
except NotImplementedError as e:
    _DTYPES["polar"] = (lambda x: torch.polar(x * 1, x).abs() + 1, (torch.ones(3).half(),), str(e))

CALLS: dict[str, BadCall] = {
    f"{kind}.{name}": BadCall(*call)
    for kind, calls in (("index", _INDICES), ("number", _NUMBERS), ("dim", _DIMS), ("index type", _INDEX_TYPES),
                        ("size", _SIZES), ("value", _VALUES), ("dtype", _DTYPES))
    for name, call in calls.items()
}

LOST = {"number.masked_fill_nan": "torch converts the number while it traces, and wraps the error"}
"""Calls for which `aot_eager`'s message differs from eager's; ours equals `aot_eager`'s."""
if TORCH in ("2.10", "2.11", "2.12"):
    LOST["dim.log_softmax"] = "Dynamo wraps what its own rule raises, before any backend is asked"
if _LIMIT != _HALF:
    LOST["number.clamp_min"] = "Dynamo wraps what torch's Python form raises, before any backend is asked"
