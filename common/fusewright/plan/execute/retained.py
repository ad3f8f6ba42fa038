"""Replay of training: forward and backward recorded each, with what forward saves left where it lies.

What forward saves for backward, and the gradients that backward gives, are handed out without a copy. So a replay must
not happen while somebody still holds what the last one gave: a second forward before the backward, a retained graph,
gradients that are accumulated. Such calls run as the plain plan. Backward finds the saved tensors at the addresses that
forward's recording has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright.interface import KernelCode, Phase, Recorder
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.execute.copies import CopiesIn, copied_out
from fusewright.plan.execute.opaque import mismatch
from fusewright.plan.execute.recording import Recorded, shown
from fusewright.plan.execute.replay import OTHER_TENSORS, obstacle, plan_device, written_places
from fusewright.plan.ir import Ref, Run, reads

SMALL = 1 << 12
"""Inputs of backward below this many bytes are copied; others are taken to lie where forward's recording left them."""

COPY_LIMIT = 1 << 24
"""Bytes of inputs that may be copied because they turned out to lie elsewhere at every call."""

MOST_RECORDINGS = 8
MISSES = 3
"""Calls in a row with other addresses, after which the plan is recorded anew."""


@dataclass(frozen=True)
class Handover:
    """What a plan of training gives to whom: its first `copies` results belong to the caller and are copied out;
    `fixed` are positions of inputs that are read where they lie (None: all but small ones). `known` is False where
    AOTAutograd does not say."""

    copies: int = 0
    fixed: frozenset[int] | None = None
    known: bool = True

    @classmethod
    def of(cls, phase: Phase) -> Handover:
        """For the graph that AOTAutograd compiles now."""
        if phase != "forward":
            return cls()
        results = compat.forward_results()
        return cls(results, compat.static_input_indices(), results > 0)


@dataclass
class _Recording:
    """`fixed` are (position, address), `storages` (identity, references when nobody else holds them)."""

    stream: Hashable
    replay: Callable[[], None]
    kept: Sequence[torch.Tensor]
    fixed: Sequence[tuple[int, int]]
    copy_in: CopiesIn
    storages: Sequence[tuple[Any, int]]


