"""Long reductions over few points: two kernels, the first one over parts of the row, the second one over the
parts.

The number of parts depends on sizes only, so results do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from fusewright.toolkit.kernel.apart import few_columns
from fusewright.toolkit.kernel.index import Index, Indirect, axis_index
from fusewright.toolkit.kernel.ir import Buffer, Kernel, Node, Stage
from fusewright.toolkit.kernel.moments import without_moments
from fusewright.toolkit.kernel.simplify import simplify_axes
from fusewright.toolkit.kernel.types import TYPES, DType
from fusewright.toolkit.kernel.verify import verify

SPLITTABLE = ("sum", "prod", "max", "min", "any", "all", "argmax", "argmin")
MIN_ROW = 1 << 15
"""Elements of a row from which splitting is worth a second launch."""
MAX_POINTS = 16
"""With more points than this there is work for every thread without splitting."""
PARTS = 32


@dataclass(frozen=True, slots=True)
class Split:
    """Run `first` on the buffers `first_buffers` of the kernel and then the partial results, then `second`
    on all buffers of the kernel and then the partial results. `partials` are their types and element counts.
    """

    first: Kernel
    first_buffers: tuple[int, ...]
    second: Kernel
    partials: tuple[tuple[DType, int], ...]


def split_rows(kernel: Kernel, parts: int = PARTS) -> Split | None:
    """The two steps, or None when the kernel is not of that kind: static sizes, few points, a long row, and
    one row stage that holds nothing but mergeable reductions."""
    kernel = without_moments(kernel)
    sizes = [s for s in kernel.sizes if isinstance(s, int)]
    rows = [k for k, s in enumerate(kernel.stages) if s.over == "PR"]
    if len(sizes) != len(kernel.sizes) or len(rows) != 1:
        return None
    points, row = math.prod(sizes[: len(kernel.p)]), math.prod(sizes[len(kernel.p) :])
    few = 0 < points <= MAX_POINTS and row >= MIN_ROW
    if not (few or few_columns(kernel)) or sizes[len(kernel.p)] < 2 * parts:
        return None
    stage = kernel.stages[rows[0]]
    reductions = [n for n in stage.nodes if n.op == "reduce"]
    plain = not any(n.op in ("store", "scan", "bound") or n.keep for n in stage.nodes)
    if not reductions or not plain or any(n.how not in SPLITTABLE for n in reductions):
        return None
    first, used = _first(kernel, rows[0], reductions, parts, points)
    second = _second(kernel, rows[0], reductions, parts, points)
    types = {n.id: n.dtype for n in kernel.nodes()}
    partials = [(types[r.args[0]], parts * points) for r in reductions]
    partials += [("i64", parts * points) for r in reductions if _is_position(r)]
    return Split(first, used, second, tuple(partials))


def _is_position(n: Node) -> bool:
    return n.how in ("argmax", "argmin")


def _linear(n_axes: int, sizes: tuple[int, ...], shape: tuple[int, ...], skip: int) -> Index:
    """Row-major index over axes `skip` .. `skip + n_axes`."""
    out = Index(sizes=sizes)
    for a in range(n_axes):
        out = out + axis_index(skip + a, sizes) * math.prod(shape[a + 1 :])
    return out


def _first(kernel: Kernel, at: int, reductions: list[Node], parts: int, points: int) -> tuple[Kernel, tuple[int, ...]]:
    """Partial results: `parts` joins P, the first row axis becomes its chunk."""
    old = tuple(int(s) for s in kernel.sizes if isinstance(s, int))
    n_p = len(kernel.p)
    chunk = -(-old[n_p] // parts)
    sizes = (parts, *old[:n_p], chunk, *old[n_p + 1 :])
    axes = [axis_index(a + 1, sizes) for a in range(len(old))]
    axes[n_p] = axis_index(0, sizes) * chunk + axis_index(n_p + 1, sizes)
    stages = [s for s in kernel.stages[:at] if s.over == "P"]
    needed = [n for s in (*stages, kernel.stages[at]) for n in s.nodes if n.op != "store"]
    used = tuple(sorted({n.buffer for n in needed if n.buffer is not None}))
    before = [replace(s, nodes=tuple(_moved(n, axes, sizes, used) for n in s.nodes if n.op != "store")) for s in stages]
    row = [_moved(n, axes, sizes, used) for n in kernel.stages[at].nodes]
    types = {n.id: n.dtype for n in kernel.nodes()}
    fresh = count(max(types) + 1)
    if parts * chunk != old[n_p]:
        row = _guarded(row, axes[n_p], old[n_p], types, fresh)
    ends = {n.id: n for n in row if n.op == "reduce"}
    results, after = [ends[r.id] for r in reductions], list[Node]()
    for r in [r for r in results if _is_position(r)]:
        # positions are compared by the values there, which go along as partial results
        value = Node(next(fresh), "reduce", types[reductions[results.index(r)].args[0]], r.args, how=r.how[3:])
        start = Node(next(fresh), "index", "i64", index=axis_index(0, sizes) * (chunk * math.prod(old[n_p + 1 :])))
        position = Node(next(fresh), "add", "i64", (r.id, start.id))
        row.append(value)
        after += [start, position]
        results = [value if x is r else x for x in results] + [position]
    place = axis_index(0, sizes) * points + _linear(n_p, sizes, old[:n_p], 1)
    after += [Node(next(fresh), "store", r.dtype, (r.id,), place, len(used) + k) for k, r in enumerate(results)]
    buffers = [replace(kernel.buffers[b], access="in") for b in used]
    buffers += [Buffer(f"part{k}", r.dtype, "out") for k, r in enumerate(results)]
    first = replace(
        kernel,
        name=f"{kernel.name}_parts",
        buffers=tuple(buffers),
        p=sizes[: n_p + 1],
        r=sizes[n_p + 1 :],
        stages=(*before, Stage("PR", tuple(row)), Stage("P", tuple(after))),
    )
    return _done(first), used


def _guarded(row: list[Node], at: Index, size: int, types: dict[int, DType], fresh: Iterator[int]) -> list[Node]:
    """The row stage with nothing read, and nothing reduced, where `at` is past `size`."""
    here = Node(next(fresh), "index", "i64", index=at)
    limit = Node(next(fresh), "const", "i64", value=size)
    inside = Node(next(fresh), "lt", "bool", (here.id, limit.id))
    out = [here, limit, inside]
    for n in row:
        if n.op == "load":
            out += _guarded_load(n, inside.id, fresh)
        elif n.op == "reduce":
            out += _guarded_reduce(n, inside.id, types[n.args[0]], fresh)
        else:
            out.append(n)
    return out


def _moved(n: Node, axes: list[Index], sizes: tuple[int, ...], used: tuple[int, ...]) -> Node:
    index = None if n.index is None else n.index.substitute(axes, sizes)
    return replace(n, index=index, buffer=None if n.buffer is None else used.index(n.buffer))


def _guarded_load(n: Node, inside: int, fresh: Iterator[int]) -> list[Node]:
    """The load with `inside` added to its mask."""
    if n.args:
        both = Node(next(fresh), "and", "bool", (n.args[0], inside))
        return [both, replace(n, args=(both.id, n.args[1]))]
    zero = Node(next(fresh), "const", n.dtype, value=_zero(n.dtype))
    return [zero, replace(n, args=(inside, zero.id))]


def _guarded_reduce(n: Node, inside: int, dtype: DType, fresh: Iterator[int]) -> list[Node]:
    """The reduction of its operand where `inside`, of its identity elsewhere."""
    edge = Node(next(fresh), "const", dtype, value=_identity(n.how.removeprefix("arg"), dtype))
    value = Node(next(fresh), "where", dtype, (inside, n.args[0], edge.id))
    return [edge, value, replace(n, args=(value.id,))]


def _zero(dtype: DType) -> float | int | bool:
    return {"float": 0.0, "int": 0, "bool": False}[TYPES[dtype].kind]


def _identity(how: str, dtype: DType) -> float | int | bool:
    info = TYPES[dtype]
    if how in ("any", "all"):
        return how == "all"
    if info.kind == "float":
        return {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}[how]
    bits = info.size * 8
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if info.signed else (0, (1 << bits) - 1)
    return {"sum": 0, "prod": 1, "max": low, "min": high}[how]


def _second(kernel: Kernel, at: int, reductions: list[Node], parts: int, points: int) -> Kernel:
    """The row stage becomes one over the parts; everything else stays."""
    n_p = len(kernel.p)
    shape = tuple(int(s) for s in kernel.p if isinstance(s, int))
    sizes = (*shape, parts)
    point = _linear(n_p, sizes, shape, 0)
    place = axis_index(n_p, sizes) * points + point
    types = {n.id: n.dtype for n in kernel.nodes()}
    fresh, buffer = count(max(types) + 1), count(len(kernel.buffers) + len(reductions))
    row, after = list[Node](), list[Node]()
    for k, r in enumerate(reductions):
        row.append(Node(next(fresh), "load", types[r.args[0]], (), place, len(kernel.buffers) + k))
        if not _is_position(r):
            row.append(replace(r, args=(row[-1].id,)))
            continue
        best = Node(next(fresh), "reduce", "i64", (row[-1].id,), how=r.how)
        there = point + Index(indirect=(Indirect(points, best.id),), sizes=sizes)
        row.append(best)
        after.append(Node(r.id, "load", "i64", (), there, next(buffer)))
    axes = [axis_index(a, sizes) for a in range(n_p)] + [Index(sizes=sizes)] * len(kernel.r)

    def moved(n: Node) -> Node:
        return n if n.index is None else replace(n, index=n.index.substitute(axes, sizes))

    stages = [replace(s, nodes=tuple(moved(n) for n in s.nodes)) for s in kernel.stages]
    stages[at : at + 1] = [Stage("PR", tuple(row)), *([Stage("P", tuple(after))] if after else [])]
    partials = [types[r.args[0]] for r in reductions] + ["i64" for r in reductions if _is_position(r)]
    buffers = [*kernel.buffers, *(Buffer(f"part{k}", t, "in") for k, t in enumerate(partials))]
    return _done(replace(kernel, name=f"{kernel.name}_total", buffers=tuple(buffers), r=(parts,), stages=tuple(stages)))


def _done(kernel: Kernel) -> Kernel:
    kernel = simplify_axes(kernel)
    verify(kernel)
    return kernel
