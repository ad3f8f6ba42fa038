"""The native core's computations in plain torch: they define the result of each kernel, bit for bit.

Sums of products are exact. They are scaled, and the bias is added, in fp64, then rounded once to fp32. What follows (residual,
post-op, quantization) is fp32 arithmetic in the order of the q/dq graph's own ops (`quantized_decomposed`). So a result equals
that of the q/dq graph with a correctly rounded product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

POSTS: dict[str, Callable[..., Tensor]] = {
    "none": lambda y: y,
    "relu": torch.relu,
    "clamp": lambda y, low, high: torch.clamp(y, low, high),
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
}
"""Post-ops by name; `clamp` takes two numbers. The last three agree with the core to a few units in the last place."""


@dataclass(frozen=True)
class Epilogue:
    """The steps after an fp32 result: add a residual, apply a post-op, then cast to a float type or quantize to [low, high]."""

    residual: Tensor | None = None
    residual_scale: float = 1.0
    residual_zero_point: int = 0
    post: str = "none"
    post_args: Sequence[float] = ()
    out_dtype: torch.dtype = torch.float32
    out_scale: float = 1.0
    out_zero_point: int = 0
    out_low: int | None = None
    out_high: int | None = None

    def apply(self, y: Tensor) -> Tensor:
        """Apply the epilogue to `y`, in fp32 and of the residual's shape."""
        if (r := self.residual) is not None:
            quantized = not r.dtype.is_floating_point
            y = y + (dequantize(r, self.residual_scale, self.residual_zero_point) if quantized else r.float())
        y = POSTS[self.post](y, *self.post_args)
        if self.out_dtype.is_floating_point:
            return y.to(self.out_dtype)
        return quantize(y, self.out_scale, self.out_zero_point, self.out_dtype, self.out_low, self.out_high)


def quantize(
    x: Tensor, scale: float, zero_point: int, dtype: torch.dtype, low: int | None = None, high: int | None = None
) -> Tensor:
    """clamp(round(x * fp32(1 / scale)) + zero_point, low, high), round half to even, NaN to 0:
    `quantized_decomposed::quantize_per_tensor`."""
    low, high = limits(dtype, low, high)
    q = torch.clamp(torch.round(x.float() * (1.0 / scale)) + zero_point, low, high)
    return torch.nan_to_num(q).to(dtype)


def limits(dtype: torch.dtype, low: int | None, high: int | None) -> tuple[int, int]:
    """Return the given limits, by default those of the type."""
    info = torch.iinfo(dtype)
    return info.min if low is None else low, info.max if high is None else high


def dequantize(q: Tensor, scale: float, zero_point: int) -> Tensor:
    """(q - zero_point) * fp32(scale) in fp32: `quantized_decomposed::dequantize_per_tensor`."""
    return (q.float() - zero_point) * scale


@dataclass(frozen=True)
class Dynamic:
    """How scales and zero points are computed from a tensor [rows, k], and how it is then quantized to [low, high].

    per_row:   one scale per row, else one for all.
    symmetric: zero point 0 and the scale from the largest magnitude.
    source:    the implementation to match bit for bit; see `RULES`.
    """

    per_row: bool
    symmetric: bool
    source: str
    eps: float
    low: int = -128
    high: int = 127


RULES: dict[str, Dynamic] = {
    "tensor": Dynamic(False, False, "decomposed", 2.0**-23, 0, 255),
    "tensor_symmetric": Dynamic(False, True, "decomposed", 2.0**-23, -127, 127),
    "row": Dynamic(True, False, "affine", 2.0**-23),
    "row_symmetric": Dynamic(True, True, "affine", 2.0**-23),
    "token": Dynamic(True, False, "token", 2.0**-23),
    "token_symmetric": Dynamic(True, True, "token", 1e-5, -127, 127),
}
"""`tensor*`: `quantized_decomposed::choose_qparams[_symmetric].tensor`, then `quantize_per_tensor` (PT2E, dynamic).
`row*`: torchao's `choose_qparams_affine` and `quantize_affine` on rows (`quantize_`: dynamic activations).
`token*`: `quantized_decomposed::_choose_qparams_per_token_asymmetric_impl`, `choose_qparams_per_token`, then
`quantize_per_token`, whose arithmetic is fp64 in the asymmetric case and rounds after the zero point is added."""


def choose(x: Tensor, rule: Dynamic) -> tuple[Tensor, Tensor]:
    """Return fp32 scales and int32 zero points of x [rows, k], [rows] each or [1]."""
    dims = [-1] if rule.per_row else [0, 1]
    least, most = torch.amin(x, dims).clamp(max=0), torch.amax(x, dims).clamp(min=0)
    # In x's type up to here, bf16 included; from here on it widens where the source does.
    scale = _scale(torch.maximum(-least, most) if rule.symmetric else most - least, rule)
    if rule.symmetric:
        zero = torch.full_like(scale, 128 if rule.low == 0 else 0)
    elif rule.source == "token":
        low, high = least / scale, most / scale
        zero = torch.where((rule.low + low) + (rule.high + high) > 0, rule.low - low, rule.high - high)
        zero = torch.clamp(zero, rule.low, rule.high).round()
    else:
        scale = scale if rule.source == "affine" else scale.float()
        zero = torch.clamp(rule.low - torch.round(least / scale), rule.low, rule.high)
    scale = torch.where(torch.isfinite(scale), scale, torch.nan).float()  # as NaN does
    return scale.reshape(-1), torch.nan_to_num(zero.float()).to(torch.int32).reshape(-1)


