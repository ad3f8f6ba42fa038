"""Rules of the scatters: the target position of each source element, and how it combines with the existing value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusewright.interface import OpView
from fusewright.toolkit.ir import Index, Val
from fusewright.toolkit.ir.extent import Extent, distinct
from fusewright.toolkit.ir.types import TYPES, DType, from_torch, to_torch
from fusewright.toolkit.lower import messages
from fusewright.toolkit.lower.movement import index_places, indexed, integer_indices, out_type
from fusewright.toolkit.lower.pointwise import truth
from fusewright.toolkit.lower.views import dim_of, insert, number
from fusewright.toolkit.rules.kinds import (
    Accumulator,
    Address,
    Check,
    Domain,
    Evaluator,
    Map,
    Row,
    RowContext,
    Scatter,
    Symbols,
    Table,
    always,
)
from fusewright.toolkit.rules.space import At, Shape, product, shape_of, stride_of

Places = tuple[tuple[Index, ...] | Address, tuple[Val, ...]]
Finish = Callable[[Evaluator, OpView, At, tuple[Val, ...]], Val]

_HOW = {"sum": "add", "prod": "mul", "mean": "add", "amax": "max", "amin": "min"}


def _start(e: Evaluator, op: OpView, at: At) -> Val:
    return e(op.arg("self"), at, out_type(op))


def _zeros(e: Evaluator, op: OpView, at: At) -> Val:
    return e.b.const(0, out_type(op))


def _single(how: str | Callable[[OpView], str], init: Any = _start) -> Callable[[OpView], tuple[Accumulator, ...]]:
    def accumulators(op: OpView) -> tuple[Accumulator, ...]:
        kind = how if isinstance(how, str) else how(op)
        return (Accumulator(kind, init, memory_type(op, kind)),)

    return accumulators


def memory_type(op: OpView, how: str) -> DType:
    """The type of the accumulators: sums of half types accumulate in fp32, those of bools as counts; values that are only
    replaced keep their type."""
    if not how:
        return from_torch(op.out.spec.dtype)  # type: ignore[union-attr]
    return "i64" if out_type(op) == "bool" else out_type(op)


def _rounded(e: Evaluator, op: OpView, at: At, accumulated: tuple[Val, ...]) -> Val:
    return accumulated[0]


def _finish_if_wide(accumulators: Callable[[OpView], tuple[Accumulator, ...]]) -> Callable[[OpView], Finish | None]:
    def finish(op: OpView) -> Finish | None:
        same = accumulators(op)[0].dtype == from_torch(op.out.spec.dtype)  # type: ignore[union-attr]
        return None if same else _rounded

    return finish


def _scatter(
    shape: Callable[[OpView], Shape],
    code: Callable[[Evaluator, OpView, At], Places],
    how: str | Callable[[OpView], str],
    check: Check = always,
    init: Any = _start,
    symbols: Symbols = (),
) -> Scatter:
    accumulators = _single(how, init)
    return Scatter(shape, accumulators, code, _finish_if_wide(accumulators), check, symbols)


def shape_like(name: str) -> Callable[[OpView], Shape]:
    return lambda op: shape_of(op.arg(name).spec)


def _no_bool(op: OpView) -> str | None:
    out = op.out.spec
    return "truth values are not folded" if out is None or out.dtype == torch.bool else None


def _scaled_truth(op: OpView) -> str | None:
    return _no_bool(op) if op.arg("alpha") != 1 else None


def _ranked(op: OpView) -> str | None:
    return None if op.arg("self").spec.rank else "a 0-dim tensor"


def _fitting(op: OpView) -> str | None:
    """Only sources with the tensor's shape, except along the index's dim."""
    ours, theirs = shape_of(op.arg("self").spec), shape_of(op.arg("source").spec)
    rest = [d for d in range(len(ours)) if d != dim_of(op)]
    same = len(ours) == len(theirs) and all(ours[d] == theirs[d] for d in rest)
    return None if same else "a source of another shape"


def _both(*checks: Check) -> Check:
    return lambda op: next((why for c in checks if (why := c(op)) is not None), None)


# ---- along one dim, an index per element ----


def _place(e: Evaluator, op: OpView, at: At) -> tuple[Index, ...]:
    d = dim_of(op)
    found = e.lookup(op.arg("index"), at, shape_of(op.arg("self").spec)[d], messages.along(op))
    return (*at.dims[:d], found, *at.dims[d + 1 :])


def _element(e: Evaluator, op: OpView, at: At) -> Places:
    src = op.arg("src")
    return _place(e, op, at), (e.cast(e.value(src, At(shape_of(src.spec), at.dims)), out_type(op)),)


def _same_value(e: Evaluator, op: OpView, at: At) -> Places:
    return _place(e, op, at), (e.const(op.arg("value"), out_type(op)),)


# ---- along one dim, an index per slice ----


def _slice_place(e: Evaluator, op: OpView, at: At, wrap: bool = False) -> tuple[Index, ...]:
    d, index = dim_of(op), op.arg("index")
    where = At((at.shape[d],), (at.dims[d],)).reshape(shape_of(index.spec))
    found = e.lookup(index, where, shape_of(op.arg("self").spec)[d], messages.along(op), wrap)
    return (*at.dims[:d], found, *at.dims[d + 1 :])


def _add_slice(e: Evaluator, op: OpView, at: At) -> Places:
    v, alpha = e(op.arg("source"), at, out_type(op)), op.arg("alpha")
    return _slice_place(e, op, at), (v if alpha == 1 else v * alpha,)


def _copy_slice(e: Evaluator, op: OpView, at: At) -> Places:
    return _slice_place(e, op, at), (e(op.arg("source"), at, out_type(op)),)


def _fill_slice(e: Evaluator, op: OpView, at: At) -> Places:
    """Of the ops with an index per slice, only eager's `index_fill` counts negative indices from the end."""
    return _slice_place(e, op, at, wrap=True), (e.const(op.arg("value"), out_type(op)),)


