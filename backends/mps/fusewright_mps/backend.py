"""The backend `apple_mps`: Metal loop kernels, with torch's own MPS calls between them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from fusewright import machine
from fusewright.errors import OptionError, nearest
from fusewright.interface import (
    CompileContext,
    Compiled,
    Decline,
    Device,
    DevicePolicy,
    OpView,
    Region,
    Unavailable,
    Verdict,
    Why,
)
from fusewright.plan.ir import Launch
from fusewright.toolkit.backend.fused import FusedBackend, Loader
from fusewright.toolkit.fuse.fuser import fuse
from fusewright_mps import device as metal
from fusewright_mps import lowerings, target
from fusewright_mps.emitter import refused
from fusewright_mps.policy import policy
from fusewright_mps.runtime import MetalLoader, host_metal, unsimulated
from fusewright_mps.select.calls import rewritten
from fusewright_mps.select.quantized import by_hand

ENV = ("PYTORCH_MPS_*", "PYTORCH_ENABLE_MPS_FALLBACK", "MTL_*", "METAL_*")
"""Environment variables that configure torch's MPS backend and Metal."""


class AppleMps(FusedBackend):
    """GPUs of Apple silicon, through Metal."""

    name = "apple_mps"
    device_type = metal.DEVICE
    priority = 50
    constant_masks = True  # MPS's attention reads any mask it is given, even an all-true one
    lowerings = lowerings.LOWERINGS
    options: ClassVar[Mapping[str, Any]] = {
        # The chip to simulate, e.g. "M4 Max".
        "target": "",
    }
    environment: ClassVar[Mapping[str, str]] = {
        "FUSEWRIGHT_MPS_CHECK": "1 checks every access of simulated kernels: bounds, alignment, races"
    }

    def __init__(self, device: Device | None = None, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(device, options)
        if self.values["target"] and not (device and device.simulated):
            raise OptionError("option 'target' chooses what is simulated; give 'simulate': True with it")

    @classmethod
    def probe(cls) -> Device | Unavailable:
        if (lacks := metal.missing()) is not None:
            return lacks
        chip = metal.chip()
        return Device(
            cls.device_type, chip.removeprefix("Apple "), target.of_chip(chip).features, platform.mac_ver()[0]
        )

    @classmethod
    def simulated(cls, options: Mapping[str, Any]) -> Device | Unavailable:
        name = options["target"] or target.TYPICAL.chip
        if name not in target.TARGETS:
            raise OptionError(f"{cls.name} has no target {name!r}; {nearest(name, target.TARGETS)}")
        if (lacks := unsimulated()) is not None:
            return lacks
        return Device(cls.device_type, name, target.TARGETS[name].features, simulated=True)

    def target(self) -> target.Target:
        """Return the chip that kernels are sized for."""
        device = self.running_on()
        return target.of_chip(device.arch, None if device.simulated else metal.cores())

    def policy(self) -> DevicePolicy:
        return policy(self.target())

    def supports(self, op: OpView) -> Verdict:
        """Claim what a kernel rule covers. Other ops that MPS computes are carried: torch's own calls between the kernels."""
        if (why := lowerings.refused(op)) is not None:
            return Verdict(Why.DTYPE, why)
        return lowerings.carried(op, super().supports(op))

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        b = rewritten(self.lowerings, by_hand, region, ctx, self.target(), self.metal().synchronize)
        fragment = fuse(b.finish(), ctx, b.calls, policy=self.policy())
        for i in fragment.instructions:
            if isinstance(i, Launch) and i.kernel in fragment.kernels:
                if (why := refused(fragment.kernels[i.kernel], self.target())) is not None:
                    raise Decline(why, ops=i.op_ids)
        return replace(fragment, notes={**fragment.notes, **b.notes}, kernels={**fragment.kernels, **b.kernels})

    def fingerprint(self) -> str:
        """The host also adds a hash of this package's files to plan keys."""
        return f"{super().fingerprint()}-torch {torch.__version__}-{machine.environment(*ENV)}"

    def metal(self) -> metal.Metal:
        """Return the device, or its simulation."""
        return host_metal() if self.running_on().simulated else metal.torch_mps()

    def _loader(self) -> Loader:
        simulated = self.running_on().simulated
        return MetalLoader(self.metal(), self.target(), check_division=simulated)
