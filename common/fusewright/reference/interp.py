"""A backend that computes every op by the opset's reference, in fp64: slow, and the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusewright import ops
from fusewright.interface import (
    HOST,
    YES,
    Backend,
    CompileContext,
    Compiled,
    Device,
    Opaque,
    OpView,
    Region,
    TensorSpec,
    Value,
    Verdict,
    Why,
    hint,
)  # fmt: skip
from fusewright.ops import oracle
from fusewright.ops.core import unbind


class Interp(Backend):
    """Claims every row of the table. Each region is one callable."""

    name = "fusewright_interp"
    device_type = HOST

    @classmethod
    def probe(cls) -> Device:
        return Device(HOST, "any")

    @classmethod
    def lowers(cls) -> Sequence[str]:
        return tuple(ops.OPS)

    def supports(self, op: OpView) -> Verdict:
        row = ops.OPS.get(op.op)
        if row is None:
            return Verdict(Why.NO_LOWERING, "not in the opset")
        if "empty" in row.name:
            return Verdict(Why.NO_LOWERING, "its values are not defined")
        if not op.outs or any(v.spec is None for v in op.outs):
            return Verdict(Why.NO_LOWERING, "gives no tensor")
        return YES

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        def run(*inputs: Any) -> tuple[torch.Tensor, ...]:
            env: dict[int, Any] = {v.id: t for v, t in zip(region.inputs, inputs, strict=True)}
            for op in region.ops:
                env.update(_evaluate(op, env))
            return tuple(env[v.id] for v in region.outputs)

        return Opaque(run)


def _evaluate(op: OpView, env: dict[int, Any]) -> dict[int, torch.Tensor]:
    """Compute one op by its reference; results get the dtype and strides of the graph. Eager runs first, so that calls that it
    refuses raise its own error."""
    row = ops.OPS[op.op]
    args, kwargs = unbind(row.params, {name: _read(a, env) for name, a in zip(op.argnames, op.args, strict=True)})
    row.target(*args, **kwargs)
    results = oracle.evaluate(row, args, kwargs)
    found = {}
    for v, r in zip(op.outs, results, strict=False):
        if v.spec is not None and isinstance(r, torch.Tensor):
            found[v.id] = _like(r, v.spec)
    return found


def _read(a: Any, env: dict[int, Any]) -> Any:
    if isinstance(a, Value):
        return env[a.id]
    return [_read(x, env) for x in a] if isinstance(a, tuple) else a


def _like(t: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A fresh copy of `t` with the dtype and strides of `spec`, or its dimension order if strides are symbolic."""
    t = t.to(spec.dtype)
    if not spec.static:
        order = sorted(range(t.dim()), key=lambda d: -hint(spec.stride[d]))
        back = [order.index(d) for d in range(t.dim())]
        return t.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    shared = [d for d, (n, step) in enumerate(zip(t.shape, spec.stride, strict=True)) if step == 0 and n > 1]
    one = t
    for d in shared:
        one = one.narrow(d, 0, 1)
    out = torch.empty_strided(tuple(one.shape), spec.stride, dtype=spec.dtype, device=t.device)  # type: ignore[arg-type]
    return out.copy_(one).expand(t.shape) if shared else out.copy_(t)
