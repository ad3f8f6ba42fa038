"""Replay of training: forward and backward are recorded separately, and tensors saved for backward stay in place.

Tensors saved for backward, and the gradients that backward returns, are handed out without a copy. So a replay must not happen
while somebody still holds the results of the last one: a second forward before the backward, a retained graph, accumulated
gradients. Such calls run the plain plan. Backward finds the saved tensors at the addresses of forward's recording.

Generators that a plan draws from (see `ops.states`) are part of a recording, which is for these objects and draws from where they
are at each replay.

Layers that share a plan, e.g. if a graph breaks between them, have one recording each, found by the addresses of the weights
that forward reads and of the tensors saved for backward. Arguments that move on their own are copied; a new set of arguments is
recorded when it comes again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright.interface import DrawingRecorder, KernelCode, Phase, PoolingRecorder, Recorder
from fusewright.plan.build import Plan, generators
from fusewright.plan.execute import codegen
from fusewright.plan.execute.opaque import mismatch
from fusewright.plan.execute.prepare import picker
from fusewright.plan.ir import Instruction, Ref, Run, reads
from fusewright.plan.memory import roots_of
from fusewright.plan.replay.copies import Call, CopiesIn, around, copied_out, flat, record_with_copies, takes_numbers
from fusewright.plan.replay.inference import OTHER_TENSORS, written_places
from fusewright.plan.replay.obstacles import counted, draws, obstacle, plan_device
from fusewright.plan.replay.pieces import Pieces, communicating, no_pieces
from fusewright.plan.replay.recording import Recorded, shown
from fusewright.plan.replay.sets import ArgumentSet, ArgumentSets, Recording
from fusewright.plan.seeds import seeds

SMALL = 1 << 12
"""Inputs of backward below this many bytes are copied; others are assumed to stay where forward's recording left them."""

COPY_LIMIT = 1 << 25
"""Bytes of inputs that may be copied because their addresses change at every call."""

COPY_SHARE = 8
"""Inputs may also be copied when they are at most one part in so many of the bytes read in place."""

FEWEST = 24
"""Plans with fewer instructions are not worth recording: the host's part of a replay (addresses, who still holds results, results)
takes as long as the launches of so many, about 110 us, and results are copied: 3 of 27 ms of device time in a step of 84 plans of
6 to 22 instructions (DDP's buckets, two H100s, 2026-11-26)."""

MOST_SETS = 64
"""Sets of arguments remembered per plan."""
MOVES = 6
"""Sets of one layer in a row, each with new addresses, after which the arguments that differ count as moving."""
MISSES = 64
"""The same for calls in a row where no address identifies a layer."""
USES = 8
"""A recording that is dropped before so many uses was not worth it."""
PATIENCE = 64
"""Arguments are recorded when their addresses come again; after recordings not worth it, only when they have come twice as
often. Replay is given up when that is beyond this number. A recording takes memory that the allocator had used, so all
addresses may move a few times before they stay (FSDP2's gathered weights)."""


@dataclass(frozen=True)
class Handover:
    """Who owns the values of a training plan: the first `copies` results belong to the caller and are copied out; `fixed` are
    the positions of inputs that are read in place (None: all but small ones). `known` is False if AOTAutograd does not tell."""

    copies: int = 0
    fixed: frozenset[int] | None = None
    known: bool = True

    @classmethod
    def of(cls, phase: Phase) -> Handover:
        """The handover of the graph that AOTAutograd is compiling."""
        if phase != "forward":
            return cls()
        results = compat.forward_results()[0]
        return cls(results, compat.static_input_indices(), results > 0)


