"""Elementwise functions. NaN, rounding and integer division follow torch where JAX differs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special

from fusewright.interface import OpView
from fusewright_xla_cpu.table import Array, Site, add, add_pointwise, cast, pointwise, promoted, wide


def _plus(self: Array, other: Array, alpha: Array) -> Array:
    if self.dtype == bool:
        return self | (other & alpha)
    return self + other * alpha


def _clamp(self: Array, min: Array | None, max: Array | None) -> Array:
    self = self if min is None else jnp.maximum(self, min)
    return self if max is None else jnp.minimum(self, max)


def _sign(self: Array) -> Array:
    return self if self.dtype == bool else (self > 0).astype(self.dtype) - (self < 0).astype(self.dtype)


def _power(self: Array, exponent: Array) -> Array:
    return jnp.power(self, exponent)


def _lerp(self: Array, end: Array, weight: Array) -> Array:
    near = jnp.abs(weight) < 0.5
    return jnp.where(near, self + weight * (end - self), end - (end - self) * (1 - weight))


def _sigmoid(self: Array) -> Array:
    return 1 / (1 + jnp.exp(-self))


def _add_product(self: Array, tensor1: Array, tensor2: Array, value: Array) -> Array:
    return self + value * tensor1 * tensor2


def _add_quotient(self: Array, tensor1: Array, tensor2: Array, value: Array) -> Array:
    return self + value * tensor1 / tensor2


def _shifted_left(self: Array, other: Array) -> Array:
    bits = jnp.iinfo(self.dtype).bits
    outside = (other < 0) | (other >= bits)
    return jnp.where(outside, 0, jnp.left_shift(self, jnp.where(outside, 0, other)))


def _shifted_right(self: Array, other: Array) -> Array:
    bits = jnp.iinfo(self.dtype).bits
    return jnp.right_shift(self, jnp.where((other < 0) | (other >= bits), bits - 1, other))


def _hypot(self: Array, other: Array) -> Array:
    return jnp.where(jnp.isinf(self) | jnp.isinf(other), jnp.inf, jnp.hypot(self, other))


def _digamma(x: Array) -> Array:
    """XLA's is NaN at the pole at zero, where torch takes the limit from the side of zero's sign."""
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), special.digamma(x))


def _exp2(x: Array) -> Array:
    """XLA's is exp(x * log 2), whose rounding error grows with x. Here the integer part becomes the result's exponent."""
    whole = jnp.clip(jnp.where(jnp.isfinite(x), jnp.round(x), 0), -1100, 1100)
    return jnp.ldexp(jnp.exp2(x - whole), whole.astype(jnp.int32))


def _erfinv(x: Array) -> Array:
    """Computed in fp64: XLA's fp32 version is too inaccurate for its gradient, which is exponential in it."""
    return special.erfinv(x.astype(jnp.float64)).astype(x.dtype)


def _lgamma(x: Array) -> Array:
    """XLA's is not quite zero at its zeros."""
    return jnp.where((x == 1) | (x == 2), 0, special.gammaln(x)).astype(x.dtype)


def _same(self: Array) -> Array:
    return self


add_pointwise(
    {
        "add": _plus,
        "sub": lambda self, other, alpha: self - other * alpha,
        "rsub": lambda self, other, alpha: other - self * alpha,
        "mul": lambda self, other: self * other,
        "div": lambda self, other: self / other,
        "maximum": lambda self, other: jnp.maximum(self, other),
        "minimum": lambda self, other: jnp.minimum(self, other),
        "fmax": lambda self, other: jnp.fmax(self, other),
        "fmin": lambda self, other: jnp.fmin(self, other),
        "clamp": _clamp,
        "clamp_tensor": _clamp,
        "atan2": lambda self, other: jnp.arctan2(self, other),
        "hypot": _hypot,
        "copysign": lambda self, other: jnp.copysign(self, other),
        "copysign_scalar": lambda self, other: jnp.copysign(self, other),
        "logaddexp": lambda self, other: jnp.logaddexp(self, other),
        "addcmul": _add_product,
        "addcdiv": _add_quotient,
        "lerp": _lerp,
        "lerp_scalar": _lerp,
        "abs": lambda self: self if self.dtype == bool else jnp.abs(self),
        "neg": lambda self: -self,
        "sign": _sign,
        "sgn": _sign,
        "relu": lambda self: jnp.maximum(self, 0),
        "sigmoid": _sigmoid,
        "bitwise_not": lambda self: ~self,
        "bitwise_and": lambda self, other: self & other,
        "bitwise_and_scalar": lambda self, other: self & other,
        "bitwise_or": lambda self, other: self | other,
        "bitwise_or_scalar": lambda self, other: self | other,
        "bitwise_xor": lambda self, other: self ^ other,
        "bitwise_xor_scalar": lambda self, other: self ^ other,
        "bitwise_left_shift": _shifted_left,
        "bitwise_left_shift_scalar": _shifted_left,
        "bitwise_right_shift": _shifted_right,
        "bitwise_right_shift_scalar": _shifted_right,
        "clone": lambda self, memory_format: self,
    }
)

