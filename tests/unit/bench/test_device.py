"""Models on an accelerator: what the host waits for, and which times are taken. The tests replace the device's queue by a list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusewright import registry
from fusewright.bench import device
from fusewright.bench.child import Server
from fusewright.bench.device import (
    BUSY_COPIES,
    EMPTY_MARKS,
    Clock,
    NoDevice,
    check_device,
    computes_fp64,
    default_device,
)
from fusewright.cli import case
from fusewright.errors import OptionError
from fusewright.interface import Unavailable
from tests import accelerator

TOYS = Path(__file__).with_name("toy_models.py")


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands sent to an accelerator named "meta", in order; events are 1.5 s apart."""
    return accelerator.pretend(monkeypatch)


def test_a_call_is_timed_from_an_idle_device_until_it_has_ended(queue: list[str]) -> None:
    assert Clock("meta").seconds(lambda: queue.append("call")) >= 0
    assert queue == ["wait", "call", "wait"]


def test_the_devices_own_time_is_between_events_behind_other_work(queue: list[str]) -> None:
    assert Clock("meta").queued(lambda: queue.append("call"), 3) == pytest.approx(0.5)
    assert queue == ["wait", "busy", "event", "call", "call", "call", "event", "wait for the event"]


def test_steps_of_a_call_are_timed_by_the_device_behind_other_work_for_as_long_as_the_host_needs(queue: list[str]) -> None:
    def steps(mark: Callable[[], None]) -> None:
        for _ in range(3):
            mark()
            queue.append("step")

    assert Clock("meta").between(steps, marks=20) == [2, 2], "what an event takes is not the step's"
    assert queue == ["wait", "busy", "busy", *["event"] * EMPTY_MARKS, *["event", "step"] * 3, "wait"]
    assert len(Clock().between(steps, marks=3)) == 2


def test_the_other_work_is_copies_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "BUSY_BYTES", 16)
    copied: list[int] = []
    clock = Clock("meta")
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: copied.append(source.nbytes))
    clock._busy()
    assert copied == [16] * BUSY_COPIES


def test_the_host_needs_no_waiting() -> None:
    clock = Clock()
    clock.begin()
    assert not clock.asynchronous and clock.queued(lambda: None, 3) is None
    assert clock.seconds(lambda: None) >= 0


def test_the_peak_is_that_of_one_call(queue: list[str]) -> None:
    assert Clock("meta").memory(lambda: queue.append("call")) == {"resident": 100, "peak": 300}
    assert queue == ["wait", "forget the peak", "call", "wait"]


def test_a_process_measures_on_the_device_that_it_is_given(queue: list[str]) -> None:
    server = Server()
    server.load(f"{TOYS}:mlp", "bf16", "full", False, 1, "meta:1")
    assert queue[:2] == ["device 1", "wait"]
    assert server.built is not None and server.built.module is not None
    assert {p.device.type for p in server.built.module.parameters()} == {"meta"}
    assert server.built.args[0].device.type == "meta"
    queue.clear()
    server.clock = Clock("meta")
    server.first("eager")
    assert queue[-1] == "wait"
    found = server.block("eager", calls=3, discard=0)
    assert len(found["times"]) == 3 and found["device_s"] == pytest.approx(0.5)
    assert server.memory("eager", calls=3) == {"resident": 100, "peak": 300}


def test_a_kernel_is_timed_by_the_device_alone(queue: list[str]) -> None:
    server = Server()
    server.load("kernel:softmax:8x4", "fp32", "full", False, 1, "meta")
    server.first("eager")
    assert server.block("eager", calls=3, discard=1) == {"times": [pytest.approx(0.5)]}
    server.first("copy")
    assert server.ready["copy"]().nbytes == 8 * 4 * 4


@pytest.mark.parametrize("name", ["meta", "meta:7", "nonsense"])
def test_a_device_that_is_not_here_is_refused_with_what_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    if name == "meta:7":
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("meta"))
    else:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    says = {"meta": "--device cpu is here", "meta:7": "torch finds 1 devices", "nonsense": "no device of torch"}[name]
    with pytest.raises(NoDevice, match=says):
        check_device(name)


@pytest.mark.parametrize("named", ["fusewright", "the backend"])
def test_models_are_where_the_backend_computes(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = accelerator.pretend_backend(monkeypatch)
    backend = name if named == "the backend" else named
    assert default_device(backend, {}) == "meta"
    assert default_device(backend, {"simulate": True}) == "cpu"
    with pytest.raises(OptionError):
        default_device(backend, {"simulate": "perhaps"})
    monkeypatch.setenv("FUSEWRIGHT_SIMULATE", "1")
    assert default_device(backend, {}) == "cpu"


def test_models_are_on_the_host_for_what_does_not_work_here_or_is_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(accelerator.Far):
        @classmethod
        def probe(cls) -> Unavailable:  # type: ignore[override]
            return Unavailable("no such device", "buy one")

    assert default_device("inductor", {}) == "cpu"
    name = accelerator.pretend_backend(monkeypatch, Absent)
    assert default_device(name, {}) == "cpu"
    monkeypatch.setattr(registry, "best", lambda device_type=None: None)
    assert default_device("fusewright", {}) == "cpu"


@pytest.mark.usefixtures("queue")
def test_explain_and_report_take_the_backends_device_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = accelerator.pretend_backend(monkeypatch)
    assert case.chosen(f"{TOYS}:mlp", name, None, False, ()).device == "meta"
    assert case.chosen("decode:llama", name, "cpu", False, ()).device == "cpu"
    assert case.chosen("large:bert", name, None, True, ("simulate=true",)).device == "cpu"
    with pytest.raises(NoDevice, match="torch finds 2 devices"):
        case.chosen("bert", name, "meta:7", False, ())


def test_fp64_is_where_torch_can_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert computes_fp64("cpu")

    def refuse(*_: object, **__: object) -> None:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    monkeypatch.setattr(torch, "zeros", refuse)
    assert not computes_fp64("mps")
