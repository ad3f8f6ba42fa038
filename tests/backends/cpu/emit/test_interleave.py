"""Strided loads whose neighbours are also loaded become whole-vector loads and match the interpreter."""

from __future__ import annotations

import pytest
import torch

from fusewright.toolkit.ir import Builder, Kernel, interpret
from fusewright.toolkit.ir.types import to_torch
from fusewright_cpu.emit.interleave import members
from fusewright_cpu.run.jit import compile_kernels


def weighted(rows: int, stride: int, dtype: str, loaded: int | None = None) -> Kernel:
    """sum over k of (k + 1) * x[i, k], for the first `loaded` of the `stride` columns."""
    b = Builder("weighted", p=[rows])
    x, y = b.input("x", dtype), b.output("y", "f32")
    (i,) = b.axes
    total = b.const(0, "f32")
    for k in range(loaded or stride):
        total = total + b.cast(b.load(x, i * stride + k), "f32") * (k + 1)
    b.store(y, i, total)
    return b.build()


@pytest.mark.parametrize("stride", range(2, 9))
@pytest.mark.parametrize("rows", [1, 16, 37, 1025])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "u8", "f64"])
def test_every_stride_and_tail(stride: int, rows: int, dtype: str) -> None:
    kernel = weighted(rows, stride, dtype)
    x = (10 * torch.rand(rows * stride)).to(to_torch(dtype))
    ours, wanted = torch.empty(rows), torch.empty(rows)
    compile_kernels([kernel]).launcher(kernel).checked([x, ours])
    interpret(kernel, [x, wanted])
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-4)


def test_only_complete_sets_count() -> None:
    assert len(members(weighted(64, 4, "f32"), 0)) == 4
    assert not members(weighted(64, 4, "f32", loaded=3), 0), "the last row's fourth element may not exist"
    assert not members(weighted(64, 9, "f32"), 0)
