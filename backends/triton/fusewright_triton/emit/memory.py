"""Loads and stores of a program: addresses, masks, broadcasts, accumulation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from fusewright.toolkit.ir.index import Index
from fusewright.toolkit.ir.ir import Kernel, Node
from fusewright.toolkit.ir.types import TYPES
from fusewright_triton.emit.addressing import Addresses
from fusewright_triton.emit.layout import Layout
from fusewright_triton.emit.operators import TRITON, Unsupported
from fusewright_triton.emit.schedule import matrices
from fusewright_triton.target import FORMULA

ATOMIC = {
    "add": ("f32", "f64", "f16", "bf16", "i32", "i64"),
    "max": ("f32", "f64", "i32", "i64"),
    "min": ("f32", "f64", "i32", "i64"),
}
"""Accumulations that hardware does atomically on one element. The result of float sums then depends on the order of programs."""
COMBINE = {"add": "{0} + {1}", "mul": "{0} * {1}", "max": "{m}.maximum({0}, {1})", "min": "{m}.minimum({0}, {1})"}


class Program(Protocol):
    """The interface of a program that memory accesses need; see `values.Values`."""

    layout: Layout
    kernel: Kernel
    address: Addresses

    def put(self, line: str) -> None: ...
    def name(self, i: int) -> str: ...
    def operand(self, i: int, literals: bool = False) -> str: ...


class Memory:
    """The memory accesses of a program. `epoch` counts the stores to each buffer so far."""

    def __init__(self, program: Program) -> None:
        self.p, self.layout, self.kernel = program, program.layout, program.kernel
        self.epoch: dict[int, int] = {}
        self.unseen: set[int] = set()
        self.matrices = matrices(self.kernel)

    def domain_mask(self, dims: Iterable[str]) -> str:
        """Return which points of a block along `dims` exist; "" when all do."""
        have = set(dims)
        return " & ".join(d.mask for d in self.layout.vectors if d.var in have and d.mask is not None)

    def load(self, n: Node) -> None:
        buffer, index = _present(n)
        if buffer in self.unseen:
            # other threads of the program may have stored it
            self.p.put("tl.debug_barrier()")
            self.unseen.discard(buffer)
        dims = self.layout.dims_of[n.id]
        at = self._pointer(buffer, index, dims)
        masks, other = [self.domain_mask(dims)], ""
        if n.args:
            masks.append(self.p.operand(n.args[0]))
            other = f", other={self.p.operand(n.args[1])}"
        mask = " & ".join(m for m in masks if m)
        policy = self._policy(buffer, index)
        self.p.put(f"{self.p.name(n.id)} = tl.load({at}{f', mask={mask}' if mask else ''}{other}{policy})")

    def _policy(self, buffer: int, index: Index) -> str:
        """Return the cache policy: rows that all programs read stay, matrices that are read once are evicted first."""
        if self.is_shared(index):
            return ', eviction_policy="evict_last"'
        return ', eviction_policy="evict_first"' if buffer in self.matrices else ""

    def is_shared(self, index: Index) -> bool:
        """Return whether all programs read the same row, which then stays in the caches while other data streams through them."""
        points = len(self.kernel.p)
        return any(a >= points for a in index.axes()) and not index.indirect and min(index.axes()) >= points

    def store(self, n: Node, over_row: bool) -> None:
        buffer, index = _present(n)
        dims = self._index_dims(index).union(*(self.layout.dims_of[a] for a in n.args))
        conflicts = bool(n.how) and self._conflicts(n, over_row)
        if conflicts:
            dims |= self.layout.vector_names(over_row)
        masks = [self.domain_mask(dims)] + [self.p.operand(a) for a in n.args[1:]]
        mask = "".join(f", mask={m}" for m in [" & ".join(m for m in masks if m)] if m)
        at, value = self._pointer(buffer, index, dims, block=True), self.p.operand(n.args[0])
        self.epoch[buffer] = self.epoch.get(buffer, 0) + 1
        self.unseen.add(buffer)
        if not n.how:
            self.p.put(f"tl.store({at}, {value}{mask}{self._passing(n, index)})")
        elif conflicts:
            if n.dtype not in ATOMIC.get(n.how, ()):
                raise Unsupported(f"accumulating {n.dtype} with {n.how} where points meet")
            shape = self.layout.shape(dims)
            value = value if shape == "()" else f"tl.broadcast_to({value}, {shape})"
            self._meet(n, at, value, mask)
        else:
            self._update(n, at, value, mask)

    def _meet(self, n: Node, at: str, value: str, mask: str) -> None:
        """Accumulate where points may meet in one element. Most operands of an extreme do not change it; a load tells, without an
        atomic. What it finds may be old, but an element only ever moves in one direction."""
        if n.how == "add":
            self.p.put(f'tl.atomic_add({at}, {value}{mask}, sem="relaxed")')
            return
        place, old, new = (f"{name}{n.id}" for name in ("place", "old", "new"))
        self.p.put(f"{place} = {at}")
        self.p.put(f"{old} = tl.load({place}{mask})")
        self.p.put(f"{new} = {value}")
        if TYPES[n.dtype].kind == "float":
            self.p.put(f"{new} = tl.where(({new} != {new}) | ({old} != {old}), {_extreme_nan(n)}, {new})")
        self.p.put(f"changes{n.id} = {_changes(n, old, new)}{mask.replace(', mask=', ' & ')}")
        self.p.put(f'tl.atomic_{n.how}({place}, {new}, mask=changes{n.id}, sem="relaxed")')

    def _update(self, n: Node, at: str, value: str, mask: str) -> None:
        """Accumulate where every element belongs to one point."""
        half = TYPES[n.dtype].kind == "float" and not TYPES[n.dtype].compute
        old = f"tl.load({at}{mask})"
        if half:
            old, value = f"{old}.to(tl.float32)", f"{value}.to(tl.float32)"
        module = "fw" if TYPES[n.dtype].kind == "float" else "tl"
        new = COMBINE[n.how].format(old, value, m=module)
        self.p.put(f"new{n.id} = {new}")
        self.p.put(f"tl.store({at}, new{n.id}{f'.to({TRITON[n.dtype]})' if half else ''}{mask})")

    def _passing(self, n: Node, index: Index) -> str:
        """Tell the caches not to keep a tensor that is larger than they are. Gains 2 to 3% where rows are read in small
        pieces (layer norms of 30522 bf16 on an H100), and nothing elsewhere."""
        sizes = [self.kernel.sizes[a] for a in index.axes()]
        known = math.prod(s for s in sizes if isinstance(s, int)) * TYPES[n.dtype].size
        return ', cache_modifier=".cs"' if self.layout.together is not None and known >= FORMULA.beyond_caches else ""

    def _conflicts(self, n: Node, over_row: bool) -> bool:
        """Return whether two points of the stage may store to one element."""
        _, index = _present(n)
        if index.indirect:
            return True
        axes = range(len(self.kernel.sizes) if over_row else len(self.kernel.p))
        return any(index.stride_of(a) in (0, None) for a in axes if self.kernel.sizes[a] != 1)

    def _index_dims(self, index: Index) -> frozenset[str]:
        dims = self.layout.dims_of_axes(index.axes())
        return dims.union(*(self.layout.dims_of[i.value] for i in index.indirect))

    def _pointer(self, buffer: int, index: Index, dims: frozenset[str], block: bool = False) -> str:
        """Return the addresses of an access as a block along `dims`; with `block`, also a single address becomes a block
        where values are blocks."""
        name, offset = self.layout.buffers[buffer], self.p.address.index(index)
        text = name if offset == "0" else f"{name} + {offset}"
        lone = block and self.layout.rank > 1 and not dims
        if self._index_dims(index) == dims and not lone:
            return text
        return f"tl.broadcast_to({text}, {self.layout.shape(dims)})"


def _changes(n: Node, old: str, new: str) -> str:
    """Return which operands of an extreme may change it. Of zeros the sign counts, so that no order of programs shows."""
    less = "<" if n.how == "max" else ">"
    if TYPES[n.dtype].kind == "int":
        return f"({old} {less} {new})"
    bits = f"tl.int{8 * TYPES[n.dtype].size}, bitcast=True"
    return f"((({new} {less} {old}) | ({new}.to({bits}) == {old}.to({bits}))) == 0)"


def _extreme_nan(n: Node) -> str:
    """Return the NaN that beats every number. Atomics on floats compare bits: of one sign as signed integers, of the other as
    unsigned ones in reverse. A NaN of the wrong sign in memory is replaced by the first operand: nobody can have read a number."""
    size = 8 * TYPES[n.dtype].size
    bits = 2 ** (size - 1) - 1 if n.how == "max" else -1
    return f"tl.full((), {bits}, tl.int{size}).to({TRITON[n.dtype]}, bitcast=True)"


def _present(n: Node) -> tuple[int, Index]:
    if n.buffer is None or n.index is None:
        raise ValueError("the node lacks a buffer or an index; verify the kernel first")
    return n.buffer, n.index
