"""Rules of gathers, joins and creations: elements read from computed positions, or computed from their position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusewright.interface import OpView, Value, hint
from fusewright.toolkit.ir import Index, Val
from fusewright.toolkit.ir.extent import Extent
from fusewright.toolkit.ir.types import TYPES, from_torch
from fusewright.toolkit.lower import messages
from fusewright.toolkit.lower.views import dim_of, insert, known_start, number, selected, signed, start_of, traced
from fusewright.toolkit.rules.evaluate import compute_dtype
from fusewright.toolkit.rules.kinds import Evaluator, Map, Table
from fusewright.toolkit.rules.space import At, Shape, dense_strides, product, shape_of

CAT_LIMIT = 8
"""Most tensors that one kernel joins, since each element tests all of them."""

BUCKET_STEPS = 40
"""Steps of a search among a symbolic number of boundaries: no memory holds 2**40 of them. Superfluous steps read nothing."""


def out_type(op: OpView, k: int = 0) -> str:
    """The compute type of an output."""
    return compute_dtype(op.outs[k].spec.dtype)  # type: ignore[union-attr]


# ---- gathers ----


def _gather(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x, index = op.arg("self"), op.arg("index")
    where = at.reshape(shape_of(index.spec))
    if not x.spec.rank:
        e.lookup(index, where, 1, messages.along(op))
        return e(x, At((), ()))
    d, shape = dim_of(op), shape_of(x.spec)
    found = e.lookup(index, where, shape[d], messages.along(op))
    dims = (*at.dims[:d], found, *at.dims[d + 1 :])
    return e.value(x, At(shape, dims))


def _index_select(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x, index = op.arg("self"), op.arg("index")
    if not x.spec.rank:
        e.lookup(index, At((), ()).reshape(shape_of(index.spec)), 1, messages.along(op))
        return e(x, At((), ()))
    d, shape = dim_of(op), shape_of(x.spec)
    where = At((at.shape[d],), (at.dims[d],)).reshape(shape_of(index.spec))
    found = e.lookup(index, where, shape[d], messages.along(op))
    return e.value(x, At(shape, (*at.dims[:d], found, *at.dims[d + 1 :])))


def _embedding(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    table, index = op.arg("weight"), op.arg("indices")
    rank, shape = index.spec.rank, shape_of(table.spec)
    found = e.lookup(index, at.pick(range(rank)), shape[0], messages.row(op))
    return e.value(table, At(shape, (found, *at.dims[rank:])))


def index_places(op: OpView) -> tuple[list[int], int, int]:
    """For an advanced indexing: the indexed dims, the position of the indices' own dims in the result, and their number."""
    given = [(d, i) for d, i in enumerate(op.arg("indices")) if i is not None]
    dims = [d for d, _ in given]
    lead = max(i.spec.rank for _, i in given)
    neighbours = dims == list(range(dims[0], dims[0] + len(dims)))
    return dims, dims[0] if neighbours else 0, lead


def indexed(e: Evaluator, op: OpView, at: At, shape: tuple[Any, ...]) -> tuple[Index, ...]:
    """The position in a tensor of `shape` that element `at` of `tensor[indices]` reads. Bounds are checked, negatives wrap."""
    dims, first, lead = index_places(op)
    where = at.pick(range(first, first + lead))
    rest = [*at.dims[:first], *at.dims[first + lead :]]
    found = {}
    for k, d in enumerate(dims):
        index = op.arg("indices")[d]
        found[d] = e.lookup(index, _last(where, index), shape[d], messages.tensor(k), wrap=True)
    return tuple(found[d] if d in found else rest.pop(0) for d in range(len(shape)))


def _last(at: At, v: Value) -> At:
    return at.broadcast(shape_of(v.spec))


