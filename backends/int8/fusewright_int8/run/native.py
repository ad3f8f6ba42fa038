"""The native core: int8 products and convolutions for several x86-64 instruction sets, on torch's own threads.

    packed = native.pack_linear(weight)                              # once
    y = native.linear(x, packed, w_scale, bias, x_scale, x_zero_point, post="relu", out_dtype=torch.uint8, ...)

Every function takes only tensors, numbers, strings and types, so that a plan can call it. `reference` defines the results bit for
bit. The extension does not link torch: it is given addresses and sizes (`words`). If it is absent, `absent()` says why, and calls
raise `BackendUnavailableError`. Plans launch the same entries without these checks of tensors: see `bound`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusewright.interface import HOST
from fusewright_int8.run import core
from fusewright_int8.run.core import absent, isa, isas, use_isa
from fusewright_int8.run.reference import RULES
from fusewright_int8.run.words import (
    BYTES,
    FLOATS,
    MOST_INNER,
    MOST_K,
    TYPES,
    after,
    check_groups,
    check_inner,
    check_k,
    check_zero,
    checked_limits,
    float_type,
    is_depthwise,
    packed_conv,
    packed_linear,
    positive,
    result_size,
    rule_words,
    run,
    window,
)

__all__ = [
    "MOST_INNER", "MOST_K", "absent", "conv2d", "dynamic_linear", "isa", "isas", "linear", "matmul", "pack_conv2d", "pack_linear",
    "quantize", "quantize_dynamic", "use_isa", "weight_linear",
]  # fmt: skip


# ---------------------------------------------------------------- products


def pack_linear(weight: Tensor) -> Tensor:
    """Pack int8 [n, k] for the products, into one dimension of int8. Raise ValueError if k is above `MOST_K`."""
    _check(weight.dtype == torch.int8 and weight.dim() == 2, "the weight", weight, "int8 [n, k]")
    n, k = weight.shape
    check_k(k)
    packed = torch.zeros(packed_linear(n, k), dtype=torch.int8, device=HOST)
    core.extension().pack_linear(weight.data_ptr(), *weight.stride(), n, k, packed.data_ptr())
    return packed


def linear(
    x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int, *,
    residual: Tensor | None = None, residual_scale: float = 1.0, residual_zero_point: int = 0,
    post: str = "none", post_args: Sequence[float] = (), out_dtype: torch.dtype = torch.float32,
    out_scale: float = 1.0, out_zero_point: int = 0, out_low: int | None = None, out_high: int | None = None,
) -> Tensor:  # fmt: skip
    """Static int8: post((x - x_zero_point) * x_scale @ (weight * w_scale).T + bias + residual), optionally quantized.

    x [..., k] is uint8 or int8, `packed` comes from `pack_linear`, w_scale and bias are fp32 [n], residual [..., n] is fp32, bf16,
    uint8 or int8. `post`: a name of `reference.POSTS`. out_dtype is fp32, bf16, uint8 or int8; 8-bit results are quantized by
    out_scale and out_zero_point to [out_low, out_high] (default: the type's limits). Rows of x may have gaps between them; other
    strides are copied. Raise ValueError for invalid arguments.
    """
    _check(x.dtype in BYTES, "x", x, "uint8 or int8")
    rows, n, k = _operands(x, packed, w_scale, bias)
    check_zero("x_zero_point", x_zero_point, x.dtype)
    shape = (*x.shape[:-1], n)
    residual = _residual(residual, shape)
    out, ends = _after(
        shape, n, residual, residual_scale, residual_zero_point, post, post_args, out_dtype, out_scale,
        out_zero_point, out_low, out_high,
    )  # fmt: skip
    weights = packed.data_ptr(), w_scale.data_ptr(), _address(bias), n, k
    signed = x.dtype == torch.int8
    run("linear", rows.data_ptr(), rows.stride(0), signed, x_scale, x_zero_point, rows.shape[0], *weights, *ends)
    return out


def matmul(
    x: Tensor, y: Tensor, x_scale: float, x_zero_point: int, y_scale: float, y_zero_point: int, *,
    post: str = "none", post_args: Sequence[float] = (), out_dtype: torch.dtype = torch.float32,
    out_scale: float = 1.0, out_zero_point: int = 0, out_low: int | None = None, out_high: int | None = None,
) -> Tensor:  # fmt: skip
    """Product of two activations: post((x - x_zero_point) * x_scale @ (y - y_zero_point) * y_scale), optionally quantized.

    x [..., m, k] and y [..., k, n] are uint8 or int8 with equal leading sizes; y may have any strides and is packed at each call.
    Other arguments as in `linear`. Raise ValueError if k is above `MOST_INNER`.
    """
    _check(x.dtype in BYTES and x.dim() >= 2, "x", x, "uint8 or int8 [..., m, k]")
    fits = y.dtype in BYTES and y.dim() == x.dim() and y.shape[:-1] == (*x.shape[:-2], x.shape[-1])
    _check(fits, "y", y, f"uint8 or int8 ({', '.join(map(str, (*x.shape[:-2], x.shape[-1])))}, n)")
    check_zero("x_zero_point", x_zero_point, x.dtype)
    check_zero("y_zero_point", y_zero_point, y.dtype)
    (m, k), n = x.shape[-2:], y.shape[-1]
    check_inner(k)
    batch = math.prod(x.shape[:-2])
    left, right = x.reshape(batch, m, k), y.reshape(batch, k, n)
    left = left if left.stride(2) == 1 else left.contiguous()
    out, ends = _after(
        (*x.shape[:-1], n), n, None, 1.0, 0, post, post_args, out_dtype, out_scale, out_zero_point, out_low, out_high
    )
    run(
        "matmul", left.data_ptr(), *left.stride()[:2], x.dtype == torch.int8, x_scale, x_zero_point,
        right.data_ptr(), *right.stride(), y.dtype == torch.int8, y_scale, y_zero_point, batch, m, n, k, *ends,
    )  # fmt: skip
    return out


def dynamic_linear(
    x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, rule: str = "tensor", *,
    residual: Tensor | None = None, post: str = "none", post_args: Sequence[float] = (),
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Dynamic int8 in one call: quantize x [..., k] (fp32 or bf16) by `reference.RULES[rule]`, multiply, scale, add, apply post-op.

    residual is fp32 or bf16; out_dtype is fp32 or bf16 (default: that of x). Other arguments as in `linear`. A row (or tensor) that
    holds NaN or Inf gives NaN.
    """
    rows, n, k = _float_operands(x, packed, w_scale, bias)
    shape = (*x.shape[:-1], n)
    residual = _residual(residual, shape)
    out, ends = _after(shape, n, residual, 1.0, 0, post, post_args, float_type(out_dtype or x.dtype))
    weights = packed.data_ptr(), w_scale.data_ptr(), _address(bias), n, k
    run("dynamic_linear", *_float_rows(rows), *weights, *rule_words(rule), *ends)
    return out


def weight_linear(
    x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, *,
    residual: Tensor | None = None, post: str = "none", post_args: Sequence[float] = (),
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Weight-only int8: x [..., k] (fp32 or bf16) times the packed weight, rounded once; see `reference.weight_linear`. Runs at
    memory speed for a few rows; for many, a float product with a widened weight is faster. Arguments as in `dynamic_linear`."""
    rows, n, k = _float_operands(x, packed, w_scale, bias)
    shape = (*x.shape[:-1], n)
    residual = _residual(residual, shape)
    out, ends = _after(shape, n, residual, 1.0, 0, post, post_args, float_type(out_dtype or x.dtype))
    weights = packed.data_ptr(), w_scale.data_ptr(), _address(bias), n, k
    run("weight_linear", *_float_rows(rows), *weights, *ends)
    return out


# ---------------------------------------------------------------- convolutions


def pack_conv2d(weight: Tensor, groups: int = 1) -> Tensor:
    """Pack int8 [n, c / groups, kh, kw] for `conv2d`. Raise ValueError if c / groups * kh * kw is above `MOST_K`."""
    _check(weight.dtype == torch.int8 and weight.dim() == 4, "the weight", weight, "int8 [n, c / groups, kh, kw]")
    n, c, kh, kw = weight.shape
    check_k(c * kh * kw)
    if groups < 1 or n % groups:
        raise ValueError(f"{n} output channels do not make {groups} groups of one size")
    depthwise = is_depthwise(c * groups, n, groups, kh * kw)
    packed = torch.zeros(packed_conv(n, c, (kh, kw), groups), dtype=torch.int8, device=HOST)
    core.extension().pack_conv2d(
        weight.data_ptr(), weight.stride(), (n, c, kh, kw, groups), depthwise, packed.data_ptr()
    )  # fmt: skip
    return packed


def conv2d(
    x: Tensor, packed: Tensor, kernel_size: Sequence[int], w_scale: Tensor, bias: Tensor | None, x_scale: float,
    x_zero_point: int, stride: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0), dilation: Sequence[int] = (1, 1),
    groups: int = 1, *,
    residual: Tensor | None = None, residual_scale: float = 1.0, residual_zero_point: int = 0,
    post: str = "none", post_args: Sequence[float] = (), out_dtype: torch.dtype = torch.float32,
    out_scale: float = 1.0, out_zero_point: int = 0, out_low: int | None = None, out_high: int | None = None,
) -> Tensor:  # fmt: skip
    """Static int8 convolution: x [batch, c, h, w] uint8 or int8, read as channels-last, -> channels-last [batch, n, oh, ow].

    `packed` comes from `pack_conv2d`. `padding` is two numbers, or four: top, left, bottom and right. It has the value 0.0, that is
    `x_zero_point`. residual has the result's shape. Depthwise convolutions (groups == c == n) have their own kernel. Other
    arguments as in `linear`.
    """
    _check(x.dtype in BYTES and x.dim() == 4, "x", x, "uint8 or int8 [batch, c, h, w]")
    check_zero("x_zero_point", x_zero_point, x.dtype)
    n, geometry = w_scale.numel(), (tuple(kernel_size), tuple(stride), tuple(padding), tuple(dilation), groups)
    shape, sizes, packed_bytes = _conv_sizes(x.shape, n, *geometry)
    _check_factors(w_scale, bias, n)
    _check_packed(packed, packed_bytes)
    residual = _images(residual, shape)
    if x.stride(1) != 1 and x.shape[1] != 1:
        x = x.contiguous(memory_format=torch.channels_last)
    levels = out_dtype, out_scale, out_zero_point, *((out_low, out_high) if out_dtype in BYTES else (None, None))
    out = torch.empty(shape, dtype=out_dtype, device=HOST, memory_format=torch.channels_last)
    ends = after(_address_of_rows(residual), residual_scale, residual_zero_point, post, post_args, out.data_ptr(), n, *levels)
    batch_step, _, *steps = x.stride()
    run(
        "conv2d", x.data_ptr(), batch_step, *steps, x.dtype == torch.int8, x_scale, x_zero_point,
        packed.data_ptr(), w_scale.data_ptr(), _address(bias), *sizes, *ends,
    )  # fmt: skip
    return out


@functools.lru_cache(4096)
def _conv_sizes(
    shape: tuple[int, ...], n: int, kernel_size: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
    dilation: tuple[int, ...], groups: int,
) -> tuple[tuple[int, ...], tuple[int, ...], int]:  # fmt: skip
    """Check the geometry of a convolution. Return the shape of the result, the words for the sizes, and the bytes of the weight."""
    batch, c, h, w = shape
    around = window(kernel_size, stride, padding, dilation)
    check_groups(c, n, groups)
    oh, ow = result_size((h, w), kernel_size, stride, padding, dilation)
    return (batch, n, oh, ow), (batch, c, h, w, n, oh, ow, groups, *around), packed_conv(n, c // groups, kernel_size, groups)


# ---------------------------------------------------------------- quantization alone


def quantize(
    x: Tensor, scale: float, zero_point: int, dtype: torch.dtype, low: int | None = None, high: int | None = None
) -> Tensor:
    """Quantize x (fp32 or bf16) to uint8 or int8: see `reference.quantize`."""
    _check(x.dtype in FLOATS, "x", x, "fp32 or bf16")
    check_zero("zero_point", zero_point, dtype)
    low, high = checked_limits(dtype, low, high)
    rows = _rows(x if x.dim() else x.reshape(1))
    q = torch.empty(x.shape, dtype=dtype, device=HOST)
    run("quantize", *_float_rows(rows), 1.0 / positive("scale", scale), zero_point, low, high, q.data_ptr())
    return q


def quantize_dynamic(x: Tensor, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [..., k] by `reference.RULES[rule]`: return values of its shape, and fp32 scales and int32 zero points per row
    ([1] each if shared)."""
    _check(x.dtype in FLOATS and x.dim() > 0, "x", x, "fp32 or bf16 [..., k]")
    rows, given = _rows(x), rule_words(rule)
    q = torch.empty(x.shape, dtype=torch.uint8 if RULES[rule].low == 0 else torch.int8, device=HOST)
    count = rows.shape[0] if RULES[rule].per_row else 1
    scale, zero = torch.empty(count, device=HOST), torch.empty(count, dtype=torch.int32, device=HOST)
    run("quantize_dynamic", *_float_rows(rows), *given, q.data_ptr(), scale.data_ptr(), zero.data_ptr())
    return q, scale, zero


# ---------------------------------------------------------------- arguments


def _rows(x: Tensor) -> Tensor:
    """Return x as [rows, k] with dense rows, which may have gaps between them."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _operands(x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None) -> tuple[Tensor, int, int]:
    """Check the operands of a product; return the rows of x, n and k."""
    if x.dim() == 0:
        raise ValueError("x has no dimension; a product needs [..., k]")
    n, k = w_scale.numel(), x.shape[-1]
    check_k(k)
    _check_factors(w_scale, bias, n)
    _check_packed(packed, packed_linear(n, k))
    return _rows(x), n, k


def _float_operands(x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None) -> tuple[Tensor, int, int]:
    _check(x.dtype in FLOATS, "x", x, "fp32 or bf16 [..., k]")
    return _operands(x, packed, w_scale, bias)


def _after(
    shape: tuple[int, ...], n: int, residual: Tensor | None, residual_scale: float, residual_zero_point: int, post: str,
    post_args: Sequence[float], out_dtype: torch.dtype, *levels: Any,
) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
    """Return an empty result [..., n] and the words of its epilogue. `residual` comes from `_residual`; the caller keeps it alive
    until the extension has run."""
    out = torch.empty(shape, dtype=out_dtype, device=HOST)
    given = residual_scale, residual_zero_point, post, post_args
    return out, after(_address_of_rows(residual), *given, out.data_ptr(), n, out_dtype, *levels)


def _address_of_rows(rows: Tensor | None) -> tuple[int, int, torch.dtype] | None:
    return None if rows is None else (rows.data_ptr(), rows.stride(0), rows.dtype)


def _float_rows(rows: Tensor) -> tuple[int, ...]:
    """The words for rows of floats."""
    return rows.data_ptr(), TYPES[rows.dtype], rows.stride(0), *rows.shape


def _check(fine: bool, name: str, t: Tensor, wanted: str) -> None:
    if not fine or not t.is_cpu:
        raise ValueError(f"{name} is {t.dtype} {tuple(t.shape)} on {t.device}; the core takes {wanted} on the CPU")


def _check_factors(w_scale: Tensor, bias: Tensor | None, n: int) -> None:
    for name, t in (("w_scale", w_scale), ("the bias", bias)):
        if t is not None:
            fine = t.dtype == torch.float32 and t.dim() == 1 and t.numel() == n and t.is_contiguous()
            if not fine or not t.is_cpu:
                _check(False, name, t, f"dense float32 [{n}]")


def _check_packed(packed: Tensor, size: int) -> None:
    fine = packed.dtype == torch.int8 and packed.dim() == 1 and packed.numel() == size and packed.is_contiguous()
    if not fine or not packed.is_cpu:
        wanted = f"int8 ({size},) for these sizes, as pack_linear or pack_conv2d makes it,"
        _check(False, "the packed weight", packed, wanted)


def _residual(residual: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return a residual of the result's shape as rows."""
    if residual is None:
        return None
    _check(
        residual.dtype in TYPES and residual.shape == shape,
        "the residual",
        residual,
        f"{shape} in fp32, bf16 or 8 bits",
    )
    return _rows(residual)


def _images(residual: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return a residual of a convolution's result as rows of channels."""
    if residual is None:
        return None
    batch, n, oh, ow = shape
    return _residual(residual.permute(0, 2, 3, 1), (batch, oh, ow, n))


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
