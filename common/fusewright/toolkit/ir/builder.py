"""Building kernels: record a dataflow graph with operators; `build` then arranges it in stages.

    b = Builder("softmax", p=[rows], r=[cols])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    v = b.load(x, i * cols + j)
    e = b.op("exp", v - b.reduce("max", v))
    b.store(y, i * cols + j, e / b.reduce("sum", e))
    kernel = b.build()

The caller does not mark stages: `build` derives them from the reductions, recomputes cheap values in later
stages and keeps expensive ones, drops dead values (checks are never dead), merges and splits axes so that
indices become affine, and verifies the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusewright.sizes.expr import Apply
from fusewright.toolkit.ir.checks import ANY_INDEX, MOST_SITES
from fusewright.toolkit.ir.extent import Atom, Extent, symbol
from fusewright.toolkit.ir.index import Index, Indirect, axis_index
from fusewright.toolkit.ir.ir import Access, Buffer, Kernel, Node, Scalar, used_symbols
from fusewright.toolkit.ir.optable import OPS
from fusewright.toolkit.ir.schedule import staged
from fusewright.toolkit.ir.simplify import simplify_axes
from fusewright.toolkit.ir.symbols import hint_of, numbered
from fusewright.toolkit.ir.types import TYPES, DType
from fusewright.toolkit.ir.verify import kernel_pass

Number = int | float | bool


@dataclass(frozen=True, slots=True, eq=False)
class Val:
    """A value of a kernel under construction. Its operators take values of the same type or Python numbers."""

    builder: Builder
    id: int
    dtype: DType

    def _binary(self, name: str, other: Val | Number, swap: bool = False) -> Val:
        o = other if isinstance(other, Val) else self.builder.const(other, self.dtype)
        return self.builder.op(name, o, self) if swap else self.builder.op(name, self, o)

    def __add__(self, o: Val | Number) -> Val:
        return self._binary("add", o)

    def __radd__(self, o: Number) -> Val:
        return self._binary("add", o, swap=True)

    def __sub__(self, o: Val | Number) -> Val:
        return self._binary("sub", o)

    def __rsub__(self, o: Number) -> Val:
        return self._binary("sub", o, swap=True)

    def __mul__(self, o: Val | Number) -> Val:
        return self._binary("mul", o)

    def __rmul__(self, o: Number) -> Val:
        return self._binary("mul", o, swap=True)

    def __truediv__(self, o: Val | Number) -> Val:
        return self._binary("div", o)

    def __rtruediv__(self, o: Number) -> Val:
        return self._binary("div", o, swap=True)

    def __neg__(self) -> Val:
        return self.builder.op("neg", self)

    def __lt__(self, o: Val | Number) -> Val:
        return self._binary("lt", o)

    def __le__(self, o: Val | Number) -> Val:
        return self._binary("le", o)

    def __gt__(self, o: Val | Number) -> Val:
        return self._binary("gt", o)

    def __ge__(self, o: Val | Number) -> Val:
        return self._binary("ge", o)

    def __and__(self, o: Val | Number) -> Val:
        return self._binary("and", o)

    def __or__(self, o: Val | Number) -> Val:
        return self._binary("or", o)

    def __invert__(self) -> Val:
        return self.builder.op("not", self)

    def eq(self, o: Val | Number) -> Val:
        return self._binary("eq", o)

    def ne(self, o: Val | Number) -> Val:
        return self._binary("ne", o)

    def to(self, dtype: DType) -> Val:
        """Cast the value to `dtype`."""
        return self.builder.cast(self, dtype)


class Builder:
    """Records one kernel. `symbols` maps the atoms of sizes, mostly names, to the values seen when tracing; `size` adds more.
    In the built kernel they become positions, in this order."""

    def __init__(
        self,
        name: str,
        p: Sequence[Extent] = (),
        r: Sequence[Extent] = (),
        symbols: Mapping[Atom, int] | Mapping[str, int] | None = None,
    ) -> None:
        self.name = name
        self.p, self.r = tuple(p), tuple(r)
        self._hints: dict[Atom, int] = dict(symbols.items()) if symbols else {}
        self._buffers: list[Buffer] = []
        self._scalars: list[Scalar] = []
        self.nodes: list[Node] = []
        self._known: dict[tuple[object, ...], Val] = {}
        self._epoch: dict[int, int] = {}
        self._sites: dict[tuple[str, Extent], int] = {}

    @property
    def axes(self) -> list[Index]:
        """One index per axis, P first, for computing addresses."""
        sizes = self.p + self.r
        return [axis_index(a, sizes) for a in range(len(sizes))]

    @property
    def symbols(self) -> tuple[Atom, ...]:
        """The atoms that the kernel's size symbols stand for, in order."""
        return tuple(self._hints)

    def size(self, atom: Atom, hint: int = 1024) -> Extent:
        """The size symbol that stands for `atom`."""
        self._hints.setdefault(atom, hint)
        return symbol(atom)

    def buffer(self, name: str, dtype: DType, access: Access) -> int:
        """Add a tensor parameter; return its position among the launch's tensors."""
        if dtype not in TYPES:
            raise ValueError(f"kernels have no type {dtype!r}")
        self._buffers.append(Buffer(name, dtype, access))
        return len(self._buffers) - 1

    def input(self, name: str, dtype: DType) -> int:
        return self.buffer(name, dtype, "in")

    def output(self, name: str, dtype: DType) -> int:
        return self.buffer(name, dtype, "out")

    def inout(self, name: str, dtype: DType) -> int:
        return self.buffer(name, dtype, "inout")

    def scalar(self, name: str, dtype: DType) -> Val:
        """Add a runtime scalar parameter of type f32, f64, i64 or bool."""
        self._scalars.append(Scalar(name, dtype))
        return self._add(Node(0, "scalar", dtype, value=len(self._scalars) - 1))

    def const(self, value: Number, dtype: DType) -> Val:
        """A literal converted to `dtype` (half types round when the kernel runs)."""
        kind = TYPES[dtype].kind
        v = bool(value) if kind == "bool" else int(value) if kind == "int" else float(value)
        return self._add(Node(0, "const", dtype, value=v))

    def index_value(self, index: Index) -> Val:
        """The value of an index expression, an i64."""
        return self._add(Node(0, "index", "i64", index=index))

    def indirect(self, value: Val, stride: Extent = 1) -> Index:
        """The index `value * stride`. `value` is an i64 that was checked with `bound` or is known to be in range."""
        return Index(indirect=(Indirect(stride, value.id),), sizes=self.p + self.r)

    def bound(
        self, value: Val, size: Extent, wrap: bool = False, mask: Val | None = None, says: str = ANY_INDEX
    ) -> Val:
        """Check `value` (i64) against `size`; with `wrap`, negative values count from the end. `says`: see `checks`."""
        args = (value.id,) if mask is None else (value.id, mask.id)
        site = self._sites.setdefault((says, size), min(len(self._sites) + 1, MOST_SITES))
        how = "wrap" if wrap else ""
        return self._add(Node(0, "bound", "i64", args, how=how, value=site, extent=size, says=says))

    def load(self, buffer: int, index: Index | int, mask: Val | None = None, other: Number = 0) -> Val:
        """Load the element of `buffer` at `index`, or `other` where `mask` is false."""
        dtype = self._buffers[buffer].dtype
        args = () if mask is None else (mask.id, self.const(other, dtype).id)
        return self._add(Node(0, "load", dtype, args, self._index(index), buffer))

    def store(self, buffer: int, index: Index | int, value: Val, mask: Val | None = None, how: str = "") -> None:
        """Store `value`, or accumulate it with `how` "add", "mul", "max" or "min"."""
        args = (value.id,) if mask is None else (value.id, mask.id)
        self._add(Node(0, "store", value.dtype, args, self._index(index), buffer, how))

    def op(self, name: str, *args: Val) -> Val:
        """A pointwise op of `optable.OPS`."""
        row = OPS[name]
        dtype = "bool" if row.result == "bool" else args[-1].dtype
        return self._add(Node(0, name, dtype, tuple(a.id for a in args)))

    def where(self, cond: Val, a: Val | Number, b: Val | Number) -> Val:
        """`a` where `cond` holds, else `b`; at least one of the two is a `Val`."""
        if not isinstance(a, Val):
            if not isinstance(b, Val):
                raise TypeError("where of two numbers: give one of them a type with const")
            a = self.const(a, b.dtype)
        b = b if isinstance(b, Val) else self.const(b, a.dtype)
        return a if self._is_zero_elsewhere(a, cond, b) else self.op("where", cond, a, b)

    def _is_zero_elsewhere(self, value: Val, cond: Val, other: Val) -> bool:
        """Whether `other` is zero, and so is `value`, an element that was loaded, where `cond` does not hold."""
        load = self.nodes[value.id]
        if load.op == "cast":
            load = self.nodes[load.args[0]]
        if load.op != "load" or load.args[:1] != (cond.id,):
            return False
        consts = (self.nodes[load.args[1]], self.nodes[other.id])
        return all(n.op == "const" and repr(n.value) in ("0.0", "0", "False") for n in consts)  # not -0.0

    def cast(self, value: Val, dtype: DType) -> Val:
        """Convert `value` to `dtype`, unless it has that type already, or is a number of that half type made wider."""
        if value.dtype == dtype:
            return value
        node, held = self.nodes[value.id], TYPES[value.dtype]
        if node.op == "cast" and not TYPES[dtype].compute and held.compute and held.kind == "float":
            if self.nodes[node.args[0]].dtype == dtype:
                return Val(self, node.args[0], dtype)
        return self._add(Node(0, "cast", dtype, (value.id,)))

    def reduce(self, how: str, value: Val) -> Val:
        """A reduction over all row axes (`optable.REDUCTIONS`)."""
        dtype = "i64" if how.startswith("arg") else value.dtype
        return self._add(Node(0, "reduce", dtype, (value.id,), how=how))

    def scan(self, how: str, value: Val) -> Val:
        """An inclusive scan along the row axis (`optable.SCANS`)."""
        return self._add(Node(0, "scan", value.dtype, (value.id,), how=how))

    def recurrence(self, before: Val, step: Callable[[Val], Val]) -> Val:
        """The states h = step(h) along the row axis, a pointwise expression. `before`, the state before the first step, does not
        vary along it."""
        return self.recurrences((before,), lambda h: (step(*h),))[0]

    def recurrences(self, before: Sequence[Val], step: Callable[[Sequence[Val]], Sequence[Val]]) -> tuple[Val, ...]:
        """Several states that depend on each other. Further results of `step` are values along the row, carried like states, which
        nothing reads."""
        number = sum(n.op == "state" for n in self.nodes)
        states = [self._add(Node(0, "state", x.dtype, (x.id,), value=number + k)) for k, x in enumerate(before)]
        found = step(states)
        for k, n in enumerate(found[len(states) :], number + len(states)):
            states.append(self._add(Node(0, "state", n.dtype, (self.const(0, n.dtype).id,), value=k)))
        return tuple(
            self._add(Node(0, "scan", h.dtype, (n.id, h.id), how="step")) for n, h in zip(found, states, strict=True)
        )

    def build(self) -> Kernel:
        """The verified kernel."""
        return simplify_axes(scheduled(self))

    def recorded(self) -> Kernel:
        """The kernel without stages, its sizes in the atoms that the caller gave."""
        return Kernel(self.name, tuple(self._buffers), tuple(self._scalars), self.p, self.r, ())

    def closed(self, kernel: Kernel) -> Kernel:
        """Replace the atoms in the kernel's sizes by positions."""
        for formula in (a for a in used_symbols(kernel) if isinstance(a, Apply)):
            self._hints.setdefault(formula, hint_of(formula, self._hints))
        return numbered(kernel, self.symbols, self._hints)

    def _index(self, index: Index | int) -> Index:
        return index if isinstance(index, Index) else Index(index, sizes=self.p + self.r)

    def _add(self, n: Node) -> Val:
        """Append a node or reuse an equal one. A load is never reused across a store to its buffer."""
        epoch = self._epoch.get(n.buffer, 0) if n.buffer is not None else 0
        # repr distinguishes -0.0 from 0.0 and True from 1, and makes nan equal to nan
        key = (n.op, n.dtype, n.args, n.index, n.buffer, n.how, repr(n.value), n.extent, n.says, epoch)
        if n.op != "store" and key in self._known:
            return self._known[key]
        node = Node(len(self.nodes), n.op, n.dtype, n.args, n.index, n.buffer, n.how, n.value, n.extent, n.keep, n.says)
        self.nodes.append(node)
        val = Val(self, node.id, node.dtype)
        if n.op == "store" and n.buffer is not None:
            self._epoch[n.buffer] = epoch + 1
        else:
            self._known[key] = val
        return val


@kernel_pass("schedule", takes="values")
def scheduled(builder: Builder) -> Kernel:
    """Arrange the nodes recorded by a builder in stages."""
    return builder.closed(replace(builder.recorded(), stages=staged(builder.nodes, len(builder.p))))
