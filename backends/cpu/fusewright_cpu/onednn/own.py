"""Products as our own kernels, where they measure faster than a library's: with a constant weight bf16 on AMX
(`fusewright_cpu.kernels.amx_linear`) and fp32 (`vector_linear`), whose activations keep NaN, so that they compute
those as well that oneDNN's calls must not; and of few rows with any weight (`gemv`), which is read where it lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch

from fusewright.interface import OpView, Size, TensorSpec, Value, hint
from fusewright.plan.ir import Ref
from fusewright.toolkit.ir.types import from_torch, to_torch
from fusewright.toolkit.region.builder import Builder, contiguous_strides
from fusewright_cpu.kernels import amx_linear, vector_linear
from fusewright_cpu.kernels.by_hand import MOST_GEMV_ROWS, VECTOR_TILES, AmxLinear, DirectConv, Gemv, VectorLinear
from fusewright_cpu.onednn.tiles import linear_tile_of
from fusewright_cpu.run.sources import hash_of
from fusewright_cpu.target import host_target

FORM, FEW_ROWS = "own", "gemv"
"""The forms of a product (see `choices.linear_form`)."""

Linear: TypeAlias = AmxLinear | VectorLinear
Packing: TypeAlias = Callable[[int, int, int], tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
PACKING: Mapping[torch.dtype, Packing] = {torch.bfloat16: amx_linear.packing, torch.float32: vector_linear.packing}
"""How weights of n columns and k rows are packed in panels of columns, by the type of a product."""


def fits(m: int, k: int, dtype: torch.dtype) -> bool:
    """Return whether a kernel computes products of m rows of k elements on this machine."""
    if dtype not in PACKING:
        return False
    kernel = kernel_of(dtype)
    return m >= kernel.least and k > 0 and k % kernel.depth == 0 and not kernel.refused(host_target())


def kernel_of(
    dtype: torch.dtype, bias: bool = True, add: bool = False, after: str = "", rows: int = 0, columns: int = 0
) -> Linear:
    """Return the kernel for a type of `PACKING`, which wastes least on a result of so many rows and columns."""
    if dtype is torch.bfloat16:
        return AmxLinear(bias, add, after)
    target = host_target()
    tile = linear_tile_of(rows, columns, target)
    size = VECTOR_TILES.get(target.vector_bytes, VECTOR_TILES[64]) if tile is None else (tile.rows, tile.columns, tile.narrow)
    return VectorLinear(bias, add, after, *size)


def takes(op: OpView, operands: Sequence[Value | None], b: Builder) -> bool:
    """Return whether the kernel may compute a product, given its input, weight and bias."""
    x = operands[0].spec if operands[0] is not None else None
    if x is None or not x.static or b.ctx.options["prepack"] != "auto" or not all(map(b.is_const, operands[1:])):
        return False
    k = hint(x.shape[-1])
    return fits(x.numel_hint() // max(k, 1), k, x.dtype)


def activation(op: OpView | None) -> str:
    """Return the kernel's name of a unary op, "" for none."""
    if op is None:
        return ""
    return "gelu_tanh" if op.op == "gelu" and op.arg("approximate") == "tanh" else op.op


