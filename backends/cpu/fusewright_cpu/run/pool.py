"""Addresses of what kernels call: the OpenMP pool that torch already runs, and the C library. Never a pool
of our own."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import sys
from collections.abc import Mapping
from types import MappingProxyType

import torch

from fusewright_cpu.emit.entry import PARALLEL, THREAD, THREADS


def _address(lib: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(lib, name), ctypes.c_void_p).value or 0


@functools.cache
def pool_symbols() -> Mapping[str, int]:
    """Entry points of the OpenMP library that this process has loaded, or nothing: kernels are then
    serial."""
    if "openmp" not in torch.__config__.parallel_info().lower():
        return MappingProxyType({})
    for path in _loaded_openmp():
        try:
            # already loaded by torch: this only gives a handle on it
            lib = ctypes.CDLL(path)
            return MappingProxyType({n: _address(lib, n) for n in (PARALLEL, THREAD, THREADS)})
        except (OSError, AttributeError):
            continue
    return MappingProxyType({})


def _loaded_openmp() -> list[str]:
    """Paths of OpenMP libraries in this process that come with torch; empty where the system does not
    tell."""
    if not sys.platform.startswith("linux"):
        return []
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/" in line}
    names = ("libgomp", "libomp", "libiomp5")
    found = [p for p in paths if p.rsplit("/", 1)[-1].startswith(names)]
    # with several, the one that lies beside torch is the one that torch calls
    return sorted(found, key=lambda p: ("torch" not in p, p))


@functools.cache
def _c_libraries() -> tuple[ctypes.CDLL, ...]:
    libs = [ctypes.CDLL(None)]
    name = ctypes.util.find_library("m") if not sys.platform.startswith("linux") else "libm.so.6"
    if name:
        libs.append(ctypes.CDLL(name))
    return tuple(libs)


def symbol_address(name: str) -> int:
    """The address of a function of the pool or of the C library. KeyError when there is none."""
    pool = pool_symbols()
    if name in pool:
        return pool[name]
    for lib in _c_libraries():
        try:
            return _address(lib, name)
        except AttributeError:
            continue
    raise KeyError(f"no function {name} in this process")
