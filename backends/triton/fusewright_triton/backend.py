"""The backends `nvidia_triton` and `rocm_triton`. They lower nothing yet: everything runs in eager."""

from __future__ import annotations

import importlib.util

import torch

from fusewright.interface import Backend, Device, Unavailable
from fusewright_triton import target

_NO_TRITON = Unavailable(
    "triton cannot be imported", "install the triton that your torch wheel asks for (pip check names it)"
)


class NvidiaTriton(Backend):
    """NVIDIA GPUs of compute capability 8.0 and later."""

    name = "nvidia_triton"
    device_type = "cuda"
    priority = 50

    @classmethod
    def probe(cls) -> Device | Unavailable:
        if torch.version.hip is not None:
            return Unavailable("torch is a ROCm build", "use rocm_triton, or install a CUDA build of torch")
        if torch.version.cuda is None:
            return Unavailable("torch is built without CUDA", "install a CUDA build of torch")
        if not torch.cuda.is_available():
            return Unavailable("no NVIDIA GPU is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
        capability = torch.cuda.get_device_capability()
        found = target.nvidia(capability)
        if found is None:
            have = "{}.{}".format(*capability)
            fix = "use a GPU of 8.0 or later, or add its row to target.py"
            return Unavailable(f"compute capability {have} has no target", fix)
        if importlib.util.find_spec("triton") is None:
            return _NO_TRITON
        return Device("cuda", "sm_{}{}".format(*capability), found.all_features, torch.version.cuda)


class RocmTriton(Backend):
    """AMD GPUs: CDNA2 to CDNA4 and RDNA3."""

    name = "rocm_triton"
    device_type = "cuda"  # torch names HIP devices so
    priority = 50

    @classmethod
    def probe(cls) -> Device | Unavailable:
        if torch.version.hip is None:
            return Unavailable("torch is built without ROCm", "install a ROCm build of torch")
        if not torch.cuda.is_available():
            return Unavailable("no AMD GPU is visible", "check rocminfo and HIP_VISIBLE_DEVICES")
        arch = torch.cuda.get_device_properties(0).gcnArchName
        found = target.amd(arch)
        if found is None:
            known = ", ".join(target.AMD)
            return Unavailable(f"{arch} has no target", f"use one of {known}, or add its row to target.py")
        if importlib.util.find_spec("triton") is None:
            return _NO_TRITON
        return Device("cuda", found.arch, found.all_features, torch.version.hip)
