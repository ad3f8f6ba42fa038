"""The device of a measurement: synchronization, and its own timers.

A call on the host has finished when it returns; on an accelerator it has only been queued. So the host waits for the device
before and after the timed code, and events in the device's queue give its own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from fusewright import registry
from fusewright.config import Options, env
from fusewright.errors import FusewrightError
from fusewright.interface import HOST

BUSY_BYTES, BUSY_COPIES = 1 << 29, 8
"""Work that keeps a device busy while the host queues calls that must run without gaps."""

EMPTY_MARKS = 8
"""Empty intervals, to measure what a mark itself takes: some 3 us on a GPU, as much as a small kernel."""

MARKS_WHILE_BUSY = 16
"""Minimum number of steps that the host queues meanwhile."""

Call = Callable[[], Any]


class NoDevice(FusewrightError, LookupError):
    """This machine has no such device, or this build of torch does not support it."""


@dataclass(frozen=True)
class Clock:
    """Times of calls on one device, in seconds."""

    device: str = HOST

    @property
    def asynchronous(self) -> bool:
        """Whether calls return before they have been computed."""
        return torch.device(self.device).type != HOST

    def begin(self) -> None:
        """Make the device current and load what its first use needs. Raises `NoDevice`."""
        check_device(self.device)
        if self.asynchronous:
            torch.accelerator.set_device_index(torch.device(self.device).index or 0)
            torch.ones(1, device=self.device).add_(1)
            self.wait()

    def wait(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.asynchronous:
            torch.accelerator.synchronize(torch.device(self.device))

    def seconds(self, call: Call) -> float:
        """Time a call on an idle device, until its results are available."""
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - start

    def queued(self, call: Call, calls: int) -> float | None:
        """Device time of one of `calls` calls, queued while the device is busy with other work: this hides the host's time as
        long as the host keeps ahead. None if the device is the host."""
        if not self.asynchronous:
            return None
        start, end = self._event(), self._event()
        self.wait()
        self._busy()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls

    def between(self, run: Callable[[Call], Any], marks: int) -> list[float]:
        """Device times in seconds between the marks, about `marks` of them, that `run` sets by calling its argument. They are
        queued while the device is busy with other work, which hides the host's time, and the cost of a mark is subtracted."""
        if not self.asynchronous:
            times: list[float] = []
            run(lambda: times.append(time.perf_counter()))
            return [after - before for before, after in pairwise(times)]
        events: list[torch.Event] = []

        def mark() -> None:
            events.append(self._event())
            events[-1].record()

        self.wait()
        for _ in range(1 + marks // MARKS_WHILE_BUSY):
            self._busy()
        for _ in range(EMPTY_MARKS):
            mark()
        run(mark)
        self.wait()
        seconds = [float(before.elapsed_time(after)) / 1e3 for before, after in pairwise(events)]
        empty = min(seconds[: EMPTY_MARKS - 1])
        return [max(s - empty, 0.0) for s in seconds[EMPTY_MARKS:]]

    def memory(self, call: Call) -> dict[str, int]:
        """Bytes of tensors on the device: between calls, and the peak during one."""
        self.wait()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        call()
        self.wait()
        return {"resident": before, "peak": torch.accelerator.max_memory_allocated()}

    def _event(self) -> torch.Event:
        return torch.Event(self.device, enable_timing=True)

    def _busy(self) -> None:
        source, target = self._buffers
        for _ in range(BUSY_COPIES):
            target.copy_(source)

    @cached_property
    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.zeros(BUSY_BYTES, dtype=torch.uint8, device=self.device)
        return source, torch.empty_like(source)


def check_device(device: str) -> None:
    """Raise `NoDevice` if torch cannot use the device here."""
    try:
        wanted = torch.device(device)
    except RuntimeError as e:
        raise NoDevice(f"{device!r} is no device of torch: {str(e).splitlines()[0]}") from None
    here = torch.accelerator.current_accelerator(check_available=True)
    if wanted.type not in (HOST, here.type if here else HOST):
        raise NoDevice(f"torch finds no {wanted.type!r} on this machine; --device {here.type if here else HOST} is here")
    if wanted.type != HOST and (wanted.index or 0) >= torch.accelerator.device_count():
        raise NoDevice(f"there is no {device}; torch finds {torch.accelerator.device_count()} devices of this type")


def default_device(backend: str, options: Mapping[str, Any]) -> str:
    """The default device for models: that of a backend that works here, or the host for a simulated backend or an unknown one.
    Raises `OptionError`."""
    name = (env("BACKEND") or registry.best()) if backend == "fusewright" else backend
    found = registry.info(name) if name in registry.plugins() else None
    if found is None or found.cls is None or not found.available or Options.parse(options, found.cls).simulate:
        return HOST
    return found.cls.device_type


def computes_fp64(device: str) -> bool:
    """Whether torch supports fp64 on a device."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):  # some devices raise TypeError
        return False
    return True


def device_name(device: str) -> str:
    """The product name, if torch reports it."""
    module = torch.get_device_module(torch.device(device))
    name = getattr(module, "get_device_name", None)
    return str(name(torch.device(device))) if name is not None else device
