"""Recording a plan on a device and replaying it: the common part of `inference` and `training`."""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.profiler import record_function

from fusewright import _torch_compat as compat
from fusewright.interface import Recorder
from fusewright.plan.build import Plan
from fusewright.plan.ir import Run
from fusewright.plan.labels import replay_label
from fusewright.plan.replay.copies import Call

log = logging.getLogger("fusewright")

R = TypeVar("R")


def shown(call: Call, plan: Plan) -> Call:
    """Wrap the call of a recording in a profiler range of its own."""

    @functools.cache
    def label() -> str:
        return replay_label(plan)

    def run(args: list[Any]) -> Sequence[torch.Tensor] | None:
        if not compat.profiling():
            return call(args)
        with record_function(label()):
            return call(args)

    return run


_turns: defaultdict[Hashable, threading.RLock] = defaultdict(threading.RLock)
"""By stream. A stream's recordings share memory: what a replay leaves there for the rest of its call must be read, or its reading
queued, before another thread queues the next replay."""


class Recorded(abc.ABC, Generic[R]):
    """A callable that replays recordings of type `R`. The plain plan `run` is valid at any time. Concurrent calls take turns, and
    if `shares` so do those of all plans whose recordings share memory, on each stream."""

    shares = False

    def __init__(self, run: Run, recorder: Recorder, device: str, tell: Callable[[str], None]) -> None:
        self.run, self.recorder, self.device, self.tell = run, recorder, device, tell
        self._lock = threading.RLock()
        self.given_up = ""

    def __call__(self, args: list[Any]) -> Any:
        stream = None if self.given_up else self.recorder.stream(self.device)
        if stream is None:
            return self.run(args)
        with _turns[stream] if self.shares else contextlib.nullcontext(), self._lock:
            found = self._recording_for(stream, args)
            results = self._results(found, args) if found is not None else None
            if results is None:
                return self.run(args)
        args.clear()
        return results

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """A context for recording and measuring, in which the plan's device is current, if the recorder supports it."""
        on = getattr(self.recorder, "on", None)
        return contextlib.nullcontext() if on is None else on(self.device)

    @abc.abstractmethod
    def _recording_for(self, stream: Hashable, args: list[Any]) -> R | None:
        """A recording for these arguments, made now if needed; None to run the plain plan."""

    @abc.abstractmethod
    def _results(self, r: R, args: list[Any]) -> tuple[Any, ...] | None:
        """Replay, and return the results for the caller; None to run the plain plan."""

    def _give_up(self, why: str) -> None:
        """Run the plain plan from now on."""
        self.given_up = why
        self.tell(f"not replayed: {why}")
        log.info("a plan is not replayed: %s", why)
