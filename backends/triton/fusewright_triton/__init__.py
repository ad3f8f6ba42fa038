"""Fusewright backends `nvidia_triton` and `rocm_triton`: one Triton emitter, two vendors."""

from collections.abc import Callable
from typing import Any

import torch

from fusewright.dynamo import entry

_ENTRIES = {name: entry(name) for name in ("nvidia_triton", "rocm_triton")}


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the entry point that `torch.compile` looks up by backend name. If the process already uses a GPU, the compiler
    processes start while Dynamo traces; merely asking whether there is a GPU would forbid the process to fork."""
    if name not in _ENTRIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if torch.cuda.is_initialized():
        from fusewright_triton.backend import prepare

        prepare(name)
    return _ENTRIES[name]
