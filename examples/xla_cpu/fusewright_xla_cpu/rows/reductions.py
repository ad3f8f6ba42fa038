"""Reductions and scans. XLA adds sequentially where torch adds pairwise, so long sums of floats are computed in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.scipy import special

from fusewright.interface import OpView
from fusewright_xla_cpu.table import Array, Site, add, cast, wide


def _dims(dim: Any, rank: int) -> tuple[int, ...]:
    """Return the reduced dimensions: all of them if none is given."""
    if dim is None or dim == []:
        return tuple(range(rank))
    named = dim if isinstance(dim, Sequence) else [dim]
    return tuple(d % max(rank, 1) for d in named) if rank else ()


def _widened(site: Site, self: Array) -> Array:
    return cast(self, wide(site.spec.dtype))


@add("sum")
def sum_of(site: Site, self: Array, dim: Any, keepdim: bool, dtype: Any) -> Array:
    return added(_widened(site, self), _dims(dim, self.ndim), keepdim)


@add("mean")
def mean(site: Site, self: Array, dim: Any, keepdim: bool, dtype: Any) -> Array:
    dims = _dims(dim, self.ndim)
    return added(_widened(site, self), dims, keepdim) / _count(self, dims)


_LONG = 32
"""Number of elements from which a sum needs more bits."""


def added(x: Array, dims: Sequence[int], keepdim: bool = False) -> Array:
    """Return the sum of `x`, rounded only once if it is long."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or _count(x, dims) < _LONG:
        return jnp.sum(x, tuple(dims), keepdims=keepdim)
    return jnp.sum(x, tuple(dims), dtype="float64", keepdims=keepdim).astype(x.dtype)


def _count(self: Array, dims: Sequence[int]) -> int:
    n = 1
    for d in dims:
        n *= self.shape[d]
    return n


@add("prod")
def prod(site: Site, self: Array, dim: int, keepdim: bool, dtype: Any) -> Array:
    return jnp.prod(_widened(site, self), _dims(dim, self.ndim), keepdims=keepdim)


@add("prod_all")
def prod_all(site: Site, self: Array, dtype: Any) -> Array:
    return jnp.prod(_widened(site, self))


def _not_empty(op: OpView) -> str | None:
    """Refuse empty tensors: eager raises an error for their maximum."""
    spec = op.arg("self").spec
    return None if all(n != 0 for n in spec.shape) else "an input without elements"


@add("amax", when=_not_empty)
def amax(site: Site, self: Array, dim: Any, keepdim: bool) -> Array:
    return jnp.max(self, _dims(dim, self.ndim), keepdims=keepdim)


@add("amin", when=_not_empty)
def amin(site: Site, self: Array, dim: Any, keepdim: bool) -> Array:
    return jnp.min(self, _dims(dim, self.ndim), keepdims=keepdim)


def _arg(self: Array, dim: int | None, keepdim: bool, largest: bool) -> Array:
    """Return the index of the first extreme element; the first NaN beats everything."""
    find = jnp.argmax if largest else jnp.argmin
    self = self.astype("int8") if self.dtype == bool else self
    if dim is None:
        found = find(self.reshape(-1))
        return found.reshape((1,) * self.ndim) if keepdim else found
    return jnp.zeros((), "int64") if self.ndim == 0 else find(self, dim, keepdims=keepdim)


@add("argmax", when=_not_empty)
def argmax(site: Site, self: Array, dim: int | None, keepdim: bool) -> Array:
    return _arg(self, dim, keepdim, largest=True)


@add("argmin", when=_not_empty)
def argmin(site: Site, self: Array, dim: int | None, keepdim: bool) -> Array:
    return _arg(self, dim, keepdim, largest=False)


def _with_index(self: Array, dim: int, keepdim: bool, largest: bool) -> tuple[Array, Array]:
    if self.ndim == 0:
        return self, jnp.zeros((), "int64")
    at = _arg(self, dim, True, largest)
    values = jnp.take_along_axis(self, at, dim)
    return (values, at) if keepdim else (values.squeeze(dim), at.squeeze(dim))


