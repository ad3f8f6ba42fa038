"""Calls too small for a second thread do not wake the thread pool."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.ir import Call, Ref
from fusewright.plan.serial import from_data, to_data
from fusewright_cpu import openmp
from fusewright_cpu.loader import LlvmLoader
from fusewright_cpu.policy import CPU


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the thread counts that plans request."""
    seen: list[int] = []

    def limited(threads: int) -> int:
        seen.append(threads)
        return openmp.limited(threads)

    monkeypatch.setattr(LlvmLoader, "policy", dataclasses.replace(CPU, limit=limited))
    return seen


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def called(module: Callable[..., Any], *args: Tensor, **how: Any) -> None:
    torch.compiler.reset()
    fast = torch.compile(module, backend="x86_onednn", options={"cache": False}, **how)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(*args), module(*args), rtol=1e-4, atol=1e-4)


SMALL = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).eval()


@pytest.mark.usefixtures("two_threads")
def test_a_plan_of_small_ops_runs_on_the_calling_thread(asked: list[int]) -> None:
    called(SMALL, torch.randn(1, 3, 8, 8))
    assert asked and asked == [1, 2] * (len(asked) // 2) and torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_one_op_that_is_worth_it_wakes_all(asked: list[int]) -> None:
    called(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 64, 3)).eval(), torch.randn(2, 3, 64, 64))
    assert not asked


@pytest.mark.usefixtures("two_threads")
def test_sizes_that_may_grow_wake_all(asked: list[int]) -> None:
    called(nn.Linear(8, 8).eval(), torch.randn(3, 8), dynamic=True)
    assert not asked


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not list threads; Linux does, in /proc")
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_kernels_of_any_size_keep_the_pools_threads(rows: int) -> None:
    """libgomp ends threads that a smaller team leaves out: each op of torch after such a kernel waited for new ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        model = nn.Sequential(nn.Linear(256, 1024), nn.LayerNorm(1024), nn.SiLU(), nn.Linear(1024, 256)).eval()
        x = torch.randn(rows, 256)
        fast = torch.compile(model, backend="x86_onednn", options={"cache": False})
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
            threads = set(os.listdir("/proc/self/task"))
            for _ in range(5):
                fast(x), model(x)
            assert not set(os.listdir("/proc/self/task")) - threads
    finally:
        torch.set_num_threads(before)


def plan_of(target: str) -> Plan:
    policy = dataclasses.replace(CPU, limit=openmp.limited)
    return Plan((1,), (Ref(2),), [Call(target, (Ref(1),), (2,))], [], (), (), {}, alone=True, policy=policy)


@pytest.mark.usefixtures("two_threads")
def test_threads_are_given_back_where_a_call_fails() -> None:
    run = codegen.load(plan_of("aten::inverse"))
    with pytest.raises(RuntimeError):
        run([torch.zeros(2, 3)])
    assert torch.get_num_threads() == 2


def test_a_stored_plan_is_alone_as_it_was() -> None:
    plan = plan_of("aten::relu")
    assert from_data(to_data(plan), lambda name: None).alone
    assert not from_data(to_data(dataclasses.replace(plan, alone=False)), lambda name: None).alone


@pytest.mark.usefixtures("two_threads")
def test_the_limit_is_the_calling_threads() -> None:
    assert openmp.limited(1) == 2
    try:
        assert torch.get_num_threads() == (1 if openmp.library() is not None else 2)
    finally:
        assert openmp.limited(2) in (1, 2)
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(openmp.library() is None, reason="torch computes without OpenMP here")
def test_the_pool_is_torchs_whatever_other_libraries_are_called(tmp_path: Path) -> None:
    """Packages may bring another copy of the library with its own pool; in an environment named torch, every path has that name."""
    script = """
import ctypes, pathlib, shutil, sys, torch
from fusewright_cpu import openmp
(real,) = openmp.loaded()
other = pathlib.Path(sys.argv[1], "torch", "a", pathlib.Path(real).name)
other.parent.mkdir(parents=True)
shutil.copy(real, other)
ctypes.CDLL(str(other)).omp_set_num_threads(7)
assert sorted([real, str(other)]) == openmp.loaded()
from fusewright_cpu.run.pool import pool_symbols
assert [openmp._is_torchs(ctypes.PyDLL(p)) for p in (str(other), real)] == [False, True]
torch.set_num_threads(2)
address = ctypes.cast(ctypes.CDLL(real).GOMP_parallel, ctypes.c_void_p).value
assert pool_symbols()["GOMP_parallel"] == address
assert torch.get_num_threads() == 2 and ctypes.CDLL(str(other)).omp_get_max_threads() == 7
assert openmp.limited(1) == 2 and torch.get_num_threads() == 1
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], check=True)
