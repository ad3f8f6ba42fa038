"""The computations of softmax and the norms: a formula for each (the fp64 oracle), and its decomposition, as in
`composite`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusewright.ops.core import Args, Shape
from fusewright.ops.semantics.composite import widened


def softmax_ref(x: Any, dim: int, half_to_float: bool = False) -> Any:
    e = torch.exp(x - x.amax(dim, keepdim=True)) if x.numel() else x
    return e / e.sum(dim, keepdim=True)


def softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    w = widened(x)
    e = torch.exp(w - torch.amax(w, dim, keepdim=True))
    return (e / torch.sum(e, dim, keepdim=True)).to(torch.float32 if half_to_float else x.dtype)


def safe_softmax_ref(x: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    return torch.where((x == -math.inf).all(dim, keepdim=True), 0.0, softmax_ref(x, dim))


def safe_softmax(x: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    out = x.dtype if dtype is None else dtype
    x = x.to(out)
    return torch.where((x == -math.inf).all(dim, keepdim=True), 0.0, softmax(x, dim, False)).to(out)


def log_softmax_ref(x: Any, dim: int, half_to_float: bool = False) -> Any:
    s = x - x.amax(dim, keepdim=True) if x.numel() else x
    return s - torch.log(torch.exp(s).sum(dim, keepdim=True))


def log_softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    w = widened(x)
    s = w - torch.amax(w, dim, keepdim=True)
    return (s - torch.log(torch.sum(torch.exp(s), dim, keepdim=True))).to(torch.float32 if half_to_float else x.dtype)


def _stats_dtype(x: Any, weight: Any) -> torch.dtype:
    """The dtype in which eager saves a norm's mean and reciprocal deviation (`rules.norm_stats`)."""
    if x.device.type != "cpu":
        return widened(x).dtype
    return x.dtype if weight is None else weight.dtype