_ELEMENTWISE = {
    "sqrt": jnp.sqrt, "rsqrt": lambda x: 1 / jnp.sqrt(x), "reciprocal": lambda x: 1 / x,
    "exp": jnp.exp, "exp2": _exp2, "expm1": jnp.expm1,
    "log": jnp.log, "log2": jnp.log2, "log10": jnp.log10, "log1p": jnp.log1p,
    "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan, "asin": jnp.arcsin, "acos": jnp.arccos, "atan": jnp.arctan,
    "sinh": jnp.sinh, "cosh": jnp.cosh, "tanh": jnp.tanh, "asinh": jnp.arcsinh, "acosh": jnp.arccosh,
    "atanh": jnp.arctanh, "erf": jax.lax.erf, "erfc": jax.lax.erfc, "erfinv": _erfinv,
    "lgamma": _lgamma, "digamma": _digamma,
}  # fmt: skip
add_pointwise({name: (lambda self, fn=fn: fn(self)) for name, fn in _ELEMENTWISE.items()})

_ROUNDING = {"ceil": jnp.ceil, "floor": jnp.floor, "round": jnp.round, "trunc": jnp.trunc}


def _rounded(fn: Any) -> Any:
    return lambda self: fn(self) if jnp.issubdtype(self.dtype, jnp.floating) else self


add_pointwise({name: _rounded(fn) for name, fn in _ROUNDING.items()})
add_pointwise({"frac": lambda self: self - jnp.trunc(self)})

_COMPARISONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "logical_and": lambda a, b: (a != 0) & (b != 0), "logical_or": lambda a, b: (a != 0) | (b != 0),
    "logical_xor": lambda a, b: (a != 0) ^ (b != 0),
}  # fmt: skip


def _compared(fn: Any) -> Any:
    return lambda self, other: fn(self, other)


add_pointwise(
    {f"{n}{kind}": _compared(f) for n, f in _COMPARISONS.items() for kind in ("", "_scalar")}, computed=promoted
)
add_pointwise(
    {
        "isnan": lambda self: self != self,
        "isinf": lambda self: jnp.isinf(self),
        "signbit": lambda self: jnp.signbit(self) if self.dtype != bool else jnp.zeros_like(self),
        "logical_not": lambda self: self == 0,
    },
    computed=promoted,
)


# ---- division: torch raises an error for integer division by zero, XLA does not ----


def _floor_float(x: Array, y: Array) -> Array:
    """torch's `div_floor_floating` (c10/util/generic_math.h): exact where x / y would round up to the next integer."""
    mod = jax.lax.rem(x, y)
    quotient = (x - mod) / y
    quotient = jnp.where((mod != 0) & ((y < 0) != (mod < 0)), quotient - 1, quotient)
    floored = jnp.floor(quotient)
    floored = jnp.where(quotient - floored > 0.5, floored + 1, floored)
    floored = jnp.where(quotient != 0, floored, jnp.copysign(jnp.zeros_like(quotient), x / y))
    return jnp.where(y == 0, x / y, floored)


def _remainder_float(x: Array, y: Array) -> Array:
    mod = jax.lax.rem(x, y)
    return jnp.where((mod != 0) & ((y < 0) != (mod < 0)), mod + y, mod)


def _operands(site: Site, self: Array, other: Array) -> tuple[Array, Array]:
    dtype = wide(site.spec.dtype)
    x, y = jnp.broadcast_arrays(cast(self, dtype), cast(other, dtype))
    if not dtype.is_floating_point:
        site.refuse(y == 0, RuntimeError("ZeroDivisionError"))
        y = jnp.where(y == 0, 1, y)
    return x, y


@add("div_rounded")
def div_rounded(site: Site, self: Array, other: Array, rounding_mode: str | None) -> Array:
    if rounding_mode is None:
        return pointwise(lambda self, other: self / other)(site, self=self, other=other)
    x, y = _operands(site, self, other)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.trunc(x / y) if rounding_mode == "trunc" else _floor_float(x, y)
    return jax.lax.div(x, y) if rounding_mode == "trunc" else jnp.floor_divide(x, y)


@add("fmod", "fmod_scalar")
def fmod(site: Site, self: Array, other: Array) -> Array:
    return jax.lax.rem(*_operands(site, self, other))


@add("remainder", "remainder_scalar")
def remainder(site: Site, self: Array, other: Array) -> Array:
    return _remainder_float(*_operands(site, self, other))


# ---- powers ----


def _integer_power(op: OpView) -> str | None:
    exponent = op.arg("exponent")
    spec = op.out.spec
    if spec is not None and spec.dtype.is_floating_point:
        return None
    return None if isinstance(exponent, int) and exponent >= 0 else "a power of integers by a tensor or a negative number"


for _name in ("pow", "pow_scalar", "scalar_pow"):
    add_pointwise({_name: _power}, when=_integer_power)


# ---- selections and casts ----


@add("where")
def where(site: Site, condition: Array, self: Array, other: Array) -> Array:
    dtype = site.spec.dtype
    return jnp.where(condition.astype(bool), cast(self, dtype), cast(other, dtype))


@add("masked_fill", "masked_fill_tensor")
def masked_fill(site: Site, self: Array, mask: Array, value: Any) -> Array:
    filled = jnp.where(mask, cast(value, site.spec.dtype), self)
    return jnp.broadcast_to(filled, jnp.broadcast_shapes(self.shape, mask.shape))


def _stays_here(op: OpView) -> str | None:
    device = op.arg("device")
    return None if device is None or str(device).startswith("cpu") else "it moves to another device"


@add("cast", when=_stays_here)
def to_dtype(site: Site, self: Array, **_: Any) -> Array:
    return self


@add("copy")
def copy(site: Site, self: Array, src: Array, non_blocking: bool) -> Array:
    return jnp.broadcast_to(cast(src, site.spec.dtype), self.shape)
