"""CUDA and HIP graphs: the `Recorder` of both backends, by torch's own graph objects."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from fusewright_triton import memsets
from fusewright_triton.launch import errors

REPEATS = 10
"""Calls of a candidate that are measured at once."""

ROUNDS = 3
"""Calls that a measurement takes the best of, after one that is not counted."""


@functools.cache
def _index(device: str) -> int:
    return torch.device(device).index or 0


class Graphs:
    """Records on a side stream of the device of the current stream. Recordings of one stream share a memory pool: they
    run in order, and nothing in the pool is needed after the work that follows a replay on its stream.
    """

    device_type = "cuda"  # torch names HIP devices so too

    def lane(self, device: str) -> Hashable | None:
        """The current stream, unless another device is current or the stream is being captured."""
        index = _index(device)
        if torch.cuda.current_device() != index or torch.cuda.is_current_stream_capturing():
            return None
        return index, torch.cuda.current_stream(index).cuda_stream  # without the index it takes three times as long

    def record(
        self, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: bool = True
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """See `Recorder.record`. Warming up loads kernels and makes workspaces, which a capture cannot."""
        current = torch.cuda.current_stream()
        key = (current.device_index, current.cuda_stream)
        pool = _pools.setdefault(key, _Pool()) if shared else _Pool()
        torch.cuda.synchronize()
        cuda = torch.version.hip is None
        graph = torch.cuda.CUDAGraph(keep_graph=cuda)
        with _beside(current):
            if warm:
                run()
            torch.cuda.synchronize()
            # thread_local: other threads may go on allocating and waiting meanwhile
            graph.capture_begin(pool=pool.handle(), capture_error_mode="thread_local")
            try:
                results = run()
            except BaseException:  # an interrupt too must not leave the stream capturing
                with contextlib.suppress(RuntimeError):  # the capture is broken; what broke it is raised
                    graph.capture_end()
                raise
            graph.capture_end()
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
        """The best of a few calls, each between two events with nothing before it."""
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


def several(run: Callable[[], Any]) -> Callable[[], None]:
    """A few calls and a wait, as a candidate of a measured choice."""

    def again() -> None:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize()

    return again


def repeated(run: Callable[[], Any]) -> Callable[[], None]:
    """As `several`, from a graph: without the host's part of a call, which replayed plans do not have."""
    current = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    with _beside(current):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            for _ in range(REPEATS):
                run()

    def again() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return again


class _Pool:
    """The memory of everything that is recorded for one stream. It goes with its last graph, and so does its handle."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._handle: Any = None

    def handle(self) -> Any:
        if not self.graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


_pools: dict[tuple[int, int], _Pool] = {}
_sides: dict[int, torch.cuda.Stream] = {}


@contextlib.contextmanager
def _beside(current: torch.cuda.Stream) -> Iterator[None]:
    """A side stream that starts after the work of the current one, which then waits for it."""
    side = _sides.setdefault(current.device_index, torch.cuda.Stream(current.device))
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)