def affine(x: Any, weight: Any, bias: Any) -> Any:
    """x * weight + bias, either of which may be absent."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def layer_norm_ref(x: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    dims = list(range(-len(normalized_shape), 0))
    mean = x.mean(dims, keepdim=True)
    rstd = 1 / torch.sqrt(((x - mean) ** 2).mean(dims, keepdim=True) + eps)
    return affine((x - mean) * rstd, weight, bias), mean, rstd


def layer_norm(x: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    w = widened(x)
    var, mean = torch.var_mean(w, list(range(-len(normalized_shape), 0)), correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    stats = _stats_dtype(x, weight)
    return affine((w - mean) * rstd, weight, bias).to(x.dtype), mean.to(stats), rstd.to(stats)


def rms_eps(dtype: torch.dtype, eps: float | None) -> float:
    """Return what `rms_norm` adds for an input of `dtype`: by default the eps of the dtype that it computes in, fp32 for half types
    (`_fused_rms_norm` on devices and its decomposition)."""
    return torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps if eps is None else eps


def rms_norm_ref(x: Any, normalized_shape: Sequence[int], weight: Any, eps: float | None) -> tuple[Any, Any]:
    dims = list(range(-len(normalized_shape), 0))
    # The default eps depends on the dtype of the computation, which an fp64 reference cannot see: assume fp32.
    rstd = 1 / torch.sqrt((x * x).mean(dims, keepdim=True) + rms_eps(torch.float32, eps))
    return affine(x * rstd, weight, None), rstd


def rms_norm(x: Any, normalized_shape: Sequence[int], weight: Any, eps: float | None) -> tuple[Any, Any]:
    w = widened(x)
    mean = torch.mean(w * w, list(range(-len(normalized_shape), 0)), keepdim=True)
    rstd = torch.rsqrt(mean + rms_eps(x.dtype, eps))
    return affine(w * rstd, weight, None).to(x.dtype), rstd


def per_channel(t: Any, rank: int) -> Any:
    """[C] as [C, 1, ...], for tensors [N, C, ...] of `rank` dimensions."""
    return None if t is None else t.reshape(-1, *(1,) * (rank - 2))


def group_norm_ref(
    x: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Any, Any, Any]:
    g = x.reshape(N, group, -1)
    mean = g.mean(-1)
    rstd = 1 / torch.sqrt(((g - mean.unsqueeze(-1)) ** 2).mean(-1) + eps)
    out = ((g - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)).reshape(x.shape)
    return affine(out, per_channel(weight, x.dim()), per_channel(bias, x.dim())), mean, rstd


def group_norm(
    x: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Any, Any, Any]:
    g = widened(x).reshape(N, group, C // group * HxW)
    var, mean = torch.var_mean(g, [-1], correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    out = affine(((g - mean) * rstd).reshape(x.shape), per_channel(weight, x.dim()), per_channel(bias, x.dim()))
    stats = _stats_dtype(x, weight) if x.device.type == "cpu" else x.dtype
    return out.to(x.dtype), mean.squeeze(-1).to(stats), rstd.squeeze(-1).to(stats)


def batch_norm_ref(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    rank = max(x.dim(), 2)
    deviation = torch.sqrt(var + eps)
    out = affine((x - per_channel(mean, rank)) / per_channel(deviation, rank), per_channel(weight, rank), per_channel(bias, rank))
    return out, *_inference_stats(mean, 1 / deviation)


def _inference_stats(mean: Any, rstd: Any) -> tuple[Any, Any]:
    """The extra results of inference: empty on a CPU."""
    return (mean[:0].clone(), rstd[:0]) if mean.device.type == "cpu" else (mean.clone(), rstd)


def batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    w, rank = widened(x), max(x.dim(), 2)
    rstd = torch.rsqrt(widened(var) + eps)
    out = (w - per_channel(widened(mean), rank)) * per_channel(rstd, rank)
    stats = _stats_dtype(x, mean)
    return (
        affine(out, per_channel(weight, rank), per_channel(bias, rank)).to(x.dtype),
        *_inference_stats(mean.to(stats), rstd.to(stats)),
    )


def batch_norm_train_ref(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    if not training:
        normed = batch_norm_ref(x, weight, bias, running_mean, running_var, momentum, eps)
        return *normed, running_mean.clone(), running_var.clone()
    out, mean, var = _by_batch(x, weight, bias, eps)
    count = x.numel() // x.shape[1]
    new_mean = running_mean + momentum * (mean - running_mean)
    new_var = running_var + momentum * (var * count / (count - 1) - running_var)
    return out, mean, 1 / torch.sqrt(var + eps), new_mean, new_var


def _by_batch(x: Any, weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    """Return `x` normalised by its own statistics, its mean and its biased variance."""
    dims, rank = [d for d in range(x.dim()) if d != 1], max(x.dim(), 2)
    mean = x.mean(dims)
    var = ((x - per_channel(mean, rank)) ** 2).mean(dims)
    normed = (x - per_channel(mean, rank)) * per_channel(1 / torch.sqrt(var + eps), rank)
    return affine(normed, per_channel(weight, rank), per_channel(bias, rank)), mean, var


def batch_norm_no_stats_ref(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    out, mean, var = _by_batch(x, weight, bias, eps)
    return out, mean, 1 / torch.sqrt(var + eps)


def batch_norm_no_stats(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    out, mean, rstd = batch_norm_no_stats_ref(widened(x), weight, bias, training, momentum, eps)
    stats = _stats_dtype(x, weight)
    return out.to(x.dtype), mean.to(stats), rstd.to(stats)


def batch_norm_train(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, *rest: Any, **named: Any
) -> tuple[Any, ...]:
    """`batch_norm_train_ref` of the same arguments in eager's compute dtypes."""
    wide = batch_norm_train_ref(widened(x), weight, bias, running_mean, running_var, *rest, **named)
    stats = _stats_dtype(x, running_mean)
    dtypes = (x.dtype, stats, stats, running_mean.dtype, running_var.dtype)
    return tuple(t.to(d) for t, d in zip(wide, dtypes, strict=True))


def weight_norm_ref(v: Any, g: Any, dim: int = 0) -> tuple[Any, Any]:
    norms = torch.sqrt((v * v).sum([d for d in range(v.dim()) if d != dim], keepdim=True))
    return v * (g / norms), norms


def weight_norm(v: Any, g: Any, dim: int = 0) -> tuple[Any, Any]:
    out, norms = weight_norm_ref(widened(v), widened(g), dim)
    return out.to(v.dtype), norms.to(norm_dtype(v, g))


def norm_dtype(v: Any, g: Any) -> torch.dtype:
    return torch.float32 if g.dtype == torch.bfloat16 else g.dtype


def weight_norm_dtypes(a: Args) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of v; norms are fp32 for bf16."""
    return a["v"].dtype, norm_dtype(a["v"], a["g"])


def weight_norm_shapes(a: Args) -> tuple[Shape, Shape]:
    """The shapes of v and of g."""
    return tuple(a["v"].shape), tuple(a["g"].shape)
