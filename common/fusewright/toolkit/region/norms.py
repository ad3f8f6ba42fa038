"""Batch norms of inference that stay in kernels: what depends on weights alone is computed once, in fp32.

In place of four loads and a square root for each element, a kernel reads two numbers of its channel, three if the input is fp32:
subtracting the mean first keeps the digits of inputs far from zero."""

from __future__ import annotations

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.graph import spec_of

WEIGHTS = ("weight", "bias", "running_mean", "running_var")


def of_constants(op: OpView, b: Builder) -> bool:
    """Whether a batch norm of fp32 or a half type has weights that are constants, and nobody reads its statistics."""
    x = spec_of(op.arg("input"))
    known = x.rank >= 2 and isinstance(x.shape[1], int) and 0 not in x.shape
    floats = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return known and floats and all(map(b.graph.unused, op.outs[1:])) and all(b.is_const(op.arg(n)) for n in WEIGHTS)


def write_batch_norm(op: OpView, b: Builder) -> None:
    """Write a norm for which `of_constants` holds as ops for the fuser, and as others that run once."""
    x, spec = op.arg("input"), spec_of(op.arg("input"))
    b.without(op)
    weight, bias, mean, variance = (_column(op.arg(n), spec, b) for n in WEIGHTS)
    assert mean is not None and variance is not None
    scale = b.append_op("rsqrt", b.append_op("add", variance, op.arg("eps")))
    scale = scale if weight is None else b.append_op("mul", scale, weight)
    out = b.with_layout(op.out, b.spec(x).stride if b.spec(x) is not spec else None)  # type: ignore[arg-type]
    if spec.dtype is torch.float32:
        x, shift = b.append_op("sub", x, mean, out=b.ctx.value(spec_of(out))), bias
    else:
        shift = b.append_op("neg", b.append_op("mul", mean, scale))
        shift = shift if bias is None else b.append_op("add", shift, bias)
    if shift is None:
        b.append_op("mul", x, scale, out=out)
    else:  # of two types, but a kernel holds both in fp32 and rounds what it stores
        b.append_op("addcmul", shift, x, scale, out=out)


def _column(value: Value | None, x: TensorSpec, b: Builder) -> Value | None:
    """Return one fp32 number per channel, in a shape that broadcasts with `x`."""
    if value is None:
        return None
    if spec_of(value).dtype is not torch.float32:
        value = b.append_op("cast", value, torch.float32)
    return b.append_op("view", value, (x.shape[1], *[1] * (x.rank - 2)))
