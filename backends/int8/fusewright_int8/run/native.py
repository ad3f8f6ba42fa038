"""The native core: int8 products and convolutions for several x86-64 instruction sets, on torch's own threads.

    packed = native.pack_linear(weight)                              # once
    y = native.linear(x, packed, w_scale, bias, x_scale, x_zero_point, post="relu", out_dtype=torch.uint8, ...)

Every function takes only tensors, numbers, strings and types, so that a plan can call it. `reference` defines the results bit for
bit. The extension does not link torch: it is given addresses and sizes. If it is absent, `absent()` says why, and calls raise
`BackendUnavailableError`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fusewright_int8.run import core
from fusewright_int8.run.core import absent, isa, isas, use_isa
from fusewright_int8.run.reference import POSTS, RULES, limits

__all__ = [
    "MOST_INNER", "MOST_K", "absent", "conv2d", "dynamic_linear", "isa", "isas", "linear", "matmul", "pack_conv2d", "pack_linear",
    "quantize", "quantize_dynamic", "use_isa", "weight_linear",
]  # fmt: skip

MOST_K = 65_536
"""Longest sum of products that fits int32 for any values: 65,536 * 255 * 128 < 2**31."""

MOST_INNER = 33_025
"""The same limit for two operands with zero points: 33,025 * 255 * 255 < 2**31."""

MOST_TAPS = 1024
"""Largest window that the depthwise kernel takes."""

_TYPES = {torch.uint8: 0, torch.int8: 1, torch.float32: 2, torch.bfloat16: 3}
_POSTS = {name: k for k, name in enumerate(POSTS)}
_SOURCES = {"decomposed": 0, "affine": 1, "token": 2}
_RULES = {
    name: (r.per_row, r.symmetric, _SOURCES[r.source], r.eps, r.low, r.high) for name, r in RULES.items()
}  # fmt: skip
_BYTES = (torch.uint8, torch.int8)
_FLOATS = (torch.float32, torch.bfloat16)
_LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}

_After: TypeAlias = tuple[Any, ...]


# ---------------------------------------------------------------- products


def pack_linear(weight: Tensor) -> Tensor:
    """Pack int8 [n, k] for the products, into one dimension of int8. Raise ValueError if k is above `MOST_K`."""
    _check(weight.dtype == torch.int8 and weight.dim() == 2, "the weight", weight, "int8 [n, k]")
    n, k = weight.shape
    _check_k(k)
    packed = torch.empty(core.extension().packed_bytes(n, k), dtype=torch.int8)
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
    _check(x.dtype in _BYTES, "x", x, "uint8 or int8")
    rows, n, k = _operands(x, packed, w_scale, bias)
    _check_zero("x_zero_point", x_zero_point, x.dtype)
    shape = (*x.shape[:-1], n)
    residual = _residual(residual, shape)
    out, after = _after(
        shape, n, residual, residual_scale, residual_zero_point, post, post_args, out_dtype, out_scale,
        out_zero_point, out_low, out_high,
    )  # fmt: skip
    core.extension().linear(
        rows.data_ptr(), rows.stride(0), x.dtype == torch.int8, rows.shape[0], n, k, packed.data_ptr(), w_scale.data_ptr(),
        _address(bias), x_scale, x_zero_point, after, torch.get_num_threads(),
    )  # fmt: skip
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
    _check(x.dtype in _BYTES and x.dim() >= 2, "x", x, "uint8 or int8 [..., m, k]")
    fits = y.dtype in _BYTES and y.dim() == x.dim() and y.shape[:-1] == (*x.shape[:-2], x.shape[-1])
    _check(fits, "y", y, f"uint8 or int8 ({', '.join(map(str, (*x.shape[:-2], x.shape[-1])))}, n)")
    _check_zero("x_zero_point", x_zero_point, x.dtype)
    _check_zero("y_zero_point", y_zero_point, y.dtype)
    (m, k), n = x.shape[-2:], y.shape[-1]
    if k > MOST_INNER:
        raise ValueError(f"sums of {k} products can overflow int32; leave those of more than {MOST_INNER} in floats")
    batch = math.prod(x.shape[:-2])
    left, right = x.reshape(batch, m, k), y.reshape(batch, k, n)
    left = left if left.stride(2) == 1 else left.contiguous()
    out, after = _after(
        (*x.shape[:-1], n), n, None, 1.0, 0, post, post_args, out_dtype, out_scale, out_zero_point, out_low, out_high
    )
    core.extension().matmul(
        left.data_ptr(), left.stride()[:2], x.dtype == torch.int8, right.data_ptr(), right.stride(), y.dtype == torch.int8,
        (batch, m, n, k), (x_scale, x_zero_point, y_scale, y_zero_point), after, torch.get_num_threads(),
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
    out, after = _after(shape, n, residual, 1.0, 0, post, post_args, _float(out_dtype or x.dtype))
    core.extension().dynamic_linear(
        rows.data_ptr(), rows.stride(0), _TYPES[x.dtype], rows.shape[0], n, k, packed.data_ptr(), w_scale.data_ptr(),
        _address(bias), _rule(rule), after, torch.get_num_threads(),
    )  # fmt: skip
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
    out, after = _after(shape, n, residual, 1.0, 0, post, post_args, _float(out_dtype or x.dtype))
    core.extension().weight_linear(
        rows.data_ptr(), rows.stride(0), _TYPES[x.dtype], rows.shape[0], n, k, packed.data_ptr(), w_scale.data_ptr(),
        _address(bias), after, torch.get_num_threads(),
    )  # fmt: skip
    return out


# ---------------------------------------------------------------- convolutions


def pack_conv2d(weight: Tensor, groups: int = 1) -> Tensor:
    """Pack int8 [n, c / groups, kh, kw] for `conv2d`. Raise ValueError if c / groups * kh * kw is above `MOST_K`."""
    _check(weight.dtype == torch.int8 and weight.dim() == 4, "the weight", weight, "int8 [n, c / groups, kh, kw]")
    n, c, kh, kw = weight.shape
    _check_k(c * kh * kw)
    if groups < 1 or n % groups:
        raise ValueError(f"{n} output channels do not make {groups} groups of one size")
    depthwise = _is_depthwise(c * groups, n, groups, kh * kw)
    packed = torch.empty(_packed_conv(n, c, (kh, kw), groups, depthwise), dtype=torch.int8)
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

    `packed` comes from `pack_conv2d`. Padding has the value 0.0, that is `x_zero_point`. residual has the result's shape.
    Depthwise convolutions (groups == c == n) have their own kernel. Other arguments as in `linear`.
    """
    _check(x.dtype in _BYTES and x.dim() == 4, "x", x, "uint8 or int8 [batch, c, h, w]")
    n, given = w_scale.numel(), (tuple(kernel_size), tuple(stride), tuple(padding), tuple(dilation), groups)
    low, high = (out_low, out_high) if out_dtype in _BYTES else (None, None)
    levels = out_dtype, out_scale, out_zero_point, low, high
    call = _conv_call(x.shape, x.dtype, n, *given, x_zero_point, post, tuple(post_args), *levels)
    _check_factors(w_scale, bias, n)
    _check_packed(packed, call.packed_bytes)
    residual = _images(residual, call.shape)
    return _convolved(call, x, packed, w_scale, bias, x_scale, x_zero_point, residual, residual_scale, residual_zero_point)


