"""Facts about the machine, read from texts of other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusewright import machine

XEON = "model name : Some Xeon\nflags\t\t: fpu fma avx2 avx512f avx512bw avx512vl avx512_vnni\n"
GRAVITON = "processor : 0\nFeatures\t: fp asimd asimdhp asimddp sve svebf16 i8mm bf16\nCPU part : 0xd40\n"


def test_features_carry_the_names_that_torch_uses() -> None:
    assert {"avx2", "fma3", "avx512_f", "avx512_bw", "avx512_vl", "avx512_vnni"} <= machine.features_of(XEON)
    assert {"neon", "fp16_arith", "dot", "sve", "sve_bf16", "bf16"} <= machine.features_of(GRAVITON)
    assert machine.features_of("") == frozenset()


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