class Retained(Recorded[Recording]):
    """A plan of training as a callable that records itself at its first call."""

    def __init__(
        self, plan: Plan, kernels: Mapping[str, KernelCode], run: Run, recorder: Recorder,
        tell: Callable[[str], None], handover: Handover,
    ) -> None:  # fmt: skip
        super().__init__(run, recorder, plan_device(plan, recorder.device_type), tell)
        self.plan, self.copies = plan, handover.copies
        apart = counted(plan)
        instructions = [i for k, i in enumerate(plan.instructions) if k not in apart]
        made = {o for i in instructions for o in i.outs}
        wanted = dict.fromkeys(o.id for o in plan.outputs if isinstance(o, Ref) and o.id in made)
        self._kept = {v: k for k, v in enumerate(wanted)}
        self._given = {i: k for k, i in enumerate(plan.inputs)}
        self._own = [o.id for o in plan.outputs[: self.copies] if isinstance(o, Ref) and o.id in self._kept]
        saved = (o.id for o in plan.outputs[self.copies :] if isinstance(o, Ref) and o.id in self._kept)
        self._handed_out = list(dict.fromkeys(saved))
        self._draws = draws(plan)
        self._counted = [r.id for r in plan.outputs if isinstance(r, Ref) and r.id not in made and r.id not in self._given]
        sums = [i for k, i in enumerate(plan.instructions) if k in apart]
        self._count = _counting(plan, sums, self._counted) if self._counted else None
        body = replace(plan, outputs=tuple(map(Ref, wanted)), instructions=instructions)
        self._pieces = Pieces(body, kernels) if communicating(plan) else None
        self._body = codegen.load(body, kernels) if self._pieces is None else run
        read = {r for i in instructions for r in reads(i)}
        drawn = generators(plan)
        self._generators = [k for k, i in enumerate(plan.inputs) if i in drawn]
        self._numbers = [k for k, i in enumerate(plan.inputs) if i in read and i in plan.scalars]
        self._used = [k for k, i in enumerate(plan.inputs) if i in read - drawn and i not in plan.scalars]
        self._written = written_places(plan)
        given_seeds = seeds(plan)
        self._onto = {k: self.device for k, i in enumerate(plan.inputs) if i in given_seeds}
        self._fixed = handover.fixed
        roots, held = roots_of(plan.instructions), self._pieces.held if self._pieces is not None else ()
        self._called = {r for v in held for r in (v, *roots.get(v, ()))}
        self._places: list[int] | None = None
        self._sets = ArgumentSets()
        self._constants = [o for o in plan.outputs if not isinstance(o, Ref)]
        self._pick = picker(self._positions())
        self._calls = self._recorded = self._misses = 0
        self._patience = 1

    def _recording_for(self, stream: Hashable, args: list[Any]) -> Recording | None:
        if self._places is None:
            self._places = [k for k in self._used if self._stays(k, args[k])]
        self._calls += 1
        if self._generators:
            stream = (stream, *[args[k] for k in self._generators])
        given = ArgumentSet(stream, tuple([args[k].data_ptr() for k in self._places]))
        found = self._sets.get(given.key) or self._but_for_copies(given, args) or given
        before, found.last, found.times = found.last, self._calls, found.times + 1
        if found.recording is not None:
            return None if found.recording.held() else found.recording
        self._sets.add(found)
        self._misses = 0 if before or found.moves else self._misses + 1
        if self._recorded and found.times <= self._patience:  # addresses may never come again
            self._forget([self._sets.oldest()] if len(self._sets) > MOST_SETS else [])
            return None
        recorded = [s for s in self._sets if s.recording is not None]
        self._forget([s for s in recorded if found.last - s.last >= 2 * len(recorded)])
        if self._patience > PATIENCE:
            self._give_up("addresses change from call to call")
            return None
        found.recording = self._record(args)
        return found.recording

    def _but_for_copies(self, given: ArgumentSet, args: list[Any]) -> ArgumentSet | None:
        """The known set that matches these arguments except for some that move, which are copied from now on: less than half of
        the bytes, or, after `MOVES` or `MISSES`, any amount that is cheap enough."""
        assert self._places is not None
        sizes = [args[k].nbytes for k in self._places]
        known = self._sets.nearest(given, sizes)
        if known is None:
            return None
        nearest, moved, identified = known
        if identified:  # an address that only this layer uses is known
            given.moves = nearest.moves + 1
        cost, places = sum(sizes[n] for n in moved), [self._places[n] for n in moved]
        if cost > max(COPY_LIMIT, sum(sizes) // COPY_SHARE) or self._written.intersection(places):
            return None
        settled = nearest.recording is not None or given.moves > 1  # saved tensors move until forward is recorded
        few = 2 * cost < sum(sizes) and settled
        alone = few or given.moves >= MOVES or (self._misses >= MISSES and not given.moves and not self._any_held(given.stream))
        if not alone or (nearest.recording is not None and nearest.recording.held()):
            return None
        self._places = [k for k in self._places if k not in places]
        self._sets.leave_out(moved)
        return nearest

    def _any_held(self, stream: Hashable) -> bool:
        return any(s.recording is not None and s.recording.held() for s in self._sets if s.stream == stream)

    def _forget(self, sets: Iterable[ArgumentSet]) -> None:
        """Drop sets of arguments."""
        for s in sets:
            if s.recording is not None and s.recording.uses < USES:
                self._patience = max(self._patience, 2 * s.recording.patience)
            self._sets.drop(s)

    def _results(self, r: Recording, args: list[Any]) -> tuple[Any, ...] | None:
        made = r.call(args)
        if made is None:
            return None
        r.uses += 1
        counts = self._count(list(args)) if self._count is not None else ()
        return self._pick([*args, *made, *[give() for give in r.give], *counts, *self._constants])

    def _positions(self) -> list[int]:
        """Where the results are among all arguments, copies, values handed out, numbers and constants."""
        plan = self.plan
        copied = {v: len(plan.inputs) + k for k, v in enumerate(self._own)}
        given = {v: len(plan.inputs) + len(self._own) + k for k, v in enumerate([*self._handed_out, *self._counted])}
        after = len(plan.inputs) + len(self._own) + len(self._handed_out) + len(self._counted)
        constants = itertools.count(after)
        return [
            next(constants) if not isinstance(o, Ref)
            else self._given[o.id] if o.id in self._given
            else (copied if k < self.copies and o.id in copied else given)[o.id]
            for k, o in enumerate(plan.outputs)
        ]  # fmt: skip

    def _record(self, args: list[Any]) -> Recording | None:
        self._recorded += 1
        fixed = set(self._places or ())
        try:
            with torch.inference_mode(False), torch.no_grad(), self.on_device():
                copy_in = CopiesIn(args, sorted(set(self._used) - fixed), self._onto, self._numbers)
                kept, call = self._recorded_body(copy_in, copy_in.given(args))
            if any(mismatch(t, self.plan.specs[v]) for v, t in zip(self._kept, kept, strict=True)):
                self._give_up(OTHER_TENSORS)
                return None
        except RuntimeError as e:  # raised by torch and drivers for what cannot be recorded, and if out of memory
            self._give_up(f"recording failed: {str(e).splitlines()[0]}")
            return None
        outside = {compat.storage_id(args[k]) for k in fixed}
        mine = [t for t in (*kept, *copy_in.buffers.values()) if compat.storage_id(t) not in outside]
        storages = list({compat.storage_id(t): t.untyped_storage() for t in mine}.values())
        uses = [compat.storage_uses(s._cdata) for s in storages]
        self.tell(f"replayed, {len(self.plan.instructions)} instructions")
        shared = self._overlapping(kept, args)
        # Separate tensors, because autograd may take them over as gradients; a value returned twice is one tensor, or two gradients
        # would share its memory.
        out = [(v, kept[self._kept[v]]) for v in self._handed_out]
        return Recording(
            shown(call, self.plan), [t.clone if v in shared else t.detach for v, t in out], storages, uses, self._patience
        )

    def _overlapping(self, kept: Sequence[torch.Tensor], args: list[Any]) -> frozenset[int]:
        """Gradients that may share elements with others: two parameters would get the same memory. What forward saves may."""
        found: set[int] = set()
        spans: dict[int, list[tuple[int, int]]] = {}
        for v in dict.fromkeys(o.id for o in self.plan.outputs if isinstance(o, Ref)) if self._fixed is None else ():
            t = args[self._given[v]] if v in self._given else kept[self._kept[v]]
            if isinstance(t, torch.Tensor) and t.layout is torch.strided:
                start, others = t.data_ptr(), spans.setdefault(compat.storage_id(t), [])
                end = start + flat(t).numel() * t.element_size()
                if v in self._kept and any(start < e and s < end for s, e in others):
                    found.add(v)
                others.append((start, end))
        return frozenset(found)

    def _recorded_body(self, copy_in: CopiesIn, given: list[Any]) -> tuple[Sequence[torch.Tensor], Call]:
        """Only the recording may hold what forward saved, which is among the arguments."""
        if self._pieces is not None and isinstance(self.recorder, PoolingRecorder):
            kept, replay = self._pieces.record(self.recorder, given, self.recorder.pool())
            own = self._returned(kept)
            return kept, around(copy_in, replay, lambda: copied_out(own))
        body, drawn = partial(self._run_body, given), [given[k] for k in self._generators]
        return record_with_copies(
            self.recorder, body, copy_in, self._returned, warm=False, shared=False, draws=self._draws, generators=drawn
        )

    def _returned(self, kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is copied out for the caller."""
        return [kept[self._kept[v]] for v in self._own]

    def _run_body(self, given: list[Any]) -> Any:
        return self._body(list(given))

    def _stays(self, position: int, x: torch.Tensor) -> bool:
        if position in self._written:  # of a copy the caller would see nothing
            return True
        if self._fixed is None and self.plan.inputs[position] in self._called:  # the call would hold what forward saved
            return False
        return x.numel() * x.element_size() >= SMALL if self._fixed is None else position in self._fixed

    def _give_up(self, why: str) -> None:
        super()._give_up(why)
        self._sets.clear()


def _counting(plan: Plan, sums: Sequence[Instruction], outs: Sequence[int]) -> Run:
    """Return what computes these numbers from the plan's inputs."""
    part = replace(
        plan, instructions=list(sums), outputs=tuple(map(Ref, outs)), prepare=[], prepare_inputs=(), prepare_outputs=()
    )
    return codegen.load(part, {})


def retained(
    plan: Plan, kernels: Mapping[str, KernelCode], run: Run, recorder: Recorder | None,
    tell: Callable[[str], None], handover: Handover,
) -> Run:  # fmt: skip
    """Return `run` of a training plan, replayed by `recorder` if possible."""
    if recorder is None:
        return run
    numbers = takes_numbers(recorder)
    why = obstacle(plan, recorder.device_type, True, numbers) or no_pieces(plan, recorder) or _handed_out(plan, handover)
    drawn = len(generators(plan))  # torch's replay launches twice for each, which takes as long as the plain call
    if why is None and drawn and not isinstance(recorder, DrawingRecorder):
        why = "it draws from a generator that it is given, and the backend records none"
    if why is None and len(plan.instructions) - drawn < FEWEST:
        why = "too few instructions"
    if why is not None:
        tell(f"not replayed: {why}")
        return run
    return Retained(plan, kernels, run, recorder, tell, handover)


def _handed_out(plan: Plan, handover: Handover) -> str | None:
    """What AOTAutograd needs that a recording would not provide: results that are the inputs themselves."""
    if not handover.known:
        return "AOTAutograd does not say which results are the caller's"
    own = {o.id for o in plan.outputs[: handover.copies] if isinstance(o, Ref)}
    return "a result is an input" if own & set(plan.inputs) & set(plan.specs) else None