def _scale(width: Tensor, rule: Dynamic) -> Tensor:
    steps = rule.high - rule.low
    if rule.source == "token" and rule.symmetric:
        return width.clamp(min=rule.eps) / rule.high
    quotient = width / (steps / 2 if rule.symmetric else float(steps))
    return (
        torch.maximum(quotient.float(), torch.tensor(rule.eps))
        if rule.source == "decomposed"
        else quotient.clamp(rule.eps)
    )


def quantize_dynamic(x: Tensor, rule: Dynamic) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [rows, k] (to int8, or uint8 when `rule.low` is 0); return it with scales and zero points."""
    scale, zero = choose(x, rule)
    s, z = scale[:, None], zero[:, None]
    if rule.source == "token" and not rule.symmetric:
        q = (x.double() * (1.0 / s.double()) + z).round()
    else:
        q = torch.round(x.float() * (1.0 / s)) + z
    q = torch.nan_to_num(torch.clamp(q, rule.low, rule.high))
    return q.to(torch.uint8 if rule.low == 0 else torch.int8), scale, zero


def _scaled(sums: Tensor, x_scale: Tensor | float, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Scale integer sums [rows, n] and add the bias in fp64, then round to fp32."""
    x_scale = torch.as_tensor(x_scale, dtype=torch.float32).double()
    y = sums.double() * (x_scale.reshape(-1, 1) * w_scale.float().double())
    return (y if bias is None else y + bias.float().double()).float()


def linear(
    x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None, x_scale: Tensor | float, x_zero_point: Tensor | int,
    epilogue: Epilogue = Epilogue(),
) -> Tensor:  # fmt: skip
    """8-bit x [rows, k], int8 weight [n, k] -> [rows, n]."""
    zero = torch.as_tensor(x_zero_point, dtype=torch.int64).reshape(-1, 1)
    sums = torch.mm((x.to(torch.int64) - zero).double(), weight.double().t())  # exact: below 2**53
    return epilogue.apply(_scaled(sums, x_scale, w_scale, bias))


def matmul(
    x: Tensor, y: Tensor, x_scale: float, x_zero_point: int, y_scale: float, y_zero_point: int,
    epilogue: Epilogue = Epilogue(),
) -> Tensor:  # fmt: skip
    """8-bit x [..., m, k] and y [..., k, n] -> [..., m, n]."""
    sums = torch.matmul(x.double() - x_zero_point, y.double() - y_zero_point)  # exact: below 2**53
    scales = torch.tensor([x_scale, y_scale], dtype=torch.float32).double()
    return epilogue.apply((sums * scales.prod()).float())


def dynamic_linear(
    x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None, rule: Dynamic, epilogue: Epilogue = Epilogue()
) -> Tensor:
    """Float x [rows, k], quantized by `rule` first."""
    q, scale, zero = quantize_dynamic(x, rule)
    return linear(q, weight, w_scale, bias, scale, zero, epilogue)


def weight_linear(
    x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None, epilogue: Epilogue = Epilogue()
) -> Tensor:
    """Float x [rows, k] times int8 weights.

    A row becomes integers with 30 bits (22 for bf16) below the power of two above its largest magnitude: numbers within a factor
    2**-6 of it (2**-14) are exact, the others off by at most 2**-31 (2**-23) of it. Their products are summed exactly.
    """
    bits = 22 if x.dtype == torch.bfloat16 else 30
    top = x.float().abs().amax(1, keepdim=True) if x.shape[1] else x.new_zeros(len(x), 1).float()
    scale = torch.ldexp(torch.ones_like(top), torch.frexp(top).exponent.clamp(min=-96) - bits)
    whole = torch.round(x.double() / scale.double())
    y = _scaled(torch.mm(whole, weight.double().t()), scale, w_scale, bias)
    floats = torch.mm(x.double(), weight.double().t()) * w_scale.double()
    floats = floats if bias is None else floats + bias.double()
    return epilogue.apply(torch.where(torch.isfinite(top), y, floats.float()))


def conv2d(
    x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    stride: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0), dilation: Sequence[int] = (1, 1), groups: int = 1,
    epilogue: Epilogue = Epilogue(),
) -> Tensor:  # fmt: skip
    """8-bit x [batch, c, h, w], int8 weight [n, c / groups, kh, kw] -> [batch, n, oh, ow]. Padding has the value 0.0."""
    centered = x.double() - x_zero_point
    sums = F.conv2d(centered, weight.double(), None, list(stride), list(padding), list(dilation), groups)
    scale = (torch.tensor(x_scale, dtype=torch.float32).double() * w_scale.float().double()).reshape(-1, 1, 1)
    y = sums * scale
    y = y if bias is None else y + bias.float().double().reshape(-1, 1, 1)
    return epilogue.apply(y.float())
