"""A fake accelerator for tests on machines without one: torch's "meta" device and a list of the commands it received."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fusewright import registry
from fusewright.bench import report
from fusewright.bench.device import Clock
from fusewright.interface import Device
from fusewright.reference.null import Null

NAME = "an accelerator of tests"


class Far(Null):
    """A backend whose device is the accelerator."""

    device_type = "meta"

    @classmethod
    def probe(cls) -> Device:
        return Device("meta", "any")

    @classmethod
    def simulated(cls, options: Mapping[str, Any]) -> Device:
        return Device("meta", "any", simulated=True)


def pretend(patch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of commands that the accelerator receives, in order. Events are 1.5 s apart, a step takes 2 s more."""
    told: list[str] = []

    class Event:
        def record(self) -> None:
            told.append("event")
            self.at = 1.5 * told.count("event") + 2 * told.count("step")

        def synchronize(self) -> None:
            told.append("wait for the event")

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at) * 1e3

    answers: dict[str, Any] = {
        "current_accelerator": lambda check_available=False: torch.device("meta") if check_available else None,
        "device_count": lambda: 2,
        "set_device_index": lambda index: told.append(f"device {index}"),
        "synchronize": lambda where: told.append("wait"),
        "reset_peak_memory_stats": lambda: told.append("forget the peak"),
        "memory_allocated": lambda: 100,
        "max_memory_allocated": lambda: 300,
    }
    for name, answer in answers.items():
        patch.setattr(torch.accelerator, name, answer)
    patch.setattr(Clock, "_event", lambda self: Event())
    patch.setattr(Clock, "_busy", lambda self: told.append("busy"))
    patch.setattr(report, "device_name", lambda device: NAME)
    return told


def pretend_backend(patch: pytest.MonkeyPatch, cls: type[Null] = Far) -> str:
    """Register a backend that computes on the accelerator as the one that `fusewright` selects, and return its name."""
    known = registry.info("fusewright_null")
    found = registry.BackendInfo(known.plugin, cls, cls.probe())
    patch.setattr(registry, "info", lambda name: found)
    patch.setattr(registry, "best", lambda device_type=None: known.name)
    return known.name
