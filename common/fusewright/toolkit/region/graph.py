"""One region as a small mutable graph: ops in order, and the producer and readers of each value, kept up to date by every edit.

Rewrite rows (`rewrite`) work on it: a row *claims* the ops that a library call will compute, or *replaces* ops by others. An
edit that would leave a value without producer, or a claim that overlaps another, is refused and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusewright.forms.spec import FormError
from fusewright.interface import OpView, Region, TensorSpec, Value


class RegionError(FormError, ValueError):
    """An edit that would break the region, or a broken region."""


@dataclass(frozen=True, eq=False)
class Claim:
    """A claim on `ops`: `write(context)` writes the call that computes them when the walk over the region reaches `at`: the last
    op, or the first if all results are slices of one product. `also` are claims that must be granted together with this one.
    `rules` are the ids of the rewrite rows that made it."""

    ops: tuple[OpView, ...]
    at: OpView
    write: Callable[[Any], None]
    note: str
    also: tuple[Claim, ...] = ()
    rules: tuple[str, ...] = ()


class RegionGraph:
    """The ops of `region`, which is not modified itself. Iteration is in order and does not see later edits."""

    def __init__(self, region: Region) -> None:
        self.source = region
        self.name, self.inputs, self.outputs, self.phase = region.name, region.inputs, region.outputs, region.phase
        self._escaping = frozenset(v.id for v in region.outputs)
        self._given = frozenset(v.id for v in region.inputs)
        self._ops: dict[int, OpView] = {}
        self._next: dict[int | None, int | None] = {None: None}  # a ring through None, which precedes and follows all
        self._previous: dict[int | None, int | None] = {None: None}
        self._positions: dict[int, int] | None = None
        self._producer: dict[int, int] = {}
        self._users: dict[int, list[int]] = {}
        self._claims: dict[int, Claim] = {}
        for op in region.ops:
            if op.id in self._ops:
                raise RegionError(f"{region.name} has two ops {op.id}")
            self._link(op, None)

    # -- reading

    def __iter__(self) -> Iterator[OpView]:
        return iter([self._ops[i] for i in self._ids()])

    def __len__(self) -> int:
        return len(self._ops)

    def __contains__(self, op: object) -> bool:
        return isinstance(op, OpView) and self._ops.get(op.id) is op

    def _ids(self) -> Iterator[int]:
        at = self._next[None]
        while at is not None:
            yield at
            at = self._next[at]

    def producer(self, value: Value) -> OpView | None:
        """The op that makes a value; None for an input of the region."""
        return self._ops.get(self._producer.get(value.id, -1))

    def users(self, value: Value) -> Sequence[OpView]:
        """The ops that read a value, with one entry per argument that reads it."""
        return [self._ops[i] for i in self._users.get(value.id, ())]

    def user_ids(self, id: int) -> Sequence[int]:
        """The ids of the ops that read the value with this id."""
        return self._users.get(id, ())

    def only_user(self, value: Value) -> OpView | None:
        """The only op that reads a value, once; None if there are other readers or the value is an output of the region."""
        users = self._users.get(value.id, ())
        return self._ops[users[0]] if len(users) == 1 and value.id not in self._escaping else None

    def unused(self, value: Value) -> bool:
        """Whether a value has no reader and is not an output."""
        return not self._users.get(value.id) and value.id not in self._escaping

    def escapes(self, value: Value) -> bool:
        """Whether a value is an output of the region."""
        return value.id in self._escaping

    def is_const(self, value: Value | None) -> bool:
        """Whether a value depends only on weights, so that results derived from it can be cached. True for None (no bias)."""
        return value is None or (self.phase == "infer" and value.spec is not None and value.spec.const)

    def before(self, a: OpView, b: OpView) -> bool:
        """Whether `a` precedes `b`."""
        return self._position(a) < self._position(b)

    def ordered(self, ops: Iterable[OpView]) -> tuple[OpView, ...]:
        """Sort these ops in the order of the region, without duplicates."""
        return tuple(sorted({op.id: op for op in ops}.values(), key=self._position))

    def _position(self, op: OpView) -> int:
        if self._positions is None:
            self._positions = {i: k for k, i in enumerate(self._ids())}
        return self._positions[op.id]

    def region(self) -> Region:
        """Return the region in its current state."""
        return replace(self.source, ops=tuple(self))

    # -- editing

    def insert(self, op: OpView, before: OpView | None = None) -> None:
        """Insert an op before another one, by default right after the last op whose result it reads."""
        self._check_new([op], gone=())
        if before is not None:
            self._link(op, before.id)
            return
        makers = [made for v in op.inputs() if (made := self.producer(v)) is not None]
        last = max(makers, key=self._position).id if makers else None
        self._link(op, self._next[last])

    def replace(self, ops: Sequence[OpView], new: Sequence[OpView]) -> None:
        """Put `new` in the place of the first of `ops`. The new ops must make every result of `ops` that other ops read."""
        self._check_free(ops)
        self._check_new(new, gone={op.id for op in ops})
        self._check_made(ops, new)
        first = ops[0] if len(ops) == 1 else self.ordered(ops)[0]
        at = self._next[first.id]
        while at in {op.id for op in ops}:
            at = self._next[at]
        for op in ops:
            self._unlink(op)
        for op in new:
            self._link(op, at)

    def erase(self, op: OpView) -> None:
        """Remove an op whose results are not read."""
        self._check_free([op])
        self._check_made([op], ())
        self._unlink(op)

    def sweep(self, names: Collection[str]) -> None:
        """Remove ops of these names whose results are not read, and then those that only they read."""
        for op in reversed(list(self)):
            if op.op in names and op.id not in self._claims and all(map(self.unused, op.outs)):
                self._unlink(op)

    def _check_free(self, ops: Sequence[OpView]) -> None:
        for op in ops:
            if op not in self:
                raise RegionError(f"{op.op} {op.id} is not in {self.name}")
            if op.id in self._claims:
                raise RegionError(f"{op.op} {op.id} is claimed: {self._claims[op.id].note}")

    def _check_new(self, new: Sequence[OpView], gone: Collection[int]) -> None:
        """Check that new ops have new ids and read only values that exist."""
        fresh = set(self._given)

        def made(v: Value) -> bool:
            maker = self._producer.get(v.id)
            return v.id in fresh or (maker is not None and maker not in gone)

        for op in new:
            if (op.id in self._ops and op.id not in gone) or any(map(made, op.outs)):
                raise RegionError(f"{op.op} {op.id} makes what is made already")
            if lost := [v.id for v in op.inputs() if not made(v)]:
                raise RegionError(f"{op.op} {op.id} reads {lost}, which nobody makes")
            fresh.update(o.id for o in op.outs)

    def _check_made(self, ops: Sequence[OpView], new: Sequence[OpView]) -> None:
        """Check that `new` makes every result of `ops` that other ops read."""
        gone, made = {op.id for op in ops}, {o.id for op in new for o in op.outs}
        for v in (o for op in ops for o in op.outs):
            if v.id not in made and (self.escapes(v) or not gone.issuperset(self._users.get(v.id, ()))):
                raise RegionError(f"value {v.id} is read, and nobody would make it")

    def _link(self, op: OpView, before: int | None) -> None:
        behind = self._previous[before]
        self._ops[op.id] = op
        self._next[behind], self._next[op.id] = op.id, before
        self._previous[before], self._previous[op.id] = op.id, behind
        self._positions = None
        self._producer.update((o.id, op.id) for o in op.outs)
        for v in op.inputs():
            self._users.setdefault(v.id, []).append(op.id)

    def _unlink(self, op: OpView) -> None:
        behind, before = self._previous.pop(op.id), self._next.pop(op.id)
        self._next[behind], self._previous[before] = before, behind
        self._positions = None
        del self._ops[op.id]
        for o in op.outs:
            if self._producer.get(o.id) == op.id:
                del self._producer[o.id]
        for v in op.inputs():
            self._users[v.id].remove(op.id)

    # -- claims

    def claim(self, claim: Claim) -> bool:
        """Grant a claim. Return False and grant nothing if some of its ops are claimed already: of two calls that took the same
        op only the second would make its result, and readers of the first's would read a value that nothing makes."""
        wanted: dict[int, Claim] = {}
        for part in (claim, *claim.also):
            ids = {op.id for op in part.ops}
            if len(ids) < len(part.ops) or not ids.isdisjoint(wanted.keys() | self._claims.keys()):
                return False
            wanted.update(dict.fromkeys(ids, part))
        self._claims |= wanted
        return True

    def release(self, claim: Claim) -> None:
        """Release a claim together with its `also` claims."""
        for part in (claim, *claim.also):
            for op in part.ops:
                if self._claims.get(op.id) is part:
                    del self._claims[op.id]

    def claim_of(self, op: OpView) -> Claim | None:
        """The claim that holds an op."""
        return self._claims.get(op.id)

    def free(self, op: OpView) -> bool:
        """Whether no claim holds an op."""
        return op.id not in self._claims

    def free_user(self, value: Value) -> OpView | None:
        """The only op that reads a value, if it is unclaimed."""
        user = self.only_user(value)
        return user if user is not None and self.free(user) else None

    @property
    def claims(self) -> Sequence[Claim]:
        """Every claim, once."""
        return list(dict.fromkeys(self._claims.values()))


def made_of(inputs: Iterable[Value], spec: TensorSpec) -> TensorSpec:
    """The spec of a value that a rewrite makes of `inputs`: constant if they all are, unless it has more elements than they do."""
    given = [v.spec for v in inputs if v.spec is not None]
    const = all(s.const for s in given) and spec.numel_hint() <= sum(s.numel_hint() for s in given)
    return replace(spec, const=const)


def spec_of(value: Any) -> TensorSpec:
    """The spec of an argument or result that is a tensor."""
    assert isinstance(value, Value) and value.spec is not None
    return value.spec
