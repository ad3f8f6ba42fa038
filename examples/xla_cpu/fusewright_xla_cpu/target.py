"""XLA on a CPU: its dtypes, and the options that keep its arithmetic IEEE-conformant."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import torch

from fusewright.interface import HOST, Device, Unavailable

DTYPES: dict[torch.dtype, str] = {
    torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16",
    torch.int8: "int8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64", torch.uint8: "uint8",
    torch.bool: "bool",
}  # fmt: skip
"""JAX's name of each lowered dtype. Complex numbers stay in eager."""

COMPILER_OPTIONS: dict[str, Any] = {
    "xla_allow_excess_precision": False,  # a cast to bf16 rounds, as eager's does
    "xla_cpu_enable_fast_math": False,
    "xla_cpu_enable_fast_min_max": False,  # a maximum propagates NaN
}


LIBRARIES = ("jax", "jaxlib")


def probe() -> Device | Unavailable:
    """Return the CPU as XLA sees it. JAX is located but not imported, which would take a second."""
    try:
        found = all(importlib.util.find_spec(name) is not None for name in LIBRARIES)
        versions = [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES] if found else []
    except ImportError:  # an import hook may refuse, and a package may lack its metadata
        found = False
    if not found:
        return Unavailable("jax is not installed", 'pip install "jax>=0.8,<0.12"')
    return Device(HOST, "xla", driver=", ".join(versions))
