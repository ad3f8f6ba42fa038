"""Find the OpenMP library that torch computes with, and limit how many of its threads a caller wakes."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch

PARALLEL, THREAD, THREADS = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
"""The functions of libgomp that compiled kernels call."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return a handle on the OpenMP library that torch computes with; None if it uses none, or if none is found."""
    if "openmp" not in torch.__config__.parallel_info().lower():
        return None
    for path in loaded():
        try:
            found = ctypes.PyDLL(path)  # already loaded: this only returns a handle
        except OSError:
            continue
        if _is_torchs(found):
            return found
    return None


def loaded() -> list[str]:
    """Return paths of the OpenMP libraries in this process; empty if the system does not list them. There may be several:
    packages bring their own."""
    if not sys.platform.startswith("linux"):
        return []
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}
    return sorted(p for p in paths if p.rsplit("/", 1)[-1].startswith(("libgomp", "libomp", "libiomp5")))


def _is_torchs(lib: ctypes.CDLL) -> bool:
    """Return whether torch sees a setting made in this library, which its path does not tell. On the pool of another library each
    of our kernels would wait for torch's threads, which keep spinning for milliseconds after their own work."""
    try:
        tell, ask = lib.omp_set_num_threads, lib.omp_get_max_threads
    except AttributeError:
        return False
    tell.argtypes, tell.restype = (ctypes.c_int,), None
    before, own = torch.get_num_threads(), ask()
    tell(before + 1)
    seen = torch.get_num_threads() == before + 1
    tell(own)
    return seen


def limited(threads: int) -> int:
    """Limit how many threads share this thread's computations from now on; return the previous limit. Torch's own function informs
    all of its libraries, and drops what they have prepared."""
    before = torch.get_num_threads()
    _set_threads()(threads)
    return before


@functools.cache
def _set_threads() -> Callable[[int], object]:
    lib = library()
    return lib.omp_set_num_threads if lib is not None else lambda threads: None