def emit(
    x: Value, weight: Ref, bias: Ref | None, n: int, after: tuple[str, tuple[float, ...]], out: Value, op: OpView, b: Builder
) -> None:
    """Emit a linear; `weight` is [n, k], `after` the activation and its scalars, and `out` may have more dimensions."""
    step = row_step(b.spec(x))
    if step is None:
        x = b.row_major(x)
    k, shape = hint(b.spec(x).shape[-1]), b.spec(out).shape
    made = b.with_layout(out, contiguous_strides(shape))  # type: ignore[arg-type]
    launch(x, weight, bias, None, after, (b.spec(x).numel_hint() // k, n, k, step or k), made, op, b)


def launch(
    x: Value, weight: Ref, bias: Ref | None, other: Value | None, after: tuple[str, tuple[float, ...]], sizes: tuple[int, ...],
    out: Value, op: OpView, b: Builder,
) -> None:  # fmt: skip
    """Emit the launch of a linear, `weight` [n, k], whose `x`, `other` and `out` have the strides that `sizes` tell."""
    m, n, k, _ = sizes
    dtype = b.spec(x).dtype
    kernel = kernel_of(dtype, bias is not None, other is not None, after[0], m, n)
    values = [x, Value(_panels(weight, kernel, n, k, b).id, None)]
    if bias is not None:
        wide = b.prepare("aten::_to_copy.default", bias, dtype=torch.float32)
        values.append(Value(b.prepare("aten::constant_pad_nd.default", wide, (0, padded(kernel, n) - n)).id, None))
    values += [] if other is None else [other]
    b.launch(kernel, hash_of(kernel), values, sizes, after[1], out=out, op=op)


def padded(kernel: Linear | DirectConv, n: int) -> int:
    """Return the columns of a packed weight of n columns."""
    return sum(count * columns for count, columns in kernel.panels(n))


def _panels(weight: Ref, kernel: Linear, n: int, k: int, b: Builder) -> Ref:
    """Pack a weight [n, k] in panels of one kind or two."""
    packing = PACKING[to_torch(kernel.dtype)]
    kinds, first, made = [kind for kind in kernel.panels(n) if kind[0]], 0, []
    for count, columns in kinds:
        end = min(n, first + count * columns)
        rows = weight if len(kinds) == 1 else b.prepare("aten::slice.Tensor", weight, 0, first, end)
        made.append(packed(rows, packing(end - first, k, columns), b))
        first = end
    if len(made) == 1:
        return made[0]
    return b.prepare("aten::cat.default", tuple(b.prepare("aten::reshape.default", m, (-1,)) for m in made))


def packed(weight: Ref, packing: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], b: Builder) -> Ref:
    """Pack a weight as a function of `PACKING` tells."""
    pad, shape, order = packing
    whole = b.prepare("aten::constant_pad_nd.default", weight, pad)
    panels = b.prepare("aten::permute.default", b.prepare("aten::reshape.default", whole, shape), order)
    return b.prepare("aten::clone.default", panels, memory_format=torch.contiguous_format)


def row_step(spec: TensorSpec) -> int | None:
    """Return how far the rows of a tensor of fixed size are apart, in elements; None if that differs or rows are not dense."""
    *shape, k = (hint(n) for n in spec.shape)
    *steps, dense = (hint(n) for n in spec.stride)
    rows = [(size, step) for size, step in zip(shape, steps, strict=True) if size != 1]
    if not rows:
        return k if dense == 1 else None
    even = all(outer == size * step for (_, outer), (size, step) in pairwise(rows))
    return rows[-1][1] if even and dense == 1 and rows[-1][1] >= k else None


# -- few rows


def gemv_of(op: OpView, operands: Sequence[Value | None], b: Builder) -> Gemv | None:
    """Return the kernel for a product of few rows of dense [n, k] weights, given input, weight and bias, or None."""
    x, w, bias = (None if v is None else b.spec(v) for v in operands)
    assert x is not None and w is not None
    if not (x.static and w.static):
        return None
    k = hint(x.shape[-1])
    rows, weight = x.numel_hint() // max(k, 1), (k, 1) if op.op == "linear" else (1, k)
    if not 0 < rows <= MOST_GEMV_ROWS or not _dense(x, contiguous_strides(x.shape)) or not _dense(w, weight):  # type: ignore[arg-type]
        return None
    if bias is not None and not is_dense_bias(bias, w.shape[0 if op.op == "linear" else 1]):
        return None
    kernel = Gemv(rows, from_torch(x.dtype), from_torch(w.dtype), "" if bias is None else from_torch(bias.dtype))
    return None if kernel.refused(host_target()) else kernel


def is_dense_bias(spec: TensorSpec, columns: Size) -> bool:
    """Whether there is one number per column, side by side: our kernels, as oneDNN's calls, read no strides of a bias."""
    return spec.shape == (columns,) and _dense(spec, (1,))


def _dense(spec: TensorSpec, stride: Sequence[int]) -> bool:
    return all(n == 1 or s == d for n, s, d in zip(spec.shape, spec.stride, stride, strict=True))


def emit_few_rows(
    kernel: Gemv, operands: Sequence[Value | None], sizes: tuple[int, int], out: Value, op: OpView, b: Builder
) -> None:
    """Emit the kernel that `gemv_of` returned for operands of these shapes; `sizes`: columns of the result, and of the input."""
    made = b.with_layout(out, contiguous_strides(b.spec(out).shape))  # type: ignore[arg-type]
    b.launch(kernel, hash_of(kernel), [v for v in operands if v is not None], sizes, (), out=made, op=op)
