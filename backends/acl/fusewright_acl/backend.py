"""The backend `graviton_acl`: what CPU backends share of oneDNN (`fusewright_cpu.onednn`), with ACL's forms of the heavy ops."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from fusewright import machine
from fusewright.errors import OptionError
from fusewright.interface import Device, Unavailable
from fusewright.toolkit.backend.fused import Loader
from fusewright.toolkit.region.rewrite import Row, by_root
from fusewright_acl import fpmath, target
from fusewright_acl.lowerings import LOWERINGS, ROWS
from fusewright_cpu.onednn.fused import OneDnnBackend

FPMATH = ("fp32", "bf16")


class GravitonAcl(OneDnnBackend):
    """aarch64 CPUs, with the Arm Compute Library that torch carries."""

    name = "graviton_acl"
    priority = 50
    lowerings = LOWERINGS
    rows: ClassVar[Mapping[str, Sequence[Row]]] = by_root(ROWS)
    namespaces = (*OneDnnBackend.namespaces, fpmath.NAMESPACE)
    options: ClassVar[Mapping[str, Any]] = {
        **OneDnnBackend.options,
        # What fp32 products and convolutions are multiplied in: "bf16" runs them on bf16 hardware, with fp32 in and out.
        "fpmath": "fp32",
        # The core that a simulation is of.
        "target": "neoverse-v1",
    }

    @classmethod
    def probe(cls) -> Device | Unavailable:
        if machine.arch() != "aarch64":
            return Unavailable(f"this is {machine.arch()}", "use a machine with an aarch64 CPU, or options={'simulate': True}")
        if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_acl_supported():
            return Unavailable(
                "torch is built without the Arm Compute Library", "install a CPU build of torch for aarch64, such as 2.10.0"
            )
        system = target.system()
        core = target.core_of(system)
        features = target.features_of(system) | {"acl"}
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            features |= {"mkldnn_bf16"}
        return Device("cpu", core.core if core else "aarch64", features, f"oneDNN {_onednn()} with ACL")

    @classmethod
    def simulated(cls, options: Mapping[str, Any]) -> Device | Unavailable:
        """The same choices and calls for a core of the table, computed by the oneDNN that this machine's torch has."""
        core = target.NAMES.get(options["target"])
        if core is None:
            raise OptionError(f"no core is called {options['target']!r}; those known are {', '.join(target.NAMES)}")
        if not torch.backends.mkldnn.is_available():
            return Unavailable("torch is built without oneDNN", "install a build of torch with oneDNN")
        features = core.features | {"acl", *({"mkldnn_bf16"} if "bf16" in core.features else ())}
        return Device("cpu", core.core, features | ({f"sve{core.sve_bits}"} if core.sve_bits else set()), simulated=True)

    def _loader(self) -> Loader:
        """Of a simulation too: loop kernels and attention are compiled for the CPU that is here."""
        return type(self).loader

    def __init__(self, device: Device | None = None, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(device, options)
        if self.values["fpmath"] not in FPMATH:
            raise OptionError(f"option 'fpmath' of graviton_acl is {self.values['fpmath']!r}; it is one of {', '.join(FPMATH)}")


def _onednn() -> str:
    found = re.search(r"(?:MKL-DNN|oneDNN) v([\d.]+)", torch.__config__.show())
    return found[1] if found else ""
