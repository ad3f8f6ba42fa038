"""The computations of the backward rows. Short derivatives are written out; long ones use autograd of the forward formula in
fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fusewright.ops.semantics import adaptive
from fusewright.ops.semantics import composite as m
from fusewright.ops.semantics import norm as nm


def grads(
    forward: Callable[..., Any], inputs: Sequence[Any], grad: Any, mask: Sequence[bool] | None = None
) -> tuple[Any, ...]:
    """Gradients of `forward(*inputs)` by autograd; None for an input that is absent or masked off."""
    mask = [True] * len(inputs) if mask is None else mask
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = forward(*leaves)
    wanted = [x for x, on in zip(leaves, mask, strict=True) if on and x is not None]
    found = iter(torch.autograd.grad(out, wanted, grad.to(out.dtype), allow_unused=True))
    return tuple(next(found) if on and x is not None else None for x, on in zip(leaves, mask, strict=True))


def _one(forward: Callable[..., Any], x: Any, grad: Any) -> Any:
    return grads(forward, [x], grad)[0]


def gelu_backward(grad: Any, x: Any, *, approximate: str = "none") -> Any:
    return _one(lambda t: m.gelu_ref(t, approximate=approximate), x, grad)


def silu_backward(grad: Any, x: Any) -> Any:
    s = torch.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


def mish_backward_ref(grad: Any, x: Any) -> Any:
    return _one(m.mish_ref, x, grad)


def mish_backward(grad: Any, x: Any) -> Any:
    g, w = m.widened(grad), m.widened(x)
    t = torch.tanh(torch.log1p(torch.exp(-w.abs())) + torch.relu(w))
    return (g * (t + w * torch.sigmoid(w) * (1 - t * t))).to(x.dtype)


def tanh_backward(grad: Any, out: Any) -> Any:
    return grad * (1 - out * out)


def sigmoid_backward(grad: Any, out: Any) -> Any:
    return grad * out * (1 - out)


def threshold_backward(grad: Any, x: Any, threshold: Any) -> Any:
    return torch.where(x <= threshold, 0.0, grad)


def hardtanh_backward(grad: Any, x: Any, min_val: Any, max_val: Any) -> Any:
    return torch.where((x <= min_val) | (x >= max_val), 0.0, grad)


def hardswish_backward(grad: Any, x: Any) -> Any:
    inner = torch.where(x < 3, grad * (x / 3 + 0.5), grad)
    return torch.where(x <= -3, 0.0, inner)


def hardsigmoid_backward(grad: Any, x: Any) -> Any:
    return torch.where((x > -3) & (x < 3), grad / 6, 0.0)


def leaky_relu_backward(grad: Any, x: Any, negative_slope: Any, self_is_result: bool) -> Any:
    return torch.where(x > 0, grad, grad * negative_slope)


def prelu_backward(grad: Any, x: Any, weight: Any) -> tuple[Any, Any]:
    return torch.where(x > 0, grad, weight * grad), torch.where(x > 0, 0.0, x * grad)


def log_sigmoid_backward(grad: Any, x: Any, buffer: Any) -> Any:
    return grad * torch.sigmoid(-x)


def elu_backward(grad: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Any) -> Any:
    slope = input_scale * (x + alpha * scale) if is_result else input_scale * alpha * scale * torch.exp(x * input_scale)
    return torch.where(x <= 0, grad * slope, grad * scale)


def softplus_backward(grad: Any, x: Any, beta: Any, threshold: Any) -> Any:
    return torch.where(x * beta > threshold, grad, grad * torch.sigmoid(x * beta))


def glu_backward(grad: Any, x: Any, dim: int) -> Any:
    return _one(lambda t: m.glu_ref(t, dim), x, grad)


def dropout_backward(grad: Any, mask: Any, scale: float) -> Any:
    return grad * mask * scale


def softmax_backward(grad: Any, out: Any, dim: int, input_dtype: torch.dtype) -> Any:
    return out * (grad - (grad * out).sum(dim, keepdim=True))


def log_softmax_backward(grad: Any, out: Any, dim: int, input_dtype: torch.dtype) -> Any:
    return grad - torch.exp(out) * grad.sum(dim, keepdim=True)


def _with_default(weight: Any, like: Any, shape: Sequence[int], value: float) -> Any:
    return torch.full(tuple(shape), value, dtype=like.dtype) if weight is None else weight


def layer_norm_backward(
    grad: Any,
    x: Any,
    normalized_shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    w = _with_default(weight, x, normalized_shape, 1.0)
    inner, outer = list(range(-len(normalized_shape), 0)), list(range(x.dim() - len(normalized_shape)))
    xhat, g = (x - mean) * rstd, grad * w
    dx = rstd * (g - g.mean(inner, keepdim=True) - xhat * (g * xhat).mean(inner, keepdim=True))
    dw, db = ((t.sum(outer) if outer else t) for t in (grad * xhat, grad))
    return tuple(t if on else None for t, on in zip((dx, dw, db), output_mask, strict=True))


def rms_norm_backward(
    grad: Any, x: Any, normalized_shape: Sequence[int], rstd: Any, weight: Any, output_mask: Sequence[bool]
) -> tuple[Any, ...]:
    w = _with_default(weight, x, normalized_shape, 1.0)
    inner, outer = list(range(-len(normalized_shape), 0)), list(range(x.dim() - len(normalized_shape)))
    xhat, g = x * rstd, grad * w
    dx = rstd * (g - xhat * (g * xhat).mean(inner, keepdim=True))
    dw = (grad * xhat).sum(outer) if outer else grad * xhat
    return tuple(t if on else None for t, on in zip((dx, dw), output_mask, strict=True))


def group_norm_backward(
    grad: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    # eps is not an argument, so use the one that relates rstd to the input's own variance.
    g = x.reshape(N, group, -1)
    eps = (1 / rstd**2 - g.var(-1, correction=0)).reshape(N, group)

    def forward(t: Any, w: Any, b: Any) -> Any:
        z = t.reshape(N, group, -1)
        z = (z - z.mean(-1, keepdim=True)) / torch.sqrt(z.var(-1, correction=0, keepdim=True) + eps.unsqueeze(-1))
        return nm.affine(z.reshape(t.shape), nm.per_channel(w, t.dim()), nm.per_channel(b, t.dim()))

    return grads(
        forward,
        [x, _with_default(weight, x, (C,), 1.0), _with_default(None, x, (C,), 0.0)],
        grad,
        output_mask,
    )


def batch_norm_backward(
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    dims = [d for d in range(x.dim()) if d != 1]

    def forward(t: Any, w: Any, b: Any) -> Any:
        mean, var = (t.mean(dims), t.var(dims, correction=0)) if train else (running_mean, running_var)
        return nm.batch_norm_ref(t, w, b, mean, var, 0.0, eps)[0]

    c = x.shape[1:2]
    return grads(forward, [x, _with_default(weight, x, c, 1.0), _with_default(None, x, c, 0.0)], grad, output_mask)


def conv_backward(
    grad: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    bias = torch.zeros(channels, dtype=x.dtype)

    def forward(t: Any, w: Any, b: Any) -> Any:
        return torch.convolution(t, w, b, stride, padding, dilation, transposed, output_padding, groups)

    return grads(forward, [x, weight, bias], grad, output_mask)


def embedding_backward_ref(
    grad: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    rows, at = grad.reshape(-1, grad.shape[-1]), indices.reshape(-1)
    if scale_grad_by_freq:
        counts = torch.zeros(num_weights, dtype=rows.dtype, device=rows.device)
        ones = torch.ones_like(at, dtype=rows.dtype)
        rows = rows / torch.index_select(counts.index_add(0, at, ones), 0, at).unsqueeze(1)
    rows = torch.where((at == padding_idx).unsqueeze(1), 0.0, rows)
    return torch.zeros(num_weights, grad.shape[-1], dtype=grad.dtype, device=grad.device).index_add(0, at, rows)


def embedding_backward(grad: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool) -> Any:
    wide = m.widened(grad)
    return embedding_backward_ref(wide, indices, num_weights, padding_idx, scale_grad_by_freq).to(grad.dtype)


def sdpa_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    def forward(a: Any, b: Any, c: Any) -> Any:
        return m.sdpa_ref(a, b, c, attn_mask, dropout_p, is_causal, scale=scale)

    return grads(forward, [q, k, v], grad)


def nll_loss_backward(
    grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total_weight: Any
) -> Any:
    return _one(lambda t: m.nll_loss_ref(t, target, weight, reduction, ignore_index)[0], x, grad)


def nll_loss2d_backward(
    grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total_weight: Any
) -> Any:
    return _one(lambda t: m.nll_loss2d_ref(t, target, weight, reduction, ignore_index)[0], x, grad)


def huber_backward(grad: Any, x: Any, target: Any, reduction: int, delta: float) -> Any:
    return (x - target).clamp(-delta, delta) * grad / (x.numel() if reduction == 1 else 1)


def soft_margin_backward(grad: Any, x: Any, target: Any, reduction: int) -> Any:
    return -target * torch.sigmoid(-target * x) * grad / (x.numel() if reduction == 1 else 1)


def mse_loss_backward(grad: Any, x: Any, target: Any, reduction: int) -> Any:
    return 2 * (x - target) * grad / (x.numel() if reduction == 1 else 1)


def smooth_l1_backward(grad: Any, x: Any, target: Any, reduction: int, beta: float) -> Any:
    d = x - target
    slope = torch.where(d.abs() < beta, d / beta, torch.sign(d)) if beta else torch.sign(d)
    return slope * grad / (x.numel() if reduction == 1 else 1)


def weight_norm_backward(grad: Any, v: Any, g: Any, norms: Any, dim: int) -> tuple[Any, ...]:
    return grads(lambda a, b: nm.weight_norm_ref(a, b, dim)[0], [v, g], grad)


def max_pool_backward(dims: int) -> Callable[..., Any]:
    """Gradient of maximum pooling over the last dimensions, of which the indices, given last, are flat."""

    def reference(grad: Any, x: Any, *args: Any) -> Any:
        out = torch.zeros(x.shape, dtype=grad.dtype).flatten(-dims)
        return out.scatter_add(-1, args[-1].flatten(-dims), grad.flatten(-dims)).reshape(x.shape)

    return reference


def avg_pool_backward(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda grad, x, *args: _one(lambda t: forward(t, *args), x, grad)


def adaptive_avg_backward(dims: int) -> Callable[..., Any]:
    forward = adaptive.avg_ref(dims)
    return lambda grad, x: _one(lambda t: forward(t, grad.shape[-dims:]), x, grad)


def resize_backward(name: str) -> Callable[..., Any]:
    """Gradient of the linear resize `name` without its suffix, by autograd of the forward reference."""
    forwards: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("nearest1d", "nearest2d", "nearest3d"), m.nearest_ref),
        "bilinear2d": m.bilinear2d_ref,
        "bicubic2d": m.bicubic2d_ref,
    }
    forward = forwards[name.split("_")[1]]

    def reference(grad: Any, output_size: Any, input_size: Any, *args: Any) -> Any:
        x = torch.zeros(tuple(input_size), dtype=grad.dtype)
        return _one(lambda t: forward(t, output_size, *args), x, grad)

    return reference


def pad_backward(mode: str) -> Callable[..., Any]:
    """Gradient of a padding that repeats the image."""

    def reference(grad: Any, x: Any, padding: Any) -> Any:
        return _one(lambda t: F.pad(t, list(padding), mode=mode), x, grad)

    return reference


def reflection_backward(grad: Any, x: Any, padding: Any) -> Any:
    """Along each dimension the padding in front and behind is mirrored, and added to the elements next to the edges."""
    return _folded("reflection", grad, x, padding, lambda p, d: (p.flip(d), 1))


def replication_backward(grad: Any, x: Any, padding: Any) -> Any:
    """Along each dimension the padding in front and behind is added up, and these sums to the edges."""
    return _folded("replication", grad, x, padding, lambda p, d: (p.sum(d, True), 0))


def _folded(kind: str, grad: Any, x: Any, padding: Any, fold: Callable[[Any, int], tuple[Any, int]]) -> Any:
    """Add what `fold` makes of the padding in front and behind, with its distance from the edge; the operator itself for symbolic
    padding and for one that cuts."""
    dims, g = len(padding) // 2, m.widened(grad)
    if not all(isinstance(n, int) for n in padding) or min(padding) < 0:
        return getattr(torch.ops.aten, f"{kind}_pad{dims}d_backward")(grad, x, padding)
    for i in range(dims):
        (before, behind), d, n = padding[2 * i : 2 * i + 2], x.dim() - 1 - i, x.shape[x.dim() - 1 - i]
        middle = g.narrow(d, before, n)
        for front, size, at in ((True, before, 0), (False, behind, before + n)):
            if size:
                piece, gap = fold(g.narrow(d, at, size), d)
                rest = n - piece.shape[d] - gap
                middle = middle + torch.constant_pad_nd(piece, [0, 0] * i + ([gap, rest] if front else [rest, gap]))
        g = middle
    return g.to(grad.dtype)


def select_backward(grad: Any, input_sizes: Any, dim: int, index: Any) -> Any:
    out = torch.zeros(tuple(input_sizes), dtype=grad.dtype)
    out.select(dim, index).copy_(grad)
    return out


def slice_backward(grad: Any, input_sizes: Any, dim: int, start: Any, end: Any, step: Any) -> Any:
    out = torch.zeros(tuple(input_sizes), dtype=grad.dtype)
    out[(slice(None),) * (dim % out.dim()) + (slice(start, end, step),)] = grad
    return out


def unfold_backward(grad: Any, input_sizes: Any, dim: int, size: int, step: int) -> Any:
    x = torch.zeros(tuple(input_sizes), dtype=grad.dtype)
    return _one(lambda t: t.unfold(dim, size, step), x, grad)


def unfold_backward_opened(grad: Any, input_sizes: Any, dim: int, size: int, step: int) -> Any:
    """Windows added up at once. Where the gradient is one row for many of the input (the windows of an inverse STFT of a batch),
    torch's decomposition has a call for each element of a window: these are computed for the one row."""
    torchs, rank = m.torch_decomposition("aten::unfold_backward"), len(input_sizes)
    if rank == 0 or grad.dim() != rank + 1:
        return torchs(grad, input_sizes, dim, size, step)
    dim %= rank
    own = [*grad.shape[:dim], input_sizes[dim], *grad.shape[dim + 1 : -1]]
    known = all(isinstance(n, int) for n in (grad.shape[dim], input_sizes[dim], size, step))
    folds = known and grad.shape[dim] > 0 and grad.is_floating_point()
    made = _windows_added(grad, own[dim], dim, size, step) if folds else torchs(grad, own, dim, size, step)
    return made if all(isinstance(n, int) and n == k for n, k in zip(own, input_sizes, strict=True)) else made.expand(input_sizes)


def _windows_added(grad: Any, length: int, dim: int, size: int, step: int) -> Any:
    """Windows along `dim` as the columns of an image of one line."""
    columns = grad.movedim(dim, -1)
    *others, _, count = columns.shape
    covered = (count - 1) * step + size
    flat = columns.reshape(math.prod(others), size, count)
    line = torch.ops.aten.col2im(flat, [1, covered], [1, size], [1, 1], [0, 0], [1, step]).reshape(*others, covered)
    line = F.pad(line, (0, length - covered)) if length > covered else line[..., :length]
    return line.movedim(-1, dim)
