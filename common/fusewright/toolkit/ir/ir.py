"""The loop-kernel IR: what sits between the graph and every emitter's source text.

A kernel runs over the points of a domain: parallel axes P (any order, any thread) and row axes R (in order,
within one point of P). Axes are numbered P first, then R; sizes are ints or polynomials over size symbols
(`extent`). A symbol is a position among the sizes that a launch passes. The body is a list of stages:

    for p in P:                      # parallel
        stage over "P":  nodes run once for this p
        stage over "PR": for r in R: nodes run for (p, r); `reduce` nodes accumulate, ready after the stage
        ...

Nodes are SSA values (`%id`), each with an element type. Types never change implicitly, only by `cast`. Math is
on f32, f64, integers and bool; half types are only moved and cast. A node may read:
- an earlier value of the same stage, a value of an earlier "P" stage, or a `reduce` of an earlier "PR" stage;
- a "PR" value of an earlier stage only if that node has `keep=True`: emitters hold it in a row buffer. Any
  other value that a later stage needs is recomputed there by nodes of its own.

Kinds of nodes (`Node.op`), besides the pointwise rows of `optable.OPS`:
- `const` (`value`), `scalar` (`value` = position among the kernel's runtime scalars), `index` (`index` as an
  i64 value);
- `load` of `buffer` at `index`; `args` are () or (mask, other): where the mask is false, nothing is read and
  the result is `other`;
- `store` of args[0] into `buffer` at `index`, args[1] an optional mask; `how` "" or one of
  `optable.ACCUMULATE`. A store in a "P" stage stores once per p. Only indirect or accumulating stores may
  hit one element from several points; those behave as if the points ran in lexicographic order of the axes,
  whatever the number of threads;
- `bound`: args[0] is an i64 index checked against [0, `extent`), or [-extent, extent) with `how="wrap"` (as
  indexing does, the result is then made positive); args[1] is an optional mask. Out of bounds, the kernel
  reports an error and touches no memory there, and the launch raises the error that `says` describes (see
  `checks`); `value` is the number of the check. A check is a side effect: it runs whether or not its result is
  used;
- `cast` (value-preserving conversion as `Tensor.to`);
- `reduce` with `how` of `optable.REDUCTIONS` over all of R (argument positions count lexicographically over
  R);
- `scan` with `how` of `optable.SCANS` along R, which must be a single axis. `step` is a recurrence: args are the new state,
  which pointwise nodes of the same stage compute, and the `state` that they compute it from;
- `state`: the state before a step, in order along R; args[0] is that before the first step, which does not vary along R.
  Each is read by one `scan`, and depends on all axes; `value` tells it from others.

Only reductions may reassociate. Sums and means of f32 are at least as accurate as torch's. Integer division by
zero also reports an error (torch raises RuntimeError).

Empty axes are legal: a P of size 0 runs nothing, an R of size 0 gives the reduction's identity (sum 0, prod
1, any False, all True, max -inf or the least integer, mean nan); the caller raises where torch does.

A kernel is plain data: it can be printed (`printer`), verified (`verify`), hashed independently of names
(`serial.structural_hash`), converted to JSON and back (`serial`) and run by the reference interpreter
(`interp`), against which every emitter is tested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fusewright.toolkit.ir.extent import Atom, Extent, atoms, evaluate
from fusewright.toolkit.ir.index import Index
from fusewright.toolkit.ir.optable import OPS
from fusewright.toolkit.ir.types import DType

Access: TypeAlias = Literal["in", "out", "inout"]
Over: TypeAlias = Literal["P", "PR"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor parameter. Buffers of one launch do not overlap, unless the host maps an output onto an input
    that is accessed at the same index expression (see `Kernel.may_share`)."""

    name: str
    dtype: DType
    access: Access = "in"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A runtime scalar parameter: f64, f32 (given as a float), i64 or bool (given as an int)."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class Node:
    """One SSA value. Which fields are used depends on `op`; see the module docstring."""

    id: int
    op: str
    dtype: DType
    args: tuple[int, ...] = ()
    index: Index | None = None
    buffer: int | None = None
    how: str = ""
    value: int | float | bool | None = None
    extent: Extent | None = None
    keep: bool = False
    says: str = ""

    @property
    def recurs(self) -> bool:
        """Whether the node is a recurrence, whose steps run in order."""
        return self.op == "scan" and self.how == "step"

    def uses(self) -> Iterator[int]:
        """Yield the ids of the values that the node reads, including those of indirect indices."""
        yield from self.args
        if self.index is not None:
            yield from (i.value for i in self.index.indirect)


