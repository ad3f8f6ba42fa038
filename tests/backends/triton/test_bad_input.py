"""A GPU without enough memory or a working compiler while a model is compiled: a clear reason, and eager's result.

Machines without a GPU, with the wrong wheel or with too old a GPU are in `test_unavailable.py`, configurations that run out
of memory during tuning in `test_autotune.py`.
"""

from __future__ import annotations

import importlib.metadata
import logging
import socket
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.interface import Device
from fusewright.plan.replay import training
from fusewright.report import recording
from fusewright.toolkit.ir import Kernel
from fusewright_triton import backend
from fusewright_triton.backend import NvidiaTriton, TritonBackend, TritonLoader
from fusewright_triton.build import workers
from fusewright_triton.run import graphs, streams
from tests.unit.plan.replay.test_inference import Recorder
from tests.unit.plan.replay.test_training import Forgetful

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 79.11 GiB."


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.nn.functional.gelu(self.first(x))) + x).exp()


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend="nvidia_triton", options={"simulate": True, "cache": False, **options})


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "fusewright"]


# ---------------------------------------------------------------- recording


class Full(Recorder):
    """A device without memory for a recording, or, if `later`, for the measurement after it."""

    def __init__(self, later: bool = False) -> None:
        super().__init__()
        self.later, self.asked = later, 0

    def record(self, run: Callable[[], Any], warm: bool, shared: bool = True) -> Any:
        self.asked += 1
        if not self.later:
            raise torch.OutOfMemoryError(NO_MEMORY)
        return super().record(run, warm)

    def seconds(self, run: Callable[[], Any]) -> float:
        raise torch.OutOfMemoryError(NO_MEMORY)


@pytest.mark.parametrize("later", [False, True])
def test_no_memory_for_a_recording(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device, model = Full(later), Small().eval()
    monkeypatch.setattr(TritonBackend, "recorder", lambda self: device)
    with torch.no_grad(), recording() as reports:
        fast = compiled(model)
        for k in range(4):
            x = torch.full((3, 8), float(k)) + torch.arange(8)
            torch.testing.assert_close(fast(x), model(x))
    (report,) = reports
    assert report.replay == "not replayed: recording failed: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert device.asked == 1, "it is not tried again"


def test_no_memory_for_a_recording_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullInTraining(Forgetful):
        def record(self, run: Callable[[], Any], warm: bool, shared: bool = True) -> Any:
            raise torch.OutOfMemoryError(NO_MEMORY)

    monkeypatch.setattr(TritonBackend, "recorder", lambda self: FullInTraining())
    monkeypatch.setattr(training, "FEWEST", 3)
    model, x = Small(), torch.randn(5, 8)
    model(x).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with recording() as reports:
        fast = compiled(model)
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            fast(x).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted)
    assert {r.replay for r in reports} == {
        "not replayed: recording failed: CUDA out of memory. Tried to allocate 2.00 GiB."
    }


