"""Machines on which the GPU backends cannot run: one clear line, and eager's result. Torch's view of the machine is patched."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusewright import registry
from fusewright.errors import OptionError
from fusewright.interface import Device
from fusewright_triton.backend import NvidiaTriton, RocmTriton, TritonBackend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.linspace(-2, 2, 12).view(3, 4)
REAL_FIND = importlib.util.find_spec


@pytest.fixture(autouse=True)
def _probed_anew() -> Iterator[None]:
    registry.info.cache_clear()
    yield
    registry.info.cache_clear()


def model(x: torch.Tensor) -> torch.Tensor:
    return x.exp().sum(-1)


def lines(caplog: pytest.LogCaptureFixture, backend: str, **options: Any) -> list[str]:
    """Return the warnings when the model is compiled and run; check that its result equals eager's."""
    with caplog.at_level(logging.WARNING, "fusewright"):
        out = torch.compile(model, backend=backend, options=options)(X)
    assert torch.equal(out, model(X))
    return [r.getMessage() for r in caplog.records if r.name == "fusewright"]


def torch_is(patch: pytest.MonkeyPatch, cuda: str | None = None, hip: str | None = None, gpus: int = 0) -> None:
    patch.setattr(torch.version, "cuda", cuda)
    patch.setattr(torch.version, "hip", hip)
    patch.setattr(torch.cuda, "is_available", lambda: gpus > 0)


def _old_nvidia(patch: pytest.MonkeyPatch) -> None:
    torch_is(patch, cuda="12.8", gpus=1)
    patch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))


def _old_amd(patch: pytest.MonkeyPatch) -> None:
    torch_is(patch, hip="6.4", gpus=1)
    patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(gcnArchName="gfx906"))


def _no_triton(patch: pytest.MonkeyPatch) -> None:
    torch_is(patch, cuda="12.8", gpus=1)
    patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    patch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "triton" else REAL_FIND(name, *rest))


MACHINES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = {
    "a CPU wheel of torch": ("nvidia_triton", torch_is, "torch is built without CUDA. Fix: install a CUDA build"),
    "a CPU wheel, for AMD": ("rocm_triton", torch_is, "torch is built without ROCm. Fix: install a ROCm build"),
    "no GPU": ("nvidia_triton", lambda p: torch_is(p, cuda="12.8"), "no NVIDIA GPU is visible. Fix: check nvidia-smi"),
    "no AMD GPU": ("rocm_triton", lambda p: torch_is(p, hip="6.4"), "no AMD GPU is visible. Fix: check rocminfo"),
    "another vendor's torch": ("nvidia_triton", lambda p: torch_is(p, hip="6.4", gpus=1), "Fix: use rocm_triton"),
    "too old a GPU": ("nvidia_triton", _old_nvidia, "compute capability 7.0 has no target. Fix: use a GPU of 8.0"),
    "too old an AMD GPU": ("rocm_triton", _old_amd, "gfx906 has no target. Fix: use one of gfx90a"),
    "no triton": ("nvidia_triton", _no_triton, "triton cannot be imported. Fix: install the triton that your torch"),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_eager_runs_with_one_line_that_says_why(
    machine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend, patch, reason = MACHINES[machine]
    with monkeypatch.context() as context:  # for the probe alone: Dynamo would use the GPU that is not there
        patch(context)
        registry.info(backend)
    found = lines(caplog, backend)
    assert len(found) == 1
    assert f"backend {backend!r} is unavailable" in found[0] and reason in found[0]
    assert "Eager runs this model" in found[0]


@pytest.mark.parametrize("cls", [NvidiaTriton, RocmTriton])
def test_tensors_on_the_cpu_stay_with_eager(
    cls: type[TritonBackend], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU is there, but the model is not on it."""
    monkeypatch.setattr(cls, "probe", classmethod(lambda c: Device("cuda", c.typical)))
    found = lines(caplog, cls.name, cache=False)
    assert len(found) == 1 and "run in eager" in found[0]
    with pytest.raises(Exception, match="device: a tensor is on cpu, the backend runs on cuda"):
        torch.compile(model, backend=cls.name, options={"fallback": "error"})(X)


def test_tensors_elsewhere_are_not_simulated() -> None:
    options = {"simulate": True, "fallback": "error"}
    if isinstance(NvidiaTriton.simulated({"target": ""}), Device):
        with pytest.raises(Exception, match="a tensor is on meta, the backend runs on cpu"):
            torch.compile(model, backend="nvidia_triton", options=options)(X.to("meta"))


def test_a_target_is_only_for_simulations() -> None:
    with pytest.raises(OptionError, match="give 'simulate': True with it"):
        NvidiaTriton(Device("cuda", "sm_90"), {"target": "sm_80"})