@dataclass(frozen=True, slots=True)
class Stage:
    """Nodes that run once per point of P ("P") or for every point of P x R ("PR")."""

    over: Over
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loop kernel; see the module docstring. `hints[k]` is the value of size symbol k seen when tracing; hints only steer
    code choices and are not hashed."""

    name: str
    buffers: tuple[Buffer, ...]
    scalars: tuple[Scalar, ...]
    p: tuple[Extent, ...]
    r: tuple[Extent, ...]
    stages: tuple[Stage, ...]
    hints: tuple[int, ...] = ()

    @property
    def symbols(self) -> range:
        """The size symbols, as positions among the sizes of a launch."""
        return range(len(self.hints))

    @property
    def sizes(self) -> tuple[Extent, ...]:
        """Sizes of all axes, P first."""
        return self.p + self.r

    @property
    def recurs(self) -> bool:
        """Whether a node is a recurrence."""
        return any(n.recurs for n in self.nodes())

    def nodes(self) -> Iterator[Node]:
        """All nodes in order."""
        for s in self.stages:
            yield from s.nodes

    def node_map(self) -> dict[int, Node]:
        """Nodes by id."""
        return {n.id: n for n in self.nodes()}

    def axes_of(self) -> dict[int, frozenset[int]]:
        """Map each value to the axes it depends on. A reduction depends on no axis of R, and an accumulating store on all axes of
        its stage: it adds at each point, also where all of them store the same to one element."""
        out: dict[int, frozenset[int]] = {}
        points = frozenset(range(len(self.p)))
        rows = frozenset(range(len(self.p), len(self.sizes)))
        for stage in self.stages:
            for n in stage.nodes:
                axes: frozenset[int] = frozenset().union(*(out[u] for u in n.uses()))
                if n.index is not None:
                    axes |= n.index.axes()
                if n.op in ("scan", "state"):
                    axes |= rows if n.op == "scan" else points | rows
                if n.op == "store" and n.how:
                    axes |= points if stage.over == "P" else points | rows
                out[n.id] = axes - rows if n.op == "reduce" else axes
        return out

    def may_share(self, out: int, source: int) -> bool:
        """Whether output buffer `out` may alias input buffer `source` (same element type).

        True if each element of `source` is read only by the point that overwrites it, and not after the store:
        all accesses of both use the same affine index, which covers every axis, and every load is in the stage of
        the store or an earlier one."""
        if self.buffers[out].dtype != self.buffers[source].dtype or self.buffers[out].access != "out":
            return False
        loads = [(k, n) for k, s in enumerate(self.stages) for n in s.nodes if n.op == "load" and n.buffer == source]
        stores = [(k, n) for k, s in enumerate(self.stages) for n in s.nodes if n.op == "store" and n.buffer == out]
        if len(stores) != 1 or not loads:
            return False
        last, store = stores[0]
        index = store.index
        if index is None or index.indirect or store.how or len(store.args) > 1:
            return False
        live = {a for a, s in enumerate(self.sizes) if s != 1}
        if not live <= {a for a, _ in index.coefs}:
            return False
        return all(k <= last and n.index == index for k, n in loads)


def extents_of(kernel: Kernel) -> Iterator[Extent]:
    """Yield every extent in the kernel."""
    yield from kernel.sizes
    for n in kernel.nodes():
        if n.extent is not None:
            yield n.extent
        if n.index is not None:
            yield from n.index.extents()


def used_symbols(kernel: Kernel) -> tuple[Atom, ...]:
    """The size symbols that the kernel uses, in order of first use."""
    return tuple(dict.fromkeys(a for e in extents_of(kernel) for a in atoms(e)))


def cost(n: Node) -> int:
    """Estimate the vector instructions of a node."""
    row = OPS.get(n.op)
    if row is not None:
        return row.cost
    return {"const": 0, "scalar": 0, "bound": 4, "load": 1 if not (n.index and n.index.indirect) else 8}.get(n.op, 1)


def across(kernel: Kernel, n: Node, v: int) -> int | None:
    """Return the parallel axis along which a plain load is contiguous; None if there is none, or its stride along `v` is 0 or 1."""
    ix = n.index
    if n.op != "load" or ix is None or n.args or ix.indirect or ix.divmods or ix.stride_of(v) in (0, 1):
        return None
    return next((a for a, c in ix.coefs if c == 1 and a != v and a < len(kernel.p)), None)


def crosses(kernel: Kernel, least: int = 16) -> bool:
    """Whether a kernel without row axes is a transpose: it stores along one axis and loads along another, each with at least
    `least` points."""
    if kernel.r:
        return False
    hints = kernel.hints
    for v, size in enumerate(kernel.p):
        stores = [n.index for n in kernel.nodes() if n.op == "store"]
        if all(ix is not None and ix.stride_of(v) == 1 for ix in stores):
            axes = {across(kernel, n, v) for n in kernel.nodes()} - {None}
            return any(min(evaluate(size, hints), evaluate(kernel.p[a], hints)) >= least for a in axes if a is not None)
    return False
