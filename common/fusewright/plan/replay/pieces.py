"""Pieces of a plan, some recorded, some called; plans that communicate, whose collectives are called.

NCCL requires that all processes capture a collective or none does (its user guide, on graphs), but what is recorded, dropped or run
as the plain plan each process decides by itself. So collectives are never captured: however a process runs a plan, it makes the
same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from fusewright.forms.spec import Pass
from fusewright.interface import Dim, KernelCode, PoolingRecorder, Recorder, TensorSpec
from fusewright.plan.build import Plan, generators, shared_by, written_by
from fusewright.plan.execute import codegen
from fusewright.plan.ir import Call, Instruction, Launch, Ref, Run, reads
from fusewright.plan.replay.copies import recorded
from fusewright.plan.replay.obstacles import FEWEST, communicates
from fusewright.plan.verify import PLAN
from fusewright.plan.vocabulary import WAIT
from fusewright.sizes.expr import SizeExpr, names


@dataclass(frozen=True)
class Piece:
    """A part of a plan. Its inputs are values of the plan that are made before it, its outputs those that are read after it. `last`
    are the inputs that no later piece reads."""

    plan: Plan
    recorded: bool
    last: frozenset[int]

    @property
    def outs(self) -> list[int]:
        return [r.id for r in self.plan.outputs]


def pieces_of(plan: Plan, called: Callable[[Instruction], bool] = communicates) -> tuple[Piece, ...]:
    """Split a plan before and after what is `called`: collectives by default. Short runs between are called as well."""
    sizes, later = defined_sizes(plan), {r.id for r in plan.outputs if isinstance(r, Ref)}
    found = []
    for kept, run in reversed(runs_of(plan, called)):
        read = _read(plan, run, sizes)
        found.append(_piece(plan, run, kept, read, later))
        later = later | read
    return tuple(found[::-1])


def runs_of(plan: Plan, called: Callable[[Instruction], bool]) -> list[tuple[bool, list[Instruction]]]:
    """The instructions of each piece, and whether it is recorded."""
    split = [(apart, list(run)) for apart, run in groupby(plan.instructions, called)]
    kinds = groupby(split, lambda part: not part[0] and len(part[1]) >= FEWEST)
    return [(recorded, [i for _, run in parts for i in run]) for recorded, parts in kinds]


def _piece(plan: Plan, run: Sequence[Instruction], recorded: bool, read: Set[int], later: Set[int]) -> Piece:
    """A run as a piece, given what it reads and what is read later."""
    made = {o for i in run for o in i.outs}
    inputs = tuple(sorted(read - made - plan.attributes.keys()))
    part = replace(
        plan, inputs=inputs, outputs=tuple(map(Ref, sorted(made & later))), instructions=list(run),
        prepare=[], prepare_inputs=(), prepare_outputs=(),
    )  # fmt: skip
    return Piece(part, recorded, frozenset(inputs) - later)


def _read(plan: Plan, run: Sequence[Instruction], sizes: Mapping[str, int]) -> set[int]:
    """What a run reads, and the inputs that define the size symbols which it names."""
    named = {n for i in run for n in named_sizes(i, plan.specs)}
    return {r for i in run for r in reads(i)}.union(map(sizes.__getitem__, named))


def named_sizes(i: Instruction, specs: Mapping[int, TensorSpec]) -> set[str]:
    """The size symbols that an instruction and its results name."""
    given = (*i.sizes, *i.scalars) if isinstance(i, Launch) else ()
    made = (n.expr for o in i.outs if o in specs for n in (*specs[o].shape, *specs[o].stride) if isinstance(n, Dim))
    return {n for x in (*given, *made) if isinstance(x, SizeExpr) for n in names(x)}


def defined_sizes(plan: Plan) -> dict[str, int]:
    """Map each size symbol that an input has as a size of its own, or is, to the first such input."""
    found: dict[str, int] = {}
    for v in plan.inputs:
        sizes = (*plan.specs[v].shape, *plan.specs[v].stride) if v in plan.specs else ()
        own = [n.expr.name for n in sizes if isinstance(n, Dim)]
        for name in (plan.scalars.get(v), *own):
            if name is not None:
                found.setdefault(name, v)
    return found


PIECES = Pass(
    "pieces of a recording",
    "plan",
    PLAN,
    lambda plan, kernels, called=communicates: pieces_of(plan, called),
    lambda args, found: [replace(piece.plan, kernels=args[1]) for piece in found],
)
"""`pieces_of`, with the kernels that launches may name."""


class Pieces:
    """A plan that communicates, as pieces that a device records. All its outputs are tensors."""

    def __init__(self, plan: Plan, kernels: Mapping[str, KernelCode]) -> None:
        self._plan = plan
        pieces = PIECES(plan, {h: code.kernel for h, code in kernels.items()})
        self._pieces = [(piece, codegen.load(piece.plan, kernels)) for piece in pieces]
        self._same = _same_tensors(plan.instructions)
        self._fixed = {v for piece in pieces if piece.recorded for v in (*piece.plan.inputs, *piece.outs)}
        self._fixed |= {r.id for r in plan.outputs}

    @property
    def held(self) -> set[int]:
        """The values that the calls of a recording hold: what pieces read that are not recorded."""
        return {v for piece, _ in self._pieces if not piece.recorded for v in piece.plan.inputs}

    def record(self, recorder: Recorder, given: Sequence[Any], shared: Any) -> tuple[Sequence[Any], Callable[[], None]]:
        """Record for the arguments `given`, whose memory every replay reads. Nothing runs, and no collective is called. Return the
        results, and a function that runs the plan once and refills them.

        Raises `RuntimeError` when something cannot be recorded.
        """
        values = dict(zip(self._plan.inputs, given, strict=True))
        steps: list[Callable[[], None]] = []
        pending: dict[int, Any] = {}  # what collectives return that is not waited for
        for piece, run in self._pieces:
            if piece.recorded:
                args = [values[v] for v in piece.plan.inputs]
                drawn = [values[v] for v in sorted(generators(piece.plan))]
                results, step = recorded(recorder, partial(_run, run, args), False, shared, drawn)
                values.update(zip(piece.outs, results, strict=True))
            else:
                step = self._called(piece, run, values, pending)
            steps.append(step)
            for v in piece.last - {r.id for r in self._plan.outputs}:
                values.pop(v, None)  # later pieces may use its memory

        def again() -> None:
            for step in steps:
                step()

        return [values[r.id] for r in self._plan.outputs], again

    def _called(self, piece: Piece, run: Run, values: dict[int, Any], pending: dict[int, Any]) -> Callable[[], None]:
        """Return a function that calls a piece. What others read lies in memory that stays: that of the operand, if the piece
        overwrites it, or else a buffer."""
        for v in piece.outs:
            if v in self._fixed:
                spec, same = self._plan.specs[v], values.get(self._same.get(v, v))
                values[v] = same if same is not None else buffer_of(spec)
        fixed = {v: values[v] for v in piece.plan.inputs if v in values}
        kept = [(v, values.get(v)) for v in piece.outs]

        def step() -> None:
            args = [fixed[v] if v in fixed else pending[v] for v in piece.plan.inputs]
            for (v, buffer), result in zip(kept, run(args), strict=True):
                if buffer is None:
                    pending[v] = result
                elif buffer.data_ptr() != result.data_ptr():
                    buffer.copy_(result)
            for v in piece.last:
                pending.pop(v, None)

        return step


def _run(run: Run, args: Sequence[Any]) -> Any:
    """Run with a copy of a list of arguments, which it empties."""
    return run(list(args))


def buffer_of(spec: TensorSpec) -> torch.Tensor:
    shape, stride = ([int(n) for n in sizes] for sizes in (spec.shape, spec.stride))  # type: ignore[arg-type]
    return torch.empty_strided(shape, stride, dtype=spec.dtype, device=spec.device)


def _same_tensors(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Map results of calls that return an operand, overwritten or waited for, to that operand."""
    same: dict[int, int] = {}
    for i in instructions:
        if isinstance(i, Call) and len(i.outs) == 1 and communicates(i):
            returned = shared_by(i) if i.target == WAIT or list(written_by(i)) == list(shared_by(i)) else ()
            if len(returned) == 1:
                same[i.outs[0]] = same.get(returned[0], returned[0])
    return same


def communicating(plan: Plan) -> bool:
    """Whether a plan holds a collective."""
    return any(map(communicates, plan.instructions))


def no_pieces(plan: Plan, recorder: Recorder) -> str | None:
    """Why a plan that communicates cannot be recorded in pieces, or None."""
    if not communicating(plan):
        return None
    if not isinstance(recorder, PoolingRecorder):
        return "it may wait for other processes, and the backend records no pieces"
    return None if any(recorded for recorded, _ in runs_of(plan, communicates)) else "too few instructions between collectives"
