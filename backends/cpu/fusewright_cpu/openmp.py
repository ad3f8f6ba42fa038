"""The OpenMP library that torch computes with: where it is loaded, and how many of its threads a caller wakes."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator

import torch


def libraries() -> Iterator[ctypes.CDLL]:
    """Handles on the OpenMP libraries that this process has loaded, torch's first; none where torch computes without."""
    if "openmp" not in torch.__config__.parallel_info().lower():
        return
    for path in _loaded():
        try:
            yield ctypes.PyDLL(path)  # already loaded by torch: this only gives a handle on it
        except OSError:
            continue


def _loaded() -> list[str]:
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


def limited(threads: int) -> int:
    """Let so many threads at most share what this thread computes from now on; how many it were. Torch's own function tells all of
    its libraries, and drops what they have prepared."""
    before = torch.get_num_threads()
    _set_threads()(threads)
    return before


@functools.cache
def _set_threads() -> Callable[[int], object]:
    for lib in libraries():
        if hasattr(lib, "omp_set_num_threads"):
            found = lib.omp_set_num_threads
            found.argtypes, found.restype = (ctypes.c_int,), None
            return found
    return lambda threads: None