def _index(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x = op.arg("self")
    return e.value(x, At(shape_of(x.spec), indexed(e, op, at, shape_of(x.spec))))


def integer_indices(op: OpView) -> str | None:
    """Only integer indices are supported; masks have data-dependent results."""
    for i in op.arg("indices"):
        if i is not None and (i.spec is None or i.spec.dtype.itemsize == 1):
            return "indexed by a mask"
    return None if any(i is not None for i in op.arg("indices")) else "no indices"


# ---- joins ----


def _constant(index: Index) -> int | None:
    """The index if it is one number, as in rows that are unrolled: one piece is read then, under the mask that holds already. With
    masks of their own, pieces that are joined inside of others would be computed once for each path to them."""
    plain = not (index.coefs or index.divmods or index.indirect)
    return index.offset if plain and isinstance(index.offset, int) else None


def _cat(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    tensors = [t for t in op.arg("tensors") if 0 not in shape_of(t.spec)]
    d = int(op.arg("dim")) % len(at.shape)
    t = out_type(op)
    position = e.position(at.dims[d])
    before: Any = 0
    bounds = []
    for v in tensors:
        bounds.append(before)
        before = shape_of(v.spec)[d] + before
    if (at_once := _constant(at.dims[d])) is not None and all(isinstance(b, int) for b in (*bounds, before)):
        for v, start in zip(tensors, bounds, strict=True):
            if start <= at_once < start + shape_of(v.spec)[d]:
                return e(v, at.with_dim(d, at.dims[d] - start, shape_of(v.spec)[d]), t)
    out: Val | None = None
    for v, start in reversed(list(zip(tensors, bounds, strict=True))):
        size = shape_of(v.spec)[d]
        inside = at.with_dim(d, at.dims[d] - start, size)
        low, high = position >= _value(e, start), position < _value(e, start + size)
        here = high if start == 0 else low if out is None else e.b.op("and", low, high)
        with e.masked(here, e.part(at.dims[d], start, size)):
            part = e(v, inside, t)
        out = part if out is None else e.b.where(high, part, out)
    assert out is not None
    return out


def _value(e: Evaluator, size: Any) -> Val:
    """An extent as an i64 value."""
    return e.b.const(size, "i64") if isinstance(size, int) else e.b.index_value(Index(size, sizes=e.b.p + e.b.r))


def _few(op: OpView) -> str | None:
    n = len(op.arg("tensors"))
    return f"joins {n} tensors, more than {CAT_LIMIT}" if n > CAT_LIMIT else None


def _stack(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    tensors = op.arg("tensors")
    d = int(op.arg("dim")) % len(at.shape)
    rest = [i for i in range(len(at.shape)) if i != d]
    t, inside = out_type(op), at.pick(rest)
    if (at_once := _constant(at.dims[d])) is not None and 0 <= at_once < len(tensors):
        return e(tensors[at_once], inside, t)
    position = e.position(at.dims[d])
    out: Val | None = None
    for i, v in reversed(list(enumerate(tensors))):
        here = position.eq(i)
        with e.masked(here, e.part(at.dims[d], i, 1)):
            part = e(v, inside, t)
        out = part if out is None else e.b.where(here, part, out)
    assert out is not None
    return out


# ---- pads, shifts, triangles ----


def _pad(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x, pad = op.arg("self"), [number(p) for p in op.arg("pad")]
    shape, dims = shape_of(x.spec), list(at.dims)
    inside: Val | None = None
    for i in range(len(pad) // 2):
        d, left, right = len(shape) - 1 - i, pad[2 * i], pad[2 * i + 1]
        dims[d] = dims[d] - left
        for width, test in ((left, ">="), (right, "<")):
            if not isinstance(width, int) or width > 0:
                p = e.position(dims[d])
                ok = p >= 0 if test == ">=" else p < _value(e, shape[d])
                inside = ok if inside is None else e.b.op("and", inside, ok)
    t, source = out_type(op), At(shape, tuple(dims))
    if inside is None:
        return e.value(x, source)
    with e.masked(inside):
        value = e.value(x, source)
    return e.b.where(inside, value, e.const(op.arg("value"), t))


def _plain_pad(op: OpView) -> str | None:
    name = "pad" if "pad" in op.argnames else "padding"
    known = (isinstance(p, int) or (isinstance(p, Value) and p.dim is not None) for p in op.arg(name))
    return None if all(known) else "a pad that is only known at run time"


def _edge_pad(clip: Callable[[Evaluator, Val, Extent], Val]) -> Callable[[Evaluator, OpView, int, At], Val]:
    def run(e: Evaluator, op: OpView, k: int, at: At) -> Val:
        x, pad = op.arg("self"), [number(p) for p in op.arg("padding")]
        shape, dims = shape_of(x.spec), list(at.dims)
        for i in range(len(pad) // 2):
            d = len(shape) - 1 - i
            p = clip(e, e.position(dims[d] - pad[2 * i]), shape[d])
            dims[d] = e.b.indirect(p)
        return e.value(x, At(shape, tuple(dims)))

    return run


def _reflect(e: Evaluator, p: Val, size: Extent) -> Val:
    p = e.b.op("abs", p)
    return e.b.op("minimum", p, _value(e, (size - 1) * 2) - p)


def _replicate(e: Evaluator, p: Val, size: Extent) -> Val:
    return e.b.op("minimum", e.b.op("maximum", p, e.b.const(0, "i64")), _value(e, size - 1))


def _roll(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x, shifts, dims = op.arg("self"), op.arg("shifts"), op.arg("dims")
    shape = shape_of(x.spec)
    if not dims and len(shape) > 1:  # as if it had one dim
        return e.value(x, _unflattened(e, _around(e, at.linear, shifts[0], product(shape)), shape))
    if not shape:  # eager accepts a shift of a scalar and ignores it
        return e.value(x, at)
    for s, d in zip(shifts, dims or range(len(shape)), strict=True):
        d, n = d % len(shape), shape[d % len(shape)]
        moved = (at.dims[d] + (-s) % n) % n if isinstance(n, int) else e.b.indirect(_around(e, at.dims[d], s, n))
        at = at.with_dim(d, moved, n)
    return e.value(x, at)


def _around(e: Evaluator, index: Index, shift: int, size: Extent) -> Val:
    """The position `index - shift`, wrapped around."""
    return e.b.op("remainder", e.position(index) - shift, _value(e, size))


def _unflattened(e: Evaluator, position: Val, shape: Shape) -> At:
    """The element of a tensor of `shape` at a row-major position."""
    dims = []
    for n, step in zip(shape, dense_strides(shape), strict=True):
        q = position if step == 1 else e.b.op("floordiv", position, _value(e, step))
        dims.append(e.b.indirect(e.b.op("remainder", q, _value(e, n))))
    return At(shape, tuple(dims))


def _static_self(op: OpView) -> str | None:
    return None if op.arg("self").spec.static else "a symbolic size"


def _rollable(op: OpView) -> str | None:
    return None if all(isinstance(s, int) for s in op.arg("shifts")) else "a symbolic shift"


def _flip(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x = op.arg("self")
    for d in op.arg("dims"):
        d %= max(x.spec.rank, 1)
        if x.spec.rank:
            at = at.with_dim(d, at.dims[d] * -1 + (at.shape[d] - 1), at.shape[d])
    return e.value(x, at)


def _repeat(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x = op.arg("self")
    shape = shape_of(x.spec)
    extra = len(at.shape) - len(shape)
    dims = tuple(at.dims[i + extra] % s if s != 1 else at.dims[i + extra] * 0 for i, s in enumerate(shape))
    return e.value(x, At(shape, dims))


def _triangle(keep: Callable[[Val, Val], Val]) -> Callable[[Evaluator, OpView, int, At], Val]:
    def run(e: Evaluator, op: OpView, k: int, at: At) -> Val:
        v = e(op.arg("self"), at)
        inside = keep(e.position(at.dims[-1]), e.position(at.dims[-2] + op.arg("diagonal")))
        return e.b.where(inside, v, e.b.const(0, v.dtype))

    return run


def _slice_scatter(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x, src, d, step = op.arg("self"), op.arg("src"), dim_of(op), op.arg("step")
    start, size, t = start_of(op), shape_of(op.arg("src").spec)[dim_of(op)], out_type(op)
    inside, place = _in_slice(e, at.dims[d], start, size, step)
    with e.masked(inside):
        new = e(src, at.with_dim(d, place, size), t)
    return e.b.where(inside, new, e(x, at, t))


def _scattered_slice(op: OpView) -> str | None:
    fixed = isinstance(start_of(op), int) or op.arg("step") == 1
    return known_start(op) if fixed else "steps from a symbolic start"


def _in_slice(e: Evaluator, index: Index, start: Any, size: Any, step: int) -> tuple[Val, Index]:
    """Whether an index is among `start, start + step, ...` (`size` of them), and its number in that sequence."""
    shifted = index - start
    p = e.position(shifted)
    inside = p < _value(e, size * step)
    if start:
        inside = e.b.op("and", p >= 0, inside)
    if step == 1:
        return inside, shifted
    # Shift `index` by a multiple of the step, so that the remainder and the quotient are not negative.
    lift = -(-start // step) * step - start
    q, r = (index + lift) // step - (start + lift) // step, (index + lift) % step
    return e.b.op("and", inside, e.position(r).eq(0)), q


def _select_scatter(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x, src, d = op.arg("self"), op.arg("src"), dim_of(op)
    here = e.position(at.dims[d]).eq(_value(e, selected(op, shape_of(x.spec)[d])))
    rest = [a for a in range(len(at.shape)) if a != d]
    t = out_type(op)
    with e.masked(here):
        new = e(src, at.pick(rest), t)
    return e.b.where(here, new, e(x, at, t))


def _select_backward(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    d = int(op.arg("dim")) % len(at.shape)
    here = e.position(at.dims[d]).eq(_value(e, selected(op, at.shape[d])))
    rest = [a for a in range(len(at.shape)) if a != d]
    with e.masked(here):
        g = e(op.arg("grad_output"), at.pick(rest))
    return e.b.where(here, g, e.b.const(0, g.dtype))


def _slice_backward(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    g, d = op.arg("grad_output"), int(op.arg("dim")) % len(at.shape)
    size = shape_of(g.spec)[d]
    inside, place = _in_slice(e, at.dims[d], start_of(op), size, op.arg("step"))
    with e.masked(inside):
        v = e(g, at.with_dim(d, place, size))
    return e.b.where(inside, v, e.b.const(0, v.dtype))


def _slice_grad(op: OpView) -> str | None:
    return _scattered_slice(op) or _of_slice(op, "grad_output")


def _slice_source(op: OpView) -> str | None:
    return _scattered_slice(op) or _of_slice(op, "src")


def _of_slice(op: OpView, name: str) -> str | None:
    """Only an argument of the slice's shape: tracing lets others pass. Eager broadcasts gradients, and refuses the rest. Symbols:
    as traced."""
    shape, sizes = shape_of(op.arg(name).spec), list(shape_of(op.out.spec))
    d = int(op.arg("dim")) % max(len(sizes), 1)
    if len(shape) != len(sizes):
        return OTHER_SHAPE
    start, end = (None if op.arg(n) is None else traced(op.arg(n)) for n in ("start", "end"))
    length = len(range(hint(op.out.spec.shape[d]))[start : end : op.arg("step")])  # type: ignore[union-attr]
    fits = hint(op.arg(name).spec.shape[d]) == length and shape[:d] + shape[d + 1 :] == (*sizes[:d], *sizes[d + 1 :])
    return None if fits else OTHER_SHAPE


def _selected_source(op: OpView) -> str | None:
    sizes, d = shape_of(op.arg("self").spec), dim_of(op)
    return signed(op) or (None if shape_of(op.arg("src").spec) == sizes[:d] + sizes[d + 1 :] else OTHER_SHAPE)


def _diagonal_source(op: OpView) -> str | None:
    if why := _plain_offset(op):
        return why
    sizes, shape, offset = shape_of(op.arg("self").spec), shape_of(op.arg("src").spec), op.arg("offset")
    a, b = dim_of(op, "dim1"), dim_of(op, "dim2")
    rows, columns = (hint(op.arg("self").spec.shape[d]) for d in (a, b))
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    fits = shape[:-1] == tuple(n for d, n in enumerate(sizes) if d not in (a, b)) and hint(op.arg("src").spec.shape[-1]) == length
    return None if fits else OTHER_SHAPE


OTHER_SHAPE = "an argument of another shape than the slice's"


def _diagonal_scatter(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x, src, offset = op.arg("self"), op.arg("src"), op.arg("offset")
    a, b = dim_of(op, "dim1"), dim_of(op, "dim2")
    here = e.position(at.dims[b] - at.dims[a]).eq(offset)
    along = at.dims[a] - max(-offset, 0)
    rest, shape, t = [d for d in range(len(at.shape)) if d not in (a, b)], shape_of(src.spec), out_type(op)
    with e.masked(here):
        new = e(src, At(shape, (*(at.dims[d] for d in rest), along)), t)
    return e.b.where(here, new, e(x, at, t))


def _plain_offset(op: OpView) -> str | None:
    return None if isinstance(op.arg("offset"), int) else "a symbolic offset"


def _bucketize(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    """Eager's binary search, step by step, so that even unsorted boundaries and NaN give the same result."""
    x, boundaries = op.arg("self"), op.arg("boundaries")
    (n,) = shape_of(boundaries.spec)
    v, low, high = e(x, at), e.b.const(0, "i64"), _value(e, n)
    for _ in range(n.bit_length() if isinstance(n, int) else BUCKET_STEPS):
        searching = low < high
        middle = low + e.b.op("shr", high - low, e.b.const(1, "i64"))
        with e.masked(searching):
            bound = e(boundaries, At((n,), (e.b.indirect(middle),)))
        below = e.b.op("and", searching, ~(bound > v if op.arg("right") else bound >= v))
        stays = e.b.op("and", searching, ~below)
        low, high = e.b.where(below, middle + 1, low), e.b.where(stays, middle, high)
    return e.b.cast(low, out_type(op))


def _same_type(op: OpView) -> str | None:
    spec = op.arg("boundaries").spec
    if spec.dtype != op.arg("self").spec.dtype or spec.dtype == torch.bool:
        return "boundaries of another type"
    if spec.rank != 1:
        return "boundaries of more than one dim"
    return None


def _pixel_shuffle(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x, r = op.arg("self"), op.arg("upscale_factor")
    *lead, c, h, w = at.dims
    source = (*lead, (c * r + h % r) * r + w % r, h // r, w // r)
    return e.value(x, At(shape_of(x.spec), source))


def _pixel_unshuffle(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x, r = op.arg("self"), op.arg("downscale_factor")
    *lead, c, h, w = at.dims
    source = (*lead, c // (r * r), h * r + c // r % r, w * r + c % r)
    return e.value(x, At(shape_of(x.spec), source))


def _glu(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x, d = op.arg("self"), dim_of(op)
    size, half = shape_of(x.spec)[d], at.shape[d]
    a, b = (e(x, at.with_dim(d, at.dims[d] + s, size)) for s in (0, half))
    return a * e.b.op("sigmoid", b)


def _glu_backward(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x, grad, d = op.arg("self"), op.arg("grad_output"), dim_of(op)
    size, half = at.shape[d], shape_of(op.arg("grad_output").spec)[d]
    first = at.dims[d] % half
    g = e(grad, at.with_dim(d, first, half))
    a, b = (e(x, at.with_dim(d, first + s, size)) for s in (0, half))
    s = e.b.op("sigmoid", b)
    return e.b.where(e.position(at.dims[d]) < _value(e, half), g * s, g * a * s * (1 - s))


# ---- creation ----


def _full(name: str) -> Callable[[Evaluator, OpView, int, At], Val]:
    def run(e: Evaluator, op: OpView, k: int, at: At) -> Val:
        given, t = op.arg(name), out_type(op)
        if isinstance(given, Value):
            return e(given, At((), ()) if given.spec is not None else at, t)
        return e.cast(e.const(given, t), from_torch(op.out.spec.dtype))  # type: ignore[union-attr]

    return run


def _number(name: str) -> Callable[[OpView], str | None]:
    def check(op: OpView) -> str | None:
        given = op.arg(name)
        if isinstance(given, Value):
            ok = given.spec is not None or given.dim is not None
        else:
            ok = isinstance(given, bool | int | float)
        return None if ok else f"{name} is no plain number"

    return check


def _arange(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    start, step, t = op.arg("start"), op.arg("step"), out_type(op)
    (i,) = at.dims
    if TYPES[t].kind == "int":
        return e.b.cast(e.position(i * number(step, 1) + number(start)), t)
    p = e.b.cast(e.position(i), "f64")
    return e.b.cast(p * float(step) + float(start), t)


def _plain_range(op: OpView) -> str | None:
    floating = op.out.spec is not None and op.out.spec.dtype.is_floating_point
    kinds = int | float if floating else int | Value
    ok = isinstance(op.arg("start"), kinds) and isinstance(op.arg("step"), int | float if floating else int)
    return None if ok else "a range whose start or step is symbolic or rounded"


def _linspace(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    start, end, steps, t = op.arg("start"), op.arg("end"), op.arg("steps"), out_type(op)
    if steps == 1:
        return e.const(start, t)
    (i,) = at.dims
    step = (float(end) - float(start)) / (steps - 1)
    p = e.b.cast(e.position(i), "f64")
    rising, falling = p * step + float(start), float(end) - (steps - 1 - p) * step
    return e.b.cast(e.b.where(p < steps // 2, rising, falling), t)


def _plain_line(op: OpView) -> str | None:
    ok = all(isinstance(op.arg(n), int | float) for n in ("start", "end")) and isinstance(op.arg("steps"), int)
    floating = op.out.spec is not None and op.out.spec.dtype.is_floating_point
    return None if ok and floating else "bounds that are tensors, or integers"


def _eye(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    t = out_type(op)
    same = e.position(at.dims[0] - at.dims[1]).eq(0)
    return e.b.where(same, e.b.const(1, t), e.b.const(0, t))


TABLE: Table = {
    name: (rule,)
    for name, rule in {
        "gather": Map(_gather, cost=12),
        "index": Map(_index, integer_indices, cost=12),
        "index_select": Map(_index_select, cost=12),
        "embedding": Map(_embedding, cost=12, symbols=("padding_idx",)),
        "cat": Map(_cat, _few, cost=6),
        "stack": Map(_stack, _few, cost=6),
        "constant_pad_nd": Map(_pad, _plain_pad, cost=4),
        **{f"reflection_pad{n}d": Map(_edge_pad(_reflect), _plain_pad, cost=8 * n) for n in (1, 2, 3)},
        **{f"replication_pad{n}d": Map(_edge_pad(_replicate), _plain_pad, cost=8 * n) for n in (1, 2, 3)},
        "bucketize": Map(_bucketize, _same_type, cost=100),
        "roll": Map(_roll, _rollable, cost=4),
        "flip": Map(_flip),
        "repeat": Map(_repeat),
        "tril": Map(_triangle(lambda column, row: column <= row)),
        "triu": Map(_triangle(lambda column, row: column >= row)),
        "slice_scatter": Map(_slice_scatter, _slice_source, cost=6, symbols=("start", "end")),
        "select_scatter": Map(_select_scatter, _selected_source, cost=6, symbols=("index",)),
        "diagonal_scatter": Map(_diagonal_scatter, _diagonal_source, cost=6),
        "select_backward": Map(_select_backward, signed, cost=6, symbols=("index",)),
        "slice_backward": Map(_slice_backward, _slice_grad, cost=6, symbols=("start", "end")),
        "pixel_shuffle": Map(_pixel_shuffle, _static_self, cost=4),
        "pixel_unshuffle": Map(_pixel_unshuffle, _static_self, cost=4),
        "glu": Map(_glu, cost=26),
        "glu_backward": Map(_glu_backward, cost=30),
        "arange": Map(_arange, _plain_range, symbols=("start", "end")),
        "full": Map(_full("fill_value"), _number("fill_value"), cost=1, symbols=("fill_value",)),
        "full_like": Map(_full("fill_value"), _number("fill_value"), cost=1, symbols=("fill_value",)),
        "new_full": Map(_full("fill_value"), _number("fill_value"), cost=1, symbols=("fill_value",)),
        "fill": Map(_full("value"), _number("value"), cost=1, symbols=("value",)),
        "fill_tensor": Map(_full("value"), cost=1),
        "scalar_tensor": Map(_full("s"), _number("s"), cost=1, symbols=("s",)),
        "linspace": Map(_linspace, _plain_line, cost=6),
        "eye": Map(_eye, symbols=("n", "m")),
    }.items()
}
__all__ = ["TABLE", "index_places", "indexed", "insert", "out_type"]
