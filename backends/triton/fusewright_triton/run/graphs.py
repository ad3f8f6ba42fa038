"""CUDA and HIP graphs: the `Recorder` of both backends, by torch's own graph objects."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from fusewright import machine
from fusewright.interface import Number
from fusewright.plan import native
from fusewright_triton.run import graph_copies, graph_kernels, memsets
from fusewright_triton.run.driver import DriverError
from fusewright_triton.run.launch import Errors, errors
from fusewright_triton.run.streams import Pool, side_of

log = logging.getLogger("fusewright")

Recording: TypeAlias = tuple[Sequence[torch.Tensor], Callable[[list[Any]], Sequence[torch.Tensor] | None]]
"""Results, and a replay from a list of arguments."""

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

    def record(
        self, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: bool | Pool = True
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """See `Recorder.record`; works on the current device. Warming up loads kernels, which a capture cannot."""
        return self._replayed(*self._captured(run, warm, shared))

    def record_drawing(
        self, run: Callable[[], Sequence[torch.Tensor]], shared: bool | Pool, generators: Sequence[torch.Generator]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """See `DrawingRecorder.record_drawing`. Each of torch's replays tells the graph where its generators are."""
        return self._replayed(*self._captured(run, False, shared, generators=generators))

    def _replayed(
        self, graph: torch.cuda.CUDAGraph, results: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        reports, replay = errors(), graph.replay

        def again() -> None:
            reports.check()
            replay()

        return results, again

    def takes_numbers(self) -> bool:
        """See `NumberRecorder.takes_numbers`."""
        return torch.version.hip is None and native.extension() is not None

    def record_with_numbers(
        self, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: bool, numbers: Mapping[int, Number]
    ) -> tuple[Sequence[torch.Tensor], Callable[[list[Any]], bool]]:
        """See `NumberRecorder.record_with_numbers`. The graph is torch's to launch, and ours to change before."""
        _forget(numbers)
        graph, results = self._captured(run, warm, shared)
        nodes, ranges = graph_kernels.taking(numbers, 0)
        _, copy, kernel = graph_copies.functions()
        handles = (0, copy, kernel, graph.raw_cuda_graph_exec(), graph_copies.context())
        change = native.graph_replay(handles, torch.cuda.current_device(), {}, [], graph_kernels.joined(nodes), ranges)
        assert change is not None
        _, replay = self._replayed(graph, results)

        def again(args: list[Any]) -> bool:
            if change(args) is None:
                return False
            replay()
            return True

        return results, again

    def record_with_copies(
        self, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: bool, inputs: Mapping[int, torch.Tensor | Number],
        returned: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> Recording | None:  # fmt: skip
        """See `CopyingRecorder.record_with_copies`. Torch's own replay would set the state of random numbers too."""
        return self._recorded(run, warm, shared, inputs, returned, lambda results: ())

    def record_written(
        self, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: bool, inputs: Mapping[int, torch.Tensor | Number],
        returned: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        written: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> Recording | None:  # fmt: skip
        """See `WritingRecorder.record_written`."""
        try:
            return self._recorded(run, warm, shared, inputs, returned, written)
        except (graph_kernels.Unknown, DriverError) as e:
            log.info("large results are not written by a recording: %s", e)
            return None

    def _recorded(
        self, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: bool, inputs: Mapping[int, torch.Tensor | Number],
        returned: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        written: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> Recording | None:  # fmt: skip
        if not self.takes_numbers():
            return None
        numbers = {k: n for k, n in inputs.items() if isinstance(n, Number)}
        _forget(numbers)
        buffers = {k: t for k, t in inputs.items() if isinstance(t, torch.Tensor)}
        copied: dict[int, native.CopyNode] = {}
        made: list[tuple[native.CopyNode, torch.Tensor]] = []
        large: list[torch.Tensor] = []
        kernels: list[graph_kernels.Captured] = []

        def copying() -> Sequence[torch.Tensor]:
            copied.update(graph_copies.copy_in(buffers))
            results = run()
            made[:] = graph_copies.copy_out(returned(results))
            before = graph_kernels.here()
            large[:] = written(results)
            kernels[:] = graph_kernels.captured_since(before) if large else []
            return results

        pool = side_of(torch.cuda.current_stream()).pool if shared else Pool()
        graph, results = self._captured(copying, warm, pool, warming=lambda: written(run()))
        takers, ranges = graph_kernels.taking(numbers, len(large) + len(made))  # before they are captured again
        nodes = self._naming(large, kernels, lambda: written(results), pool) if large else []
        handles = (*graph_copies.functions(), graph.raw_cuda_graph_exec(), graph_copies.context())
        kept = [t for _, t in made]
        made = [*[(native.WRITTEN, t) for t in large], *made]  # `nodes` count from the first
        nodes = graph_kernels.joined([*nodes, *takers])
        call = native.graph_replay(handles, torch.cuda.current_device(), copied, made, nodes, ranges)
        assert call is not None
        return results, functools.partial(_again, (graph, inputs, kept), errors(), call)

    def _naming(
        self, results: Sequence[torch.Tensor], kernels: Sequence[graph_kernels.Captured],
        again: Callable[[], Sequence[torch.Tensor]], pool: Pool,
    ) -> list[native.KernelNode]:  # fmt: skip
        """Return the nodes that name `results`, found by a capture of what made them that is thrown away."""
        moved: list[torch.Tensor] = []
        others: list[graph_kernels.Captured] = []
        side = side_of(torch.cuda.current_stream())
        with side.beside(torch.cuda.current_stream()), side.capturing(torch.cuda.CUDAGraph(keep_graph=True), pool=pool.handle()):
            moved[:] = again()
            others[:] = graph_kernels.captured_since(0)
        return graph_kernels.naming(results, kernels, moved, others)

    def _captured(
        self, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: bool | Pool,
        warming: Callable[[], Any] | None = None, generators: Sequence[torch.Generator] = (),
    ) -> tuple[torch.cuda.CUDAGraph, Sequence[torch.Tensor]]:  # fmt: skip
        """Capture `run`, which may draw from `generators`, on the side stream, after a run of `warming` (default: the same) if
        `warm`."""
        current = torch.cuda.current_stream()
        side = side_of(current)
        pool = shared if isinstance(shared, Pool) else side.pool if shared else Pool()
        torch.cuda.synchronize()
        cuda = torch.version.hip is None
        graph = torch.cuda.CUDAGraph(keep_graph=cuda)
        for generator in generators:  # before the capture; torch registers the device's own itself
            graph.register_generator_state(generator)
        with side.beside(current):
            if warm:
                _warm_up(warming or run)
            torch.cuda.synchronize()
            with side.capturing(graph, pool=pool.handle()):
                results = run()
        if cuda:
            memsets.as_kernels(graph.raw_cuda_graph(), current.device_index)
            graph.instantiate()
        pool.graphs.add(graph)
        return graph, results

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


def _forget(numbers: Mapping[int, Number]) -> None:
    """Drop what a recording that was given up noted of numbers."""
    for n in numbers.values():
        n.uses.clear()


def _again(
    memory: object, reports: Errors, call: Callable[[list[Any]], list[torch.Tensor] | None], args: list[Any]
) -> list[torch.Tensor] | None:
    """Launch a graph by its handle and addresses, which are valid as long as `memory`."""
    reports.check()
    return call(args)


def _warm_up(run: Callable[[], Any]) -> None:
    """Run once. Raise RuntimeError for code that draws random numbers without an operator tag saying so: warming up, measuring
    and replaying would each draw."""
    before = torch.cuda.get_rng_state()
    run()
    if not torch.equal(before, torch.cuda.get_rng_state()):
        torch.cuda.set_rng_state(before)
        raise RuntimeError("it draws random numbers")


def several(run: Callable[[], Any], device: str, calls: int = REPEATS) -> Callable[[], None]:
    """Return a candidate of a measured choice: a few calls on a device, then a wait."""

    def again() -> None:
        for _ in range(calls):
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
