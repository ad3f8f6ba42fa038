"""The backend `graviton_acl`: the shared oneDNN lowerings (`fusewright_cpu.onednn`), with heavy ops in forms that ACL computes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from fusewright import machine
from fusewright.errors import OptionError
from fusewright.interface import Device, OpView, Unavailable
from fusewright.toolkit.backend.fused import Loader
from fusewright.toolkit.region.graph import RegionGraph
from fusewright.toolkit.region.rewrite import Row, by_root
from fusewright_acl import fpmath, quantized, quantized_convolutions, target
from fusewright_acl.lowerings import LOWERINGS, ROWS
from fusewright_cpu.onednn.fused import HALVES, half_features
from fusewright_cpu.onednn.quantized import QuantizedBackend

FPMATH = ("fp32", "bf16")


class GravitonAcl(QuantizedBackend):
    """aarch64 CPUs, with the Arm Compute Library that torch bundles."""

    name = "graviton_acl"
    priority = 50
    lowerings = LOWERINGS
    rows: ClassVar[Mapping[str, Sequence[Row]]] = by_root((*quantized.ROWS, *quantized_convolutions.ROWS, *ROWS))
    carried = frozenset({"int_mm", "choose_qparams"})
    products = ("linear", "conv")
    halves: ClassVar[Mapping[torch.dtype, str]] = {torch.bfloat16: HALVES[torch.bfloat16]}  # Arm's eager multiplies fp16 itself
    namespaces = (*QuantizedBackend.namespaces, fpmath.NAMESPACE)
    options: ClassVar[Mapping[str, Any]] = {
        **QuantizedBackend.options,
        # Type in which fp32 products and convolutions multiply: "bf16" uses bf16 hardware, with fp32 inputs and results.
        "fpmath": "fp32",
        # The core to simulate.
        "target": "neoverse-v1",
    }
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {**QuantizedBackend.choices, "fpmath": FPMATH}

    @classmethod
    def probe(cls) -> Device | Unavailable:
        if machine.arch() != "aarch64":
            return Unavailable(f"this is {machine.arch()}", "use a machine with an aarch64 CPU, or options={'simulate': True}")
        if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_acl_supported():
            return Unavailable(
                "torch is built without the Arm Compute Library", "install a CPU build of torch for aarch64, such as 2.10.0"
            )
        core, said = target.here()
        features = said | {"acl"}
        features |= half_features()
        return Device("cpu", core, features, f"oneDNN {_onednn()} with ACL")

    @classmethod
    def simulated(cls, options: Mapping[str, Any]) -> Device | Unavailable:
        """Make the choices and calls of a core from the table. The oneDNN of this machine's torch computes them: where it takes no
        bf16, the core has none."""
        features = target.simulated(options["target"])
        if features is None:
            raise OptionError(f"no core is called {options['target']!r}; those known are {', '.join(target.ARM_CORES)}")
        if not torch.backends.mkldnn.is_available():
            return Unavailable("torch is built without oneDNN", "install a build of torch with oneDNN")
        features |= {"acl", *(half_features() if "bf16" in features else ())}
        return Device("cpu", options["target"], features, simulated=True)

    def why_not(self, op: OpView, graph: RegionGraph, note: str) -> str | None:
        if "int8" in note:
            return None
        return (quantized if op.op == "linear" else quantized_convolutions).why_not(op, graph)

    def _loader(self) -> Loader:
        """Return the loader for this machine's CPU, in simulation too: loop kernels and attention are compiled for it."""
        return type(self).loader

    def __init__(self, device: Device | None = None, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(device, options)
        if self.values["fpmath"] not in FPMATH:
            raise OptionError(f"option 'fpmath' of graviton_acl is {self.values['fpmath']!r}; it is one of {', '.join(FPMATH)}")


def _onednn() -> str:
    found = re.search(r"(?:MKL-DNN|oneDNN) v([\d.]+)", torch.__config__.show())
    return found[1] if found else ""
