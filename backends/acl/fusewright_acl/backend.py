"""The backend `graviton_acl`. It lowers nothing yet: everything runs in eager."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fusewright import machine
from fusewright.interface import Backend, Device, Unavailable
from fusewright_acl import target


class GravitonAcl(Backend):
    """aarch64 CPUs under Linux, with the Arm Compute Library that torch carries."""

    name = "graviton_acl"
    device_type = "cpu"
    priority = 50

    @classmethod
    def probe(cls) -> Device | Unavailable:
        if sys.platform != "linux" or machine.arch() != "aarch64":
            here = f"this is {sys.platform} on {machine.arch()}"
            return Unavailable(here, "use a Linux machine with an aarch64 CPU")
        if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_acl_supported():
            return Unavailable(
                "torch is built without the Arm Compute Library", "install a CPU build of torch for aarch64"
            )
        cpuinfo = Path("/proc/cpuinfo")
        core = target.core_of(cpuinfo.read_text()) if cpuinfo.exists() else None
        features = machine.cpu_features() | (core.features if core else frozenset())
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            features |= {"mkldnn_bf16"}
        return Device("cpu", core.core if core else "aarch64", features)
