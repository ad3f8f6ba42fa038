"""The compiled extension: whether it is present, and which of its instruction sets to use."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType
from typing import Any

from fusewright import machine
from fusewright.errors import BackendUnavailableError, OptionError, nearest
from fusewright_cpu.openmp import PARALLEL, THREAD
from fusewright_cpu.run.pool import pool_symbols

ISA_VARIABLE = "FUSEWRIGHT_INT8_ISA"
"""Environment variable that names the instruction set to use, one of `isas()`; read once."""

SIMULATED = "amx_simulated"
"""The AMX kernels with tile instructions emulated in C++, for machines without AMX; used only when named explicitly."""

_EXTENSION = "fusewright_int8._core"
_REMEDY = "install a C++20 compiler (apt install g++) and reinstall fusewright-int8; torch's own int8 kernels are used meanwhile"


def absent() -> str | None:
    """Return why there is no native core and how to get it, or None if there is one."""
    return _load()[1]


def extension() -> Any:
    """Return the extension. Raise BackendUnavailableError with the reason if there is none."""
    module, reason = _load()
    if module is None:
        raise BackendUnavailableError(f"x86_int8 has no native core: {reason}")
    return module


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    if machine.arch() != "x86_64":
        return None, f"it is for x86-64, and this is {machine.arch()}"
    try:
        module = importlib.import_module(_EXTENSION)
    except ModuleNotFoundError as e:
        if e.name != _EXTENSION:
            raise
        return (
            None,
            f"fusewright-int8 was installed without a C++ compiler, or runs from a checkout (cmake/README.md); {_REMEDY}",
        )
    except ImportError as e:
        return None, f"its extension does not load ({e}); {_REMEDY}"
    pool = pool_symbols()
    module.set_pool(pool.get(PARALLEL, 0), pool.get(THREAD, 0))
    _use(module, os.environ.get(ISA_VARIABLE), ISA_VARIABLE)
    return module, None


def isas() -> tuple[str, ...]:
    """Return the sets that this CPU can run, best first, of "amx_int8", "avx512_vnni", "avx_vnni", "avx2", "portable"."""
    return tuple(name for name in extension().isas() if name != SIMULATED)


def isa() -> str:
    """Return the instruction set in use: the best, or the one that `FUSEWRIGHT_INT8_ISA` or `use_isa` names."""
    return str(extension().isa())


def use_isa(name: str | None) -> None:
    """Use this instruction set from now on, in all threads; None selects the best. Results do not depend on it. Raise OptionError
    for one that this CPU cannot run."""
    _use(extension(), name, "the instruction set")


def _use(module: ModuleType, name: str | None, source: str) -> None:
    found: list[str] = module.isas()
    if name and name not in found:
        raise OptionError(f"{source} is {name!r}, which this CPU cannot run; {nearest(name, found)}")
    module.use(name or found[0])
