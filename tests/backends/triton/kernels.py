"""Kernels shared by the tests of the Triton backends, and functions that run them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusewright.toolkit.ir import Builder, Kernel, interpret, symbol
from fusewright_triton.runtime import simulate_kernels
from fusewright_triton.target import Target
from tests.kernels import (
    add_gelu,
    argmax,
    column_sum,
    cumsum,
    decayed_maximum,
    embedding,
    layer_norm,
    recurrence,
    scatter_add,
    scatter_extreme,
    softmax,
    transpose,
)


def simulate(
    kernel: Kernel,
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[int] = (),
    scalars: Sequence[int | float | bool] = (),
    target: Target | None = None,
) -> None:
    """Run the emitted source on CPU tensors."""
    simulate_kernels([kernel], target).launcher(kernel)(tensors, sizes, scalars)


def masked_mean(rows: int = 512, cols: int = 300) -> Kernel:
    """Return a kernel with boolean inputs and outputs and row reductions of flags."""
    b = Builder("masked_mean", p=[rows], r=[cols])
    x, m, out, some = b.input("x", "f32"), b.input("m", "bool"), b.output("out", "f32"), b.output("some", "bool")
    i, j = b.axes
    keep = b.load(m, i * cols + j)
    b.store(out, i, b.reduce("mean", b.where(keep, b.load(x, i * cols + j), 0.0)))
    b.store(some, i, b.reduce("any", keep) & ~b.reduce("all", keep))
    return b.build()


def double_math(n: int = 5000) -> Kernel:
    """Return a kernel with f64 math functions and integers."""
    b = Builder("double_math", p=[n])
    x, k, out = b.input("x", "f64"), b.input("k", "i64"), b.output("out", "f64")
    (i,) = b.axes
    v, q = b.load(x, i), b.op("remainder", b.load(k, i), b.const(7, "i64"))
    b.store(out, i, b.op("tanh", v) / (b.op("exp", v) + 0.1) + q.to("f64"))
    return b.build()


def suite() -> list[Kernel]:
    """Return the kernels that are built for every target."""
    n = symbol("n")
    return [
        add_gelu(), add_gelu(n, "bf16"), softmax(dtype="bf16"), softmax(cols=50257), softmax(n, symbol("m")),
        layer_norm(dtype="bf16"), layer_norm(4, 1 << 20), column_sum(dtype="bf16"), transpose(),
        embedding(), embedding(n), scatter_add(), scatter_extreme("max"), scatter_extreme("min", dtype="f64"),
        argmax(), cumsum(), masked_mean(), double_math(),
        recurrence(512, 128, 16), recurrence(64, n, 16, "bf16", 0.0), recurrence(1, 1000, 1, "f32", -0.0),
        decayed_maximum(64, n, 16),
    ]  # fmt: skip


def reference(kernel: Kernel, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> list[torch.Tensor]:
    """Return the buffers after a run of the reference interpreter."""
    out = [t.clone() for t in tensors]
    interpret(kernel, out, sizes)
    return out
