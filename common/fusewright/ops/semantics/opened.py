"""Formulas of the rows in `table.opened`, and their decompositions, which compute half types in fp32 and round once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusewright.ops.core import Args, Shape
from fusewright.ops.rules import wrap
from fusewright.ops.semantics.composite import reduced_loss, widened
from fusewright.ops.shape_rules import broadcast_shapes, drop_dims, shape


def _promoted(*tensors: Any) -> torch.dtype:
    dtype = tensors[0].dtype if len(tensors) == 1 else torch.result_type(*tensors)
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _wide(x: Any, dtype: torch.dtype) -> Any:
    return x.to(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)


# ---- functions of one number ----


def limits(dtype: torch.dtype) -> tuple[float, float]:
    """The lowest and the highest finite number."""
    info = torch.finfo(dtype)
    return info.min, info.max


def nan_to_num(x: Any, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Any:
    if not x.is_floating_point():
        return x.clone()
    low, high = limits(x.dtype)
    finite = torch.where(x != x, 0.0 if nan is None else nan, x)
    finite = torch.where(x == float("inf"), high if posinf is None else posinf, finite)
    return torch.where(x == float("-inf"), low if neginf is None else neginf, finite).to(x.dtype)


def logit(x: Any, eps: float | None = None) -> Any:
    dtype = _promoted(x)
    z = _wide(x, dtype)
    if eps is not None and eps >= 0:
        z = torch.where(z < eps, eps, torch.where(z > 1 - eps, 1 - eps, z))
    return torch.log(z / (1 - z)).to(dtype)


def logit_backward(grad: Any, x: Any, eps: float | None = None) -> Any:
    g, z = widened(grad), widened(x)
    kept = eps is not None and eps >= 0
    low, high = (eps, 1 - eps) if kept else (0.0, 1.0)  # type: ignore[operator]
    slope = g / (z * (1 - z)).abs()  # of -0, too, the positive infinity
    return torch.where((z < low) | (z > high), 0.0 if kept else float("nan"), slope).to(torch.result_type(grad, x))


def sinc(x: Any) -> Any:
    dtype = _promoted(x)
    z = _wide(x, dtype) * torch.pi
    return torch.where(z == 0, 1.0, torch.sin(z) / z).to(dtype)


def softshrink(x: Any, lambd: Any = 0.5) -> Any:
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0)).to(x.dtype)


def hardshrink(x: Any, lambd: Any = 0.5) -> Any:
    return torch.where((x >= -lambd) & (x <= lambd), torch.zeros((), dtype=x.dtype, device=x.device), x)


def isposinf(x: Any) -> Any:
    return x == float("inf") if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


def isneginf(x: Any) -> Any:
    return x == float("-inf") if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


# ---- functions of two ----


def _times_log(log: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def times_log(x: Any, y: Any) -> Any:
        dtype = _promoted(x, y)
        a, b = _wide(x, dtype), _wide(y, dtype)
        return torch.where(b != b, b, torch.where(a == 0, 0.0, a * log(b))).to(dtype)

    return times_log


xlogy, xlog1py = _times_log(torch.log), _times_log(torch.log1p)


def cross(x: Any, y: Any, *, dim: int = -1) -> Any:
    a, b = (t.expand(torch.broadcast_shapes(x.shape, y.shape)).unbind(dim) for t in (x, y))
    ahead, behind = (1, 2, 0), (2, 0, 1)
    return torch.stack([a[i] * b[j] - a[j] * b[i] for i, j in zip(ahead, behind, strict=True)], dim)


# ---- statistics ----


def std_mean(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    var, mean = torch.var_mean(x, dim, correction=1 if correction is None else correction, keepdim=keepdim)
    return var.sqrt(), mean


def aminmax(x: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    dims = [] if dim is None else [dim]
    return torch.amin(x, dims, keepdim), torch.amax(x, dims, keepdim)


def extremes_shape(a: Args) -> tuple[Shape, Shape]:
    """`self` without `dim`, or 0-dim, twice."""
    s = drop_dims(shape(a["self"]), a["dim"], a["keepdim"])
    return s, s


def euclidean_dist(x: Any, y: Any) -> Any:
    """Distances by one product, as eager computes those of more than 25 vectors."""
    (a, one), (b, other) = ((t.pow(2).sum(-1, keepdim=True), torch.ones_like(t[..., :1])) for t in (x, y))
    made = torch.matmul(torch.cat([x * -2, a, one], -1), torch.cat([y, other, b], -1).mT)
    return made.clamp_min(0).sqrt()


def distances_shape(a: Args) -> tuple[Shape]:
    """[..., n, k] x [..., m, k] -> [..., n, m]."""
    x, y = shape(a["x1"]), shape(a["x2"])
    return ((*broadcast_shapes([x[:-2], y[:-2]]), x[-2], y[-2]),)


# ---- losses ----


def bce(x: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    loss = (target - 1) * torch.log1p(-x).clamp_min(-100) - target * torch.log(x).clamp_min(-100)
    return reduced_loss(loss if weight is None else loss * weight, reduction)


def bce_backward(grad: Any, x: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    g, z, t = map(widened, (grad, x, target))
    slope = g * (z - t) / ((1 - z) * z).clamp_min(1e-12)
    slope = slope if weight is None else slope * weight
    return (slope / x.numel() if reduction == 1 else slope).to(x.dtype)


# ---- moved elements ----


def rot90(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    a, b = dims
    turned = {0: lambda: x, 1: lambda: x.flip(b).transpose(a, b), 2: lambda: x.flip(a, b), 3: lambda: x.flip(a).transpose(a, b)}
    return turned[k % 4]() if k % 4 else x.clone()


def rotated_shape(a: Args) -> tuple[Shape]:
    """The two dims swapped for odd `k`."""
    s = list(shape(a["self"]))
    i, j = (wrap(d, len(s)) for d in a["dims"])
    if a["k"] % 2:
        s[i], s[j] = s[j], s[i]
    return (tuple(s),)


def diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    (made,) = embedded_shape({"self": x, "offset": offset, "dim1": dim1, "dim2": dim2})
    return torch.diagonal_scatter(x.new_zeros(made), x, offset, dim1, dim2)


def embedded_shape(a: Args) -> tuple[Shape]:
    """The last size of `self`, and `offset` more, twice, at `dim1` and `dim2`."""
    s = list(shape(a["self"]))
    rank, n = len(s) + 1, s.pop() + abs(a["offset"])
    for d in sorted(wrap(a[k], rank) for k in ("dim1", "dim2")):
        s.insert(d, n)
    return (tuple(s),)


def diagonal_copy(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return torch.diagonal(x, offset, dim1, dim2).clone(memory_format=torch.contiguous_format)


def diagonal_backward(grad: Any, input_sizes: Any, offset: int, dim1: int, dim2: int) -> Any:
    return torch.diagonal_scatter(grad.new_zeros(input_sizes), grad, offset, dim1, dim2)


def channel_shuffle(x: Any, groups: int) -> Any:
    n, c, *rest = x.shape
    return x.reshape(n, groups, c // groups, *rest).transpose(1, 2).reshape(x.shape).clone()
