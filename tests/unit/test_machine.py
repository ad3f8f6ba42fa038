"""Facts about the machine, parsed from recorded texts of other machines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusewright import machine
from fusewright_int8 import target as int8
from fusewright_onednn import target as onednn

XEON = (
    "model name : Some Xeon\nflags\t\t: fpu pni fma sse4_1 avx f16c abm bmi1 avx2 bmi2 avx512f avx512dq avx512ifma avx512cd "
    "sha_ni avx512bw avx512vl avx512vbmi avx512_vnni avx512_bf16\n"
)
GRAVITON = "processor : 0\nFeatures\t: fp asimd asimdhp asimddp sve svebf16 i8mm bf16\nCPU part : 0xd40\n"


def test_features_carry_the_names_that_torch_uses() -> None:
    assert onednn.best(machine.features_of(XEON)) == onednn.TARGETS[0]
    assert int8.best(machine.features_of(XEON)) is not None
    assert {"neon", "fp16_arith", "dot", "sve", "sve_bf16", "bf16"} <= machine.features_of(GRAVITON)
    assert machine.features_of("") == frozenset()


def test_the_kernel_and_torch_name_the_same_features_here() -> None:
    if not (hasattr(torch.cpu, "get_capabilities") and Path("/proc/cpuinfo").exists()):
        pytest.skip("torch 2.10 lists no capabilities, and only Linux has /proc/cpuinfo")
    asked = frozenset().union(*(t.requires for t in onednn.TARGETS), *(t.needs for t in int8.TARGETS))
    told = {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    assert told & asked == machine.features_of(Path("/proc/cpuinfo").read_text()) & asked


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_quota_of_both_kinds_of_cgroup(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.cpu_quota(tmp_path) == quota
