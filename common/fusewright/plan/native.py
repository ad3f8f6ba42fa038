"""The optional extension `fusewright-native`: hot-path code in C++, each part faster than a single Python statement.

Every user has a Python version for when it is missing, and tests compare the two.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright.config import env_or_default
from fusewright.errors import without_memory

log = logging.getLogger("fusewright")

_EXTENSION = "fusewright_native._core"
_REMEDY = "install a C++20 compiler (apt install g++) and then fusewright-native; until then Python does its part"


def extension() -> Any | None:
    """The extension; None if it is not installed or `FUSEWRIGHT_NATIVE=0`."""
    return _load()[0] if env_or_default("NATIVE") else None


def absent() -> str | None:
    """Why the extension is missing and how to get it; None if it is present."""
    return _load()[1] if env_or_default("NATIVE") else "FUSEWRIGHT_NATIVE=0 turns it off"


def device_launch(driver: int, errors: int) -> Any | None:
    """A launcher that calls the function at address `driver` (cuLaunchKernel, hipModuleLaunchKernel) as long as the word at
    `errors` (0: none) is 0; None without the extension. See `device.h` of the extension."""
    core = extension()
    if core is None:
        return None
    return core.Device(driver, errors, compat.current_device, compat.current_stream, _bytes_on_gpu)


def _bytes_on_gpu(count: int) -> torch.Tensor:
    return compat.empty_strided_on_gpu((count,), (1,), torch.uint8)


def call_cache(run: Callable[..., Any], trace: Callable[..., Any], launch: int, encode: int) -> Callable[..., Any] | None:
    """`run`, whose repeated calls skip Python: `trace` tells once for each layout of the arguments what a call does. `launch` and
    `encode` are addresses of the driver's functions. None without the extension. See `call_cache.h` of the extension."""
    core = extension()
    if core is None:
        return None
    made: Callable[..., Any] = core.call_cache(
        run, trace, compat.empty_strided_on_gpu, compat.current_device, compat.current_stream, launch, encode
    )
    return made


@functools.cache
def _load() -> tuple[Any | None, str | None]:
    try:
        module = importlib.import_module(_EXTENSION)
        module.bind_tensors(torch.Tensor, torch.nn.Parameter, without_memory)
    except ModuleNotFoundError as e:
        if e.name not in (_EXTENSION, _EXTENSION.partition(".")[0]):
            raise
        return None, f"fusewright-native is not installed, or was without a C++ compiler; {_REMEDY}"
    except ImportError as e:
        reason = f"its extension does not load ({e}); {_REMEDY}"
        log.warning("fusewright: fusewright-native: %s", reason)
        return None, reason
    return module, None
