"""Gathers and scatters. Indices out of bounds raise an error as in eager, where JAX would clamp them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch

from fusewright.interface import OpView, Value
from fusewright_xla_cpu.rows.shapes import sliced
from fusewright_xla_cpu.table import Array, Site, add, cast, wide

_OUT_OF_BOUNDS = "index out of bounds"


def _held(site: Site, at: Array, size: int, negative: bool = False, error: type[Exception] = IndexError) -> Array:
    """Check indices against `size`. Negative ones count from the end where torch allows them."""
    site.refuse((at >= size) | (at < (-size if negative else 0)), error(f"{_OUT_OF_BOUNDS} for a size of {size}"))
    return jnp.where(at < 0, at + size, at) if negative else at


def _along(self_rank: int, at: Array, dim: int) -> tuple[Array, ...]:
    """Return the position of each element of `at`, with its value as the coordinate along `dim`."""
    grid = list(jnp.indices(at.shape, sparse=True))
    grid[dim % self_rank] = at
    return tuple(grid)


def _vector(self: Array, index: Array) -> tuple[Array, Array]:
    """Return scalars as vectors of one element."""
    return (self.reshape(1) if self.ndim == 0 else self), (index.reshape(1) if index.ndim == 0 else index)


@add("gather")
def gather(site: Site, self: Array, dim: int, index: Array, sparse_grad: bool) -> Array:
    x, at = _vector(self, index)
    at = _held(site, at, x.shape[dim], error=RuntimeError)
    return x[_along(x.ndim, at, dim)].reshape(index.shape)


@add("index_select")
def index_select(site: Site, self: Array, dim: int, index: Array) -> Array:
    x, at = _vector(self, index)
    found = jnp.take(x, _held(site, at, x.shape[dim]), axis=dim % x.ndim)
    return found.reshape(()) if self.ndim == 0 else found


def _whole_indices(op: OpView) -> str | None:
    given = [v for v in op.arg("indices") if isinstance(v, Value)]
    masks = any(v.spec is not None and not v.spec.dtype.is_signed for v in given)
    return "masks: the size of the result depends on data" if masks else None


def _places(site: Site, self: Array, indices: Sequence[Array | None]) -> tuple[Any, ...]:
    return tuple(
        slice(None) if at is None else _held(site, at, self.shape[d], negative=True) for d, at in enumerate(indices)
    )


@add("index", when=_whole_indices)
def index(site: Site, self: Array, indices: Sequence[Array | None]) -> Array:
    return self[_places(site, self, indices)]


@add("index_put", when=_whole_indices)
def index_put(site: Site, self: Array, indices: Sequence[Array | None], values: Array, accumulate: bool) -> Array:
    at = _places(site, self, indices)
    if not accumulate:
        return self.at[at].set(values)
    x = cast(self, _summed(site.spec.dtype))
    return x.at[at].add(cast(values, _summed(site.spec.dtype)))


def _summed(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and products: JAX does not add bools, and torch's sum of bools is whether any is true."""
    return torch.int32 if dtype is torch.bool else wide(dtype)


def _taken(at: Array, src: Array) -> Array:
    """Return the part of `src` that `index` covers."""
    return src[tuple(slice(n) for n in at.shape)]


def _scattered(site: Site, self: Array, dim: int, index: Array, src: Any, how: str) -> Array:
    x, at = _vector(cast(self, _summed(site.spec.dtype)), index)
    at = _held(site, at, x.shape[dim], error=RuntimeError)
    source = cast(src, _summed(site.spec.dtype))
    source = _taken(at, source) if source.ndim else source
    return getattr(x.at[_along(x.ndim, at, dim)], how)(source).reshape(self.shape)


@add("scatter")
def scatter(site: Site, self: Array, dim: int, index: Array, src: Array) -> Array:
    return _scattered(site, self, dim, index, src, "set")


@add("scatter_value")
def scatter_value(site: Site, self: Array, dim: int, index: Array, value: Any) -> Array:
    return _scattered(site, self, dim, index, value, "set")


@add("scatter_add")
def scatter_add(site: Site, self: Array, dim: int, index: Array, src: Array) -> Array:
    return _scattered(site, self, dim, index, src, "add")


_REDUCES = {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min"}


def _known_reduce(op: OpView) -> str | None:
    known = op.arg("reduce") in _REDUCES and op.arg("include_self")
    return None if known else "only sum, prod, amax and amin that include self"


@add("scatter_reduce", when=_known_reduce)
def scatter_reduce(site: Site, self: Array, dim: int, index: Array, src: Array, reduce: str, include_self: bool) -> Array:
    return _scattered(site, self, dim, index, src, _REDUCES[reduce])


def _same_rank(op: OpView) -> str | None:
    """Refuse a source of another rank: eager rejects it, and JAX would broadcast it."""
    x, source = (op.arg(n).spec for n in ("self", "source"))
    return None if len(x.shape) == len(source.shape) else "a source of another rank"


@add("index_add", when=_same_rank)
def index_add(site: Site, self: Array, dim: int, index: Array, source: Array, alpha: Any) -> Array:
    dtype = _summed(site.spec.dtype)
    x, at = _vector(cast(self, dtype), index)
    at = _held(site, at, x.shape[dim])
    places = (*(slice(None),) * (dim % x.ndim), at)
    added = cast(source, dtype).reshape(1 if self.ndim == 0 else source.shape) * cast(alpha, dtype)
    return x.at[places].add(added).reshape(self.shape)


@add("index_copy")
def index_copy(site: Site, self: Array, dim: int, index: Array, source: Array) -> Array:
    x, at = _vector(self, index)
    at = _held(site, at, x.shape[dim])
    placed = x.at[(*(slice(None),) * (dim % x.ndim), at)].set(source.reshape(1) if self.ndim == 0 else source)
    return placed.reshape(self.shape)


@add("index_fill")
def index_fill(site: Site, self: Array, dim: int, index: Array, value: Any) -> Array:
    x, at = _vector(self, index)
    at = _held(site, at, x.shape[dim], negative=True)
    return x.at[(*(slice(None),) * (dim % x.ndim), at)].set(cast(value, site.spec.dtype)).reshape(self.shape)


@add("slice_scatter")
def slice_scatter(site: Site, self: Array, src: Array, dim: int, start: Any, end: Any, step: int) -> Array:
    return self.at[sliced(self.shape, dim, start, end, step)].set(cast(src, site.spec.dtype))


@add("select_scatter")
def select_scatter(site: Site, self: Array, src: Array, dim: int, index: int) -> Array:
    return self.at[(*(slice(None),) * (dim % self.ndim), index)].set(cast(src, site.spec.dtype))


@add("bucketize")
def bucketize(site: Site, self: Array, boundaries: Array, out_int32: bool, right: bool) -> Array:
    return jnp.searchsorted(boundaries, self, side="right" if right else "left")
