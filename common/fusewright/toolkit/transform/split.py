"""Splits long reductions over few points into two kernels: the first reduces parts of the row, and stores its elements where they
are stored, the second combines the parts.

The number of parts depends only on sizes (for symbolic sizes, those seen when tracing), so results do not depend on the
number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from fusewright.interface import Splits
from fusewright.toolkit.ir.extent import Extent, apply, evaluate, product
from fusewright.toolkit.ir.index import Index, Indirect, axis_index
from fusewright.toolkit.ir.ir import Buffer, Kernel, Node, Stage
from fusewright.toolkit.ir.symbols import Step, step
from fusewright.toolkit.ir.types import TYPES, DType
from fusewright.toolkit.ir.verify import kernel_pass
from fusewright.toolkit.transform.moments import without_moments
from fusewright.toolkit.transform.split_columns import SPLITS, few_columns

SPLITTABLE = ("sum", "prod", "max", "min", "any", "all", "argmax", "argmin")
LINE = 64
"""Long parts are multiples of this many elements: vector loads that cross a cache line take twice as long."""


@dataclass(frozen=True, slots=True)
class Split:
    """Run `first` on the kernel's buffers `first_buffers` followed by the partial results, then `second` on all of the
    kernel's buffers followed by the partial results. `partials` are their types and element counts.
    """

    first: Step
    first_buffers: tuple[int, ...]
    second: Step
    partials: tuple[tuple[DType, Extent], ...]


@kernel_pass("split_rows", made=lambda s: () if s is None else (s.first.kernel, s.second.kernel))
def split_rows(kernel: Kernel, splits: Splits = SPLITS) -> Split | None:
    """Split a kernel with few points, a long row and one row stage of only mergeable reductions, and of elements that they are
    computed with, in two steps. Return None for any other kernel."""
    kernel = without_moments(kernel)
    n_p = len(kernel.p)
    seen = [evaluate(s, kernel.hints) for s in kernel.sizes]
    rows = [k for k, s in enumerate(kernel.stages) if s.over == "PR"]
    if len(rows) != 1:
        return None
    few, parts = 0 < math.prod(seen[:n_p]) <= splits.few_points and math.prod(seen[n_p:]) >= splits.long_row, splits.parts
    if not (few or few_columns(kernel, splits)) or seen[n_p] < 2 * parts:
        return None
    chunk = chunk_of(kernel, parts)
    stage = kernel.stages[rows[0]]
    reductions = [n for n in stage.nodes if n.op == "reduce"]
    plain = not any(n.op in ("scan", "bound") or n.keep for n in stage.nodes)
    stored = _stored(stage)
    if stored and not (few and all(kernel.buffers[b].access == "out" for b in stored)):
        return None
    if not reductions or not plain or any(n.how not in SPLITTABLE for n in reductions):
        return None
    first, used = _first(kernel, rows[0], reductions, parts, chunk)
    second = _second(kernel, rows[0], reductions, parts)
    points = product(kernel.p)
    types = {n.id: n.dtype for n in kernel.nodes()}
    partials = [(types[r.args[0]], points * parts) for r in reductions]
    partials += [("i64", points * parts) for r in reductions if _is_position(r)]
    return Split(first, used, second, tuple(partials))


def _stored(stage: Stage) -> frozenset[int]:
    """The buffers that a stage stores."""
    return frozenset(n.buffer for n in stage.nodes if n.op == "store" and n.buffer is not None)


def chunk_of(kernel: Kernel, parts: int) -> Extent:
    """The length of one part along the first row axis."""
    size = kernel.sizes[len(kernel.p)]
    line = LINE if evaluate(size, kernel.hints) >= 16 * LINE * parts else 1
    return apply("FloorDiv", size + (parts * line - 1), parts * line) * line


def _is_position(n: Node) -> bool:
    return n.how in ("argmax", "argmin")


def linear(n_axes: int, sizes: tuple[Extent, ...], shape: tuple[Extent, ...], skip: int) -> Index:
    """The row-major index over axes `skip` .. `skip + n_axes`."""
    out = Index(sizes=sizes)
    for a in range(n_axes):
        out = out + axis_index(skip + a, sizes) * product(shape[a + 1 :])
    return out


def _first(
    kernel: Kernel, at: int, reductions: list[Node], parts: int, chunk: Extent
) -> tuple[Step, tuple[int, ...]]:
    """The kernel of partial results: `parts` joins P, and the first row axis shrinks to one chunk."""
    old, n_p = kernel.sizes, len(kernel.p)
    sizes: tuple[Extent, ...] = (parts, *old[:n_p], chunk, *old[n_p + 1 :])
    axes = [axis_index(a + 1, sizes) for a in range(len(old))]
    axes[n_p] = axis_index(0, sizes) * chunk + axis_index(n_p + 1, sizes)
    stages = [s for s in kernel.stages[:at] if s.over == "P"]
    needed = [n for s in stages for n in s.nodes if n.op != "store"] + [*kernel.stages[at].nodes]
    used = tuple(sorted({n.buffer for n in needed if n.buffer is not None}))
    before = [replace(s, nodes=tuple(_moved(n, axes, sizes, used) for n in s.nodes if n.op != "store")) for s in stages]
    row = [_moved(n, axes, sizes, used) for n in kernel.stages[at].nodes]
    types = {n.id: n.dtype for n in kernel.nodes()}
    fresh = count(max(types) + 1)
    if chunk * parts != old[n_p]:
        row = guarded(row, axes[n_p], old[n_p], types, fresh)
    ends = {n.id: n for n in row if n.op == "reduce"}
    results, after = [ends[r.id] for r in reductions], list[Node]()
    for r in [r for r in results if _is_position(r)]:
        # positions are compared by the values at them, which are partial results too
        value = Node(next(fresh), "reduce", types[reductions[results.index(r)].args[0]], r.args, how=r.how[3:])
        start = Node(next(fresh), "index", "i64", index=axis_index(0, sizes) * (product(old[n_p + 1 :]) * chunk))
        position = Node(next(fresh), "add", "i64", (r.id, start.id))
        row.append(value)
        after += [start, position]
        results = [value if x is r else x for x in results] + [position]
    place = axis_index(0, sizes) * product(kernel.p) + linear(n_p, sizes, old[:n_p], 1)
    after += [Node(next(fresh), "store", r.dtype, (r.id,), place, len(used) + k) for k, r in enumerate(results)]
    stored = _stored(kernel.stages[at])
    buffers = [replace(kernel.buffers[b], access="out" if b in stored else "in") for b in used]
    buffers += [Buffer(f"part{k}", r.dtype, "out") for k, r in enumerate(results)]
    first = replace(
        kernel,
        name=f"{kernel.name}_parts",
        buffers=tuple(buffers),
        p=sizes[: n_p + 1],
        r=sizes[n_p + 1 :],
        stages=(*before, Stage("PR", tuple(row)), Stage("P", tuple(after))),
    )
    return step(first), used


def guarded(row: list[Node], at: Index, size: Extent, types: dict[int, DType], fresh: Iterator[int]) -> list[Node]:
    """Guard the row stage: nothing is read, checked, reduced or stored where `at` is past `size`."""
    here = Node(next(fresh), "index", "i64", index=at)
    limit = _number(size, at, fresh)
    inside = Node(next(fresh), "lt", "bool", (here.id, limit.id))
    out = [here, limit, inside]
    for n in row:
        if n.op == "load":
            out += _guarded_load(n, inside.id, fresh)
        elif n.op in ("bound", "store"):
            out += _guarded_access(n, inside.id, fresh)
        elif n.op == "reduce":
            out += _guarded_reduce(n, inside.id, types[n.args[0]], fresh)
        else:
            out.append(n)
    return out


def _number(size: Extent, like: Index, fresh: Iterator[int]) -> Node:
    """A size as a value."""
    if isinstance(size, int):
        return Node(next(fresh), "const", "i64", value=size)
    return Node(next(fresh), "index", "i64", index=Index(size, sizes=like.sizes))


def _moved(n: Node, axes: list[Index], sizes: tuple[Extent, ...], used: tuple[int, ...]) -> Node:
    index = None if n.index is None else n.index.substitute(axes, sizes)
    return replace(n, index=index, buffer=None if n.buffer is None else used.index(n.buffer))


def _guarded_load(n: Node, inside: int, fresh: Iterator[int]) -> list[Node]:
    """Add `inside` to the mask of a load."""
    if n.args:
        both = Node(next(fresh), "and", "bool", (n.args[0], inside))
        return [both, replace(n, args=(both.id, n.args[1]))]
    zero = Node(next(fresh), "const", n.dtype, value=_zero(n.dtype))
    return [zero, replace(n, args=(inside, zero.id))]


def _guarded_access(n: Node, inside: int, fresh: Iterator[int]) -> list[Node]:
    """Add `inside` to the mask of a check or a store."""
    if len(n.args) == 1:
        return [replace(n, args=(n.args[0], inside))]
    both = Node(next(fresh), "and", "bool", (n.args[1], inside))
    return [both, replace(n, args=(n.args[0], both.id))]


def _guarded_reduce(n: Node, inside: int, dtype: DType, fresh: Iterator[int]) -> list[Node]:
    """Make a reduction take its identity outside of `inside`."""
    edge = Node(next(fresh), "const", dtype, value=identity(n.how.removeprefix("arg"), dtype))
    value = Node(next(fresh), "where", dtype, (inside, n.args[0], edge.id))
    return [edge, value, replace(n, args=(value.id,))]


def _zero(dtype: DType) -> float | int | bool:
    return {"float": 0.0, "int": 0, "bool": False}[TYPES[dtype].kind]


def identity(how: str, dtype: DType) -> float | int | bool:
    """The identity of a reduction of `SPLITTABLE` other than argmax and argmin."""
    info = TYPES[dtype]
    if how in ("any", "all"):
        return how == "all"
    if info.kind == "float":
        return {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}[how]
    bits = info.size * 8
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if info.signed else (0, (1 << bits) - 1)
    return {"sum": 0, "prod": 1, "max": low, "min": high}[how]


def _second(kernel: Kernel, at: int, reductions: list[Node], parts: int) -> Step:
    """The kernel that combines the parts: its row stage runs over them, everything else stays."""
    n_p, points = len(kernel.p), product(kernel.p)
    sizes: tuple[Extent, ...] = (*kernel.p, parts)
    point = linear(n_p, sizes, kernel.p, 0)
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
    return step(replace(kernel, name=f"{kernel.name}_total", buffers=tuple(buffers), r=(parts,), stages=tuple(stages)))