def planned_conv2d(
    x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    residual: Tensor | None, residual_scale: float, residual_zero_point: int, post: str, post_args: Sequence[float],
    out_dtype: torch.dtype, out_scale: float, out_zero_point: int, out_low: int, out_high: int,
) -> Tensor:  # fmt: skip
    """`conv2d` of a plan, which prepared the weight, its scales and the bias: they are not checked at every call, which took half
    the time of a small layer on eight cores."""
    call = _conv_call(
        x.shape, x.dtype, w_scale.shape[0], tuple(kernel_size), tuple(stride), tuple(padding), tuple(dilation), groups,
        x_zero_point, post, tuple(post_args), out_dtype, out_scale, out_zero_point, out_low, out_high,
    )  # fmt: skip
    residual = _images(residual, call.shape)
    return _convolved(call, x, packed, w_scale, bias, x_scale, x_zero_point, residual, residual_scale, residual_zero_point)


class _ConvCall(NamedTuple):
    """What a convolution's arguments other than tensors come to, as the extension takes it."""

    shape: tuple[int, ...]
    window: tuple[int, ...]
    sizes: tuple[int, ...]
    packed_bytes: int
    post: tuple[int, float, float]
    dtype: torch.dtype
    levels: tuple[int, float, int, int, int]


def _convolved(
    call: _ConvCall, x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    residual: Tensor | None, residual_scale: float, residual_zero_point: int,
) -> Tensor:  # fmt: skip
    strides = x.stride()
    if strides[1] != 1 and call.sizes[1] != 1:
        x = x.contiguous(memory_format=torch.channels_last)
        strides = x.stride()
    address, row, kind = 0, 0, torch.float32
    if residual is not None:
        address, row, kind = residual.data_ptr(), residual.stride(0), residual.dtype
    out = torch.empty(call.shape, dtype=call.dtype, memory_format=torch.channels_last)
    after = (
        address, row, _TYPES[kind], residual_scale, residual_zero_point, *call.post, out.data_ptr(), call.shape[1], *call.levels,
    )  # fmt: skip
    core.extension().conv2d(
        x.data_ptr(), (strides[0], strides[2], strides[3]), x.dtype == torch.int8, call.sizes, call.window, packed.data_ptr(),
        w_scale.data_ptr(), 0 if bias is None else bias.data_ptr(), x_scale, x_zero_point, after, torch.get_num_threads(),
    )  # fmt: skip
    return out


