"""The class that the host loads: what it claims, and how it compiles a region as one XLA function."""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.interface import (
    HOST,
    Backend,
    CompileContext,
    Compiled,
    Decline,
    Device,
    Opaque,
    OpView,
    Region,
    Unavailable,
    Verdict,
    Why,
)
from fusewright_xla_cpu import target


class XlaCpu(Backend):
    """Each region is one XLA program: compiled when a shape is first seen, called on torch's own memory."""

    name = "xla_cpu"
    device_type = HOST
    interface = (1, 3)
    opset = 1

    @classmethod
    def probe(cls) -> Device | Unavailable:
        return target.probe()

    @classmethod
    def lowers(cls) -> Sequence[str] | None:
        if isinstance(target.probe(), Unavailable):
            return None  # the table needs JAX's functions
        from fusewright_xla_cpu.lowerings import LOWERINGS

        return tuple(LOWERINGS)

    def supports(self, op: OpView) -> Verdict:
        from fusewright_xla_cpu.lowerings import verdict

        return verdict(op, self.device or Device(HOST, "xla"))

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        from fusewright_xla_cpu.runtime import Program

        program = Program(region)
        if why := program.refusal():
            raise Decline(f"JAX refuses it: {why}", Why.ATTR)
        return Opaque(program)
