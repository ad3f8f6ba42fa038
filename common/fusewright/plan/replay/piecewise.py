"""Recording of plans that hold what cannot be recorded: the pieces between are recorded, the rest is called.

A cache that grows gives such a plan: concatenations and attention have other sizes at each call, and all else has fixed ones. What
a recording keeps for what is called stays where it is; what is called gives the recorded pieces copies of what they read, and reads
none of those itself: a view of a copy would change at the next call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from fusewright.interface import CopyingRecorder, KernelCode, PoolingRecorder, Recorder, TensorSpec
from fusewright.plan.build import Plan, generators, shared_by, written_by
from fusewright.plan.execute import codegen
from fusewright.plan.ir import Call, Instruction, Launch, Ref, Run, reads
from fusewright.plan.memory import roots_of, storage_bytes
from fusewright.plan.replay.copies import Call as Replay
from fusewright.plan.replay.copies import copier_out, flat
from fusewright.plan.replay.obstacles import (
    communicates,
    devices,
    draws,
    host_scalars,
    located,
    names_sizes,
    result_obstacle,
    unrecordable,
    written_inputs,
)
from fusewright.plan.replay.pieces import PIECES, Piece, buffer_of, defined_sizes, named_sizes, runs_of
from fusewright.storage import lazy

MOST_COPIED = 1 << 20
"""Bytes of a value that is copied for recorded pieces; what reads a larger one is called."""

MOST_RETURNED = 1 << 20
"""Bytes of a recorded result, of which the caller gets a copy; what makes a larger one is called."""

FEWEST_RECORDED = 3
"""One in so many of the instructions that do something, at least, must be recorded."""


def called(plan: Plan, recorder: Recorder) -> frozenset[int] | None:
    """What a plan that cannot be recorded as a whole has to call, by position, to have its other instructions recorded in pieces;
    None if it has too few of these, or cannot be recorded in pieces either."""
    if not isinstance(recorder, PoolingRecorder) or _obstructed(plan):
        return None
    found = _Division(plan, recorder.device_type).called
    recorded = [i for kept, run in runs_of(plan, among(plan, found)) if kept for i in run]
    working = [sum(not shared_by(i) for i in part) for part in (recorded, plan.instructions)]
    return found if found and recorded and FEWEST_RECORDED * working[0] >= working[1] else None


def among(plan: Plan, positions: Set[int]) -> Callable[[Instruction], bool]:
    """Return whether an instruction of the plan is at one of these positions."""
    there = {id(plan.instructions[k]) for k in positions}
    return lambda i: id(i) in there


def _obstructed(plan: Plan) -> bool:
    """Whether a plan cannot be recorded in pieces at all."""
    sizes = defined_sizes(plan)
    unknown = any(n not in sizes for i in plan.instructions for n in named_sizes(i, plan.specs))  # they depend on data
    complex_ = any(s.dtype.is_complex for s in plan.specs.values())  # of which real views may be negated lazily
    return (
        unknown or complex_ or draws(plan) or bool(generators(plan)) or any(map(communicates, plan.instructions))
        or result_obstacle(plan) is not None
    )  # fmt: skip


class _Division:
    """Divide the instructions of a plan into those that are called and others."""

    def __init__(self, plan: Plan, device: str) -> None:
        self.plan = plan
        self.home, self.host = devices(plan, device), host_scalars(plan)
        self.fixed = {v for v in plan.inputs if v in plan.specs and plan.specs[v].const} | written_inputs(plan)
        self.maker = {o: k for k, i in enumerate(plan.instructions) for o in i.outs}
        self.results = {r.id for r in plan.outputs if isinstance(r, Ref)}
        self.groups = list(_sharing(plan))
        self.writers = defaultdict[int, set[int]](set)
        for k, i in enumerate(plan.instructions):
            for v in _written(i):
                self.writers[v].add(k)
        self.overwritten = set(self.writers)
        self.overwritten |= {v for group in self.groups if group & self.overwritten for v in group}
        self.roots = roots_of(plan.instructions)
        found = {k for k, i in enumerate(plan.instructions) if not self._recordable(i)}
        while more := (self._drawn_in(found) | self._short(found)) - found:
            found |= more
        self.called = frozenset(found)

    def _short(self, found: Set[int]) -> set[int]:
        """The instructions between those `found` that are too few to be recorded."""
        short = {id(i) for kept, run in runs_of(self.plan, among(self.plan, found)) if not kept for i in run}
        return {k for k, i in enumerate(self.plan.instructions) if id(i) in short}

    def _recordable(self, i: Instruction) -> bool:
        large = any(self._bytes(v) > MOST_RETURNED for v in self.results.intersection(i.outs))
        known = all(map(self._known, (*reads(i), *i.outs)))
        return known and not large and not names_sizes(i) and unrecordable(i, self.plan, self.roots) is None

    def _known(self, v: int) -> bool:
        """Whether a value has one type, shape and device in all calls."""
        spec, plan = self.plan.specs.get(v), self.plan
        if spec is not None:
            return v in self.host or (spec.static and spec.device in self.home)
        if v in self.maker:  # between two operators that stand for one
            return all(map(self._known, reads(plan.instructions[self.maker[v]])))
        return v in plan.attributes or v in plan.prepare_outputs

    def _drawn_in(self, found: Set[int]) -> set[int]:
        """The instructions to be called because those `found` are."""
        more = set()
        for k, i in enumerate(self.plan.instructions):
            if k not in found and (self._displaced(i, found) or not all(map(self._crosses, self._outside(i, found)))):
                more.add(k)
        for group in self.groups:  # one memory for all that is returned or written
            users = {self.maker[v] for v in group if v in self.maker}.union(*(self.writers[v] for v in group if v in self.writers))
            if users & found and (group & self.results or group & self.overwritten):
                more |= users
        return more

    def _displaced(self, i: Instruction, found: Set[int]) -> bool:
        """Whether a copy of what is called makes would begin elsewhere in its storage, where that matters."""
        return any(self.maker.get(r) in found for v in located(i) for r in self.roots.get(v, {v}))

    def _outside(self, i: Instruction, found: Set[int]) -> Iterator[int]:
        """What an instruction reads of what the call is given and what is called makes."""
        for v in reads(i):
            if (self.maker[v] in found) if v in self.maker else (v in self.plan.inputs and v not in self.fixed):
                yield v

    def _crosses(self, v: int) -> bool:
        """Whether a recorded piece may have a copy of a value."""
        spec = self.plan.specs.get(v)
        return (
            spec is not None and spec.static and spec.device in self.home and _dense(spec)
            and storage_bytes(spec) <= MOST_COPIED and v not in self.overwritten
        )  # fmt: skip

    def _bytes(self, v: int) -> int:
        spec = self.plan.specs.get(v)
        return storage_bytes(spec) if spec is not None and spec.static else 0


def _written(i: Instruction) -> set[int]:
    """The values that an instruction writes to."""
    return set(i.written) if isinstance(i, Launch) else set(written_by(i)) if isinstance(i, Call) else set()


def _sharing(plan: Plan) -> Iterator[set[int]]:
    """Yield sets of tensors that may share memory."""
    group: dict[int, set[int]] = {}
    numbers = {o for i in plan.instructions if isinstance(i, Call) and i.target.startswith("py::") for o in i.outs}
    numbers |= set(plan.inputs) - plan.specs.keys()
    for i in plan.instructions:
        for o in i.outs:
            sources = (v for v in shared_by(i) if v not in numbers)
            written = (v for v, made in i.written.items() if made == o) if isinstance(i, Launch) else ()
            merged = {o}.union(*(group.get(v, {v}) for v in (*sources, *written)), group.get(o, ()))
            group.update(dict.fromkeys(merged, merged))
    yield from {id(g): g for g in group.values()}.values()


def _dense(spec: TensorSpec) -> bool:
    """Whether elements of a tensor of fixed sizes lie side by side."""
    span = 1
    sizes = [(int(s), int(n)) for n, s in zip(spec.shape, spec.stride, strict=True) if n != 1]  # type: ignore[arg-type]
    for stride, n in sorted(sizes):
        if stride != span:
            return False
        span *= n
    return True


Live = dict[int, Any]
"""Values of a call that no recording has: what it was given, and what the called pieces made."""


class Piecewise:
    """A plan, without constants to prepare, whose instructions at some positions are called."""

    def __init__(self, plan: Plan, kernels: Mapping[str, KernelCode], positions: Set[int]) -> None:
        self._plan = plan
        pieces = PIECES(plan, {h: code.kernel for h, code in kernels.items()}, among(plan, positions))
        self._pieces = [(piece, codegen.load(piece.plan, kernels)) for piece in pieces]

    def record(self, recorder: Recorder, given: Sequence[Any], constants: Sequence[Any], fixed: Collection[int]) -> Replay:
        """Record for the arguments `given`, of which all replays read those at the places `fixed` where they are, and constants
        prepared for them. Nothing runs. Raise `RuntimeError` when something cannot be recorded."""
        inputs, specs = self._plan.inputs[: len(given)], self._plan.specs
        memory = dict(zip(self._plan.inputs[len(given) :], constants, strict=True))
        values = dict(zip(inputs, given, strict=True))
        read = {inputs[k]: given[k] for k in fixed}
        steps: list[Callable[[Live], None]] = []
        for piece, run in self._pieces:
            if not piece.recorded:
                steps.append(_called(piece, run, memory))
                continue
            fills = [v for v in piece.plan.inputs if v not in memory and v not in read]
            if any(lazy(values.get(v)) for v in fills):
                raise RuntimeError("the memory of an input is not its value")
            read.update((v, buffer_of(specs[v])) for v in fills)
            steps.append(_recorded(recorder, piece, run, memory, read, fills))
        results = [r.id for r in self._plan.outputs]
        kept = [v for v in results if v in memory]
        copy_out = copier_out([memory[v] for v in kept])

        def call(args: list[Any]) -> list[Any]:
            live = dict(zip(inputs, args, strict=True))
            for step in steps:
                step(live)
            live.update(zip(kept, copy_out(), strict=True))
            return [live[v] for v in results]

        return call


def _called(piece: Piece, run: Run, memory: Mapping[int, Any]) -> Callable[[Live], None]:
    """Return a function that calls a piece, which reads what a recording made where it lies."""
    arguments, outs = _arguments(piece, memory), piece.outs

    def step(live: Live) -> None:
        args = arguments(live)
        for v in piece.last:
            live.pop(v, None)  # so that its memory can be used again
        live.update(zip(outs, run(args), strict=True))

    return step


def _arguments(piece: Piece, memory: Mapping[int, Any]) -> Callable[[Live], list[Any]]:
    """Return a function that gives a piece its inputs, of a call or from the `memory` of a recording. This keeps no argument of the
    call that was recorded: a weight that was replaced is freed, and writes are counted by the tensors that are given."""
    inputs = piece.plan.inputs
    kept = {v: memory[v] for v in inputs if v in memory}
    return lambda live: [kept[v] if v in kept else live[v] for v in inputs]


def _recorded(
    recorder: Recorder, piece: Piece, run: Run, memory: dict[int, Any], read: Mapping[int, Any], fills: Sequence[int]
) -> Callable[[Live], None]:
    """Record a piece, which also reads what a call is given, or copies of that, in `read`. Add what it makes to `memory`, and
    return a function that copies `fills` to there and replays it."""
    given, buffers = {v: read[v] for v in piece.plan.inputs if v in read}, [read[v] for v in fills]
    arguments = _arguments(piece, memory)

    def made() -> Sequence[torch.Tensor]:
        results: Sequence[torch.Tensor] = run(arguments(given))
        return results

    def fill(live: Live) -> None:
        for buffer, v in zip(buffers, fills, strict=True):
            buffer.copy_(live[v])

    copying = None
    if isinstance(recorder, CopyingRecorder):
        copying = recorder.record_with_copies(made, False, True, dict(enumerate(buffers)), lambda results: ())
    if copying is None:
        results, replay = recorder.record(made, warm=False)

        def step(live: Live) -> None:
            fill(live)
            replay()

    else:
        results, with_copies = copying

        def step(live: Live) -> None:
            if with_copies([live[v] for v in fills]) is None:  # the driver refuses
                fill(live)
                for old, new in zip(results, run(arguments(live)), strict=True):
                    if old.data_ptr() != new.data_ptr():  # else it is a view of what is read in place
                        flat(old).copy_(flat(new))

    memory.update(zip(piece.outs, results, strict=True))
    return step
