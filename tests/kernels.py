"""Loop kernels typical of models, shared by the tests of several emitters."""

from __future__ import annotations

from fusewright.toolkit.ir import Builder, Extent, Kernel
from fusewright.toolkit.ir.extent import Atom, atoms
from fusewright.toolkit.ir.types import DType, compute_type


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


def scatter_extreme(how: str, n: int = 4096, width: int = 4, rows: int = 500, dtype: DType = "f32") -> Kernel:
    b = Builder(f"scatter_{how}", p=[n, width])
    ids, src, out = b.input("ids", "i64"), b.input("src", dtype), b.inout("out", dtype)
    i, j = b.axes
    row = b.bound(b.load(ids, i), rows)
    b.store(out, b.indirect(row, width) + j, b.load(src, i * width + j), how=how)
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


def decayed_maximum(rows: int = 6, steps: Extent = 37, inner: int = 5) -> Kernel:
    """m[t] = max(m[t - 1] + a, b[t]) and, from the same state, n[t] = tanh(n[t - 1] * m[t]): one step reads another's state."""
    b = Builder("decayed_maximum", p=[rows, inner], r=[steps], symbols=hints(steps))
    a, x, out, second = b.input("a", "f32"), b.input("b", "f32"), b.output("out", "f32"), b.output("second", "f32")
    i, j, t = b.axes
    decay, here, first = b.load(a, j), b.load(x, i * (steps * inner) + t * inner + j), b.const(-1e38, "f32")
    top = b.recurrence(first, lambda m: b.op("maximum", m + decay, here))
    b.store(out, i * (steps * inner) + t * inner + j, top)
    b.store(second, i * (steps * inner) + t * inner + j, b.recurrence(first, lambda n: b.op("tanh", n * top)))
    return b.build()


def recurrence(
    outer: int = 6, steps: Extent = 37, inner: int = 5, dtype: DType = "f32", first: float | None = None
) -> Kernel:
    """h[t] = a[t] * h[t - 1] + b[t] along the middle of [outer, steps, inner], from a state per row or a number."""
    b = Builder("recurrence", p=[outer, inner], r=[steps], symbols=hints(steps))
    a, x, h, out = b.input("a", dtype), b.input("b", dtype), b.input("h", dtype), b.output("out", dtype)
    i, j, t = b.axes
    at, state = i * (steps * inner) + t * inner + j, compute_type(dtype)
    before = b.cast(b.load(h, i * inner + j), state) if first is None else b.const(first, state)
    factor, summand = b.cast(b.load(a, at), state), b.cast(b.load(x, at), state)
    b.store(out, at, b.cast(b.recurrence(before, lambda h: factor * h + summand), dtype))
    return b.build()
