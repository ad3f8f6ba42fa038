"""The backend that claims nothing. What it gives must be what `aot_eager` gives, bit for bit."""

from __future__ import annotations

from fusewright.interface import Backend, Device


class Null(Backend):
    """Everything falls back to eager."""

    name = "fusewright_null"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Device:
        return Device("cpu", "any")

    @classmethod
    def lowers(cls) -> tuple[str, ...]:
        return ()
