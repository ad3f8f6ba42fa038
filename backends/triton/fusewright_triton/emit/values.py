"""The values of one Triton function: the points of a program, and a line of text per value of the IR."""

from __future__ import annotations

import abc
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from fusewright.toolkit.ir.ir import Node
from fusewright.toolkit.ir.optable import OPS
from fusewright.toolkit.ir.types import is_int
from fusewright.toolkit.transform.online_softmax import pairs
from fusewright_triton.emit.addressing import Addresses, atom
from fusewright_triton.emit.layout import Dim, Layout, axis_name, product
from fusewright_triton.emit.memory import Memory
from fusewright_triton.emit.operators import TRITON, Unsupported, cast, constant, form_of, is_negative_zero, literal
from fusewright_triton.emit.precision import APPROXIMATE

DIVISIONS = ("floordiv", "truncdiv", "remainder", "fmod")
INDEX_ERROR, ZERO_DIVISION = 1, 2
"""Codes in the error flag."""


class Values(abc.ABC):
    """Values are written once, under the name `v<id>`; constants stand where they are used."""

    address: Addresses
    flattened: list[Dim]

    def __init__(self, layout: Layout, wide: bool, check_division: bool) -> None:
        self.layout, self.kernel, self.config = layout, layout.kernel, layout.config
        self.wide, self.check_division = wide, check_division
        self.lines: list[str] = []
        self.depth = 1
        self.known: set[int] = set()
        self.alias: dict[int, int] = {}
        self.keys: dict[tuple[object, ...], int] = {}
        self.used_axes = self._used_axes()
        self.approximable: frozenset[int] = frozenset()
        self.totals = pairs(self.kernel)
        """Sums of a softmax, which are at least 1: divisions by them become multiplications by their reciprocal."""
        self.memory = Memory(self)
        self.lay(layout)
        self.limit = self.address.extent(product(self.kernel.r))

    def lay(self, layout: Layout) -> None:
        """Print what follows in this layout."""
        self.layout = self.memory.layout = layout
        self.flattened = [d for d in layout.dims if len(d.axes) > 1]
        strides = [d.strides(self.kernel) for d in self.flattened]
        self.address = Addresses(layout.sizes, self._axis, self._index_value, strides)

    # text

    def put(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    @contextmanager
    def indented(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1

    def name(self, i: int) -> str:
        return f"v{self.alias.get(i, i)}"

    def node(self, i: int) -> Node:
        return self.layout.nodes[i]

    def operand(self, i: int, literals: bool = False) -> str:
        """Return a value as an operand: its name, or a constant (a bare number where those are allowed)."""
        n = self.node(i)
        if n.op != "const":
            return self.name(i)
        value = n.value if n.value is not None else 0
        if literals and not is_negative_zero(value):
            return literal(value, n.dtype)
        return constant(value, n.dtype)

    def _axis(self, a: int) -> str:
        if a < 0:
            return self.flattened[~a].var
        for d in self.layout.dims:
            if d.axes == (a,):
                return d.var
        return axis_name(self.kernel, a)

    def _index_value(self, i: int) -> str:
        """Return a value used as an index. One that was checked against a bound fits 32 bits in a narrow kernel."""
        text = self.operand(i)
        return text if self.wide or self.node(i).op != "bound" else f"{text}.to(tl.int32)"

    def _used_axes(self) -> frozenset[int]:
        found = (n.index.axes() for n in self.kernel.nodes() if n.index is not None)
        return frozenset().union(*found)

    @abc.abstractmethod
    def scan(self, n: Node) -> None:
        """Print a scan over a row that is held whole."""

    # points

    def _constants(self, first: int, last: int) -> None:
        for d in self.layout.dims:
            if d.vector:
                self.put(f"{d.const}: tl.constexpr = {d.block}")

    def _points(self) -> None:
        """Print which points of P this program has."""
        wide = ".to(tl.int64)" if self.wide else ""
        factors = self._grid_factors()
        if not factors and self.config.split == 1:
            return
        if len(factors) == 1 and self.config.split == 1:
            self._place(*factors[0], f"tl.program_id(0){wide}")
            return
        self.put(f"pid = tl.program_id(0){wide}")
        rest = "pid"
        if self.shares_row:
            self.put(f"part = pid % {self.config.split}")
            rest = f"pid // {self.config.split}"
        for what, count in reversed(factors[1:]):
            self._place(what, count, f"{atom(rest)} % {atom(count)}")
            rest = f"{atom(rest)} // {atom(count)}"
        if factors:
            self._place(*factors[0], rest)

    shares_row = False
    """Whether several programs of this function share a row (set by the caller before `write`)."""

    def _grid_factors(self) -> list[tuple[int | Dim, str]]:
        """Return what programs enumerate, outermost first: single axes, then tiles; with their counts."""
        out: list[tuple[int | Dim, str]] = [(a, self.address.extent(self.kernel.sizes[a])) for a in self.layout.rest]
        for d in self.layout.dims:
            if d is not self.layout.row:
                out.append((d, self._blocks(d)))
        return out

    def _blocks(self, d: Dim) -> str:
        size = self.address.extent(d.size)
        if d.block == 1:
            return size
        if isinstance(d.size, int):
            return str(-(-d.size // d.block))
        return f"({size} + {d.block - 1}) // {d.block}"

    def _place(self, what: int | Dim, count: str, pid: str) -> None:
        if isinstance(what, int):
            self.put(f"{axis_name(self.kernel, what)} = {pid}")
            return
        if what.vector:
            spread = self.layout.spread(what)
            lanes = f"tl.arange(0, {what.const}){spread}"
            pid = f"{atom(pid)} * {what.const} + {f'tl.max_contiguous({lanes}, 1)' if self.layout.apart else lanes}"
        self.put(f"{what.var} = {pid}")
        self._finish_dim(what)

    def _finish_dim(self, d: Dim) -> None:
        """Print the mask of a dimension, and the axes that were flattened into it."""
        if d.mask is not None:
            self.put(f"{d.mask} = {d.var} < {atom(self.address.extent(d.size))}")
        if len(d.axes) == 1:
            return
        for k, (a, inner) in reversed(list(enumerate(d.strides(self.kernel)))):
            text = d.var if inner == 1 else f"{d.var} // {atom(self.address.extent(inner))}"
            if k:
                text = f"{text} % {atom(self.address.extent(self.kernel.sizes[a]))}"
            if a in self.used_axes:
                self.put(f"{axis_name(self.kernel, a)} = {text}")

    # values

    def value(self, n: Node) -> None:
        """Print the value of a node, unless it is already there."""
        if n.id in self.known or n.op == "const":
            return
        if self.config.persistent and self._found(n):
            return
        self.known.add(n.id)
        if n.op == "load":
            self.memory.load(n)
        elif n.op == "bound":
            self._bound(n)
        elif n.op == "scan":
            self.scan(n)
        elif n.op == "state":
            self.put(f"{self.name(n.id)} = carry{n.id}")
        else:
            self.put(f"{self.name(n.id)} = {self._expression(n)}")

    def _found(self, n: Node) -> bool:
        """Return whether an equal value is known: a persistent program computes nothing twice."""
        renamed = {u: self.alias.get(u, u) for u in n.uses()}
        index = n.index.with_values(renamed) if n.index is not None else None
        epoch = self.memory.epoch.get(n.buffer, 0) if n.op == "load" and n.buffer is not None else 0
        args = tuple(renamed[a] for a in n.args)
        key = (n.op, n.dtype, args, index, n.buffer, n.how, repr(n.value), n.extent, epoch)
        found = self.keys.setdefault(key, n.id)
        if found != n.id:
            self.alias[n.id] = found
            self.known.add(n.id)
        return found != n.id

    def _expression(self, n: Node) -> str:
        if n.op in OPS:
            return self._pointwise(n)
        if n.op == "cast":
            return cast(self.operand(n.args[0]), self.node(n.args[0]).dtype, n.dtype)
        if n.op == "scalar":
            name = self.layout.scalars[int(n.value or 0)]
            return f"{name} != 0" if n.dtype == "bool" else f"tl.full((), {name}, {TRITON[n.dtype]})"
        if n.op == "index" and n.index is not None:
            text = self.address.index(n.index)
            return f"{atom(text)}.to(tl.int64)" if self.layout.dims_of[n.id] else f"tl.full((), {text}, tl.int64)"
        raise Unsupported(f"no Triton for {n.op}")

    def _pointwise(self, n: Node) -> str:
        dtype = self.node(n.args[-1]).dtype
        if n.id in self.approximable and n.op in APPROXIMATE:
            if n.op == "div" and n.args[1] in self.totals:
                return f"{self.operand(n.args[0])} * fw.reciprocal({self.operand(n.args[1])})"
            text, literals = APPROXIMATE[n.op], False
        elif n.op == "div" and dtype == "f32" and (factor := self._exact_reciprocal(n.args[1])) is not None:
            return f"{self.operand(n.args[0])} * {constant(factor, dtype)}"
        elif n.op == "div" and dtype == "f32" and (inverse := self._inverse(n.args[1])) is not None:
            return f"fw.divide_by({self.operand(n.args[0])}, {self.operand(n.args[1])}, {inverse})"
        else:
            text, literals = form_of(n.op, dtype)
        args = [self.operand(a, literals) for a in n.args]
        tensors = [self.node(a).op != "const" for a in n.args]
        if literals and not any(tensors[1:] if n.op == "where" else tensors):
            args[-1] = self.operand(n.args[-1])
        if n.op == "where" and not tensors[0]:
            args[0] = self.operand(n.args[0])
        if n.op in DIVISIONS and is_int(dtype):
            args[1] = self._divisor(n, args[1])
        if n.op == "neg" and is_int(dtype):
            args[0] = self.operand(n.args[0])
        return text.format(*(atom(a) if "(" not in text else a for a in args))

    def _exact_reciprocal(self, i: int) -> float | None:
        """Return the reciprocal of a constant power of 2: its product is the quotient, and needs no division."""
        n = self.node(i)
        if n.op != "const" or not n.value or abs(math.frexp(n.value)[0]) != 0.5 or not 2.0**-120 < abs(n.value) < 2.0**120:
            return None
        return 1.0 / n.value

    def _inverse(self, i: int) -> str | None:
        """Return the rounded reciprocal of a divisor that is the same for the whole row and neither tiny nor huge."""
        n = self.node(i)
        if i in self.totals:
            return f"fw.reciprocal({self.operand(i)})"
        if n.op != "const" or not n.value or not 2.0**-120 < abs(n.value) < 2.0**120:
            return None
        (value,) = struct.unpack("f", struct.pack("f", n.value))
        (inverse,) = struct.unpack("f", struct.pack("f", 1.0 / value))
        return constant(inverse, n.dtype)

    def _divisor(self, n: Node, text: str) -> str:
        """Return the divisor with zeros replaced. Zero is an error where eager makes it one (on the CPU)."""
        zero = f"{atom(text)} == 0"
        if self.check_division:
            mask = self.memory.domain_mask(self.layout.dims_of[n.id])
            bad = f"({zero}) & {mask}" if mask else zero
            self.put(f"fw.report(error_ptr, {bad}, {ZERO_DIVISION})")
        return f"tl.where({zero}, {constant(1, self.node(n.args[1]).dtype)}, {text})"

    def _bound(self, n: Node) -> None:
        """Print a checked index: reported and replaced by 0 if out of bounds."""
        v, i, size = self.name(n.id), self.operand(n.args[0]), atom(self.address.extent(n.extent or 0))
        low = f"-{size}" if n.how == "wrap" else "0"
        self.put(f"{v}_bad = ({i} < {low}) | ({i} >= {size})")
        masks = [self.memory.domain_mask(self.layout.dims_of[n.id])]
        masks += [self.operand(n.args[1])] if len(n.args) > 1 else []
        bad = " & ".join([f"{v}_bad", *(m for m in masks if m)])
        self.put(f"fw.report(error_ptr, {bad}, {INDEX_ERROR}, {int(n.value or 1)}, {i})")
        wrapped = f"tl.where({i} < 0, {i} + {size}, {i})" if n.how == "wrap" else i
        value, dims = f"tl.where({v}_bad, 0, {wrapped})", self.layout.dims_of[n.id]
        if self.layout.dims_of[n.args[0]] != dims:  # one index of all points that are not masked: they load a block
            value = f"tl.broadcast_to({value}, {self.layout.shape(dims)})"
        self.put(f"{v} = {value}")
