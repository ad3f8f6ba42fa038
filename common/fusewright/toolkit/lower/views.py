"""Rules of the view rows: the element of the argument that each element of the result is."""

from __future__ import annotations

from fusewright.interface import Dim, OpView, Size, Value, hint
from fusewright.sizes.expr import names
from fusewright.toolkit.ir import Index
from fusewright.toolkit.ir.extent import Extent
from fusewright.toolkit.rules.kinds import Table, View
from fusewright.toolkit.rules.space import At, extent, shape_of


def dim_of(op: OpView, name: str = "dim", tensor: str = "self") -> int:
    """A dim argument, counted from the front."""
    rank = max(op.arg(tensor).spec.rank, 1)
    return int(op.arg(name)) % rank


def number(arg: object, default: Extent = 0) -> Extent:
    """A size or position argument as an extent: an int, a symbolic size, or the default for None."""
    if arg is None:
        return default
    if isinstance(arg, Value):
        if arg.dim is None:
            raise ValueError("a number that is only known at run time")
        return extent(arg.dim)
    return extent(arg) if isinstance(arg, int | Dim) else int(arg)  # type: ignore[call-overload]


def _plain(*names: str) -> object:
    """A check that the arguments are plain ints, or None."""

    def check(op: OpView) -> str | None:
        for n in names:
            if not (op.arg(n) is None or isinstance(op.arg(n), int)):
                return f"{n} is no plain integer"
        return None

    return check


def start_of(op: OpView) -> Extent:
    """The start of a slice, clipped as in Python; for symbols, as tracing did, which guards it."""
    start, size = op.arg("start"), _sliced(op)
    if start is None:
        return 0
    if isinstance(start, int) and isinstance(size, int):
        return min(max(start + size, 0) if start < 0 else start, size)
    if traced(start) >= 0:
        return number(start)
    return extent(size) + number(start) if hint(size) + traced(start) >= 0 else 0


def traced(position: int | Value) -> int:
    """A position, as tracing saw it."""
    return position if isinstance(position, int) else position.dim.hint  # type: ignore[union-attr]


def _guarded(position: int | Value) -> bool:
    """Whether tracing guarded the sign of a position."""
    x = number(position)
    return isinstance(x, int) or not any(s.startswith("u") for s in names(x))


def _sliced(op: OpView) -> Size:
    """The size that a slice, or its gradient, is taken from."""
    if "self" in op.argnames:
        return op.arg("self").spec.shape[dim_of(op)]
    return op.out.spec.shape[int(op.arg("dim")) % op.out.spec.rank]  # type: ignore[union-attr]


def known_start(op: OpView) -> str | None:
    """Only slices whose step is known, and whose start is counted from a known end."""
    start, size = op.arg("start") or 0, _sliced(op)
    if not isinstance(op.arg("step"), int):
        return "the step of the slice is symbolic"
    if not _guarded(start):
        return "a start that may count from the end"
    unknown = not isinstance(size, int) and any(s.startswith("u") for s in names(extent(size)))
    return "a start from the end of a size that tracing did not know" if unknown and traced(start) < 0 else None


def _reshape(op: OpView, k: int, at: At) -> tuple[Value, At]:
    x = op.arg("self")
    return x, at.reshape(shape_of(x.spec))


def _expand(op: OpView, k: int, at: At) -> tuple[Value, At]:
    x = op.arg("self")
    return x, at.broadcast(shape_of(x.spec))


def _reordered(at: At, source: list[int], x: Value) -> At:
    """`source[i]`: the argument's dim that is dim `i` of the result."""
    dims = [at.dims[0]] * len(source)
    for i, d in enumerate(source):
        dims[d] = at.dims[i]
    return At(shape_of(x.spec), tuple(dims))


def _permute(op: OpView, k: int, at: At) -> tuple[Value, At]:
    x = op.arg("self")
    rank = x.spec.rank
    return x, _reordered(at, [d % rank for d in op.arg("dims")], x) if rank else at