@functools.lru_cache(4096)
def _conv_call(
    shape: tuple[int, ...], dtype: torch.dtype, n: int, kernel_size: tuple[int, ...], stride: tuple[int, ...],
    padding: tuple[int, ...], dilation: tuple[int, ...], groups: int, x_zero_point: int, post: str, post_args: tuple[float, ...],
    out_dtype: torch.dtype, *levels: Any,
) -> _ConvCall:  # fmt: skip
    """Check the arguments and return what the extension takes. `levels`: scale, zero point and limits of the result."""
    _check_zero("x_zero_point", x_zero_point, dtype)
    if out_dtype not in _TYPES:
        raise ValueError(f"out_dtype is {out_dtype}; results are float32, bfloat16, uint8 or int8")
    batch, c, h, w = shape
    window = _window(kernel_size, stride, padding, dilation)
    if groups < 1 or c % groups or n % groups:
        raise ValueError(f"{c} input and {n} output channels do not make {groups} groups of one size")
    taps = window[0] * window[1]
    oh, ow = (_positions(size, *window[d::2]) for d, size in enumerate((h, w)))
    packed_bytes = _packed_conv(n, c // groups, window[:2], groups, _is_depthwise(c, n, groups, taps))
    sizes = batch, c, h, w, n, oh, ow, groups
    ends = _post(post, post_args), out_dtype, _levels(out_dtype, *levels)
    return _ConvCall((batch, n, oh, ow), window, sizes, packed_bytes, *ends)


def _window(*pairs: Sequence[int]) -> tuple[int, ...]:
    """Check kernel size, stride, padding and dilation; return them flattened, two numbers each."""
    for name, pair, least in zip(("kernel_size", "stride", "padding", "dilation"), pairs, (1, 1, 0, 1), strict=True):
        if len(pair) != 2 or min(pair) < least:
            raise ValueError(f"{name} is {tuple(pair)}; conv2d takes two numbers from {least}")
    return tuple(int(v) for pair in pairs for v in pair)


def _positions(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Return the size of the result along one dimension."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    if room < 0:
        raise ValueError(f"a window of {kernel} (dilation {dilation}) does not fit {size} with padding {padding}")
    return room // stride + 1


def _is_depthwise(c: int, n: int, groups: int, taps: int) -> bool:
    return 1 < groups == c == n and taps <= MOST_TAPS


def _packed_conv(n: int, c: int, kernel: tuple[int, ...], groups: int, depthwise: bool) -> int:
    if depthwise:
        return int(core.extension().depthwise_bytes(n, *kernel))
    return groups * int(core.extension().packed_bytes(n // groups, c * math.prod(kernel)))


# ---------------------------------------------------------------- quantization alone


def quantize(
    x: Tensor, scale: float, zero_point: int, dtype: torch.dtype, low: int | None = None, high: int | None = None
) -> Tensor:
    """Quantize x (fp32 or bf16) to uint8 or int8: see `reference.quantize`."""
    _check(x.dtype in _FLOATS, "x", x, "fp32 or bf16")
    low, high = limits(dtype, low, high)
    _check_zero("zero_point", zero_point, dtype)
    rows = _rows(x if x.dim() else x.reshape(1))
    q = torch.empty(x.shape, dtype=dtype)
    core.extension().quantize(
        rows.data_ptr(), rows.stride(0), _TYPES[x.dtype], *rows.shape, 1.0 / _scale("scale", scale), zero_point, low, high,
        q.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return q


def quantize_dynamic(x: Tensor, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [..., k] by `reference.RULES[rule]`: return values of its shape, and fp32 scales and int32 zero points per row
    ([1] each if shared)."""
    _check(x.dtype in _FLOATS and x.dim() > 0, "x", x, "fp32 or bf16 [..., k]")
    rows, given = _rows(x), _rule(rule)
    q = torch.empty(x.shape, dtype=torch.uint8 if RULES[rule].low == 0 else torch.int8)
    count = rows.shape[0] if RULES[rule].per_row else 1
    scale, zero = torch.empty(count), torch.empty(count, dtype=torch.int32)
    core.extension().quantize_dynamic(
        rows.data_ptr(), rows.stride(0), _TYPES[x.dtype], *rows.shape, given, q.data_ptr(), scale.data_ptr(), zero.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
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
    _check_k(k)
    _check_factors(w_scale, bias, n)
    _check_packed(packed, core.extension().packed_bytes(n, k))
    return _rows(x), n, k


def _float_operands(x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None) -> tuple[Tensor, int, int]:
    _check(x.dtype in _FLOATS, "x", x, "fp32 or bf16 [..., k]")
    return _operands(x, packed, w_scale, bias)


def _after(
    shape: tuple[int, ...], n: int, residual: Tensor | None, residual_scale: float, residual_zero_point: int, post: str,
    post_args: Sequence[float], out_dtype: torch.dtype, out_scale: float = 1.0, out_zero_point: int = 0,
    out_low: int | None = None, out_high: int | None = None,
) -> tuple[Tensor, _After]:  # fmt: skip
    """Return an empty result [..., n] and the extension's epilogue arguments. `residual` comes from `_residual`; the caller keeps
    it alive until the extension has run."""
    if out_dtype not in _TYPES:
        raise ValueError(f"out_dtype is {out_dtype}; results are float32, bfloat16, uint8 or int8")
    address, row, kind = 0, 0, torch.float32
    if residual is not None:
        address, row, kind = residual.data_ptr(), residual.stride(0), residual.dtype
    out = torch.empty(shape, dtype=out_dtype)
    after = (
        address, row, _TYPES[kind], residual_scale, residual_zero_point, *_post(post, post_args), out.data_ptr(), n,
        *_levels(out_dtype, out_scale, out_zero_point, out_low, out_high),
    )  # fmt: skip
    return out, after


@functools.lru_cache(4096)
def _levels(
    dtype: torch.dtype, scale: float, zero_point: int, low: int | None, high: int | None
) -> tuple[int, float, int, int, int]:
    """Return a result's type, the inverse of its scale, its zero point and its limits."""
    if dtype not in _BYTES:
        return _TYPES[dtype], 1.0, zero_point, 0, 255
    _check_zero("out_zero_point", zero_point, dtype)
    return _TYPES[dtype], 1.0 / _scale("out_scale", scale), zero_point, *limits(dtype, low, high)


def _post(post: str, args: Sequence[float]) -> tuple[int, float, float]:
    if post not in _POSTS:
        raise ValueError(f"there is no post-op {post!r}; the core has {', '.join(_POSTS)}")
    if len(args) != (2 if post == "clamp" else 0):
        raise ValueError(f"{post} takes {'two numbers' if post == 'clamp' else 'no numbers'}, not {list(args)}")
    low, high = args if args else (0.0, 0.0)
    return _POSTS[post], low, high


def _rule(rule: str) -> tuple[Any, ...]:
    if rule not in _RULES:
        raise ValueError(f"there is no rule {rule!r} for dynamic quantization; there are {', '.join(_RULES)}")
    return _RULES[rule]


def _scale(name: str, scale: float) -> float:
    if not scale > 0.0:
        raise ValueError(
            f"{name} is {scale}; a scale is a positive number: calibrate with inputs that are not constant zero"
        )
    return scale


def _float(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _FLOATS:
        raise ValueError(f"out_dtype is {dtype}; without a scale for its values it can be float32 or bfloat16")
    return dtype


def _check(fine: bool, name: str, t: Tensor, wanted: str) -> None:
    if not fine or not t.is_cpu:
        raise ValueError(f"{name} is {t.dtype} {tuple(t.shape)} on {t.device}; the core takes {wanted} on the CPU")


def _check_k(k: int) -> None:
    if k > MOST_K:
        raise ValueError(
            f"sums of {k} products of 8 bits can overflow int32; leave layers of more than {MOST_K} in floats"
        )


def _check_zero(name: str, zero_point: int, dtype: torch.dtype) -> None:
    least, most = _LIMITS[dtype]
    if not least <= zero_point <= most:
        raise ValueError(f"{name} is {zero_point}; {dtype} holds {least} to {most}")


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
        residual.dtype in _TYPES and residual.shape == shape,
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
