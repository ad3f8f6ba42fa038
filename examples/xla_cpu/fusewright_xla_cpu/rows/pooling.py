"""Pooling over [..., H, W], and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fusewright.interface import OpView
from fusewright_xla_cpu.rows.products import gradients
from fusewright_xla_cpu.table import Array, Site, add, cast, wide


def _pair(values: Sequence[int], default: Sequence[int]) -> tuple[int, int]:
    """Return two numbers: torch passes one for two equal ones, and none for the default."""
    given = list(values) or list(default)
    return (given[0], given[-1])


def _outputs(n: int, k: int, s: int, p: int, d: int, ceil: bool) -> int:
    """Return the number of windows along one dimension (`pooling_output_shape` of ATen/native/Pool.h): the last one starts inside
    the input or in the padding before it."""
    span = n + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil else 0)
    count = span // s + 1
    return count - 1 if ceil and (count - 1) * s >= n + p else count


def _windows(x: Array, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, fill: Any) -> list[Array]:
    """Return, for each position in the window, the elements of all windows there; `fill` outside `x`."""
    kernel = _pair(kernel, kernel)
    stride, padding, dilation = _pair(stride, kernel), _pair(padding, (0, 0)), _pair(dilation, (1, 1))
    sizes = [_outputs(n, k, s, p, d, ceil) for n, k, s, p, d in zip(x.shape[-2:], kernel, stride, padding, dilation, strict=True)]
    needed = [(o - 1) * s + d * (k - 1) + 1 for o, s, d, k in zip(sizes, stride, dilation, kernel, strict=True)]
    edges = [(p, max(m - n - p, 0), 0) for p, m, n in zip(padding, needed, x.shape[-2:], strict=True)]
    padded = jax.lax.pad(x, jnp.asarray(fill, x.dtype), [(0, 0, 0)] * (x.ndim - 2) + edges)
    rows, columns = ([slice(a * d, a * d + (o - 1) * s + 1, s) for a in range(k)]
                     for o, s, d, k in zip(sizes, stride, dilation, kernel, strict=True))  # fmt: skip
    return [padded[..., r, c] for r in rows for c in columns]


@add("max_pool2d")
def max_pool2d(
    site: Site, self: Array, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> tuple[Array, Array]:
    """Return each window's maximum and its position in the plane: the first of equal ones, the last NaN, as in torch's loop."""
    h, w = self.shape[-2:]
    how = (kernel_size, stride, padding, dilation, ceil_mode)
    plane = jnp.arange(h * w, dtype="int64").reshape(h, w)
    places = _windows(plane, *how, -1)
    values = _windows(self, *how, 0)
    best, at = values[0], jnp.full(values[0].shape, -1, "int64")
    for value, place in zip(values, places, strict=True):
        taken = (place >= 0) & ((at < 0) | (value > best) | (value != value))
        best, at = jnp.where(taken, value, best), jnp.where(taken, place, at)
    return best, at


@add("max_pool2d_backward")
def max_pool2d_backward(site: Site, grad_output: Array, self: Array, indices: Array, **_: Any) -> Array:
    *lead, h, w = self.shape
    flat = cast(grad_output, wide(site.spec.dtype)).reshape(*lead, -1)
    at = indices.reshape(*lead, -1)
    grid = list(jnp.indices(at.shape, sparse=True))
    grid[-1] = at
    return jnp.zeros((*lead, h * w), flat.dtype).at[tuple(grid)].add(flat).reshape(self.shape)


def _averaged(
    x: Array, kernel: Any, stride: Any, padding: Any, ceil: bool, count_padding: bool, divisor: int | None
) -> Array:
    total = sum(_windows(x, kernel, stride, padding, (1, 1), ceil, 0))
    return total / (_inside(x.shape, kernel, stride, padding, ceil, count_padding) if divisor is None else divisor)


def _inside(shape: Sequence[int], kernel: Any, stride: Any, padding: Any, ceil: bool, count_padding: bool) -> Array:
    """Return how many elements each window averages: padding counts on request, positions beyond it never."""
    p = _pair(padding, (0, 0))
    ones = jnp.ones(shape[-2:], "float32")
    if count_padding:
        grown = jnp.pad(ones, [(p[0], p[0]), (p[1], p[1])], constant_values=1)
        kernel = _pair(kernel, kernel)
        sizes = [_outputs(n, k, s, q, 1, ceil) for n, k, s, q in zip(shape[-2:], kernel, _pair(stride, kernel), p, strict=True)]
        counted = _windows(grown, kernel, stride, (0, 0), (1, 1), True, 0)
        return sum(c[: sizes[0], : sizes[1]] for c in counted)
    return sum(_windows(ones, kernel, stride, padding, (1, 1), ceil, 0))


def _has_two(op: OpView) -> str | None:
    return None if op.out.spec is not None and op.out.spec.dtype.is_floating_point else "not of floats"


@add("avg_pool2d", when=_has_two)
def avg_pool2d(
    site: Site, self: Array, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool,
    divisor_override: int | None,
) -> Array:  # fmt: skip
    x = cast(self, wide(site.spec.dtype))
    return _averaged(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@add("avg_pool2d_backward", when=_has_two)
def avg_pool2d_backward(
    site: Site, grad_output: Array, self: Array, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> Array:  # fmt: skip
    how = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    dtype = wide(site.spec.dtype)
    return gradients(lambda x: _averaged(x, *how), [cast(self, dtype)], cast(grad_output, dtype))[0]


def _adaptive(x: Array, sizes: Sequence[int]) -> Array:
    """Return the means of windows from floor(i n / m) to ceil((i + 1) n / m)."""
    (h, w), (oh, ow) = x.shape[-2:], sizes
    if oh and ow and h % oh == 0 and w % ow == 0:
        return x.reshape(*x.shape[:-2], oh, h // oh, ow, w // ow).mean((-3, -1))
    rows = [x[..., i * h // oh : -(-(i + 1) * h // oh), :] for i in range(oh)]
    cells = [[r[..., j * w // ow : -(-(j + 1) * w // ow)].mean((-2, -1)) for j in range(ow)] for r in rows]
    return jnp.stack([jnp.stack(c, -1) for c in cells], -2)


def _few_windows(op: OpView) -> str | None:
    spec = op.out.spec if op.op == "adaptive_avg_pool2d" else op.arg("grad_output").spec
    sizes = [n for n in spec.shape[-2:] if isinstance(n, int) and n] if spec is not None else []
    few = len(sizes) == 2 and sizes[0] * sizes[1] <= 256
    return _has_two(op) if few else "too many windows of different sizes"


@add("adaptive_avg_pool2d", when=_few_windows)
def adaptive_avg_pool2d(site: Site, self: Array, output_size: Sequence[int]) -> Array:
    return _adaptive(cast(self, wide(site.spec.dtype)), output_size)


@add("adaptive_avg_pool2d_backward", when=_few_windows)
def adaptive_avg_pool2d_backward(site: Site, grad_output: Array, self: Array) -> Array:
    dtype = wide(site.spec.dtype)
    sizes = grad_output.shape[-2:]
    return gradients(lambda x: _adaptive(x, sizes), [cast(self, dtype)], cast(grad_output, dtype))[0]
