"""Fusewright backends `nvidia_triton` and `rocm_triton`: one Triton emitter, two vendors."""

from collections.abc import Callable
from typing import Any

import torch

from fusewright.dynamo import entry

_ENTRIES = {name: entry(name) for name in ("nvidia_triton", "rocm_triton")}


def __getattr__(name: str) -> Callable[..., Any]:
    """An entry point: `torch.compile` was given the backend's name. Compiler processes get ready while Dynamo traces, if the
    process uses a GPU already; asking whether there is one would forbid it to fork."""
    if name not in _ENTRIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if torch.cuda.is_initialized():
        from fusewright_triton.backend import prepare

        prepare(name)
    return _ENTRIES[name]
