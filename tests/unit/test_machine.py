"""Facts about the machine, parsed from recorded texts of other machines."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusewright import machine
from fusewright.interface import Device
from fusewright_int8 import target as int8
from fusewright_int8.backend import X86Int8
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


CORE = f"_core{importlib.machinery.EXTENSION_SUFFIXES[0]}"
CHANGES: dict[str, Callable[[Path], object]] = {
    "a rebuilt core": lambda p: (p / CORE).write_bytes(b"another core"),
    "a core that is missing": lambda p: (p / CORE).unlink(),
    "other code": lambda p: (p / "part" / "a.py").write_text("x = 12"),
    "another file": lambda p: (p / "part" / "b.py").touch(),
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a core that nobody has imported."""
    made = tmp_path / "fusewright_made_up"
    (made / "part").mkdir(parents=True)
    (made / "part" / "a.py").write_text("x = 1")
    (made / "__init__.py").touch()
    (made / CORE).write_bytes(b"a core")
    (tmp_path / "fusewright_beside.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return made


def sources(package: str) -> str:
    machine.sources.cache_clear()
    return machine.sources(package)


@pytest.mark.parametrize("change", CHANGES)
def test_a_package_is_its_code_and_its_core(package: Path, change: str) -> None:
    before = sources(package.name)
    (package / "notes.txt").touch()
    assert sources(package.name) == before
    CHANGES[change](package)
    assert sources(package.name) != before


def test_of_a_module_only_its_file_counts(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of site-packages, or a script: the files beside it are not its own."""
    alone = package.parent / "fusewright_alone.py"
    alone.touch()
    importlib.invalidate_caches()
    monkeypatch.setitem(sys.modules, alone.stem, importlib.import_module(alone.stem))
    before = sources(alone.stem)
    (package.parent / "fusewright_beside.py").write_text("x = 1")
    assert sources(alone.stem) == before
    alone.write_text("x = 1")
    assert sources(alone.stem) != before


def test_a_package_that_is_not_installed_has_no_files() -> None:
    assert sources("fusewright_nowhere") == sources("fusewright_nowhere_else") != sources("fusewright")


def test_a_rebuilt_core_is_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans contain its calls, and choices were measured with it."""
    backend = X86Int8(Device("cpu", "x86_64_v4"))
    before, known = backend.fingerprint(), machine.sources
    monkeypatch.setattr(machine, "sources", lambda p: "another" if p == "fusewright_int8" else known(p))
    assert backend.fingerprint() != before
