"""The backend `x86_int8`. It lowers nothing yet: everything runs in eager."""

from __future__ import annotations

from fusewright import machine
from fusewright.interface import Backend, Device, Unavailable
from fusewright_int8 import target


class X86Int8(Backend):
    """x86-64 CPUs with int8 dot-product instructions."""

    name = "x86_int8"
    device_type = "cpu"
    priority = 10  # quantized models only: for the others the float backend of this CPU comes first

    @classmethod
    def probe(cls) -> Device | Unavailable:
        if machine.arch() != "x86_64":
            return Unavailable(f"this is {machine.arch()}", "use an x86-64 machine")
        found = target.best(machine.cpu_features())
        if found is None:
            return Unavailable("the CPU has neither AVX512-VNNI nor AVX-VNNI", "use a CPU of 2019 or later")
        return Device("cpu", found.arch, machine.cpu_features())
