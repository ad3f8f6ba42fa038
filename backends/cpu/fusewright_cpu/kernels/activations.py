"""Activations as code for a vector of fp32. A comparison with NaN is false, which keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fusewright_cpu.emit.math import erf, exp, sigmoid, tanh
from fusewright_cpu.emit.text import Fn, V, const


def _at_least(f: Fn, x: V, low: V) -> V:
    return f.select(f.cmp("fcmp olt", x, low), low, x)


def _at_most(f: Fn, x: V, high: V) -> V:
    return f.select(f.cmp("fcmp ogt", x, high), high, x)


def _silu(f: Fn, x: V) -> V:
    return f.bin("fdiv", x, f.bin("fadd", const(1.0, x.t), exp(f, f.fneg(x))))


def _sixth(f: Fn, x: V) -> V:
    """Return min(max(x + 3, 0), 6)."""
    return _at_most(f, _at_least(f, f.bin("fadd", x, const(3.0, x.t)), const(0.0, x.t)), const(6.0, x.t))


def _hardswish(f: Fn, x: V) -> V:
    return f.bin("fdiv", f.bin("fmul", x, _sixth(f, x)), const(6.0, x.t))


def _gelu(f: Fn, x: V) -> V:
    return _gated(f, x, erf(f, f.bin("fmul", x, const(math.sqrt(0.5), x.t))))


def _gelu_tanh(f: Fn, x: V) -> V:
    cube = f.bin("fmul", f.bin("fmul", x, x), f.bin("fmul", x, const(0.044715, x.t)))
    return _gated(f, x, tanh(f, f.bin("fmul", f.bin("fadd", x, cube), const(math.sqrt(2 / math.pi), x.t))))


def _gated(f: Fn, x: V, gate: V) -> V:
    """Return x * (1 + gate) / 2."""
    return f.bin("fmul", f.bin("fmul", x, const(0.5, x.t)), f.bin("fadd", gate, const(1.0, x.t)))


ACTIVATIONS: Mapping[str, Callable[..., V]] = {
    "": lambda f, x: x,
    "relu": lambda f, x: _at_least(f, x, const(0.0, x.t)),
    "clamp": lambda f, x, low, high: _at_most(f, _at_least(f, x, low), high),
    "leaky_relu": lambda f, x, slope: f.select(f.cmp("fcmp ogt", x, const(0.0, x.t)), x, f.bin("fmul", x, slope)),
    "silu": _silu,
    "hardswish": _hardswish,
    "hardsigmoid": lambda f, x: f.bin("fdiv", _sixth(f, x), const(6.0, x.t)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "tanh": tanh,
    "sigmoid": sigmoid,
}
"""Name -> code for a vector, and for each scalar that is an argument (see `by_hand.SCALARS`)."""
