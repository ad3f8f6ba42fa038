"""A backend that claims nothing. Its results must equal those of `aot_eager` bit for bit."""

from __future__ import annotations

from fusewright.interface import HOST, Backend, Device


class Null(Backend):
    """Everything falls back to eager."""

    name = "fusewright_null"
    device_type = HOST

    @classmethod
    def probe(cls) -> Device:
        return Device(HOST, "any")

    @classmethod
    def lowers(cls) -> tuple[str, ...]:
        return ()
