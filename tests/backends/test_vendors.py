"""The vendor packages: what they register, what their probes return on other machines, and their targets."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

import fusewright
from fusewright import machine, registry
from fusewright.dynamo import entry
from fusewright.interface import Device, Unavailable
from fusewright_acl import target as acl
from fusewright_acl.backend import GravitonAcl
from fusewright_int8 import target as int8
from fusewright_int8.backend import X86Int8
from fusewright_mps import target as mps
from fusewright_mps.backend import AppleMps
from fusewright_triton import target as triton
from fusewright_triton.backend import NvidiaTriton, RocmTriton

VENDORS = ("nvidia_triton", "rocm_triton", "x86_onednn", "graviton_acl", "apple_mps", "x86_int8")


@pytest.mark.parametrize("name", VENDORS)
def test_every_vendor_is_registered_and_answers_its_probe(name: str) -> None:
    info = registry.info(name)
    assert info.cls is not None, info.device
    assert info.plugin.version == fusewright.__version__
    if isinstance(info.device, Unavailable):
        assert info.device.reason and info.device.fix


@pytest.mark.parametrize("name", VENDORS)
def test_torch_finds_an_entry_under_each_name(name: str) -> None:
    assert name in torch.compiler.list_backends(exclude_tags=())
    package = importlib.import_module(registry.plugins()[name].value.partition(".")[0])
    found = getattr(package, name)
    assert callable(found) and found is entry(name)  # Dynamo compares backends by identity
    found.of_dynamo = True  # Dynamo sets attributes on it
    del found.of_dynamo


def _reason(device: Device | Unavailable) -> str:
    assert isinstance(device, Unavailable)
    return device.reason


def _gpu(
    monkeypatch: pytest.MonkeyPatch, *, cuda: str | None = None, hip: str | None = None, n: int = 1
) -> None:
    """Make torch look like a GPU build with `n` devices."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())


def test_nvidia_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch)
    assert "without CUDA" in _reason(NvidiaTriton.probe())
    _gpu(monkeypatch, hip="6.4")
    assert "ROCm build" in _reason(NvidiaTriton.probe())
    _gpu(monkeypatch, cuda="13.0", n=0)
    assert "no NVIDIA GPU" in _reason(NvidiaTriton.probe())
    _gpu(monkeypatch, cuda="13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "7.5" in _reason(NvidiaTriton.probe())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    device = NvidiaTriton.probe()
    assert isinstance(device, Device) and device.arch == "sm_90"
    assert {"wgmma", "tma", "float8_e4m3fn"} <= device.features
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "triton" in _reason(NvidiaTriton.probe())


def test_rocm_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch, cuda="13.0")
    assert "without ROCm" in _reason(RocmTriton.probe())
    _gpu(monkeypatch, hip="6.4", n=0)
    assert "no AMD GPU" in _reason(RocmTriton.probe())
    _gpu(monkeypatch, hip="6.4")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    device = RocmTriton.probe()
    assert isinstance(device, Device) and device.arch == "gfx942" and "mfma" in device.features
    properties.gcnArchName = "gfx803"
    assert "gfx803" in _reason(RocmTriton.probe())


def test_cpu_probes_name_the_machine_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "riscv64" in _reason(GravitonAcl.probe())
    assert "riscv64" in _reason(X86Int8.probe())
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    monkeypatch.setattr(machine, "cpu_features", lambda: frozenset({"avx2", "avx_vnni"}))
    device = X86Int8.probe()
    assert isinstance(device, Device) and device.arch == "avx_vnni"
    monkeypatch.setattr(machine, "cpu_features", lambda: frozenset({"avx", "fma3"}))
    assert "AVX2" in _reason(X86Int8.probe())


def test_apple_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert "linux" in _reason(AppleMps.probe())
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert "Metal" in _reason(AppleMps.probe())
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M3 Pro")
    device = AppleMps.probe()
    assert isinstance(device, Device) and device.type == "mps" and "bf16" in device.features


def test_gpu_targets() -> None:
    assert triton.nvidia((8, 7)) == triton.NVIDIA["sm_86"]  # the nearest older target of the same major version
    assert triton.nvidia((7, 5)) is None
    assert not triton.NVIDIA["sm_80"].fp8
    mi300, mi350, rx = triton.AMD["gfx942"], triton.AMD["gfx950"], triton.AMD["gfx1100"]
    assert (mi300.lanes, rx.lanes) == (64, 32)
    assert (mi300.shared, mi350.shared) == (64 * 1024, 160 * 1024)
    assert mi300.fp8 != mi350.fp8 and not rx.fp8


def test_cpu_targets() -> None:
    graviton3 = "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: 0xd40\n"
    core = acl.core_of(acl.System(cpuinfo=graviton3))
    assert core is not None and (core.name, core.sve_bits) == ("neoverse-v1", 256)
    assert "bf16" in core.features
    assert acl.core_of(acl.System(cpuinfo="model name : something else")) is None
    vnni = frozenset({"avx2", "avx512_f", "avx512_bw", "avx512_vl", "avx512_vnni", "avx_vnni"})
    found = int8.best(vnni)
    assert found is not None and found.arch == "avx512_vnni"
    assert int8.best(frozenset()) is None
    assert mps.of_chip("Apple M1").family == "apple7" and mps.of_chip("Apple M9").family == "apple10"
    assert mps.of_chip("Apple M4 Max").cores == 40 and mps.of_chip("Apple M3 Pro", 14).cores == 14
