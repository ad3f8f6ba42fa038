"""The native core: int8 products and convolutions for one x86-64 instruction set or another, on torch's own threads.

    packed = native.pack_linear(weight)                              # once
    y = native.linear(x, packed, w_scale, bias, x_scale, x_zero_point, post="relu", out_dtype=torch.uint8, ...)

Every function takes tensors, numbers, strings and types only, so that it can be a plan's call. What each computes, to the bit, is
written in `reference`. The extension links no torch: it sees addresses and sizes. Where it is absent, `absent()` says why, and
calls raise `BackendUnavailableError`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusewright_int8.run import reference
from fusewright_int8.run.reference import RULES, Epilogue

MOST_K = 65_536
"""Longest sum of products that fits int32 whatever the values are: 65,536 * 255 * 128 < 2**31."""

ISA_VARIABLE = "FUSEWRIGHT_INT8_ISA"
"""Environment variable that names the instruction set to use, one of `isas()`."""


def absent() -> str | None:
    """Why there is no native core here, and what would bring it; None when there is one."""
    return None


def isas() -> tuple[str, ...]:
    """Instruction sets that this CPU can run, best first, of "amx_int8", "avx512_vnni", "avx_vnni", "avx2", "portable"."""
    return ("portable",)


def isa() -> str:
    """The one that calls use: the best, or what `FUSEWRIGHT_INT8_ISA` or `use_isa` names. OptionError for another name."""
    return "portable"


def use_isa(name: str | None) -> None:
    """Use this instruction set from now on, the best one for None. Results do not depend on it."""


def pack_linear(weight: Tensor) -> Tensor:
    """int8 [n, k] as the products read it: int8, one dimension. ValueError when k is above `MOST_K`."""
    return weight.clone()


def linear(
    x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int, *,
    residual: Tensor | None = None, residual_scale: float = 1.0, residual_zero_point: int = 0,
    post: str = "none", post_args: Sequence[float] = (), out_dtype: torch.dtype = torch.float32,
    out_scale: float = 1.0, out_zero_point: int = 0, out_low: int | None = None, out_high: int | None = None,
) -> Tensor:  # fmt: skip
    """Static int8: post((x - x_zero_point) * x_scale @ (weight * w_scale).T + bias + residual), perhaps quantized.

    x [..., k] uint8 or int8; `packed` by `pack_linear`; w_scale and bias fp32 [n]. residual [..., n] in fp32, bf16, uint8 or int8.
    `post`: a name of `reference.POSTS`. out_dtype fp32, bf16, uint8 or int8; 8 bits are quantized by out_scale, out_zero_point to
    [out_low, out_high], the type's limits when None. Of x, rows may be apart; else it is copied. ValueError for what cannot be.
    """
    after = Epilogue(residual, residual_scale, residual_zero_point, post, post_args, out_dtype, out_scale, out_zero_point,
                     out_low, out_high)  # fmt: skip
    y = reference.linear(_rows(x), packed, w_scale, bias, x_scale, x_zero_point, _rows_of(after))
    return y.reshape(*x.shape[:-1], -1)


def dynamic_linear(
    x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, rule: str = "tensor", *,
    residual: Tensor | None = None, post: str = "none", post_args: Sequence[float] = (),
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Dynamic int8 in one call: quantize x [..., k] (fp32 or bf16) by `reference.RULES[rule]`, multiply, scale, add, post-op.

    residual in fp32 or bf16. out_dtype fp32 or bf16, x's when None. The others as in `linear`. A row (or tensor) that holds NaN or
    Inf gives NaN.
    """
    after = _rows_of(Epilogue(residual, post=post, post_args=post_args, out_dtype=out_dtype or x.dtype))
    y = reference.dynamic_linear(_rows(x), packed, w_scale, bias, RULES[rule], after)
    return y.reshape(*x.shape[:-1], -1)


def weight_linear(
    x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, *,
    residual: Tensor | None = None, post: str = "none", post_args: Sequence[float] = (),
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Weight-only int8: x [..., k] (fp32 or bf16) times the packed weight, sums in fp32. At memory speed for up to 32 rows; more
    rows are right, but a float product of a widened weight is faster. Arguments as in `dynamic_linear`."""
    after = _rows_of(Epilogue(residual, post=post, post_args=post_args, out_dtype=out_dtype or x.dtype))
    y = reference.weight_linear(_rows(x), packed, w_scale, bias, after)
    return y.reshape(*x.shape[:-1], -1)


def pack_conv2d(weight: Tensor, groups: int = 1) -> Tensor:
    """int8 [n, c / groups, kh, kw] as `conv2d` reads it. ValueError when c / groups * kh * kw is above `MOST_K`."""
    return weight.clone()


def conv2d(
    x: Tensor, packed: Tensor, kernel_size: Sequence[int], w_scale: Tensor, bias: Tensor | None, x_scale: float,
    x_zero_point: int, stride: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0), dilation: Sequence[int] = (1, 1),
    groups: int = 1, *,
    residual: Tensor | None = None, residual_scale: float = 1.0, residual_zero_point: int = 0,
    post: str = "none", post_args: Sequence[float] = (), out_dtype: torch.dtype = torch.float32,
    out_scale: float = 1.0, out_zero_point: int = 0, out_low: int | None = None, out_high: int | None = None,
) -> Tensor:  # fmt: skip
    """Static int8 convolution: x [batch, c, h, w] uint8 or int8, read as channels-last, -> channels-last [batch, n, oh, ow].

    `packed` by `pack_conv2d`. Padding is worth 0.0, that is `x_zero_point`. residual has the result's shape. Depthwise
    (groups == c == n) has a kernel of its own. The rest as in `linear`.
    """
    after = Epilogue(residual, residual_scale, residual_zero_point, post, post_args, out_dtype, out_scale, out_zero_point,
                     out_low, out_high)  # fmt: skip
    y = reference.conv2d(x, packed, w_scale, bias, x_scale, x_zero_point, stride, padding, dilation, groups, after)
    return y.contiguous(memory_format=torch.channels_last)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _rows_of(after: Epilogue) -> Epilogue:
    from dataclasses import replace

    return after if after.residual is None else replace(after, residual=_rows(after.residual))
