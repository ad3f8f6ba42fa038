"""Kernels that the tests of the Triton backends share, and how they are run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusewright.toolkit.ir import Builder, Extent, Kernel, interpret, symbol
from fusewright.toolkit.ir.extent import Atom, atoms
from fusewright.toolkit.ir.types import DType
from fusewright_triton.runtime import simulate_kernels
from fusewright_triton.target import Target


def simulate(
    kernel: Kernel,
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[int] = (),
    scalars: Sequence[int | float | bool] = (),
    target: Target | None = None,
) -> None:
    """Runs the emitted source on CPU tensors."""
    simulate_kernels([kernel], target).launcher(kernel)(tensors, sizes, scalars)


def hints(*sizes: Extent) -> dict[Atom, int]:
    return {a: 4096 for e in sizes for a in atoms(e)}


def add_gelu(n: Extent = 1 << 20, dtype: DType = "f32") -> Kernel:
    b = Builder("add_gelu", p=[n], symbols=hints(n))
    x, y, out = b.input("x", dtype), b.input("y", dtype), b.output("out", dtype)
    (i,) = b.axes
    v = b.load(x, i).to("f32") + b.load(y, i).to("f32")
    b.store(out, i, (v * 0.5 * (b.op("erf", v * 0.7071067811865476) + 1)).to(dtype))
    return b.build()


def softmax(rows: Extent = 4096, cols: Extent = 768, dtype: DType = "f32") -> Kernel:
    b = Builder("softmax", p=[rows], r=[cols], symbols=hints(rows, cols))
    x, out = b.input("x", dtype), b.output("out", dtype)
    i, j = b.axes
    v = b.load(x, i * cols + j).to("f32")
    e = b.op("exp", v - b.reduce("max", v))
    b.store(out, i * cols + j, (e / b.reduce("sum", e)).to(dtype))
    return b.build()


def layer_norm(rows: Extent = 4096, cols: int = 768, dtype: DType = "f32") -> Kernel:
    b = Builder("layer_norm", p=[rows], r=[cols], symbols=hints(rows))
    x, w, c, out = b.input("x", dtype), b.input("w", dtype), b.input("b", dtype), b.output("out", dtype)
    i, j = b.axes
    v = b.load(x, i * cols + j).to("f32")
    mean, m2 = b.reduce("mean", v), b.reduce("m2", v)
    y = (v - mean) * b.op("rsqrt", m2 * (1 / cols) + 1e-5) * b.load(w, j).to("f32") + b.load(c, j).to("f32")
    b.store(out, i * cols + j, y.to(dtype))
    return b.build()


def column_sum(rows: int = 8192, cols: int = 768, dtype: DType = "f32") -> Kernel:
    b = Builder("column_sum", p=[cols], r=[rows])
    x, out = b.input("x", dtype), b.output("out", "f32")
    i, j = b.axes
    b.store(out, i, b.reduce("sum", b.load(x, j * cols + i).to("f32")))
    return b.build()


def transpose(rows: int = 1024, cols: int = 2048, dtype: DType = "bf16") -> Kernel:
    b = Builder("transpose", p=[rows, cols])
    x, out = b.input("x", dtype), b.output("out", dtype)
    i, j = b.axes
    b.store(out, i * cols + j, b.load(x, j * rows + i))
    return b.build()


def embedding(n: Extent = 4096, width: int = 768, rows: int = 30522, dtype: DType = "bf16") -> Kernel:
    b = Builder("embedding", p=[n, width], symbols=hints(n))
    ids, table, out = b.input("ids", "i64"), b.input("table", dtype), b.output("out", dtype)
    i, j = b.axes
    row = b.bound(b.load(ids, i), rows, wrap=True)
    b.store(out, i * width + j, b.load(table, b.indirect(row, width) + j))
    return b.build()


def scatter_add(n: int = 4096, width: int = 768, rows: int = 30522, dtype: DType = "f32") -> Kernel:
    b = Builder("scatter_add", p=[n, width])
    ids, src, out = b.input("ids", "i64"), b.input("src", dtype), b.inout("out", dtype)
    i, j = b.axes
    row = b.bound(b.load(ids, i), rows)
    b.store(out, b.indirect(row, width) + j, b.load(src, i * width + j), how="add")
    return b.build()


def argmax(rows: int = 64, cols: int = 50257) -> Kernel:
    b = Builder("argmax", p=[rows], r=[cols])
    x, out = b.input("x", "f32"), b.output("out", "i64")
    i, j = b.axes
    b.store(out, i, b.reduce("argmax", b.load(x, i * cols + j)))
    return b.build()


def cumsum(rows: int = 64, cols: Extent = 10000, dtype: DType = "f32") -> Kernel:
    b = Builder("cumsum", p=[rows], r=[cols], symbols=hints(cols))
    x, out = b.input("x", dtype), b.output("out", dtype)
    i, j = b.axes
    b.store(out, i * cols + j, b.scan("sum", b.load(x, i * cols + j)))
    return b.build()


def masked_mean(rows: int = 512, cols: int = 300) -> Kernel:
    """Booleans in and out, a row reduction of each kind of flag."""
    b = Builder("masked_mean", p=[rows], r=[cols])
    x, m, out, some = b.input("x", "f32"), b.input("m", "bool"), b.output("out", "f32"), b.output("some", "bool")
    i, j = b.axes
    keep = b.load(m, i * cols + j)
    b.store(out, i, b.reduce("mean", b.where(keep, b.load(x, i * cols + j), 0.0)))
    b.store(some, i, b.reduce("any", keep) & ~b.reduce("all", keep))
    return b.build()


def double_math(n: int = 5000) -> Kernel:
    """f64 through the library functions, and integers."""
    b = Builder("double_math", p=[n])
    x, k, out = b.input("x", "f64"), b.input("k", "i64"), b.output("out", "f64")
    (i,) = b.axes
    v, q = b.load(x, i), b.op("remainder", b.load(k, i), b.const(7, "i64"))
    b.store(out, i, b.op("tanh", v) / (b.op("exp", v) + 0.1) + q.to("f64"))
    return b.build()


def suite() -> list[Kernel]:
    """What is built for every target."""
    n = symbol("n")
    return [
        add_gelu(), add_gelu(n, "bf16"), softmax(dtype="bf16"), softmax(cols=50257), softmax(n, symbol("m")),
        layer_norm(dtype="bf16"), layer_norm(4, 1 << 20), column_sum(dtype="bf16"), transpose(),
        embedding(), embedding(n), scatter_add(), argmax(), cumsum(), masked_mean(), double_math(),
    ]  # fmt: skip


def reference(kernel: Kernel, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> list[torch.Tensor]:
    """The buffers after the reference interpreter."""
    out = [t.clone() for t in tensors]
    interpret(kernel, out, sizes)
    return out