def _transpose(op: OpView, k: int, at: At) -> tuple[Value, At]:
    x = op.arg("self")
    if not x.spec.rank:
        return x, at
    order = list(range(x.spec.rank))
    a, b = dim_of(op, "dim0"), dim_of(op, "dim1")
    order[a], order[b] = order[b], order[a]
    return x, _reordered(at, order, x)


def _t(op: OpView, k: int, at: At) -> tuple[Value, At]:
    x = op.arg("self")
    return x, _reordered(at, [1, 0], x) if x.spec.rank == 2 else at


def _slice(op: OpView, k: int, at: At) -> tuple[Value, At]:
    x, d = op.arg("self"), dim_of(op)
    return x, at.with_dim(d, at.dims[d] * op.arg("step") + start_of(op), shape_of(x.spec)[d])


def insert(at: At, dim: int, index: Index | Extent, size: Extent) -> At:
    """`at` with one more dim."""
    ix = index if isinstance(index, Index) else Index(index, sizes=at.dims[0].sizes if at.dims else None)
    dims, shape = list(at.dims), list(at.shape)
    dims.insert(dim, ix)
    shape.insert(dim, size)
    return At(tuple(shape), tuple(dims))


def _select(op: OpView, k: int, at: At) -> tuple[Value, At]:
    x, d = op.arg("self"), dim_of(op)
    size = shape_of(x.spec)[d]
    return x, insert(at, d, selected(op, size), size)


def selected(op: OpView, size: Extent) -> Extent:
    """The position in a dim of this size that a select has, whose sign tracing has guarded if it is a symbol."""
    given = op.arg("index")
    return number(given) + size if traced(given) < 0 else number(given)


def signed(op: OpView) -> str | None:
    """Only indices whose sign is known."""
    return None if _guarded(op.arg("index")) else "an index that may count from the end"


def _unbind(op: OpView, k: int, at: At) -> tuple[Value, At]:
    x, d = op.arg("self"), dim_of(op)
    return x, insert(at, d, k, shape_of(x.spec)[d])


def _piece(op: OpView, k: int, at: At) -> tuple[Value, At]:
    x, d = op.arg("self"), dim_of(op)
    before: Extent = 0
    for v in op.outs[:k]:
        before = before + shape_of(v.spec)[d]
    return x, at.with_dim(d, at.dims[d] + before, shape_of(x.spec)[d])


def _diagonal(op: OpView, k: int, at: At) -> tuple[Value, At]:
    x, offset = op.arg("self"), op.arg("offset")
    a, b = dim_of(op, "dim1"), dim_of(op, "dim2")
    rest, i = list(at.dims[:-1]), at.dims[-1]
    dims = []
    for d in range(x.spec.rank):
        dims.append(i + max(-offset, 0) if d == a else i + max(offset, 0) if d == b else rest.pop(0))
    return x, At(shape_of(x.spec), tuple(dims))


def _unfold(op: OpView, k: int, at: At) -> tuple[Value, At]:
    x, d = op.arg("self"), dim_of(op, "dimension")
    if not x.spec.rank:
        return x, At((), ())
    dims = list(at.dims[:-1])
    dims[d] = dims[d] * op.arg("step") + at.dims[-1]
    return x, At(shape_of(x.spec), tuple(dims))


def _alias(op: OpView, k: int, at: At) -> tuple[Value, At]:
    return op.arg("self"), at


TABLE: Table = {
    name: (rule,)
    for name, rule in {
        "view": View(_reshape),
        "reshape": View(_reshape),
        "expand": View(_expand),
        "permute": View(_permute),
        "transpose": View(_transpose),
        "t": View(_t),
        "squeeze": View(_reshape),
        "unsqueeze": View(_reshape),
        "slice": View(_slice, known_start, ("start", "end")),
        "select": View(_select, signed, ("index",)),
        "split": View(_piece, symbols=("split_size",)),
        "split_with_sizes": View(_piece),
        "unbind": View(_unbind),
        "diagonal": View(_diagonal, _plain("offset")),  # type: ignore[arg-type]
        "unfold": View(_unfold, _plain("size", "step")),  # type: ignore[arg-type]
        "alias": View(_alias),
    }.items()
}