class FakeGraph:
    """A CUDA graph that records the calls of its methods."""

    made: list[FakeGraph]

    def __init__(self, keep_graph: bool = False) -> None:
        self.calls: list[str] = []
        self.made.append(self)

    def raw_cuda_graph(self) -> int:
        return 7

    def instantiate(self) -> None:
        """Exist as in torch; not recorded."""

    def register_generator_state(self, generator: object) -> None:
        self.calls.append(f"register {generator}")

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")
        if self.broken:
            type(self).broken -= 1
            raise RuntimeError("operation failed due to a previous error during capture")

    broken = 0
    """How many more times ending a capture fails."""

    def replay(self) -> None:
        self.calls.append("replay")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    """Fake the device under `graphs.Graphs`."""
    stream = SimpleNamespace(device_index=0, cuda_stream=5, device="cuda:0", wait_stream=lambda other: None)
    monkeypatch.setattr(streams, "driver", lambda kind: SimpleNamespace(stream=lambda: 6, restart_capture=lambda s: None))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(2))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda made, device: stream)
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(streams.SideStream, "_take_workspaces", lambda self: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(graphs.memsets, "as_kernels", lambda graph, device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda s: recording())  # any context
    monkeypatch.setattr(graphs, "errors", lambda: SimpleNamespace(check=lambda: None))
    monkeypatch.setattr(streams, "_sides", {})
    monkeypatch.setattr(FakeGraph, "made", [], raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    return FakeGraph


def fails_at(n: int) -> Callable[[], Any]:
    calls = iter(range(10))

    def run() -> list[torch.Tensor]:
        if next(calls) == n:
            raise torch.OutOfMemoryError(NO_MEMORY)
        return [torch.zeros(1)]

    return run


def test_no_memory_while_warming_up_begins_no_capture(device: type[FakeGraph]) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        graphs.Graphs().record(fails_at(0), warm=True)
    assert [g.calls for g in device.made] == [[]]


@pytest.mark.parametrize("broken", [0, 1])
def test_no_memory_in_a_capture_leaves_the_stream_free(
    device: type[FakeGraph], broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeGraph, "broken", broken)
    made = graphs.Graphs()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        made.record(fails_at(1), warm=True)
    assert device.made[0].calls == ["begin", "end"]
    assert not streams._sides[0, 5].pool.graphs, "a graph that failed keeps no memory"
    monkeypatch.setattr(FakeGraph, "broken", 0)
    _, again = made.record(fails_at(9), warm=True)
    again()
    assert device.made[1].calls == ["begin", "end", "replay"]


def test_a_capture_that_an_operator_broke_is_ended_all_the_same(
    device: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise torch's generator would stay in capture mode, and every later draw in the process would fail."""
    monkeypatch.setattr(FakeGraph, "broken", 1)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        graphs.Graphs().record(fails_at(9), warm=False)
    assert device.made[0].calls == ["begin", "end", "end"]


def test_given_generators_are_registered_before_a_capture_and_draw_in_torchs_own_replay(device: type[FakeGraph]) -> None:
    generators: Any = ["first", "second"]
    _, again = graphs.Graphs().record_drawing(fails_at(1), False, generators)  # it runs once
    again()
    assert device.made[0].calls == ["register first", "register second", "begin", "end", "replay"]


def test_what_draws_without_saying_so_is_not_recorded(
    device: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter([torch.zeros(1), torch.ones(1)])
    put_back = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: next(states))
    monkeypatch.setattr(torch.cuda, "set_rng_state", put_back.append)
    with pytest.raises(RuntimeError, match="draws random numbers"):
        graphs.Graphs().record(fails_at(9), warm=True)
    assert put_back == [torch.zeros(1)] and device.made[0].calls == []


# ---------------------------------------------------------------- measuring


@torch.no_grad()
@pytest.mark.parametrize("all_of_them", [False, True])
def test_no_memory_for_candidates(
    all_of_them: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A candidate that does not fit is dropped; if none fits, the region is left to eager, with the reason."""
    real, chosen = TritonBackend.compile, []

    def compile(self: TritonBackend, region: Any, ctx: Any) -> Any:
        def no_memory() -> None:
            raise torch.OutOfMemoryError(NO_MEMORY)

        candidates = {"large": no_memory, "small": no_memory if all_of_them else lambda: None}
        chosen.append(ctx.choose("a product", candidates))
        return real(self, region, ctx)

    monkeypatch.setattr(TritonBackend, "compile", compile)
    model, x = Small().eval(), torch.randn(3, 8)
    with recording() as reports, caplog.at_level(logging.WARNING, "fusewright"):
        torch.testing.assert_close(compiled(model)(x), model(x))
    if not all_of_them:
        assert chosen == ["small"] and not said(caplog)
        return
    assert {o.where for o in reports[0].ops} == {"eager"}
    (why,) = {str(o.verdict) for o in reports[0].ops}
    assert (
        "no candidate for a product ran: large: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
        in why
    )
    (line,) = said(caplog)
    assert "6 of 6 ops of this infer graph run in eager" in line


# ---------------------------------------------------------------- building


def without_exp(self: TritonLoader, kernels: Mapping[str, Kernel]) -> Any:
    """A loader whose compiler dies on kernels with an exp."""
    if any(n.op == "exp" for k in kernels.values() for n in k.nodes()):
        raise workers.BuildError("a compiler process ended with code -9")
    return REAL_LOAD(self, kernels)


REAL_LOAD = backend.TritonLoader.__call__


@torch.no_grad()
@pytest.mark.faulty
def test_a_kernel_that_does_not_build_is_eagers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TritonLoader, "__call__", without_exp)
    model, x = Small().eval(), torch.randn(3, 8)
    with recording() as reports, caplog.at_level(logging.WARNING, "fusewright"):
        torch.testing.assert_close(compiled(model)(x), model(x))
    lines = said(caplog)
    assert "could not build 1 of" in lines[0] and "a compiler process ended with code -9" in lines[0]
    assert "eager runs those ops" in lines[0]
    (report,) = reports
    where = {o.op: o.where for o in report.ops}
    assert where["exp"] == "eager" and where["gelu"] == "lowered"
    assert len(report.bugs) == 1


@torch.no_grad()
def test_strict_raises_what_does_not_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonLoader, "__call__", without_exp)
    with pytest.raises(Exception, match="could not build its kernels: a compiler process ended with code -9"):
        compiled(Small().eval(), strict=True)(torch.randn(3, 8))


def test_a_compiler_process_that_ends_is_named() -> None:
    connection, its = socket.socketpair()
    worker = workers.Worker(connection)
    assert worker.alive()
    its.close()
    assert not worker.alive()
    for _ in range(2):
        with pytest.raises(workers.BuildError, match="a compiler process ended"):
            worker.build({"text": ""})
    worker.close()


class Answering:
    """A worker that answers, or, if `ends`, one whose process ends."""

    def __init__(self, ends: bool = False) -> None:
        self.ends = ends

    def alive(self) -> bool:
        return not self.ends

    def close(self) -> None: ...

    def build(self, request: workers.Request) -> workers.Answer:
        if self.ends:
            raise workers.Ended("a compiler process ended")
        return [{"name": request["text"]}]


REQUEST = {"text": "k", "target": ["cuda", 90, 32]}


def test_a_compiler_process_that_ends_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, crashing = workers.Pool(), Answering()
    monkeypatch.setattr(crashing, "build", Answering(ends=True).build)
    pool.free = [crashing, Answering(ends=True)]  # type: ignore[list-item]
    monkeypatch.setattr(pool, "_new", lambda target: Answering())
    assert pool.build(REQUEST) == [{"name": "k"}]
    monkeypatch.setattr(pool, "_new", lambda target: Answering(ends=True))
    pool.free = []
    with pytest.raises(workers.BuildError, match="a compiler process ended"):
        pool.build(REQUEST)


def test_the_parent_of_compiler_processes_is_started_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Parent:
        def __init__(self, target: Any) -> None:
            started.append(target)
            self.process = SimpleNamespace(poll=lambda: None)

        def worker(self) -> Answering:
            return Answering()

    pool = workers.Pool()
    monkeypatch.setattr(workers, "Parent", Parent)
    for _ in range(2):
        pool.warm_up(["cuda", 90, 32])
    assert started == [["cuda", 90, 32]] and not pool.free
    monkeypatch.setattr(workers, "pool", lambda: pool)
    monkeypatch.setattr(workers, "processors", lambda: 4)
    monkeypatch.setattr(workers, "_here", pytest.fail)
    assert workers.submitted([REQUEST])[0].result() == [{"name": "k"}], "its workers are used for a single kernel too"
    pool.parent.process.poll = lambda: 0  # type: ignore[union-attr]
    pool.free = []
    pool.build(REQUEST)
    assert len(started) == 2, "another one replaces it when it has ended"
    pool.free, pool.parent = [], None


def test_only_a_graph_on_a_real_device_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(workers.Pool, "warm_up", lambda self, target: started.append(target[1]))
    torch.compile(lambda x: x + 1, backend="nvidia_triton", options={"simulate": True, "cache": False})(torch.ones(2))
    assert not started
    NvidiaTriton(Device("cuda", "sm_90")).prepare()
    assert started == [90]


@pytest.mark.parametrize("in_use", [True, False])
def test_the_backends_name_starts_them_where_a_gpu_is_in_use(in_use: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(workers.Pool, "warm_up", lambda self, target: started.append(target))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(NvidiaTriton, "probe", classmethod(lambda cls: Device("cuda", "sm_90")))
    (point,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="nvidia_triton")
    assert point.load().__name__ == "nvidia_triton"
    assert started == [["cuda", 90, 32]] * in_use
    with pytest.raises(ImportError, match="nvidia_trito"):
        from fusewright_triton import nvidia_trito  # type: ignore[attr-defined]  # noqa: F401
