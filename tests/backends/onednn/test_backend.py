"""The probe on various machines, targets, versions, and which regions are worth taking."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fusewright import machine
from fusewright.interface import Device, Unavailable, Why
from fusewright_onednn import target
from fusewright_onednn.backend import X86OneDnn
from tests.backends.onednn.common import DEVICE, check
from tests.fragments import Sketch, targets

V3 = frozenset({"avx2", "bmi", "bmi2", "f16c", "fma3", "lzcnt"})


def _machine(monkeypatch: pytest.MonkeyPatch, arch: str, features: frozenset[str], mkldnn: bool = True) -> None:
    monkeypatch.setattr(machine, "arch", lambda: arch)
    monkeypatch.setattr(machine, "cpu_features", lambda: features)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: mkldnn)


def test_probe_names_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, "x86_64", V3)
    device = X86OneDnn.probe()
    assert isinstance(device, Device) and device.arch == "x86_64_v3" and device.driver.startswith("oneDNN")


@pytest.mark.parametrize(
    ("arch", "features", "mkldnn", "words"),
    [
        ("aarch64", frozenset(), True, "aarch64"),
        ("x86_64", frozenset({"avx"}), True, "AVX2"),
        ("x86_64", V3, False, "oneDNN"),
    ],
)
def test_probe_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, arch: str, features: frozenset[str], mkldnn: bool, words: str
) -> None:
    _machine(monkeypatch, arch, features, mkldnn)
    found = X86OneDnn.probe()
    assert isinstance(found, Unavailable) and words in found.reason and found.fix


def test_targets_are_ordered_best_first() -> None:
    assert target.best(V3 | {"avx512_f"}) is target.TARGETS[1]
    assert target.best(frozenset().union(*(t.requires for t in target.TARGETS))) is target.TARGETS[0]
    assert target.best(frozenset()) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("  - Intel(R) MKL-DNN v3.12.0 (Git Hash 0)", "3.12.0"),
        ("  - oneDNN v3.7.1", "3.7.1"),
        ("nothing", ""),
    ],
)
def test_version_of_onednn(text: str, version: str) -> None:
    assert target.onednn_version(text) == version


def test_fingerprint_tells_machines_apart() -> None:
    other = Device("cpu", "x86_64_v4", DEVICE.features - {"mkldnn_bf16"}, DEVICE.driver)
    assert X86OneDnn(DEVICE).fingerprint() == X86OneDnn(DEVICE).fingerprint()
    assert X86OneDnn(DEVICE).fingerprint() != X86OneDnn(other).fingerprint()
    assert torch.__version__ in X86OneDnn(DEVICE).fingerprint()


def test_what_no_library_call_takes_becomes_a_kernel() -> None:
    g = Sketch()
    y = g.op("mul", g.op("relu", g.input(torch.randn(4))), 2.0)
    assert targets(check(g, [y])) == ["kernel mul"]  # the relu is recomputed where it is read


def test_an_unknown_op_is_not_claimed() -> None:
    g = Sketch()
    g.op("relu", g.input(torch.randn(4)))
    assert X86OneDnn(DEVICE).supports(replace(g.ops[0], op="aten.unheard_of")).why is Why.NO_LOWERING


def test_without_llvmlite_it_is_unavailable_from_the_start() -> None:
    code = "import sys; sys.modules['llvmlite'] = None; from fusewright import registry; print(registry.info('x86_onednn').device)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "does not load: ModuleNotFoundError" in said and "llvmlite" in said
