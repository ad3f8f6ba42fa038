"""Views (ordinary values in XLA), rearrangements and creation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fusewright.interface import OpView
from fusewright_xla_cpu.table import Array, Site, add, cast, dtype_name, wide


def _resolved(size: Sequence[int], numel: int) -> tuple[int, ...]:
    """Return sizes with -1 replaced by the remaining size."""
    known = math.prod(n for n in size if n != -1)
    return tuple(numel // known if n == -1 else n for n in size) if known else tuple(max(n, 0) for n in size)


@add("view")
def view(site: Site, self: Array, size: Sequence[int]) -> Array:
    return self.reshape(_resolved(size, self.size))


@add("reshape")
def reshape(site: Site, self: Array, shape: Sequence[int]) -> Array:
    return self.reshape(_resolved(shape, self.size))


@add("expand")
def expand(site: Site, self: Array, size: Sequence[int], implicit: bool) -> Array:
    lead = len(size) - self.ndim
    sizes = tuple(self.shape[d - lead] if n == -1 else n for d, n in enumerate(size))
    return jnp.broadcast_to(self, sizes)


@add("permute")
def permute(site: Site, self: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(self, [d % self.ndim for d in dims])


@add("transpose")
def transpose(site: Site, self: Array, dim0: int, dim1: int) -> Array:
    return self if self.ndim == 0 else jnp.swapaxes(self, dim0, dim1)


@add("t")
def t(site: Site, self: Array) -> Array:
    return self.T


@add("squeeze")
def squeeze(site: Site, self: Array, dim: Sequence[int]) -> Array:
    gone = {d % self.ndim for d in dim} if self.ndim else set()
    return self.reshape([n for d, n in enumerate(self.shape) if d not in gone or n != 1])


@add("unsqueeze")
def unsqueeze(site: Site, self: Array, dim: int) -> Array:
    return jnp.expand_dims(self, dim)


def sliced(shape: Sequence[int], dim: int, start: Any, end: Any, step: int) -> tuple[slice, ...]:
    """Return the index for `aten::slice`; bounds are clamped, never rejected."""
    dim %= len(shape)
    bounds = slice(start, end, step).indices(shape[dim])
    return (*(slice(None),) * dim, slice(bounds[0], max(bounds[0], bounds[1]), step))


@add("slice")
def slice_of(site: Site, self: Array, dim: int, start: Any, end: Any, step: int) -> Array:
    return self[sliced(self.shape, dim, start, end, step)]


@add("select")
def select(site: Site, self: Array, dim: int, index: int) -> Array:
    dim %= self.ndim
    return jax.lax.index_in_dim(self, index % self.shape[dim], dim, keepdims=False)


def pieces(self: Array, sizes: Sequence[int], dim: int) -> tuple[Array, ...]:
    """Return parts of the listed sizes along `dim`."""
    dim, start, found = dim % self.ndim, 0, []
    for n in sizes:
        found.append(jax.lax.slice_in_dim(self, start, start + n, axis=dim))
        start += n
    return tuple(found)


@add("split")
def split(site: Site, self: Array, split_size: int, dim: int) -> tuple[Array, ...]:
    n = self.shape[dim]
    if not split_size:
        return (self,)
    return pieces(self, [min(split_size, n - at) for at in range(0, n, split_size)] or [0], dim)


@add("split_with_sizes")
def split_with_sizes(site: Site, self: Array, split_sizes: Sequence[int], dim: int) -> tuple[Array, ...]:
    return pieces(self, split_sizes, dim)


@add("unbind")
def unbind(site: Site, self: Array, dim: int) -> tuple[Array, ...]:
    return tuple(jax.lax.index_in_dim(self, k, dim % self.ndim, keepdims=False) for k in range(self.shape[dim]))


@add("diagonal")
def diagonal(site: Site, self: Array, offset: int, dim1: int, dim2: int) -> Array:
    return jnp.diagonal(self, offset, dim1, dim2)


@add("unfold")
def unfold(site: Site, self: Array, dimension: int, size: int, step: int) -> Array:
    if self.ndim == 0:
        return self.reshape(1)[:size]
    dimension %= self.ndim
    count = (self.shape[dimension] - size) // step + 1
    at = jnp.arange(count)[:, None] * step + jnp.arange(size)[None, :]
    return jnp.moveaxis(jnp.take(self, at, axis=dimension), dimension + 1, -1)


@add("alias")
def alias(site: Site, self: Array) -> Array:
    return self


# ---- rearrangements ----


def _joined(site: Site, tensors: Sequence[Array]) -> list[Array]:
    """Return the tensors to concatenate; `cat` ignores empty vectors."""
    dtype = site.spec.dtype
    kept = [x for x in tensors if x.shape != (0,)] or list(tensors[:1])
    return [cast(x, dtype) for x in kept]


@add("cat")
def cat(site: Site, tensors: Sequence[Array], dim: int) -> Array:
    return jnp.concatenate(_joined(site, tensors), dim)


@add("stack")
def stack(site: Site, tensors: Sequence[Array], dim: int) -> Array:
    return jnp.stack([cast(x, site.spec.dtype) for x in tensors], dim)


def _pairs(pad: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """Return padding per dimension; torch lists the last dimension first."""
    given = [(pad[k], pad[k + 1]) for k in range(0, len(pad), 2)]
    return [(0, 0)] * (rank - len(given)) + given[::-1]


@add("constant_pad_nd")
def constant_pad_nd(site: Site, self: Array, pad: Sequence[int], value: Any) -> Array:
    config = [(low, high, 0) for low, high in _pairs(pad, self.ndim)]
    return jax.lax.pad(self, cast(value, site.spec.dtype), config)


@add("reflection_pad2d")
def reflection_pad2d(site: Site, self: Array, padding: Sequence[int]) -> Array:
    return _padded(self, padding, "reflect")


@add("replication_pad2d")
def replication_pad2d(site: Site, self: Array, padding: Sequence[int]) -> Array:
    return _padded(self, padding, "edge")


def _padded(self: Array, padding: Sequence[int], mode: str) -> Array:
    """Pad `self`; negative padding crops."""
    pairs = _pairs(padding, self.ndim)
    grown = jnp.pad(self, [(max(a, 0), max(b, 0)) for a, b in pairs], mode=mode)
    return grown[tuple(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(pairs, grown.shape, strict=True))]


@add("roll")
def roll(site: Site, self: Array, shifts: Sequence[int], dims: Sequence[int]) -> Array:
    return jnp.roll(self, tuple(shifts), tuple(dims)) if dims else jnp.roll(self, shifts[0])


@add("flip")
def flip(site: Site, self: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(self, tuple(dims)) if dims else self


@add("repeat")
def repeat(site: Site, self: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(self, tuple(repeats)) if self.ndim or repeats else self


@add("tril")
def tril(site: Site, self: Array, diagonal: int) -> Array:
    return jnp.tril(self, diagonal)


@add("triu")
def triu(site: Site, self: Array, diagonal: int) -> Array:
    return jnp.triu(self, diagonal)


# ---- creation ----


def _here(op: OpView) -> str | None:
    spec = op.out.spec
    return None if spec is not None and spec.device == "cpu" else "it is made on another device"


@add("full", "new_full", when=_here)
def full(site: Site, size: Sequence[int], fill_value: Any, **_: Any) -> Array:
    return jnp.full(tuple(size), cast(fill_value, site.spec.dtype))


@add("full_like", when=_here)
def full_like(site: Site, self: Array, fill_value: Any, **_: Any) -> Array:
    return jnp.full(self.shape, cast(fill_value, site.spec.dtype))


@add("fill", "fill_tensor")
def fill(site: Site, self: Array, value: Any) -> Array:
    return jnp.full(self.shape, cast(value, site.spec.dtype))


@add("empty", "new_empty", when=_here)
def empty(site: Site, size: Sequence[int], **_: Any) -> Array:
    """Return an array whose content must not be read; decompositions of norms return such ones."""
    return jnp.zeros(tuple(size), dtype_name(site.spec.dtype))


@add("scalar_tensor", when=_here)
def scalar_tensor(site: Site, s: Any, **_: Any) -> Array:
    return cast(s, site.spec.dtype)


def _whole(op: OpView) -> str | None:
    spec = op.out.spec
    exact = spec is not None and not spec.dtype.is_floating_point
    numbers = (op.arg("start"), op.arg("end"), op.arg("step"))
    return None if exact and not any(isinstance(n, float) for n in numbers) else "torch adds up floats in its own way"


@add("arange", when=_whole)
def arange(site: Site, start: int, end: int, step: int, **_: Any) -> Array:
    count = max(-(-(end - start) // step), 0)
    return (jnp.arange(count, dtype="int64") * step + start).astype(dtype_name(site.spec.dtype))


@add("eye", when=_here)
def eye(site: Site, n: int, m: int, **_: Any) -> Array:
    return jnp.eye(n, m, dtype=dtype_name(wide(site.spec.dtype)))
