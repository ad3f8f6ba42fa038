"""Accumulators of reductions and scans: their state, one step, merging two states, folding lanes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusewright.toolkit.ir.ir import Node
from fusewright.toolkit.ir.types import TYPES, DType
from fusewright_cpu.emit.pointwise import LLVM_TYPE
from fusewright_cpu.emit.text import BITS, Fn, V, const

State = list[V]
NOWHERE = (1 << 63) - 1
"""Position of an arg-reduction over nothing; every real position is smaller."""


@dataclass(frozen=True, slots=True)
class Reducer:
    """One `reduce` node: `dtype` is the type of its operand. Means and m2 have already become sums (`kernel.moments`)."""

    node: Node
    dtype: DType

    @property
    def how(self) -> str:
        return self.node.how

    @property
    def is_float(self) -> bool:
        return TYPES[self.dtype].kind == "float"

    @property
    def cascades(self) -> bool:
        """Return whether long runs are summed in chunks, to keep the rounding error of a sum small."""
        return self.is_float and self.how == "sum"

    def _edge(self, least: bool) -> V:
        t = LLVM_TYPE[self.dtype]
        if self.is_float:
            return const(-math.inf if least else math.inf, t)
        bits, signed = BITS[t], TYPES[self.dtype].signed
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        return const(low if least else high, t)

    def start(self, f: Fn, w: int) -> State:
        """Return the initial state in `w` lanes."""
        t = LLVM_TYPE[self.dtype]
        match self.how:
            case "sum" | "step":
                state = [const(0, t)]
            case "prod":
                state = [const(1, t)]
            case "max" | "min":
                state = [self._edge(self.how == "max")]
            case "argmax" | "argmin":
                state = [self._edge(self.how == "argmax"), const(NOWHERE, "i64")]
            case _:
                state = [const(self.how == "all", "i1")]
        return [f.splat(s, w) for s in state]

    def step(self, f: Fn, state: State, x: V, at: V, mask: V | None) -> State:
        """Return the state after element `x` at position `at`; lanes off in `mask` stay unchanged."""
        match self.how:
            case "argmax" | "argmin":
                new = self._better(f, state, [x, at])
            case _:
                new = self.merge(f, state, [x])
        if mask is None:
            return new
        return [f.select(mask, n, s) for n, s in zip(new, state, strict=True)]

    def merge(self, f: Fn, a: State, b: State) -> State:
        """Return the state after the elements of `a`, then those of `b`."""
        x, y = a[0], b[0]
        match self.how:
            case "sum":
                return [f.bin("fadd" if self.is_float else "add", x, y)]
            case "prod":
                return [f.bin("fmul" if self.is_float else "mul", x, y)]
            case "max" | "min":
                if self.is_float:
                    # NaN wins and stays; which of two zeros is taken may depend on the order, as in eager
                    return [f.call(f"{self.how}imum", x.t, [y, x], flags="nsz ")]
                sign = "s" if TYPES[self.dtype].signed else "u"
                pred = f"icmp {sign}{'gt' if self.how == 'max' else 'lt'}"
                return [f.select(f.cmp(pred, y, x), y, x)]
            case "any" | "all":
                return [f.bin("or" if self.how == "any" else "and", x, y)]
            case _:
                return self._better(f, a, b)

    def _better(self, f: Fn, a: State, b: State) -> State:
        """Return value and position of the extreme one; the first of equals; NaN beats numbers."""
        up = self.how == "argmax"
        x, y = a[0], b[0]
        if self.is_float:
            wins = f.cmp("fcmp ogt" if up else "fcmp olt", y, x)
            x_nan, y_nan = f.cmp("fcmp uno", x, x), f.cmp("fcmp uno", y, y)
            wins = f.bin("or", wins, f.bin("and", y_nan, f.bin("xor", x_nan, const(True, "i1"))))
            tie = f.bin("or", f.cmp("fcmp oeq", x, y), f.bin("and", x_nan, y_nan))
        else:
            sign = "s" if TYPES[self.dtype].signed else "u"
            wins, tie = f.cmp(f"icmp {sign}{'gt' if up else 'lt'}", y, x), f.cmp("icmp eq", x, y)
        take = f.bin("or", wins, f.bin("and", tie, f.cmp("icmp slt", b[1], a[1])))
        return [f.select(take, y, x), f.select(take, b[1], a[1])]

    def fold(self, f: Fn, state: State) -> State:
        """Merge all lanes into one."""
        w = state[0].w
        while w > 1:
            w //= 2
            if w == 1:
                low, high = [f.extract(s, 0) for s in state], [f.extract(s, 1) for s in state]
            else:
                low = [f.lanes(s, list(range(w))) for s in state]
                high = [f.lanes(s, list(range(w, 2 * w))) for s in state]
            state = self.merge(f, low, high)
        return state

    def finish(self, f: Fn, state: State) -> V:
        """Return the value of the node."""
        if self.how in ("argmax", "argmin"):
            return f.select(f.cmp("icmp eq", state[1], const(NOWHERE, "i64")), const(0, "i64"), state[1])
        return state[0]


@dataclass(frozen=True, slots=True)
class Scanner:
    """One `scan` node. Sums and products of f32 run in f64, as torch's do."""

    node: Node

    @property
    def wide(self) -> bool:
        return self.node.dtype == "f32" and self.node.how in ("sum", "prod")

    @property
    def by_vectors(self) -> bool:
        """Return whether neighbours may be added first, which floats that could then overflow rule out."""
        exact = self.node.how in ("max", "min") or (self.node.dtype[0] in "iu" and not self.node.recurs)
        return exact or (self.wide and self.node.how == "sum")

    def _reducer(self) -> Reducer:
        return Reducer(self.node, "f64" if self.wide else self.node.dtype)

    def start(self, f: Fn, w: int) -> State:
        return self._reducer().start(f, w)

    def step(self, f: Fn, state: State, x: V, along: bool) -> tuple[State, V]:
        """Return (state, value of the scan here). With `along` the lanes are elements of one row, and the state in every lane
        is that before the first one; else each lane is a row."""
        r, w = self._reducer(), x.w if along else 1
        x = f.conv("fpext", x, "double") if self.wide else x
        before, reach = r.start(f, w), 1
        while reach < w:  # each lane adds twice as many lanes before it
            x = r.merge(f, [f.shuffle(before[0], x, [i if i < reach else w + i - reach for i in range(w)])], [x])[0]
            reach *= 2
        out = r.merge(f, state, [x])
        last = out if w == 1 else [f.lanes(out[0], [w - 1] * w)]
        return last, f.conv("fptrunc", out[0], "float") if self.wide else out[0]