class Retained(Recorded[_Recording]):
    """A plan of training as a callable that records itself at its first call."""

    def __init__(
        self, plan: Plan, kernels: Mapping[str, KernelCode], run: Run, recorder: Recorder,
        tell: Callable[[str], None], handover: Handover,
    ) -> None:  # fmt: skip
        super().__init__(run, recorder, plan_device(plan, recorder.device_type), tell)
        self.plan, self.copies = plan, handover.copies
        made = {o for i in plan.instructions for o in i.outs}
        wanted = dict.fromkeys(o.id for o in plan.outputs if isinstance(o, Ref) and o.id in made)
        self._kept = {v: k for k, v in enumerate(wanted)}
        self._given = {i: k for k, i in enumerate(plan.inputs)}
        self._body = codegen.load(replace(plan, outputs=tuple(map(Ref, wanted))), kernels)
        read = {r for i in plan.instructions for r in reads(i)}
        self._used = [k for k, i in enumerate(plan.inputs) if i in read]
        self._written = written_places(plan)
        self._fixed = handover.fixed
        self._copied: set[int] = set()
        self._recording: _Recording | None = None
        self._recorded = self._misses = 0

    def _recording_for(self, stream: Hashable, args: list[Any]) -> _Recording | None:
        r = self._recording
        if r is None:
            return self._record(stream, args)
        addresses = list(map(torch.Tensor.data_ptr, args))
        moved = [k for k, address in r.fixed if addresses[k] != address]
        if r.stream == stream and not moved:
            self._misses = 0
            return None if self._held(r) else r
        self._misses += 1
        if self._held(r):
            return None
        bytes_moved = sum(args[k].numel() * args[k].element_size() for k in moved)
        if r.stream == stream and bytes_moved <= COPY_LIMIT and not self._written.intersection(moved):
            self._copied.update(moved)  # not what is written: the caller would not see it
        elif self._misses < MISSES:
            return None
        return self._record(stream, args)

    @staticmethod
    def _held(r: _Recording) -> bool:
        """Whether somebody still holds what the last replay gave."""
        return any(compat.storage_uses(s) > count for s, count in r.storages)

    def _results(self, r: _Recording, args: list[Any]) -> tuple[Any, ...]:
        r.copy_in(args)
        r.replay()
        own = [o.id for o in self.plan.outputs[: self.copies] if isinstance(o, Ref) and o.id in self._kept]
        copies = dict(zip(own, copied_out([r.kept[self._kept[v]] for v in own]), strict=True))
        return tuple(self._result(o, k < self.copies, copies, r, args) for k, o in enumerate(self.plan.outputs))

    def _result(self, o: Any, own: bool, copies: Mapping[int, torch.Tensor], r: _Recording, args: list[Any]) -> Any:
        if not isinstance(o, Ref):
            return o
        if o.id in self._given:
            return args[self._given[o.id]]
        if own:
            return copies[o.id]
        return r.kept[self._kept[o.id]].detach()  # a tensor of its own: autograd may take it over as a gradient

    def _record(self, stream: Hashable, args: list[Any]) -> _Recording | None:
        self._recording = None
        self._misses = 0
        if self._recorded >= MOST_RECORDINGS:
            self._give_up("addresses change from call to call")
            return None
        self._recorded += 1
        try:
            with torch.inference_mode(False), torch.no_grad(), self.on_device():
                fixed = [(k, args[k].data_ptr()) for k in self._used if self._stays(k, args[k])]
                copy_in = CopiesIn(args, sorted(set(self._used) - {k for k, _ in fixed}))
                run = partial(self._run_body, copy_in.given(args))
                kept, again = self.recorder.record(run, warm=False, shared=False)
            if any(mismatch(t, self.plan.specs[v]) for v, t in zip(self._kept, kept, strict=True)):
                self._give_up(OTHER_TENSORS)
                return None
        except RuntimeError as e:  # torch and drivers raise it for what cannot be recorded, and for lack of memory
            self._give_up(f"recording failed: {str(e).splitlines()[0]}")
            return None
        del run  # what forward saved must be held by nobody but its recording
        outside = {compat.storage_id(args[k]) for k, _ in fixed}
        mine = [t for t in (*kept, *copy_in.buffers.values()) if compat.storage_id(t) not in outside]
        storages = list({compat.storage_id(t): t.untyped_storage() for t in mine}.values())
        uses = [(s, compat.storage_uses(s)) for s in storages]
        self._recording = _Recording(stream, shown(again, self.plan), kept, fixed, copy_in, uses)
        self.tell(f"replayed, {len(self.plan.instructions)} instructions")
        return self._recording

    def _run_body(self, given: list[Any]) -> Any:
        return self._body(list(given))

    def _stays(self, position: int, x: torch.Tensor) -> bool:
        if position in self._copied:
            return False
        return x.numel() * x.element_size() >= SMALL if self._fixed is None else position in self._fixed


def retained(
    plan: Plan, kernels: Mapping[str, KernelCode], run: Run, recorder: Recorder | None,
    tell: Callable[[str], None], handover: Handover,
) -> Run:  # fmt: skip
    """`run` of a plan of training, replayed by `recorder` where that is possible."""
    if recorder is None:
        return run
    why = obstacle(plan, recorder.device_type, training=True) or _handed_out(plan, handover)
    if why is not None:
        tell(f"not replayed: {why}")
        return run
    return Retained(plan, kernels, run, recorder, tell, handover)


def _handed_out(plan: Plan, handover: Handover) -> str | None:
    """What AOTAutograd relies on that a recording would not give: the identity of inputs that are results, or that are
    written and may lie elsewhere next time."""
    if not handover.known:
        return "AOTAutograd does not say which results are the caller's"
    if not written_places(plan) <= (handover.fixed or frozenset()):
        return "it writes into its inputs"
    own = {o.id for o in plan.outputs[: handover.copies] if isinstance(o, Ref)}
    return "a result is an input" if own & set(plan.inputs) else None
