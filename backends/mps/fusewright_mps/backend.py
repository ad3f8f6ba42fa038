"""The backend `apple_mps`. It lowers nothing yet: everything runs in eager."""

from __future__ import annotations

import platform
import sys

import torch

from fusewright.interface import Backend, Device, Unavailable
from fusewright_mps import target


class AppleMps(Backend):
    """GPUs of Apple silicon, through Metal."""

    name = "apple_mps"
    device_type = "mps"
    priority = 50

    @classmethod
    def probe(cls) -> Device | Unavailable:
        if sys.platform != "darwin":
            return Unavailable(f"this is {sys.platform}", "use a Mac with Apple silicon")
        if not torch.backends.mps.is_built():
            return Unavailable("torch is built without MPS", "install the macOS arm64 build of torch")
        if not torch.backends.mps.is_available():
            return Unavailable("no Metal device is found", "macOS 14 or later on Apple silicon is needed")
        chip = torch.backends.mps.get_name()
        return Device("mps", chip, target.family_of(chip).features, platform.mac_ver()[0])
