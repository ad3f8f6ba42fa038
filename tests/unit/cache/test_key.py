"""A plan is reused exactly if everything it depends on is unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from fusewright.interface import Device
from fusewright.reference.null import Null
from fusewright_cpu import target
from fusewright_onednn.backend import X86OneDnn
from tests.unit.cache.graphs import affine, compiled, counted

X = torch.randn(5)
pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.hardware("x86_onednn")]


@contextmanager
def set_and_back(now: Callable[[], object], later: Callable[[], object]) -> Iterator[None]:
    now()
    try:
        yield
    finally:
        later()


def threads(n: int) -> object:
    before = torch.get_num_threads()
    return set_and_back(lambda: torch.set_num_threads(n), lambda: torch.set_num_threads(before))


def _products_in(precision: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = precision


def mkldnn() -> object:
    return torch.backends.mkldnn.flags(enabled=False)


SETTINGS: dict[str, Callable[[], object]] = {
    "number of threads": lambda: threads(torch.get_num_threads() + 1),
    "deterministic algorithms": lambda: set_and_back(
        lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)
    ),
    "precision of products": lambda: set_and_back(
        lambda: torch.set_float32_matmul_precision("medium"), lambda: torch.set_float32_matmul_precision("highest")
    ),
    "precision of products, by the newer interface": lambda: set_and_back(
        lambda: _products_in("bf16"), lambda: _products_in("none")
    ),
    "default dtype": lambda: set_and_back(
        lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)
    ),
    "oneDNN switched off": mkldnn,
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_another_setting_of_torch_is_another_plan(setting: Callable[[], object]) -> None:
    with counted() as made:
        compiled(affine)(X)
        with setting():  # type: ignore[attr-defined]
            compiled(affine)(X)
    assert len(made) == 2 and made[0] != made[1]


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE"])
def test_what_onednn_is_told_by_the_environment_is_in_the_key(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cpu", "x86_64_v3")
    before = X86OneDnn(device).fingerprint()
    monkeypatch.setenv(variable, "x")
    assert X86OneDnn(device).fingerprint() != before


IN_A_PROCESS = """
import torch
from tests.unit.cache.graphs import affine, compiled, counted
x = torch.arange(5.0)
with counted() as made:
    assert torch.equal(compiled(affine)(x), affine(x))
print("compiled" if made else "found")
"""


def process(**env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS], env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_code_for_another_cpu_is_not_run() -> None:
    """Regression: `FUSEWRIGHT_CPU_ISA=avx2` ran code compiled for AVX-512."""
    told = [process(), process(FUSEWRIGHT_CPU_ISA="avx2"), process(FUSEWRIGHT_CPU_ISA="avx2")]
    assert told == ["compiled", "compiled", "found"]


def test_the_cpu_and_llvm_are_in_the_fingerprint_of_every_backend_with_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cpu", "x86_64_v3")
    host = target.host_target()
    assert host.fingerprint in X86OneDnn(device).fingerprint()
    assert host.cpu in host.fingerprint and host.features in host.fingerprint and "llvmlite 0." in host.fingerprint
    monkeypatch.setattr(target.llvm, "llvm_version_info", (99, 0, 0))
    assert "/llvm 99.0.0, llvmlite" in X86OneDnn(device).fingerprint()


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    """The iteration order of a set of features is not."""
    code = (
        "from fusewright.interface import Device; from fusewright.reference.null import Null\n"
        "print(Null(Device('cpu', 'a', frozenset('abcdefgh'))).fingerprint())"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert told == {Null(Device("cpu", "a", frozenset("abcdefgh"))).fingerprint()}


def at_most(limit: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] < limit)
        return torch.relu(x * 3 - 2)

    return run


def test_other_bounds_of_a_size_are_another_plan() -> None:
    """Code may rely on bounds, e.g. for 32-bit offsets, but the text of the graph does not show them."""
    x = torch.randn(8, 3)
    torch._dynamo.mark_dynamic(x, 0)
    with counted() as made:
        for limit in (100, 1 << 40, 100):
            torch.testing.assert_close(compiled(at_most(limit))(x), affine(x))
    assert len(made) == 2 and made[0] != made[1]
