"""Recordings of a stream own their workspaces and memory pool, on any device. Streams and devices are faked here, except in the
tests at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusewright import _torch_compat as compat
from fusewright import machine
from fusewright.report import recording
from fusewright_triton.run import graphs, streams
from tests.unit.plan.replay.test_inference import Recorder, Small, compiled


class Devices:
    """Two fake devices, one of them current; streams are numbers. `noted` holds the events in order."""

    def __init__(self) -> None:
        self.current, self.capturing, self.made = 0, frozenset[int](), 100
        self.noted: list[str] = []

    @contextlib.contextmanager
    def device(self, index: Any) -> Iterator[None]:
        before, self.current = self.current, torch.device(index).index if isinstance(index, str) else index
        yield
        self.current = before

    def stream(self, index: int | None = None) -> Any:
        index = self.current if index is None else index
        return SimpleNamespace(device_index=index, cuda_stream=10 + index, device=torch.device("cuda", index))

    def new(self) -> int:
        self.made += 1
        return self.made


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    found = Devices()
    monkeypatch.setattr(streams, "_sides", {})
    monkeypatch.setattr(streams, "driver", lambda kind: SimpleNamespace(stream=found.new))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.current)
    monkeypatch.setattr(torch.cuda, "current_stream", found.stream)
    monkeypatch.setattr(machine, "current_stream", lambda index: found.stream(index).cuda_stream)
    monkeypatch.setattr(torch.cuda, "device", found.device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.current in found.capturing)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda made, device: SimpleNamespace(made=made, device_index=device))
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    return found


def test_a_plan_of_another_device_is_replayed_on_its_current_stream(devices: Devices) -> None:
    made = graphs.Graphs()
    assert made.stream("cuda:0") == (0, 10) and made.stream("cuda:1") == (1, 11) and made.stream("cuda") == (0, 10)
    assert devices.current == 0
    devices.capturing = frozenset({1})
    assert made.stream("cuda:1") is None and made.stream("cuda:0") == (0, 10)


def test_each_stream_has_a_stream_beside_it_that_nobody_else_has(devices: Devices) -> None:
    first, again = streams.side_of(devices.stream(0)), streams.side_of(devices.stream(0))
    other = streams.side_of(devices.stream(1))
    assert first is again and first is not other
    assert (first.side.made, first.side.device_index) == (101, 0)  # type: ignore[attr-defined]
    assert (other.side.made, other.side.device_index) == (102, 1)  # type: ignore[attr-defined]
    assert first.pool is not other.pool


def test_what_a_failed_recording_has_queued_is_waited_for(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up may run out of memory while its kernels still read buffers that the plain plan, which runs next, is given."""
    current, beside = devices.stream(0), streams.side_of(devices.stream(0))
    beside.side.wait_stream = lambda stream: devices.noted.append("side")  # type: ignore[method-assign]
    current.wait_stream = lambda stream: devices.noted.append("current")
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(beside, "_take_workspaces", lambda: None)
    with pytest.raises(torch.OutOfMemoryError), beside.beside(current):
        raise torch.OutOfMemoryError
    assert devices.noted == ["side", "current"]


@torch.no_grad()
def test_a_plan_is_recorded_and_measured_on_its_device() -> None:
    class On(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.inside: list[str] = []
            self.seen: list[tuple[str, bool]] = []

        @contextlib.contextmanager
        def on(self, device: str) -> Iterator[None]:
            self.inside.append(device)
            yield
            self.inside.pop()

        def record(self, run: Any, warm: bool) -> Any:
            self.seen.append(("record", bool(self.inside)))
            return super().record(run, warm)

        def seconds(self, run: Any) -> float:
            self.seen.append(("seconds", bool(self.inside)))
            return super().seconds(run)

    model, recorder = Small().eval(), On()
    fast, x = compiled(model, recorder), torch.randn(4, 8)
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
    assert recorder.seen == [("record", True), ("seconds", True), ("seconds", True)] and not recorder.inside


# ---------------------------------------------------------------- on a GPU

OURS: Any = {"backend": "nvidia_triton", "options": {"fallback": "allow", "cache": False}}


def products(device: str = "cuda") -> tuple[torch.nn.Module, torch.Tensor]:
    """Return products with and without a bias, large enough that the library splits K, and their input."""
    layers = [torch.nn.Linear(4096, 4096, bias=k % 2 == 0) for k in range(4)]
    return torch.nn.Sequential(*layers).to(device, torch.bfloat16).eval(), torch.randn(24, 4096, device=device).bfloat16()


def replayed(model: torch.nn.Module, x: torch.Tensor) -> Any:
    """Return the model, compiled and recorded."""
    with recording() as reports:
        fast = torch.compile(model, **OURS)
        for _ in range(3):
            fast(x)
    assert [r.replay[:8] for r in reports] == ["replayed"]
    return fast


@pytest.mark.hardware("nvidia_triton")
@torch.no_grad()
def test_workspaces_that_others_clear_are_not_those_of_recordings() -> None:
    """Inductor's graph trees clear cuBLAS workspaces around each graph: their memory is reused, or returned to the driver."""
    model, x = products()
    fast, wanted = replayed(model, x), model(x)
    for k in range(4):
        compat.clear_workspaces()
        if k % 2:
            torch.cuda.empty_cache()
        others = [torch.full((1 << 21,), 7, dtype=torch.int32, device="cuda") for _ in range(32)]
        torch.testing.assert_close(fast(x), wanted, rtol=2e-2, atol=2e-2)
        torch.cuda.synchronize()
        assert all(bool((t == 7).all()) for t in others)


@pytest.mark.hardware("nvidia_triton")
@torch.no_grad()
def test_a_model_on_another_gpu_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    model, x = products("cuda:1")
    fast = replayed(model, x)
    for k in range(3):
        torch.testing.assert_close(fast(x + k), model(x + k), rtol=2e-2, atol=2e-2)
    assert torch.cuda.current_device() == 0