def _sliced_shape(op: OpView) -> Shape:
    shape, index = list(shape_of(op.arg("self").spec)), shape_of(op.arg("index").spec)
    shape[dim_of(op)] = index[0] if index else 1
    return tuple(shape)


# ---- advanced indexing ----


def _indexed_shape(op: OpView) -> Shape:
    """The shape of `self[indices]`."""
    dims, first, lead = index_places(op)
    found: list[Any] = [1] * lead
    for d in dims:
        shape = shape_of(op.arg("indices")[d].spec)
        for i, s in enumerate(reversed(shape)):
            found[lead - 1 - i] = s if found[lead - 1 - i] == 1 else found[lead - 1 - i]
    rest = [s for d, s in enumerate(shape_of(op.arg("self").spec)) if d not in dims]
    return (*rest[:first], *found, *rest[first:])


def _put(e: Evaluator, op: OpView, at: At) -> Places:
    return indexed(e, op, at, shape_of(op.arg("self").spec)), (e(op.arg("values"), at, out_type(op)),)


def _put_how(op: OpView) -> str:
    return "add" if op.arg("accumulate") else ""


def _put_rules(op: OpView) -> tuple[Scatter | Map, ...]:
    """Values that are the same for all hits of a mask are a select per element; everything else is stored to computed positions."""
    d = _mask_of(op)
    return (_MASKED_PUT,) if d is not None and (_one_value(op) or _same_for_hits(op, d)) else (_PUT,)


def _mask_of(op: OpView) -> int | None:
    """The position of the mask, if it is the only index."""
    given = [d for d, i in enumerate(op.arg("indices")) if i is not None]
    if len(given) != 1:
        return None
    spec = op.arg("indices")[given[0]].spec
    return given[0] if spec is not None and spec.dtype in (torch.bool, torch.uint8) else None


def _one_value(op: OpView) -> bool:
    return all(n == 1 for n in op.arg("values").spec.shape)


def _same_for_hits(op: OpView, d: int) -> bool:
    """Whether values have no dim for the hits of a mask at `d`, or one of size 1: else values are counted off, hit by hit."""
    behind, shape = op.arg("self").spec.rank - d - op.arg("indices")[d].spec.rank, op.arg("values").spec.shape
    return len(shape) <= d + 1 + behind and (len(shape) <= behind or shape[len(shape) - 1 - behind] == 1)


