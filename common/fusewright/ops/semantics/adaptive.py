"""Pools of a given number of cells, of which cell i of n elements in m cells is floor(i * n / m) to ceil((i + 1) * n / m):
formulas, and decompositions for equal cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fusewright.ops.semantics.composite import widened

aten = torch.ops.aten


def cells(n: int, made: int) -> list[tuple[int, int]]:
    """The start and the end of every cell."""
    return [(i * n // made, -(-(i + 1) * n // made)) for i in range(made)]


def avg_ref(dims: int) -> Callable[..., Any]:
    """Means of cells of the last dimensions."""

    def reference(x: Any, output_size: Any) -> Any:
        sides = [cells(x.shape[d - dims], m) for d, m in enumerate(output_size)]
        parts = [x[(..., *itertools.starmap(slice, cell))].mean(tuple(range(-dims, 0))) for cell in itertools.product(*sides)]
        return torch.stack(parts, -1).reshape(*x.shape[:-dims], *output_size)

    return reference


def max_ref(dims: int) -> Callable[..., Any]:
    """Maxima of cells of the last dimensions, and their flat indices."""
    pool: Callable[..., Any] = getattr(F, f"adaptive_max_pool{dims}d")
    return lambda x, output_size: pool(x, tuple(output_size), return_indices=True)


def _whole(shape: Sequence[Any], made: Sequence[Any]) -> list[int] | None:
    """The sizes of cells of the last dimensions if all are equal."""
    lengths = shape[len(shape) - len(made) :]
    if not all(isinstance(n, int) and n for n in (*lengths, *made)) or any(n % m for n, m in zip(lengths, made, strict=True)):
        return None
    return [n // m for n, m in zip(lengths, made, strict=True)]


def _in_cells(x: Any, made: Sequence[int], sizes: Sequence[int]) -> Any:
    """[..., n, k] -> [..., n / size, size, k / size, size]."""
    for d, (m, size) in enumerate(zip(reversed(made), reversed(sizes), strict=True)):
        x = x.unflatten(-1 - 2 * d, (m, size))
    return x


def avg(dims: int) -> Callable[..., Any]:
    """Means of equal cells, else the operator itself."""
    operator = getattr(aten, f"_adaptive_avg_pool{dims}d")

    def pool(x: Any, output_size: Any) -> Any:
        sizes = _whole(x.shape, output_size)
        if sizes is None:
            return operator(x, output_size)
        return _in_cells(widened(x), output_size, sizes).mean([-1 - 2 * d for d in range(dims)]).to(x.dtype)

    return pool


def _along(values: Any, dim: int) -> Any:
    """Append dimensions, so that values of `dim` broadcast."""
    return values[(..., *[None] * (-1 - dim))]


def avg_backward(dims: int) -> Callable[..., Any]:
    """A share of the gradient for every element of equal cells, else the operator itself."""
    operator = getattr(aten, f"_adaptive_avg_pool{dims}d_backward")

    def backward(grad: Any, x: Any) -> Any:
        made = grad.shape[-dims:]
        sizes = _whole(x.shape, made)
        if sizes is None:
            return operator(grad, x)
        return _spread(widened(grad) / math.prod(sizes), made, sizes).to(grad.dtype)

    return backward


def _spread(x: Any, made: Sequence[int], sizes: Sequence[int]) -> Any:
    """Repeat the value of each cell for its elements."""
    spread = x
    for d in range(len(made)):
        spread = spread.unsqueeze(-1 - 2 * d)
    shape = [n for pair in zip(made, sizes, strict=True) for n in pair]
    return spread.expand(*x.shape[: x.dim() - len(made)], *shape).reshape(
        *x.shape[: x.dim() - len(made)], *(m * size for m, size in zip(made, sizes, strict=True))
    )


def max_pool(dims: int) -> Callable[..., Any]:
    """Maxima of equal cells, the last NaN winning as in eager; else the operator itself."""
    operator = getattr(aten, f"adaptive_max_pool{dims}d")

    def pool(x: Any, output_size: Any) -> Any:
        sizes = _whole(x.shape, output_size)
        if sizes is None:
            return operator(x, output_size)
        lead = x.dim() - dims
        outer, inner = ([lead + 2 * d + k for d in range(dims)] for k in (0, 1))
        apart = _in_cells(x, output_size, sizes).permute(*range(lead), *outer, *inner).flatten(-dims)
        best, place = apart.max(-1)
        number = torch.arange(apart.shape[-1], device=x.device)
        last = torch.where(apart != apart, number, -1).amax(-1)
        return best, _flat(torch.where(best != best, last, place), x.shape[-dims:], output_size, sizes)

    return pool


def _flat(place: Any, lengths: Sequence[int], made: Sequence[int], sizes: Sequence[int]) -> Any:
    """Positions in images of positions in cells."""
    flat: Any = 0
    for d, (n, size, m) in enumerate(zip(lengths, sizes, made, strict=True)):
        inside = place // math.prod(sizes[d + 1 :]) % size
        start = _along(torch.arange(m, device=place.device) * size, d - len(sizes))
        flat = flat * n + start + inside
    return flat


def max_backward(dims: int) -> Callable[..., Any]:
    """The gradient of an image's only cell at its maximum; else the operator itself, which visits cells, not elements: 256 planes
    of 28x28 in 7x7 cells take 0.16 ms, a kernel 0.30 (a Zen 5 virtual machine, one thread, 2026-11-28)."""
    operator = getattr(aten, f"adaptive_max_pool{dims}d_backward")

    def backward(grad: Any, x: Any, indices: Any) -> Any:
        lengths, made = x.shape[-dims:], grad.shape[-dims:]
        if _whole(x.shape, made) is None or any(m != 1 for m in made):
            return operator(grad, x, indices)
        here = torch.arange(math.prod(lengths), device=x.device).reshape(lengths)
        return torch.where(indices == here, grad, 0.0).to(grad.dtype)

    return backward
