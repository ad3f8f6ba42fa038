"""Matrix products, convolutions and attention. Half types are summed in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fusewright.interface import OpView
from fusewright_xla_cpu.rows.reductions import added
from fusewright_xla_cpu.table import Array, Site, add, cast, wide


def _dot(site: Site, x: Array, y: Array) -> Array:
    """Return `x @ y`, accumulated in the dtype that eager uses."""
    dtype = wide(site.spec.dtype)
    return jnp.matmul(cast(x, dtype), cast(y, dtype), precision=jax.lax.Precision.HIGHEST)


def _plus(site: Site, self: Array, product: Array, beta: Any, alpha: Any) -> Array:
    """Return alpha * product + beta * self. With beta 0, `self` is not read, so its NaNs do not propagate."""
    dtype = wide(site.spec.dtype)
    scaled = product if alpha == 1 else product * cast(alpha, dtype)
    if beta == 0:
        return scaled
    return scaled + (cast(self, dtype) if beta == 1 else cast(self, dtype) * cast(beta, dtype))


@add("mm", "bmm")
def mm(site: Site, self: Array, mat2: Array) -> Array:
    return _dot(site, self, mat2)


@add("matmul")
def matmul(site: Site, self: Array, other: Array) -> Array:
    return _dot(site, self, other)


@add("linear")
def linear(site: Site, input: Array, weight: Array, bias: Array | None) -> Array:
    product = _dot(site, input, jnp.swapaxes(weight, -1, -2) if weight.ndim > 1 else weight)
    return product if bias is None else product + cast(bias, wide(site.spec.dtype))


@add("addmm")
def addmm(site: Site, self: Array, mat1: Array, mat2: Array, beta: Any, alpha: Any) -> Array:
    return _plus(site, self, _dot(site, mat1, mat2), beta, alpha)


@add("baddbmm")
def baddbmm(site: Site, self: Array, batch1: Array, batch2: Array, beta: Any, alpha: Any) -> Array:
    return _plus(site, self, _dot(site, batch1, batch2), beta, alpha)


@add("addbmm")
def addbmm(site: Site, self: Array, batch1: Array, batch2: Array, beta: Any, alpha: Any) -> Array:
    return _plus(site, self, _dot(site, batch1, batch2).sum(0), beta, alpha)


@add("mv")
def mv(site: Site, self: Array, vec: Array) -> Array:
    return _dot(site, self, vec)


@add("addmv")
def addmv(site: Site, self: Array, mat: Array, vec: Array, beta: Any, alpha: Any) -> Array:
    return _plus(site, self, _dot(site, mat, vec), beta, alpha)


@add("dot")
def dot(site: Site, self: Array, tensor: Array) -> Array:
    return _dot(site, self, tensor)


# ---- convolutions ----

_LETTERS = "DHW"


def _convolved(
    x: Array, w: Array, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int,
) -> Array:  # fmt: skip
    """Convolve [N, C, *S] with [O, C / groups, *K], or if transposed with [C, O / groups, *K]."""
    space = _LETTERS[-len(stride) :]
    names = ("NC" + space, "OI" + space, "NC" + space)
    how: dict[str, Any] = {"feature_group_count": groups, "rhs_dilation": tuple(dilation), "dimension_numbers": names}
    precision = jax.lax.Precision.HIGHEST
    if not transposed:
        pads = [(p, p) for p in padding]
        return jax.lax.conv_general_dilated(x, w, tuple(stride), pads, precision=precision, **how)
    reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
    pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
    return jax.lax.conv_general_dilated(
        x, _turned(w, groups), (1,) * len(stride), pads, lhs_dilation=tuple(stride), precision=precision, **how
    )


def _turned(w: Array, groups: int) -> Array:
    """Turn a transposed convolution's weight [C, O / groups, *K] into that of a plain one: [O, C / groups, *K], mirrored."""
    c, o, *k = w.shape
    w = jnp.flip(w, tuple(range(2, w.ndim))).reshape(groups, c // groups, o, *k)
    return jnp.swapaxes(w, 1, 2).reshape(groups * o, c // groups, *k)


def _has_batch(op: OpView) -> str | None:
    x, w = op.arg("input").spec, op.arg("weight").spec
    ranks = x.rank == w.rank and 3 <= w.rank <= 5 and len(op.arg("stride")) == w.rank - 2
    sized = all(n != 0 for s in (x, w) for n in s.shape)
    return None if ranks and sized else "without a batch, or without elements"


@add("conv", when=_has_batch)
def conv(site: Site, input: Array, weight: Array, bias: Array | None, **how: Any) -> Array:
    dtype = wide(site.spec.dtype)
    out = _convolved(cast(input, dtype), cast(weight, dtype), **how)
    return out if bias is None else out + cast(bias, dtype).reshape(-1, *(1,) * (out.ndim - 2))


@add("conv_backward", when=_has_batch)
def conv_backward(
    site: Site, grad_output: Array, input: Array, weight: Array, bias_sizes: Any, output_mask: Sequence[bool], **how: Any
) -> tuple[Array | None, ...]:
    dtype = wide(site.op.arg("grad_output").spec.dtype)
    grad, x, w = (cast(t, dtype) for t in (grad_output, input, weight))
    dx, dw = gradients(lambda a, b: _convolved(a, b, **how), (x, w), grad)
    db = added(grad, (0, *range(2, grad.ndim)))
    return tuple(t if on else None for t, on in zip((dx, dw, db), output_mask, strict=True))


def gradients(fn: Callable[..., Array], inputs: Sequence[Array], grad: Array) -> tuple[Array, ...]:
    """Return the gradients of `fn(*inputs)` by JAX's reverse mode. XLA removes those that are not read."""
    _, back = jax.vjp(fn, *inputs)
    return tuple(back(grad))


# ---- attention ----


def _attended(
    q: Array, k: Array, v: Array, mask: Array | None, causal: bool, scale: float | None
) -> tuple[Array, Array]:
    """Return attention and its log-sum-exp. A row without keys gives zeros, as in eager's kernels."""
    s = jnp.matmul(q, jnp.swapaxes(k, -1, -2), precision=jax.lax.Precision.HIGHEST)
    s = s * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf) if mask.dtype == bool else s + mask
    top = jax.lax.stop_gradient(s.max(-1, keepdims=True))
    top = jnp.where(jnp.isneginf(top), 0, top)
    e = jnp.exp(s - top)
    total = e.sum(-1, keepdims=True)
    p = jnp.where(total == 0, 0, e / jnp.where(total == 0, 1, total))
    return jnp.matmul(p, v, precision=jax.lax.Precision.HIGHEST), (top + jnp.log(total)).squeeze(-1)


def _widened(site: Site, q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array, Array, Array | None]:
    dtype = wide(site.spec.dtype)
    added = mask if mask is None or mask.dtype == bool else cast(mask, dtype)
    return cast(q, dtype), cast(k, dtype), cast(v, dtype), added


def _no_dropout(op: OpView) -> str | None:
    if op.arg("dropout_p"):
        return "it draws random numbers"
    sizes = [n for name in ("query", "key", "value") for n in op.arg(name).spec.shape]
    return "an input without elements" if 0 in sizes else None


@add("sdpa", when=_no_dropout)
def sdpa(
    site: Site, query: Array, key: Array, value: Array, attn_mask: Array | None, is_causal: bool, scale: float | None,
    enable_gqa: bool, **_: Any,
) -> Array:  # fmt: skip
    if enable_gqa:
        key, value = (jnp.repeat(x, query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    return _attended(*_widened(site, query, key, value, attn_mask), is_causal, scale)[0]


@add("sdpa_with_lse", when=_no_dropout)
def sdpa_with_lse(
    site: Site, query: Array, key: Array, value: Array, is_causal: bool, attn_mask: Array | None, scale: float | None,
    **_: Any,
) -> tuple[Array, Array]:  # fmt: skip
    if key.shape[-3] != query.shape[-3]:
        key, value = (jnp.repeat(x, query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    return _attended(*_widened(site, query, key, value, attn_mask), is_causal, scale)


@add("sdpa_backward", when=_no_dropout)
def sdpa_backward(
    site: Site, grad_out: Array, query: Array, key: Array, value: Array, is_causal: bool, attn_mask: Array | None,
    scale: float | None, **_: Any,
) -> tuple[Array, ...]:  # fmt: skip
    q, k, v, mask = _widened(site, query, key, value, attn_mask)
    grad = cast(grad_out, wide(site.spec.dtype))
    return gradients(lambda a, b, c: _attended(a, b, c, mask, is_causal, scale)[0], (q, k, v), grad)
