"""A whole backend: it lowers `add` and `relu` of float32 tensors, and leaves everything else to eager."""

from __future__ import annotations

import torch

from fusewright.interface import (
    YES,
    Backend,
    CompileContext,
    Compiled,
    Decline,
    Device,
    Fragment,
    OpView,
    Region,
    Unavailable,
    Value,
    Verdict,
    Why,
)
from fusewright.plan.ir import Call, Ref

# The vendor's kernels. Here they are torch ops of our own; a real package would bind its library like this.
_LIBRARY = torch.library.Library("fusewright_example", "DEF")
_LIBRARY.define("add(Tensor a, Tensor b) -> Tensor")
_LIBRARY.define("relu(Tensor a) -> Tensor")
_LIBRARY.impl("add", lambda a, b: torch.add(a, b), "CPU")
_LIBRARY.impl("relu", lambda a: torch.clamp_min(a, 0), "CPU")

# One table holds what is claimed and how it is lowered, so that the two cannot drift apart.
LOWERINGS = {
    "add": ("fusewright_example::add", ("self", "other")),
    "relu": ("fusewright_example::relu", ("self",)),
}


class Example(Backend):
    """Claims two ops, and lowers each to one call."""

    name = "example"
    device_type = "cpu"
    options = {"broadcast": True}  # noqa: RUF012  (the interface declares it a class variable)
    namespaces = ("fusewright_example",)

    @classmethod
    def probe(cls) -> Device | Unavailable:
        return Device("cpu", "example")

    @classmethod
    def lowers(cls) -> tuple[str, ...]:
        return tuple(LOWERINGS)

    def supports(self, op: OpView) -> Verdict:
        if op.op not in LOWERINGS:
            return Verdict(Why.NO_LOWERING)
        operands = [op.arg(name) for name in LOWERINGS[op.op][1]]
        if not all(isinstance(v, Value) and v.spec is not None for v in operands):
            return Verdict(Why.ATTR, "an operand is a number, not a tensor")
        if any(v.spec.dtype is not torch.float32 for v in operands):
            return Verdict(Why.DTYPE, "only float32")
        if op.op == "add" and op.arg("alpha") != 1:
            return Verdict(Why.ATTR, "alpha is not 1")
        return YES

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        calls, notes = [], {}
        for op in region.ops:
            target, names = LOWERINGS[op.op]
            operands = [op.arg(name) for name in names]
            if not ctx.options["broadcast"] and len({v.spec.shape for v in operands}) > 1:
                raise Decline("shapes differ and broadcast=False", Why.ATTR, [op.id])
            calls.append(Call(target, tuple(Ref(v.id) for v in operands), (op.out.id,), op_id=op.id))
            notes[op.id] = target
        return Fragment(tuple(calls), notes)
