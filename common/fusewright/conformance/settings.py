"""The settings of a run of the kit, and how it creates backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from fusewright import pipeline, registry
from fusewright.capture import capture
from fusewright.config import Options
from fusewright.interface import HOST, Backend, Device, Unavailable

DTYPES = ("float32", "bfloat16", "int64", "bool")


@dataclass(frozen=True)
class Settings:
    """`samples`: per OpInfo entry, 0 for all. `opinfo`, `rows`: whether C2 includes them. `part`: test every n-th row, entry or
    model; 1 tests all."""

    backend: str
    simulate: bool = False
    samples: int = 1
    dtypes: tuple[str, ...] = DTYPES
    opinfo: bool = True
    part: int = 1
    rows: bool = True

    def plugin(self) -> type[Backend]:
        """The backend's class. LookupError with the reason if it does not load."""
        info = registry.info(self.backend)
        if info.cls is None:
            assert isinstance(info.device, Unavailable)
            raise LookupError(info.device.reason)
        return info.cls

    def options(self, **given: Any) -> Options:
        """The options of a check: no caching, and no messages about ops in eager."""
        common = {"simulate": self.simulate, "cache": False, "fallback": "allow"}
        return Options.parse({**common, **given}, self.plugin())

    def device(self) -> Device | Unavailable:
        """The device that the backend computes on."""
        info = registry.info(self.backend)
        if info.cls is None or not self.simulate:
            return info.device
        return info.cls.simulated(self.options().backend)

    def tensors_on(self) -> str:
        """Torch's name of the device for tensors."""
        return HOST if self.simulate else self.plugin().device_type

    def make(self, changed: type[Backend] | None = None) -> Backend:
        """Create the backend on its device; `changed`: a subclass to create instead. LookupError if there is no device."""
        device = self.device()
        if isinstance(device, Unavailable):
            raise LookupError(device.reason)
        return (changed or self.plugin())(device, self.options().backend)


Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def compiler(backend: Backend, options: Options) -> Compiler:
    """A `torch.compile` backend for an instance: the entry point of users, without the registry."""

    def compile_dynamo(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return capture.capture(
            gm,
            example_inputs,
            lambda aten, phase, const, mode: pipeline.compile_graph(backend, options, aten, phase, const, mode),
        )

    return compile_dynamo
