"""The computations of the composites: a formula for each (the fp64 oracle), and its decomposition into primitives.

A decomposition computes in eager's compute dtype: half inputs are widened to fp32 and rounded once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fusewright import _torch_compat as compat
from fusewright.ops.core import Args, Shape, resolve
from fusewright.ops.shape_rules import replace

_HALF = (torch.bfloat16, torch.float16)


def widened(x: Any) -> Any:
    """`x` in the dtype that eager accumulates in."""
    return x.to(torch.float32) if x.dtype in _HALF else x


def torch_decomposition(qualname: str) -> Callable[..., Any]:
    """Torch's own decomposition of an op, looked up when first called."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        return compat.decomposition(resolve(qualname))(*args, **kwargs)

    return decompose


# ---- products ----


def linear_ref(x: Any, weight: Any, bias: Any = None) -> Any:
    out = torch.matmul(x, weight.mT if weight.dim() > 1 else weight)
    return out if bias is None else out + bias


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if weight.dim() == 1:
        out = matmul(x, weight)
        return out if bias is None else out + bias
    rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    out = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return out if x.dim() == 2 else out.reshape(*x.shape[:-1], weight.shape[0])


def matmul(x: Any, y: Any) -> Any:
    """A matrix product as mm if the batch shares one matrix, else as bmm."""
    if x.dim() == 1 or y.dim() == 1:
        out = matmul(x.unsqueeze(0) if x.dim() == 1 else x, y.unsqueeze(1) if y.dim() == 1 else y)
        out = out.squeeze(-1) if y.dim() == 1 else out
        return out.squeeze(-1 if y.dim() == 1 else -2) if x.dim() == 1 else out
    if y.dim() == 2:
        rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
        out = torch.mm(rows, y)
        return out if x.dim() == 2 else out.reshape(*x.shape[:-1], y.shape[1])
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    xs, ys = (t.expand(*batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (x, y))
    return torch.bmm(xs, ys).reshape(*batch, x.shape[-2], y.shape[-1])


def _scores(q: Any, k: Any, attn_mask: Any, is_causal: bool, scale: float | None) -> Any:
    s = torch.matmul(q, k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        below = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        s = s.masked_fill(~below, -math.inf)
    if attn_mask is None:
        return s
    return s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask


def _grouped(q: Any, k: Any, v: Any, enable_gqa: bool) -> tuple[Any, Any]:
    if not enable_gqa or q.shape[-3] == k.shape[-3]:
        return k, v
    return k.repeat_interleave(q.shape[-3] // k.shape[-3], -3), v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)


def _attend(q: Any, k: Any, v: Any, s: Any) -> tuple[Any, Any]:
    top = s.amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    # A row with all scores masked gives zeros, as in eager's kernels.
    p = torch.where(total == 0, 0.0, e / total)
    return torch.matmul(p, v), (top + torch.log(total)).squeeze(-1)


def _no_dropout(p: float) -> None:
    if p:
        raise NotImplementedError("attention with dropout draws random numbers: it has no formula")


def sdpa_ref(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    _no_dropout(dropout_p)
    k, v = _grouped(q, k, v, enable_gqa)
    return _attend(q, k, v, _scores(q, k, attn_mask, is_causal, scale))[0]


def _widened_mask(mask: Any) -> Any:
    return mask if mask is None or mask.dtype == torch.bool else widened(mask)


def sdpa(q: Any, k: Any, v: Any, attn_mask: Any = None, *rest: Any, **named: Any) -> Any:
    """`sdpa_ref` of the same arguments in eager's compute dtype."""
    wide = (widened(q), widened(k), widened(v))
    return sdpa_ref(*wide, _widened_mask(attn_mask), *rest, **named).to(q.dtype)


def sdpa_lse_ref(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any]:
    _no_dropout(dropout_p)
    k, v = _grouped(q, k, v, True)
    return _attend(q, k, v, _scores(q, k, attn_mask, is_causal, scale))


def sdpa_lse(q: Any, k: Any, v: Any, *rest: Any, attn_mask: Any = None, **named: Any) -> tuple[Any, Any]:
    """`sdpa_lse_ref` of the same arguments in eager's compute dtype."""
    wide = (widened(q), widened(k), widened(v))
    out, lse = sdpa_lse_ref(*wide, *rest, attn_mask=_widened_mask(attn_mask), **named)
    return out.to(q.dtype), lse


# ---- activations ----


def gelu_ref(x: Any, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _half_safe(formula: Callable[..., Any]) -> Callable[..., Any]:
    def decompose(x: Any, *args: Any, **kwargs: Any) -> Any:
        return formula(widened(x), *args, **kwargs).to(x.dtype)

    return decompose


def silu_ref(x: Any) -> Any:
    return x / (1 + torch.exp(-x))


def mish_ref(x: Any) -> Any:
    return x * torch.tanh(torch.log1p(torch.exp(-x.abs())) + torch.relu(x))


def hardsigmoid_ref(x: Any) -> Any:
    return torch.clamp(x + 3, 0, 6) / 6


def hardswish_ref(x: Any) -> Any:
    return x * torch.clamp(x + 3, 0, 6) / 6


def leaky_relu_ref(x: Any, negative_slope: Any = 0.01) -> Any:
    return torch.where(x > 0, x, x * negative_slope)


def elu_ref(x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


def softplus_ref(x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    z = x * beta
    return torch.where(z > threshold, x, torch.log1p(torch.exp(z)) / beta)


def threshold_ref(x: Any, threshold: Any, value: Any) -> Any:
    return torch.where(x <= threshold, value, x)


def prelu_ref(x: Any, weight: Any) -> Any:
    return torch.where(x > 0, x, x * weight)


def glu_ref(x: Any, dim: int = -1) -> Any:
    half = x.shape[dim] // 2
    return x.narrow(dim, 0, half) * torch.sigmoid(x.narrow(dim, half, half))


def glu_shape(a: Args) -> tuple[Shape]:
    """`dim` halved."""
    s, d = tuple(a["self"].shape), a["dim"]
    return (replace(s, d, s[d] // 2),)


gelu, silu, mish, hardswish, hardsigmoid, elu, softplus, glu = map(
    _half_safe, (gelu_ref, silu_ref, mish_ref, hardswish_ref, hardsigmoid_ref, elu_ref, softplus_ref, glu_ref)
)
leaky_relu = _half_safe(leaky_relu_ref)


def threshold(x: Any, threshold: Any, value: Any) -> Any:
    return torch.where(x <= threshold, value, x).to(x.dtype)


def prelu(x: Any, weight: Any) -> Any:
    return torch.where(x > 0, x, x * weight)


def log_sigmoid_ref(x: Any) -> tuple[Any, Any]:
    """The buffer has no defined content: zeros stand for it."""
    return torch.clamp_max(x, 0) - torch.log1p(torch.exp(-x.abs())), torch.zeros_like(x)


def log_sigmoid_shapes(a: Args) -> tuple[Shape, Shape]:
    """The shape of `self`; the buffer has the same shape on a CPU, and is empty elsewhere."""
    s = tuple(a["self"].shape)
    return s, s if str(a["self"].device).startswith("cpu") else (0,)


# ---- lookups, pooling, resizing ----


def embedding_ref(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    return weight[indices]


def embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    return torch.index_select(weight, 0, indices.reshape(-1)).reshape(*indices.shape, *weight.shape[1:])


def max_pool_ref(dims: int) -> Callable[..., Any]:
    """Maxima of windows over the last dimensions, and their flat indices."""
    pool: Callable[..., Any] = getattr(F, f"max_pool{dims}d")
    return lambda x, size, stride=(), *rest: pool(x, tuple(size), tuple(stride) or None, *rest, return_indices=True)


def avg_pool_ref(dims: int) -> Callable[..., Any]:
    """Means of windows over the last dimensions."""
    pool: Callable[..., Any] = getattr(F, f"avg_pool{dims}d")
    return lambda x, size, stride=(), *rest: pool(x, tuple(size), tuple(stride or size), *rest)


def nearest_ref(x: Any, output_size: Any, *scales: float | None, ahead: float = 0.0) -> Any:
    first = x.dim() - len(output_size)
    for d, (out, scale) in enumerate(zip(output_size, scales or [None] * len(output_size), strict=True), first):
        n, ratio = x.shape[d], 1 / scale if scale else x.shape[d] / out
        x = x.index_select(d, ((torch.arange(out, device=x.device) + ahead) * ratio).floor().to(torch.int64).clamp(max=n - 1))
    return x


nearest_exact_ref = partial(nearest_ref, ahead=0.5)
bilinear2d_ref = torch.ops.aten.upsample_bilinear2d.default
bicubic2d_ref = torch.ops.aten.upsample_bicubic2d.default


def sampled_shape(a: Args) -> tuple[Shape]:
    """[n, c, ...] at [n, ..., d] -> [n, c, ...], of the grid's sizes."""
    return ((*a["input"].shape[:2], *a["grid"].shape[1:-1]),)


def pixel_shuffle_ref(x: Any, upscale_factor: int) -> Any:
    *lead, c, h, w = x.shape
    r = upscale_factor
    blocks = x.reshape(*lead, c // (r * r), r, r, h, w)
    n = len(lead)
    return blocks.permute(*range(n + 1), n + 3, n + 1, n + 4, n + 2).reshape(*lead, c // (r * r), h * r, w * r)


pixel_shuffle = pixel_shuffle_ref


def pixel_shuffle_shape(a: Args) -> tuple[Shape]:
    """[..., c * r * r, h, w] -> [..., c, h * r, w * r]."""
    *lead, c, h, w = a["self"].shape
    r = a["upscale_factor"]
    return ((*lead, c // (r * r), h * r, w * r),)


def pixel_unshuffle_ref(x: Any, downscale_factor: int) -> Any:
    *lead, c, h, w = x.shape
    r = downscale_factor
    blocks = x.reshape(*lead, c, h // r, r, w // r, r)
    n = len(lead)
    return blocks.permute(*range(n + 1), n + 2, n + 4, n + 1, n + 3).reshape(*lead, c * r * r, h // r, w // r)


pixel_unshuffle = pixel_unshuffle_ref


def pixel_unshuffle_shape(a: Args) -> tuple[Shape]:
    """[..., c, h * r, w * r] -> [..., c * r * r, h, w]."""
    *lead, c, h, w = a["self"].shape
    r = a["downscale_factor"]
    return ((*lead, c * r * r, h // r, w // r),)


# ---- losses ----


def reduced_loss(loss: Any, reduction: int) -> Any:
    return (loss, loss.mean(), loss.sum())[reduction] if reduction != 0 else loss


def nll_loss_ref(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> tuple[Any, Any]:
    rows, t = (x, target) if x.dim() == 2 else (x.unsqueeze(0), target.reshape(1))
    keep = t != ignore_index
    safe = torch.where(keep, t, 0)
    w = torch.ones_like(rows[:, 0]) if weight is None else weight[safe]
    w = torch.where(keep, w, 0.0)
    loss = torch.where(keep, -rows.gather(1, safe.unsqueeze(1)).squeeze(1) * w, 0.0)
    if reduction == 0 and x.dim() == 2:
        return loss, x.new_zeros(())
    total = w.sum()
    return (loss.sum() / total if reduction == 1 else loss.sum()), total


def nll_loss(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> tuple[Any, Any]:
    out, total = nll_loss_ref(widened(x), target, weight, reduction, ignore_index)
    return out.to(x.dtype), total.to(x.dtype)


def nll_loss2d_ref(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> tuple[Any, Any]:
    rows = x.movedim(1, -1).reshape(-1, x.shape[1])
    loss, total = nll_loss_ref(rows, target.reshape(-1), weight, reduction, ignore_index)
    return loss.reshape(target.shape) if reduction == 0 else loss, total


def nll_loss2d(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> tuple[Any, Any]:
    out, total = nll_loss2d_ref(widened(x), target, weight, reduction, ignore_index)
    return out.to(x.dtype), total.to(x.dtype)


def narrowed(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of two tensors in eager's compute dtype."""

    def decomposed(x: Any, target: Any, *args: Any) -> Any:
        return loss(widened(x), widened(target), *args).to(torch.promote_types(x.dtype, target.dtype))

    return decomposed


def huber_ref(x: Any, target: Any, reduction: int = 1, delta: float = 1.0) -> Any:
    d = (x - target).abs()
    return reduced_loss(torch.where(d <= delta, 0.5 * d * d, delta * (d - 0.5 * delta)), reduction)


def soft_margin_ref(x: Any, target: Any, reduction: int = 1) -> Any:
    return reduced_loss(torch.log1p(torch.exp(-target * x)), reduction)


def mse_loss_ref(x: Any, target: Any, reduction: int = 1) -> Any:
    return reduced_loss((x - target) ** 2, reduction)


def mse_loss(x: Any, target: Any, reduction: int = 1) -> Any:
    return mse_loss_ref(widened(x), widened(target), reduction).to(torch.promote_types(x.dtype, target.dtype))


def smooth_l1_ref(x: Any, target: Any, reduction: int = 1, beta: float = 1.0) -> Any:
    d = (x - target).abs()
    return reduced_loss(torch.where(d < beta, 0.5 * d * d / beta, d - 0.5 * beta) if beta else d, reduction)


def smooth_l1(x: Any, target: Any, reduction: int = 1, beta: float = 1.0) -> Any:
    return smooth_l1_ref(widened(x), widened(target), reduction, beta).to(torch.promote_types(x.dtype, target.dtype))


def bce_with_logits_ref(x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1) -> Any:
    softplus_neg = torch.log1p(torch.exp(-x.abs())) + torch.relu(-x)
    factor = 1 if pos_weight is None else (pos_weight - 1) * target + 1
    loss = (1 - target) * x + factor * softplus_neg
    return reduced_loss(loss if weight is None else loss * weight, reduction)


def bce_with_logits(x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1) -> Any:
    return bce_with_logits_ref(widened(x), widened(target), weight, pos_weight, reduction).to(target.dtype)
