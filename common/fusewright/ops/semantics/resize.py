"""Resizing: bilinear with eager's weights; gradients as gathers that sum over the outputs an element contributed to, one
dimension after the other.

Autograd of the forward pass would give colliding scatters: four accumulating ones for a bilinear resize.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusewright import _torch_compat as compat

_AXES = (-1, -2)


def bilinear2d(
    x: Tensor, output_size: Any, align_corners: bool, scale_h: float | None = None, scale_w: float | None = None
) -> Tensor:
    """The weighted mean of four elements, as in eager's kernel: torch's decomposition, `a + (b - a) * share`, gives NaN next to
    an infinity. Integers use the decomposition, which rounds."""
    aten = torch.ops.aten
    if not x.is_floating_point():
        found: Tensor = compat.decomposition(aten.upsample_bilinear2d.default)(
            x, output_size, align_corners, scale_h, scale_w
        )
        return found
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    top, bottom, down = _taps(x.shape[-2], output_size[0], align_corners, scale_h, wide, x.device)
    left, right, across = _taps(x.shape[-1], output_size[1], align_corners, scale_w, wide, x.device)

    def row(at: Tensor) -> Tensor:
        a, b = (aten._unsafe_index(x, [None, None, at[:, None], c]).to(wide) for c in (left, right))
        return a * (1 - across) + b * across

    out = row(top) * (1 - down[:, None]) + row(bottom) * down[:, None]
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return out.to(x.dtype).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _taps(
    n: Any, made: Any, align_corners: bool, scale: float | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `made` results, two positions among `n` and the weight of the second: ATen's
    `area_pixel_compute_source_index` and `compute_source_index_and_lambda`."""
    place = torch.arange(made, device=device)
    if compat.statically_true(n == made):
        return place, place, torch.zeros((), dtype=dtype, device=device).expand(made)
    place = place.to(dtype)
    if align_corners:
        source = place * ((n - 1) / (made - 1) if made > 1 else 0.0)
    else:
        step = 1.0 / scale if scale is not None and scale > 0 else n / made
        source = ((place + 0.5) * step - 0.5).clamp(min=0)
    first = source.to(torch.int64).clamp(max=n - 1)
    return first, (first + 1).clamp(max=n - 1), (source - first).clamp(0, 1)


def nearest_backward(dims: int) -> Callable[..., Any]:
    """Sums of blocks if each size is a whole multiple; else the operator itself."""

    def backward(grad: Tensor, output_size: Any, input_size: Any, *scales: Any) -> Any:
        shape, made = _ints(input_size), _ints(grad.shape)
        if shape is None or made is None or not _multiple(made, shape, dims) or not _as_sized(made, shape, scales):
            return getattr(torch.ops.aten, f"upsample_nearest{dims}d_backward")(grad, output_size, input_size, *scales)
        blocks = grad
        for d in range(dims):
            blocks = blocks.unflatten(-1 - 2 * d, (shape[-1 - d], made[-1 - d] // shape[-1 - d]))
        return blocks.sum([-1 - 2 * d for d in range(dims)])

    return backward


def bilinear2d_backward(grad: Tensor, output_size: Any, input_size: Any, align_corners: bool, *scales: Any) -> Any:
    """Weighted sums of the outputs within one step of an element; the operator itself for symbolic sizes and for scales other
    than the ratio of sizes. Weights are those of ATen's `compute_source_index_and_lambda`."""
    shape, made = _ints(input_size), _ints(grad.shape)
    if shape is None or made is None or not all((*shape, *made)) or not (align_corners or _as_sized(made, shape, scales)):
        return torch.ops.aten.upsample_bilinear2d_backward(grad, output_size, input_size, align_corners, *scales)
    out = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
    for d in _AXES:
        out = _gathered(out, d, shape[d], align_corners)
    return out.to(grad.dtype)


def _ints(sizes: Sequence[Any]) -> list[int] | None:
    return [*sizes] if all(isinstance(n, int) for n in sizes) else None


def _multiple(made: Sequence[int], shape: Sequence[int], dims: int) -> bool:
    return all(shape) and not any(made[-1 - d] % shape[-1 - d] for d in range(dims))


def _as_sized(made: Sequence[int], shape: Sequence[int], scales: Sequence[Any]) -> bool:
    """Whether the scales of the last dimensions are absent or equal to the ratio of sizes."""
    return all(s is None or s * shape[d] == made[d] for d, s in enumerate(scales, -len(scales)))


def _gathered(grad: Tensor, dim: int, n: int, align_corners: bool) -> Tensor:
    """Gradient of a linear resize of `n` elements along `dim` (-1 or -2): element i sums the outputs whose source lies in
    [i - 1, i + 1), weighted by distance."""
    made = grad.shape[dim]
    if n == made:
        return grad
    element = torch.arange(n, device=grad.device)[:, None]
    outputs = _first(element, n, made, align_corners).clamp(min=0) + torch.arange(_most(n, made, align_corners), device=grad.device)
    step = ((n - 1) / (made - 1) if made > 1 else 0.0) if align_corners else n / made
    place = outputs.to(grad.dtype)
    source = place * step if align_corners else (place + 0.5) * step - 0.5
    ahead = element - source.clamp(0, n - 1)
    reached = (outputs < made) & (ahead > -1) & (ahead <= 1)
    weight, at = 1 - ahead.abs(), outputs.clamp(max=made - 1)
    if dim == -1:
        return torch.where(reached, grad[..., at] * weight, 0.0).sum(-1)
    return torch.where(reached[..., None], grad[..., at, :] * weight[..., None], 0.0).sum(-2)


def _first(element: Any, n: int, made: int, align_corners: bool) -> Any:
    """The first output that may reach `element`: source(o) >= element - 1, in integer arithmetic."""
    return (element - 1) * (made - 1) // max(n - 1, 1) if align_corners else ((2 * element - 1) * made - n) // (2 * n)


def _most(n: int, made: int, align_corners: bool) -> int:
    """The maximum number of outputs, from the first one on, that reach an element."""
    last = [-_first(-i, n, made, True) if align_corners else -(-((2 * i + 3) * made - n) // (2 * n)) for i in range(n)]
    return max(min(b, made - 1) - max(_first(i, n, made, align_corners), 0) + 1 for i, b in enumerate(last))
