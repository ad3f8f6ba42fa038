"""The LLVM IR of kernels for fixed machines, independent of this one."""

from __future__ import annotations

import pytest

from fusewright.toolkit.ir import Kernel, symbol
from fusewright_cpu.emit.entry import emit_kernel, new_module
from fusewright_cpu.target import CpuTarget, aarch64_target, x86_target
from tests import golden
from tests.backends.triton import kernels

AVX2, AVX512, NEON = x86_target("avx2"), x86_target("avx512"), aarch64_target("neoverse-n1")
CASES: dict[str, tuple[Kernel, CpuTarget]] = {
    "llvm_add_gelu": (kernels.add_gelu(64), AVX512),
    "llvm_add_gelu_bf16": (kernels.add_gelu(64, "bf16"), AVX2),
    "llvm_column_sum": (kernels.column_sum(64, 16), AVX2),
    "llvm_cumsum": (kernels.cumsum(4, 64), NEON),
    "llvm_embedding": (kernels.embedding(symbol("n"), dtype="f32"), NEON),
    "llvm_scatter_add": (kernels.scatter_add(3, 8, 10), AVX512),
}


@pytest.mark.parametrize("name", CASES)
def test_the_text_of_a_kernel(name: str, goldens: golden.Goldens) -> None:
    kernel, target = CASES[name]
    module = new_module(target)
    emit_kernel(module, kernel, kernel.name, parallel=False)
    goldens.check(name, module.render())


def test_every_text_has_its_case() -> None:
    assert golden.names("llvm") == sorted(CASES)
