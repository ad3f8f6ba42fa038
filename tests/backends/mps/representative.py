"""Kernels typical of models, emitted and handwritten."""

from __future__ import annotations

from fusewright.toolkit.ir import Builder, Extent, Kernel, symbol
from fusewright.toolkit.ir.extent import atoms
from fusewright.toolkit.ir.types import DType
from fusewright_mps.kernels.decode import Parts
from fusewright_mps.kernels.gemv import Gemv
from fusewright_mps.kernels.handwritten import Handwritten
from tests.kernels import (
    add_gelu,
    argmax,
    column_sum,
    cumsum,
    embedding,
    hints,
    scatter_add,
    softmax,
    transpose,
)

N: Extent = symbol("n")


def bias_silu(rows: int = 4096, cols: int = 768, dtype: DType = "f16") -> Kernel:
    """A bias along rows and the SiLU of a gated unit; fast math, since the result is a half type."""
    b = Builder("bias_silu", p=[rows, cols])
    x, bias, gate, out = b.input("x", dtype), b.input("bias", dtype), b.input("gate", dtype), b.output("out", dtype)
    i, j = b.axes
    v = b.load(x, i * cols + j).to("f32") + b.load(bias, j).to("f32")
    b.store(out, i * cols + j, (v * b.op("sigmoid", v) * b.load(gate, i * (2 * cols) + j).to("f32")).to(dtype))
    return b.build()


def layer_norm(rows: Extent = 4096, cols: int = 768, dtype: DType = "bf16") -> Kernel:
    b = Builder("layer_norm", p=[rows], r=[cols], symbols=hints(rows))
    x, w, c, out = b.input("x", dtype), b.input("weight", dtype), b.input("bias", dtype), b.output("out", dtype)
    i, j = b.axes
    v = b.load(x, i * cols + j).to("f32")
    mean, m2 = b.reduce("mean", v), b.reduce("m2", v)
    y = (v - mean) * b.op("rsqrt", m2 * (1 / cols) + 1e-5) * b.load(w, j).to("f32") + b.load(c, j).to("f32")
    b.store(out, i * cols + j, y.to(dtype))
    return b.build()


def rms_norm(rows: Extent = N, cols: int = 4096, dtype: DType = "f16") -> Kernel:
    """One row per threadgroup."""
    b = Builder("rms_norm", p=[rows], r=[cols], symbols={a: 16 for a in atoms(rows)})
    x, w, out = b.input("x", dtype), b.input("weight", dtype), b.output("out", dtype)
    i, j = b.axes
    v = b.load(x, i * cols + j).to("f32")
    scale = b.op("rsqrt", b.reduce("sum", v * v) * (1 / cols) + 1e-6)
    b.store(out, i * cols + j, (v * scale * b.load(w, j).to("f32")).to(dtype))
    return b.build()


KERNELS = {
    k.name: k
    for k in (
        add_gelu(N, "bf16"), bias_silu(), softmax(4096, 50257), layer_norm(), rms_norm(), column_sum(),
        transpose(), embedding(N), scatter_add(), argmax(), cumsum(),
    )
}  # fmt: skip

BY_HAND: dict[str, Handwritten] = {
    "gemv_int4": Gemv("half", 4, 1, 4096, 4096, 32, "", False, 4, "tinygemm"),
    "decode": Parts("bfloat", "bool", 128, 1, 8, 4, 1, 4096, 128, (4096, 128, 4096, *(2**22, 2**19, 128) * 2, 0, 0, 0, 1)),
}
"""Products with packed weights, and attention with one query over a cache."""
