"""Detection of the core and its features from what each operating system reports."""

from __future__ import annotations

import pytest
import torch

from fusewright import machine
from fusewright.errors import OptionError
from fusewright.interface import Device, Unavailable
from fusewright_acl import target
from fusewright_acl.backend import GravitonAcl
from fusewright_cpu.arm import CORES, System, core_of

CPUINFO = "CPU implementer\t: 0x{0:x}\nCPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: 0x{1:x}\n"
GRAVITON2, GRAVITON3 = System(0x107FFF, 0, cpuinfo=CPUINFO.format(0x41, 0xD0C)), System(0x57FFFF, 0x7000 | 3, 32)


@pytest.mark.parametrize(("identity", "core"), [(c.part, c.name) for c in CORES if c.part])
def test_a_core_by_cpuinfo_and_by_its_register(identity: tuple[int, int], core: str) -> None:
    found = core_of(System(cpuinfo=CPUINFO.format(*identity)))
    assert found is not None and found.name == core
    assert core_of(System(midr=identity[0] << 24 | 1 << 20 | identity[1] << 4)) == found


def test_features_by_the_auxiliary_vector() -> None:
    assert target.said(GRAVITON2) == {"neon", "fp16_arith", "dot"}
    assert {"neon", "dot", "sve", "sve256", "i8mm", "bf16", "sve_bf16", "sve2"} <= target.said(GRAVITON3)
    assert target.said(System()) == frozenset()


def test_macos_tells_by_sysctl() -> None:
    said = {"machdep.cpu.brand_string": "Apple M2 Pro", "hw.optional.AdvSIMD": 1, "hw.optional.arm.FEAT_BF16": 1,
            "hw.optional.arm.FEAT_I8MM": 0}  # fmt: skip
    core = core_of(System(sysctl=said))
    assert core is not None and core.name == "apple-m2"
    assert target.said(System(sysctl=said)) == {"neon", "bf16"}
    assert core_of(System(sysctl={"machdep.cpu.brand_string": "Apple M99"})) is None


def test_an_emulator_names_no_core() -> None:
    assert core_of(System(0x57FFFF, cpuinfo="model name : AMD EPYC\n")) is None


@pytest.mark.skipif(machine.arch() == "aarch64", reason="this is aarch64: the probe finds the device")
def test_elsewhere_it_is_unavailable_or_simulated_on_request() -> None:
    found = GravitonAcl.probe()
    assert isinstance(found, Unavailable) and machine.arch() in found.reason and "simulate" in found.fix
    v1, n1 = (GravitonAcl.simulated({"target": core}) for core in ("neoverse-v1", "neoverse-n1"))
    assert isinstance(v1, Device) and v1.simulated and "sve256" in v1.features
    assert ("mkldnn_bf16" in v1.features) == torch.ops.mkldnn._is_mkldnn_bf16_supported()  # the host's oneDNN computes
    assert isinstance(n1, Device) and "mkldnn_bf16" not in n1.features
    with pytest.raises(OptionError, match="neoverse-v1"):
        GravitonAcl.simulated({"target": "z80"})


@pytest.mark.hardware("graviton_acl")
def test_the_probe_finds_acl_and_bf16() -> None:
    found = GravitonAcl.probe()
    assert isinstance(found, Device) and not found.simulated
    assert "ACL" in found.driver and {"acl", "neon"} <= found.features
    assert ("mkldnn_bf16" in found.features) == ("bf16" in found.features)
