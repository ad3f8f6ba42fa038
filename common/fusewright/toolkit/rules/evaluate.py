"""Evaluates a tensor at an index inside a kernel: loads it if it is in memory, else computes it by its rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.sizes.expr import OffsetOf
from fusewright.toolkit.ir import Builder, Index, Val
from fusewright.toolkit.ir.extent import Extent
from fusewright.toolkit.ir.types import TYPES, DType, compute_type, from_torch
from fusewright.toolkit.rules.coverage import covers
from fusewright.toolkit.rules.flow import Flow
from fusewright.toolkit.rules.kinds import Domain, Evaluator, Map, Row, View
from fusewright.toolkit.rules.space import At, NotAligned, Part, extent, is_contiguous, product, shape_of, stride_of

SAME_START = frozenset({"view", "reshape", "alias", "squeeze", "unsqueeze", "permute", "transpose", "t", "expand"})
"""Views that start at the same address as their argument."""


DEEPEST = 32
"""How many values are evaluated one inside another. Python's stack holds about a hundred, and a kernel may have longer chains."""


class _TooDeep(Exception):
    """A value that must be evaluated on its own first, with the state of the evaluator in which it is needed."""

    def __init__(self, v: Value, at: At, state: tuple[Any, ...]) -> None:
        super().__init__(v.id)
        self.v, self.at, self.state = v, at, state


def compute_dtype(dtype: torch.dtype) -> DType:
    """The kernel type that holds values of a torch dtype."""
    return compute_type(from_torch(dtype))