@add("max_with_indices", when=_not_empty)
def max_with_indices(site: Site, self: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    return _with_index(self, dim, keepdim, largest=True)


@add("min_with_indices", when=_not_empty)
def min_with_indices(site: Site, self: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    return _with_index(self, dim, keepdim, largest=False)


@add("any")
def any_of(site: Site, self: Array, dim: Any, keepdim: bool) -> Array:
    return jnp.any(self != 0, _truth_dims(dim, self.ndim), keepdims=keepdim)


@add("all")
def all_of(site: Site, self: Array, dim: Any, keepdim: bool) -> Array:
    return jnp.all(self != 0, _truth_dims(dim, self.ndim), keepdims=keepdim)


def _truth_dims(dim: Any, rank: int) -> tuple[int, ...]:
    """Return the reduced dimensions; here an empty list means none."""
    return () if dim == [] else _dims(dim, rank)


def _moments(self: Array, dim: Any, correction: Any, keepdim: bool) -> tuple[Array, Array]:
    dims = _dims(dim, self.ndim)
    n = _count(self, dims)
    mean = added(self, dims, True) / n
    total = added(jnp.square(self - mean), dims, keepdim)
    left = max(n - (1 if correction is None else correction), 0)
    return total / left, mean if keepdim else mean.squeeze(dims)


def _real(op: OpView) -> str | None:
    return None if op.arg("self").spec.dtype.is_floating_point else "not of floats"


@add("var", when=_real)
def var(site: Site, self: Array, dim: Any, correction: Any, keepdim: bool) -> Array:
    return _moments(_widened(site, self), dim, correction, keepdim)[0]


@add("std", when=_real)
def std(site: Site, self: Array, dim: Any, correction: Any, keepdim: bool) -> Array:
    return jnp.sqrt(_moments(_widened(site, self), dim, correction, keepdim)[0])


@add("var_mean", when=_real)
def var_mean(site: Site, self: Array, dim: Any, correction: Any, keepdim: bool) -> tuple[Array, Array]:
    return _moments(_widened(site, self), dim, correction, keepdim)


def _common_norm(op: OpView) -> str | None:
    empty = _not_empty(op)
    return empty or (None if op.arg("ord") in (0, 1, 2, float("inf"), float("-inf")) else "a norm of another order")


@add("vector_norm", when=_common_norm)
def vector_norm(site: Site, self: Array, ord: float, dim: Any, keepdim: bool, dtype: Any) -> Array:
    x, dims = jnp.abs(_widened(site, self)), _dims(dim, self.ndim)
    if ord == 2:
        return jnp.sqrt(added(jnp.square(x), dims, keepdim))
    if ord in (0, 1):
        return added(x if ord else (x != 0).astype(x.dtype), dims, keepdim)
    return (jnp.max if ord > 0 else jnp.min)(x, dims, keepdims=keepdim)


@add("logsumexp")
def logsumexp(site: Site, self: Array, dim: Any, keepdim: bool) -> Array:
    return special.logsumexp(_widened(site, self), _dims(dim, self.ndim), keepdims=keepdim)


# ---- scans ----


def _scanned(site: Site, self: Array, dim: int, scan: Any) -> Array:
    x = _widened(site, self)
    return x if x.ndim == 0 else scan(x, dim)


@add("cumsum")
def cumsum(site: Site, self: Array, dim: int, dtype: Any) -> Array:
    return _scanned(site, self, dim, jnp.cumsum)


@add("cumprod")
def cumprod(site: Site, self: Array, dim: int, dtype: Any) -> Array:
    return _scanned(site, self, dim, jnp.cumprod)


@add("logcumsumexp")
def logcumsumexp(site: Site, self: Array, dim: int) -> Array:
    return _scanned(site, self, dim, lambda x, d: jax.lax.cumlogsumexp(x, axis=d % x.ndim))


def _sorted(self: Array, dim: int, descending: bool) -> tuple[Array, Array]:
    """Sort stably with NaN last (first if descending), as torch does. Descending order also keeps the order of equal elements."""
    if self.ndim == 0:
        return self, jnp.zeros((), "int64")
    x = self.astype("int8") if self.dtype == bool else self
    if descending:
        back = jnp.argsort(jnp.flip(x, dim), dim, stable=True)
        at = x.shape[dim] - 1 - jnp.flip(back, dim)
    else:
        at = jnp.argsort(x, dim, stable=True)
    return jnp.take_along_axis(self, at, dim), at


def _few(op: OpView) -> str | None:
    """Take only floats, where ties are rare: which of equal elements torch picks is unspecified."""
    return None if op.arg("self").spec.dtype in (torch.float32, torch.float64) else "ties of equal elements"


def _ordered(op: OpView) -> str | None:
    """Also take stable sorts, where the order of equal elements is specified."""
    return None if op.arg("stable") else _few(op)


@add("sort", when=_ordered)
def sort(site: Site, self: Array, stable: Any, dim: int, descending: bool) -> tuple[Array, Array]:
    return _sorted(self, dim, descending)


@add("topk", when=_few)
def topk(site: Site, self: Array, k: int, dim: int, largest: bool, sorted: bool) -> tuple[Array, Array]:
    values, at = _sorted(self, dim, largest)
    if self.ndim == 0:
        return values, at
    return jax.lax.slice_in_dim(values, 0, k, axis=dim % self.ndim), jax.lax.slice_in_dim(at, 0, k, axis=dim % self.ndim)
