"""The backend `x86_onednn`: the shared oneDNN backend (`fusewright_cpu.onednn`) on x86-64."""

from __future__ import annotations

import torch

from fusewright import machine
from fusewright.interface import Device, Unavailable
from fusewright_cpu.onednn.fused import OneDnnBackend, half_features
from fusewright_onednn import target


class X86OneDnn(OneDnnBackend):
    """x86-64 CPUs with AVX2 or better, with the oneDNN that torch includes."""

    name = "x86_onednn"
    priority = 50

    @classmethod
    def probe(cls) -> Device | Unavailable:
        if machine.arch() != "x86_64":
            return Unavailable(f"this is {machine.arch()}", "use an x86-64 machine")
        features = machine.cpu_features()
        found = target.best(features)
        if found is None:
            return Unavailable("the CPU has no AVX2", "use a CPU of 2015 or later")
        if not torch.backends.mkldnn.is_available():
            return Unavailable("torch is built without oneDNN", "install a build of torch with oneDNN")
        features |= half_features()
        version = target.onednn_version(torch.__config__.show())
        return Device("cpu", found.arch, features, f"oneDNN {version}".rstrip())