class KernelEvaluator:
    """Evaluates values of a graph over the axes of one kernel. `members` are the values that it computes."""

    def __init__(self, builder: Builder, flow: Flow, members: frozenset[int]) -> None:
        self.b = builder
        self.flow = flow
        self.members = members
        self.rows: dict[int, tuple[Val, Index]] = {}
        """Result of a row op -> its value and the linear index for which the value holds."""
        self.buffers: dict[int, int] = {}
        """Loaded value -> buffer, in the order of the kernel's inputs."""
        self._memo: dict[tuple[Any, ...], Val] = {}
        self._mask: Val | None = None
        self._parts: list[Part | None] = []
        self._op: OpView | None = None
        self._depth = 0
        self._checks: dict[tuple[int, Any], list[Index]] = {}
        """(result of a checking op, what it checks) -> the elements that were checked."""

    # ---- values ----

    def __call__(self, arg: Any, at: At, dtype: DType | None = None) -> Val:
        """Evaluate `arg` (a value or a number) at element `at`, broadcast if necessary, in `dtype` or its own compute type."""
        if not isinstance(arg, Value):
            return self.const(arg, dtype or _type_of_number(arg))
        if arg.spec is None:
            if arg.dim is None:
                raise NotAligned("a number that is only known at run time")
            v = self.b.index_value(Index(extent(arg.dim), sizes=self.b.p + self.b.r))
        else:
            v = self.value(arg, at.broadcast(shape_of(arg.spec)))
        return v if dtype is None else self.cast(v, dtype)

    def const(self, number: Any, dtype: DType) -> Val:
        """Convert a Python number to a value; integers wrap as in torch's conversion."""
        info = TYPES[dtype]
        if info.kind == "int" and isinstance(number, int | float) and not isinstance(number, bool):
            bits = 8 * info.size
            number = int(number) & ((1 << bits) - 1)
            if info.signed and number >> (bits - 1):
                number -= 1 << bits
        return self.b.const(number, dtype)

    def cast(self, v: Val, dtype: DType) -> Val:
        """Convert `v` to another type. For half types, round and hold the result in fp32."""
        if not TYPES[dtype].compute:
            return self.b.cast(self.b.cast(v, dtype), compute_type(dtype))
        return self.b.cast(v, dtype)

    def value(self, v: Value, at: At) -> Val:
        """Evaluate a tensor value at an element of its own shape."""
        key = (v.id, at, None if self._mask is None else self._mask.id)
        found = self._memo.get(key)
        if found is not None:
            return found
        if self._depth == DEEPEST:
            raise _TooDeep(v, at, (self._mask, [*self._parts], self._op))
        self._depth += 1
        try:
            found = self._memo[key] = self._value(v, at) if self._depth > 1 else self._outermost(v, at)
        finally:
            self._depth -= 1
        return found

    def _outermost(self, v: Value, at: At) -> Val:
        """Evaluate a value after those that lie too deep below it. What was begun is found again: builder and memo know it."""
        own = self._mask, self._parts, self._op
        waiting = [_TooDeep(v, at, own)]
        try:
            while True:
                now = waiting[-1]
                self._mask, self._parts, self._op = now.state
                try:
                    found = self._value(now.v, now.at)
                except _TooDeep as deeper:
                    waiting.append(deeper)
                    continue
                waiting.pop()
                if not waiting:
                    return found
                self._memo[now.v.id, now.at, None if self._mask is None else self._mask.id] = found
        finally:
            self._mask, self._parts, self._op = own

    def _value(self, v: Value, at: At) -> Val:
        made = self.flow.producer.get(v.id)
        if made is None:
            return self.load(v, at)
        op, k = made
        rule = self.flow.rule(op, k)
        if isinstance(rule, View):
            return self.value(*rule.code(op, k, at))
        if v.id in self.members or self.flow.is_inline(op):
            if isinstance(rule, Row):
                return self.row_result(v, at)
            if isinstance(rule, Map):
                return self.computed(v, op, k, at, rule)
        return self.load(v, at)

    def computed(self, v: Value, op: OpView, k: int, at: At, rule: Map) -> Val:
        """Compute an element of a map op, in the compute type of its dtype."""
        assert v.spec is not None
        before, self._op = self._op, op
        try:
            return self.held(rule.code(self, op, k, at), v)
        finally:
            self._op = before

    def held(self, val: Val, v: Value) -> Val:
        """Convert a result that the kernel computed to the type that holds it, rounded to its own if the flow rounds."""
        assert v.spec is not None
        return self.cast(val, from_torch(v.spec.dtype) if self.flow.rounds else compute_dtype(v.spec.dtype))

    def row_result(self, v: Value, at: At) -> Val:
        if v.id not in self.rows:
            raise NotAligned("a row op that is not computed yet")
        val, linear = self.rows[v.id]
        if at.linear != linear:
            raise NotAligned("a result of a row is read at another element than its own")
        return val

    def load(self, v: Value, at: At) -> Val:
        """Load an element from memory; nothing is read where the mask is false."""
        assert v.spec is not None
        buffer = self.buffer(v)
        address = self.address(v.spec, at)
        if self._mask is None:
            got = self.b.load(buffer, address)
        else:
            got = self.b.load(buffer, address, self._mask, 0)
        return self.b.cast(got, compute_type(got.dtype))

    def buffer(self, v: Value) -> int:
        """The input buffer of a value."""
        assert v.spec is not None
        if v.id not in self.buffers:
            name = f"x{len(self.buffers)}"
            self.buffers[v.id] = self.b.input(name, from_torch(v.spec.dtype))
        return self.buffers[v.id]

    @staticmethod
    def address(spec: TensorSpec, at: At) -> Index:
        """The address of an element, counted in elements from the tensor's first."""
        if is_contiguous(spec):
            return at.linear
        out = Index(sizes=at.dims[0].sizes) if at.dims else Index()
        for ix, size, step in zip(at.dims, shape_of(spec), stride_of(spec), strict=True):
            if size != 1 and step != 0:
                out = out + ix * step
        return out

    def offset(self, v: Value) -> Extent:
        """The storage offset of a tensor, in elements; 0 for tensors that kernels make."""
        made = self.flow.producer.get(v.id)
        if made is None:
            return self.b.size(OffsetOf(v.id), 0)
        if not self.flow.is_view(made[0]):
            return 0
        if made[0].op not in SAME_START:
            raise NotAligned("where a part of a tensor begins in its storage is not followed")
        return self.offset(next(iter(made[0].inputs())))

    # ---- helpers for rules ----

    @property
    def mask(self) -> Val | None:
        """The condition under which values are currently needed; None means always."""
        return self._mask

    @contextmanager
    def masked(self, condition: Val, part: Part | None = None) -> Iterator[None]:
        """Evaluate values inside only where `condition` holds; nothing is read elsewhere. `part`: the points where it holds,
        if they are a range of one axis.
        """
        before = self._mask
        self._mask = condition if before is None else self.b.op("and", before, condition)
        self._parts.append(part)
        try:
            yield
        finally:
            self._mask = before
            self._parts.pop()

    @staticmethod
    def part(index: Index, start: Extent, size: Extent) -> Part | None:
        """The points at which an index lies in [start, start + size), or None if they are not a range of one axis."""
        (axis, step), *more = index.coefs or ((0, 0),)
        plain = step == 1 and not (more or index.divmods or index.indirect or index.offset != 0)
        return Part(axis, start, size) if plain else None

    def position(self, index: Index) -> Val:
        """An index as an i64 value."""
        return self.b.index_value(index)

    def lookup(self, indices: Value, at: At, size: Any, says: str, wrap: bool = False) -> Index:
        """Read an index from an integer tensor and check it against `size`. Out of bounds, the launch raises the error that
        `says` describes (see `messages`).
        """
        i = self(indices, at, "i64")
        self.checked(indices.id, at)
        return self.b.indirect(self.b.bound(i, size, wrap, self._mask, says))

    def checked(self, what: Any, at: At) -> None:
        """Record that the op being computed checks an element of `what`."""
        if self._op is None:  # an op of the kernel's own domain
            return
        found = self._checks.setdefault((self._op.out.id, (what, product(at.shape))), [])
        place: Index | None = at.linear
        for part in self._parts:
            place = None if part is None or place is None else part.of(place)
        if place is not None:
            found.append(place)

    def coverage(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the results of ops whose checks were all made here, and of ops whose checks were made in part."""
        partly = {v for (v, (_, total)), places in self._checks.items() if not covers(places, total)}
        return frozenset(v for v, _ in self._checks) - partly, frozenset(partly)


def _type_of_number(number: Any) -> DType:
    return "bool" if isinstance(number, bool) else "i64" if isinstance(number, int) else "f64"


@dataclass
class Space:
    """The axes of one kernel: `base` is the current element of the domain, `row` the same without the reduced dims."""

    domain: Domain
    base: At
    row: At
    along: At

    @classmethod
    def of(cls, domain: Domain, axes: Mapping[int, Index]) -> Space:
        base = At(domain.shape, tuple(axes[d] for d in range(len(domain.shape))))
        outer = [d for d in range(len(domain.shape)) if d not in domain.dims]
        return cls(domain, base, base.pick(outer), base.pick(domain.dims))


class KernelRow:
    """The context of a row rule: elements of its domain, and reductions over its rows."""

    def __init__(self, e: Evaluator, space: Space, domain: Domain) -> None:
        self.e, self.b = e, e.b
        self.domain = domain
        self.full = space.base.reshape(domain.shape)
        outer = [d for d in range(len(domain.shape)) if d not in domain.dims]
        self.row = At(tuple(domain.shape[d] for d in outer), tuple(self.full.dims[d] for d in outer), space.row.linear)
        self.along = self.full.pick(domain.dims)

    def x(self, arg: Any, dtype: DType | None = None) -> Val:
        """Evaluate a value over the domain: it has the domain's shape or element count, or is broadcast to it."""
        at = self.full
        if isinstance(arg, Value) and arg.spec is not None:
            shape = shape_of(arg.spec)
            at = at if _broadcasts(shape, at.shape) else at.reshape(shape)
        return self.e(arg, at, dtype)

    def per_row(self, arg: Any, dtype: DType | None = None) -> Val:
        """Evaluate a value with one element per row, whatever its shape."""
        return self.e(arg, self._shaped(self.row, arg), dtype)

    def per_position(self, arg: Any, dtype: DType | None = None) -> Val:
        """Evaluate a value with one element per position in the row, the same for all rows (a weight)."""
        return self.e(arg, self._shaped(self.along, arg), dtype)

    @staticmethod
    def _shaped(at: At, arg: Any) -> At:
        return at.reshape(shape_of(arg.spec)) if isinstance(arg, Value) and arg.spec is not None else at

    def count(self) -> Any:
        """The row length, as an extent."""
        n: Any = 1
        for d in self.domain.dims:
            n = self.domain.shape[d] * n
        return n

    def sum(self, v: Val) -> Val:
        return self.b.reduce("sum", v)

    def mean(self, v: Val) -> Val:
        return self.b.reduce("mean", v)


def _broadcasts(shape: tuple[Any, ...], to: tuple[Any, ...]) -> bool:
    if len(shape) > len(to):
        return False
    return all(s in (1, t) for s, t in zip(reversed(shape), reversed(to), strict=False))
