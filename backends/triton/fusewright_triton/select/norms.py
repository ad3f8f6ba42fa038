"""Batch norms of inference that stay in kernels: what depends on weights alone is computed once, in fp32.

In place of four loads, four conversions and a square root for each element, a kernel reads two numbers of its channel (three where
the input is fp32)."""

from __future__ import annotations

from dataclasses import replace

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.select.calls import Calls


def reason(op: OpView) -> str | None:
    """Return why a batch norm is computed from its own statistics."""
    x = spec_of(op.arg("input"))
    if x.rank < 2 or not isinstance(x.shape[1], int) or 0 in x.shape:
        return "empty, or channels of symbolic number"
    return None


def _of_constants(m: Match, c: Calls) -> bool:
    op = m.anchor
    return all(map(c.graph.unused, op.outs[1:])) and c.is_const(*(op.arg(n) for n in STATISTICS))


STATISTICS = ("weight", "bias", "running_mean", "running_var")


def _write(m: Match, c: Calls) -> None:
    """Emit the numbers of each channel, which are computed once, and the norm as ops for the fuser."""
    op, b = m.anchor, c.b
    x, spec = op.arg("input"), spec_of(op.arg("input"))
    b.without(op)
    weight, bias, mean, variance = (_column(op.arg(n), spec, c) for n in ("weight", "bias", "running_mean", "running_var"))
    assert mean is not None and variance is not None
    scale = b.append_op("rsqrt", b.append_op("add", variance, op.arg("eps")))
    scale = scale if weight is None else b.append_op("mul", scale, weight)
    out = b.with_layout(op.out, b.spec(x).stride if b.spec(x) is not spec else None)  # type: ignore[arg-type]
    if spec.dtype is torch.float32:  # subtracting first keeps the digits of inputs far from zero, as eager does
        x, shift = b.append_op("sub", x, mean, out=c.ctx.value(replace(spec_of(out)))), bias
    else:
        shift = b.append_op("neg", b.append_op("mul", mean, scale))
        shift = shift if bias is None else b.append_op("add", shift, bias)
    if shift is None:
        b.append_op("mul", x, scale, out=out)
    else:  # of two types, but a kernel holds both in fp32 and rounds what it stores
        b.append_op("addcmul", shift, x, scale, out=out)


def _column(value: Value | None, x: TensorSpec, c: Calls) -> Value | None:
    """Return one fp32 number per channel, in a shape that broadcasts with `x`."""
    if value is None:
        return None
    if spec_of(value).dtype is not torch.float32:
        value = c.b.append_op("cast", value, torch.float32)
    return c.b.append_op("view", value, (x.shape[1], *[1] * (x.rank - 2)))


ROWS = (Row("triton.batch_norm", chain("batch_norm"), when=_of_constants, write=_write, note="batch norm of constants"),)
