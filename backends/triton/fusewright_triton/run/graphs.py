"""CUDA and HIP graphs: the `Recorder` of both backends, by torch's own graph objects."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from fusewright import machine
from fusewright.plan import native
from fusewright_triton.run import memsets
from fusewright_triton.run.driver import driver
from fusewright_triton.run.launch import errors
from fusewright_triton.run.streams import Pool, side_of

REPEATS = 10
"""Calls of a candidate that are timed together."""

ROUNDS = 3
"""Timed calls of which a measurement takes the best, after one that is not counted."""


@functools.cache
def _index(device: str) -> int | None:
    """Return the index of a device; None means the current one."""
    return torch.device(device).index


class Graphs:
    """Record on a side stream of a device's current one (see `streams`)."""

    device_type = "cuda"  # torch names HIP devices so too

    def on(self, device: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a device is the current one, as `record` and `seconds` require."""
        return torch.cuda.device(device)

    def stream(self, device: str) -> Hashable | None:
        """Return the device's current stream, unless that is being captured."""
        index, current = _index(device), torch.cuda.current_device()
        if index is not None and index != current:
            with torch.cuda.device(index):
                return self.stream(device)
        if torch.cuda.is_current_stream_capturing():
            return None
        return current, machine.current_stream(current)

    def pool(self) -> Pool:
        """See `PoolingRecorder.pool`."""
        return Pool()

    def copies(self) -> native.DeviceCopies | None:
        """See `CopyingRecorder.copies`."""
        d = driver("cuda" if torch.version.hip is None else "hip")
        return native.device_copies(d.copy_address(), torch.cuda.current_device())

    def record(
        self, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: bool | Pool = True
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """See `Recorder.record`; works on the current device. Warming up loads kernels, which a capture cannot."""
        current = torch.cuda.current_stream()
        side = side_of(current)
        pool = shared if isinstance(shared, Pool) else side.pool if shared else Pool()
        torch.cuda.synchronize()
        cuda = torch.version.hip is None
        graph = torch.cuda.CUDAGraph(keep_graph=cuda)
        with side.beside(current):
            if warm:
                _warm_up(run)
            torch.cuda.synchronize()
            with side.capturing(graph, pool=pool.handle()):
                results = run()
        if cuda:
            memsets.as_kernels(graph.raw_cuda_graph(), current.device_index)
            graph.instantiate()
        pool.graphs.add(graph)
        reports, replay = errors(), graph.replay

        def again() -> None:
            reports.check()
            replay()

        return results, again

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the best time of a few calls, each between two events with nothing queued before it."""
        run()
        return min(self._once(run) for _ in range(ROUNDS))

    def _once(self, run: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _warm_up(run: Callable[[], Any]) -> None:
    """Run once. Raise RuntimeError for code that draws random numbers without an operator tag saying so: warming up, measuring
    and replaying would each draw."""
    before = torch.cuda.get_rng_state()
    run()
    if not torch.equal(before, torch.cuda.get_rng_state()):
        torch.cuda.set_rng_state(before)
        raise RuntimeError("it draws random numbers")


def several(run: Callable[[], Any], device: str) -> Callable[[], None]:
    """Return a candidate of a measured choice: a few calls on a device, then a wait."""

    def again() -> None:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize(device)

    return again


def repeated(run: Callable[[], Any], device: str) -> Callable[[], None]:
    """Like `several`, but from a graph, without the host's part of a call, which replayed plans do not have."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        side = side_of(current)
        with side.beside(current):
            run()
            torch.cuda.synchronize()
            with side.capturing(graph):
                for _ in range(REPEATS):
                    run()

    def again() -> None:
        graph.replay()
        torch.cuda.synchronize(device)

    return again
