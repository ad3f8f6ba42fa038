"""Shared by the tests of x86_int8: sketches of quantized graphs, and the exact judge of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import _torch_compat as compat
from fusewright.interface import Device, Fragment, Value
from fusewright_int8 import engines
from fusewright_int8.backend import X86Int8
from fusewright_int8.engines import present
from fusewright_int8.run import native
from tests.fragments import Context, Sketch, by_preference, targets

compat.register_quantized_decomposed()

DEVICE = Device("cpu", "avx512_vnni", frozenset({"avx512_vnni", "mkldnn_bf16"}))
BY_NAME = {e.name: e for e in engines.ENGINES}
ENGINES = tuple(e.name for e in present())
needs_core = pytest.mark.skipif(native.absent() is not None, reason=f"no native core: {native.absent()}")
needs_onednn = pytest.mark.skipif("onednn" not in ENGINES, reason=f"{BY_NAME['onednn'].absent()}; runs with VNNI")
U8, I8, F32, BF16 = torch.uint8, torch.int8, torch.float32, torch.bfloat16
LIMITS = {U8: (0, 255), I8: (-128, 127)}
TIE = 1e-4
"""The distance in levels from the midpoint of two levels within which an fp32 result may round to either."""


def compiled(g: Sketch, outputs: list[Value], engine: str = "core", **options: Any) -> Fragment:
    """Lower the whole sketch with one engine."""
    g.temporaries.clear()
    given = {**X86Int8.options, "engine": engine, **options}
    ctx = Context(given, DEVICE, by_preference(engine, "packed", "aten", "together", "kernel"), specs=g.temporaries)
    found = X86Int8(DEVICE).compile(g.region(outputs), ctx)
    assert isinstance(found, Fragment)
    return found


def quantized_input(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool = False) -> Tensor:
    """Bytes over the whole range, including the limits."""
    low, high = LIMITS[dtype]
    x = torch.randint(low, high + 1, shape).to(dtype)
    x.view(-1)[:2] = torch.tensor([low, high])
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def dequantize(g: Sketch, q: Value, scale: float, zero: int, out_dtype: torch.dtype | None = None) -> Value:
    dtype = g.tensors[q.id].dtype
    return g.op("dequantize", q, scale, zero, *LIMITS[dtype], dtype, out_dtype=out_dtype)


def quantize(g: Sketch, x: Value, scale: float, zero: int, dtype: torch.dtype) -> Value:
    return g.op("quantize", x, scale, zero, *LIMITS[dtype], dtype)


def weight(g: Sketch, w: Tensor, per_channel: bool = True, zeros: Tensor | None = None) -> tuple[Value, Tensor]:
    """Sketch a constant int8 weight, dequantized as in a graph; also return it in fp64."""
    held = g.input(w, const=True)
    if not per_channel:
        return dequantize(g, held, 0.02, 0), w.double() * 0.02
    scales = torch.rand(w.shape[0]) * 0.02 + 0.01
    zeros = torch.zeros(w.shape[0], dtype=torch.int64) if zeros is None else zeros
    column = [-1, *[1] * (w.dim() - 1)]
    value = g.op(
        "dequantize_per_channel", held, g.input(scales, const=True), g.input(zeros, const=True), 0, -128, 127, I8
    )
    return value, (w.double() - zeros.reshape(column)) * scales.double().reshape(column)


def same_levels(ours: Tensor, exact: Tensor, scale: float, zero: int) -> None:
    """Check that `ours` is `exact` (fp64) quantized; at midpoints either neighbour is allowed."""
    low, high = LIMITS[ours.dtype]
    wide = exact / scale + zero
    off = (ours.double() - wide.round().clamp(low, high)).abs()
    middle = ((wide - wide.floor()) - 0.5).abs() < TIE * max(1.0, float(wide.abs().max()) / 256)
    assert bool(((off == 0) | ((off == 1) & middle)).all()), f"{int((off > 0).sum())} of {off.numel()} levels differ"


def run(g: Sketch, out: Value, engine: str = "core", **options: Any) -> tuple[Tensor, Fragment]:
    """Run the fragment, checking eager's shape and strides; return the result and the fragment."""
    fragment = compiled(g, [out], engine, **options)
    (ours,) = g.run(fragment, [out])
    eager = g.tensors[out.id]
    assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
    return ours, fragment


def calls(fragment: Fragment) -> list[str]:
    """The calls that run each time, without dequantizations of weights that nothing reads, which the host drops."""
    return [t for t in targets(fragment) if not t.startswith("quantized_decomposed::dequantize")]


POSTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def post(g: Sketch, y: Value, name: str) -> Value:
    """Sketch one of `POSTS` as an op."""
    if name == "none":
        return y
    return g.op("gelu", y, approximate="tanh") if name == "gelu_tanh" else g.op(name, y)
