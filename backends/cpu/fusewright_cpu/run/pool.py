"""Addresses of the functions that kernels call: the OpenMP pool that torch already runs, and the C library. Never a pool
of our own."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import sys
from collections.abc import Mapping
from types import MappingProxyType

from fusewright_cpu.openmp import PARALLEL, THREAD, THREADS, library


def _address(lib: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(lib, name), ctypes.c_void_p).value or 0


@functools.cache
def pool_symbols() -> Mapping[str, int]:
    """Return entry points of the OpenMP library that torch computes with, or nothing: kernels are then
    serial."""
    lib = library()
    try:
        return MappingProxyType({n: _address(lib, n) for n in (PARALLEL, THREAD, THREADS)} if lib is not None else {})
    except AttributeError:
        return MappingProxyType({})


@functools.cache
def _c_libraries() -> tuple[ctypes.CDLL, ...]:
    libs = [ctypes.CDLL(None)]
    name = ctypes.util.find_library("m") if not sys.platform.startswith("linux") else "libm.so.6"
    if name:
        libs.append(ctypes.CDLL(name))
    return tuple(libs)


def symbol_address(name: str) -> int:
    """Return the address of a function of the pool or of the C library. Raise KeyError when there is none."""
    pool = pool_symbols()
    if name in pool:
        return pool[name]
    for lib in _c_libraries():
        try:
            return _address(lib, name)
        except AttributeError:
            continue
    raise KeyError(f"no function {name} in this process")