def _masked_put(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    d = _mask_of(op)
    assert d is not None
    mask, t = op.arg("indices")[d], out_type(op)
    inner = range(d, d + mask.spec.rank)
    hit = truth(e.b, e(mask, at.pick(inner)))
    if _one_value(op):
        place = At((), ()).reshape(shape_of(op.arg("values").spec))
    else:
        rest = at.pick([i for i in range(len(at.dims)) if i not in inner])
        place = insert(rest, d, 0, 1).broadcast(shape_of(op.arg("values").spec))
    x, v = e(op.arg("self"), at, t), e(op.arg("values"), place, t)
    new = v if not op.arg("accumulate") else e.b.op("or", x, v) if t == "bool" else x + v
    return e.b.where(hit, new, x)


# ---- embedding ----


def _embedding(e: Evaluator, op: OpView, at: At) -> Places:
    index, rank = op.arg("indices"), op.arg("indices").spec.rank
    row = e(index, at.pick(range(rank)), "i64")
    n = op.arg("num_weights")
    inside = e.b.op("and", row >= 0, row < n)  # eager skips indices out of bounds
    counts = e.b.op("and", row.ne(op.arg("padding_idx")), inside)
    found = e.b.indirect(e.b.bound(row, n, mask=inside))
    g = e(op.arg("grad_output"), at, out_type(op))
    return (found, at.dims[-1]), (e.b.where(counts, g, 0),)


def _unscaled(op: OpView) -> str | None:
    if op.arg("scale_grad_by_freq") or not isinstance(op.arg("num_weights"), int):
        return "scaled by frequency, or a symbolic size"
    return None


# ---- scatter_reduce and index_reduce ----


def _folds(op: OpView) -> tuple[Accumulator, ...]:
    """The accumulated value and, if that is needed, the number of contributions, or else whether there are any."""
    how, t = _HOW[op.arg("reduce")], _folded_type(op)
    inclusive = op.arg("include_self")

    def init(e: Evaluator, op: OpView, at: At) -> Val:
        return e.b.cast(_start(e, op, at), t) if inclusive else e.b.const(_identity(op.arg("reduce"), t), t)

    def hits(e: Evaluator, op: OpView, at: At) -> Val:
        return e.b.const(1 if inclusive else 0, "i64")

    folded = Accumulator(how, init, t)
    if op.arg("reduce") == "mean":
        return folded, Accumulator("add", hits, "i64")
    return (folded,) if inclusive else (folded, Accumulator("", _untouched, "bool"))


def _folded_type(op: OpView) -> DType:
    """Extremes of small integers are folded in 32 bits: devices have no narrower atomics. (Sums and products wrap.)"""
    t = out_type(op)
    return "i32" if op.arg("reduce") in ("amax", "amin") and TYPES[t].kind == "int" and TYPES[t].size < 4 else t


def _untouched(e: Evaluator, op: OpView, at: At) -> Val:
    return e.b.const(False, "bool")


def _identity(reduce: str, t: DType) -> int | float:
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if TYPES[t].kind == "float":
        return float("-inf") if reduce == "amax" else float("inf")
    info = torch.iinfo(to_torch(t))
    return info.min if reduce == "amax" else info.max


def _folded(place: Callable[[Evaluator, OpView, At], Places]) -> Callable[[Evaluator, OpView, At], Places]:
    def code(e: Evaluator, op: OpView, at: At) -> Places:
        dims, (value,) = place(e, op, at)
        return dims, (value, *(e.b.const(1, a.dtype) for a in _folds(op)[1:]))

    return code


def _fold_finish(op: OpView) -> Finish | None:
    if len(_folds(op)) == 1:
        return _finish_if_wide(_folds)(op)
    return _mean if op.arg("reduce") == "mean" else _where_touched


def _mean(e: Evaluator, op: OpView, at: At, accumulated: tuple[Val, ...]) -> Val:
    value, hits = accumulated
    n = e.b.cast(e.b.op("maximum", hits, e.b.const(1, "i64")), value.dtype)
    value = value / n if TYPES[value.dtype].kind == "float" else e.b.op("floordiv", value, n)
    return e.b.where(hits > 0, value, _start(e, op, at))


def _where_touched(e: Evaluator, op: OpView, at: At, accumulated: tuple[Val, ...]) -> Val:
    value, touched = accumulated
    return e.b.where(touched, e.b.cast(value, out_type(op)), _start(e, op, at))


# ---- by strides ----


def _strided(e: Evaluator, op: OpView, at: At) -> tuple[Address, tuple[Val, ...]]:
    src, out = op.arg("src"), op.out.spec
    assert out is not None
    start: Extent = 0
    if op.arg("storage_offset") is not None:  # counted from the start of the storage
        start = number(op.arg("storage_offset")) - e.offset(op.arg("self"))
    index = Index(start, sizes=e.b.p + e.b.r)
    for i, step in zip(at.dims, map(number, op.arg("stride")), strict=True):
        index = index + i * step
    end = _reach(shape_of(out), stride_of(out)) + 1
    p = e.position(index)
    inside = e.b.op("and", p >= 0, p < e.b.index_value(Index(end, sizes=e.b.p + e.b.r)))
    return Address(index, inside), (e(src, at, out_type(op)),)


def _reach(shape: Shape, stride: Shape) -> Extent:
    """Elements from a tensor's first one to its last."""
    out: Extent = 0
    for n, step in zip(shape, stride, strict=True):
        out = out + (n - 1) * step
    return out


def _clear_strides(op: OpView) -> str | None:
    """Eager copies within memory, in an order of its own if elements share it."""
    x, out = op.arg("self").spec, op.out.spec
    if out is None or shape_of(x) != shape_of(out) or stride_of(x) != stride_of(out):
        return "a tensor whose elements share memory"
    clear = distinct([number(n) for n in op.arg("size")], [number(s) for s in op.arg("stride")])
    return None if clear else "strides by which elements may share memory"


# ---- by a mask ----


def _flat(op: OpView) -> Domain:
    """One row of all elements; mask hits are counted in their order."""
    return Domain((product(shape_of(op.out.spec)),), (0,))


def _masked(r: RowContext, op: OpView) -> tuple[Val, ...]:
    """Each mask hit takes the source element whose number is the count of hits before it. An error if there are too few."""
    e, b, t, source = r.e, r.b, out_type(op), op.arg("source")
    at = r.full.reshape(shape_of(op.out.spec))
    hit = truth(b, e(op.arg("mask"), at))
    count = product(shape_of(source.spec))
    place = b.bound(b.scan("sum", b.cast(hit, "i64")) - 1, count, mask=hit, says=messages.TOO_FEW)
    with e.masked(hit):
        new = e(source, At((count,), (b.indirect(place),)).reshape(shape_of(source.spec)), t)
    return (b.where(hit, new, e(op.arg("self"), at, t)),)


_PUT = _scatter(_indexed_shape, _put, _put_how, integer_indices)
_MASKED_PUT = Map(_masked_put, cost=4)

TABLE: Table = {
    "scatter": (_scatter(shape_like("index"), _element, "", _ranked),),
    "scatter_value": (_scatter(shape_like("index"), _same_value, "", _ranked),),
    "scatter_add": (_scatter(shape_like("index"), _element, "add", _ranked),),
    "scatter_reduce": (Scatter(shape_like("index"), _folds, _folded(_element), _fold_finish, _both(_ranked, _no_bool)),),
    "index_put": _put_rules,
    "index_add": (_scatter(shape_like("source"), _add_slice, "add", _both(_ranked, _scaled_truth, _fitting)),),
    "index_reduce": (
        Scatter(shape_like("source"), _folds, _folded(_copy_slice), _fold_finish, _both(_ranked, _no_bool, _fitting)),
    ),
    "index_copy": (_scatter(shape_like("source"), _copy_slice, "", _both(_ranked, _fitting)),),
    "index_fill": (_scatter(_sliced_shape, _fill_slice, "", _ranked),),
    "as_strided_scatter": (_scatter(shape_like("src"), _strided, "", _clear_strides, symbols=("storage_offset",)),),
    "masked_scatter": (Row(_flat, _masked, levels=("full",), ordered=True),),
    "embedding_backward": (_scatter(shape_like("grad_output"), _embedding, "add", _unscaled, init=_zeros),),
}
