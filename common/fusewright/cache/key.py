"""The key of a plan: everything that the plan depends on."""

from __future__ import annotations

import hashlib
import platform

import torch
from torch.fx import GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright import machine
from fusewright.cache.store import Key
from fusewright.config import Options
from fusewright.graph import printer
from fusewright.interface import Backend, Phase
from fusewright.version import __version__


def key_of(
    backend: Backend, options: Options, gm: GraphModule, phase: Phase, const: frozenset[Node], format: int
) -> Key:
    """The graph with its types and size constraints, and everything else that its compiled code depends on."""
    text = printer.to_text(gm.graph, sources=False)
    vendor = type(backend).__module__.partition(".")[0]
    return Key(
        {
            "graph": hashlib.sha256(text.encode()).hexdigest(),
            "sizes": hashlib.sha256(compat.assumed_sizes(gm).encode()).hexdigest(),
            "constants": ",".join(str(i) for i, n in enumerate(gm.graph.nodes) if n in const),
            "phase": phase,
            "backend": backend.fingerprint(),
            "options": options.key(),
            "versions": f"{__version__} {torch.__version__} {platform.python_version()} {platform.machine()} {format}",
            "workers": str(backend.policy().count_workers()),  # choices are measured with them
            "torch": switches(),
            "sources": "".join(map(machine.sources, ("fusewright", "fusewright_native", vendor))),
        }
    )


def switches() -> str:
    """Torch settings that a backend may compile differently for; settings of a device's libraries are in its fingerprint."""
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return f"{torch.get_default_dtype()} {machine.matmul_precisions()} {deterministic}"
