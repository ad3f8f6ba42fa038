"""Kernels written by hand, compiled once for the tests of a process: code that nobody holds is unloaded."""

from __future__ import annotations

from functools import cache

from fusewright_cpu.run.jit import compile_kernels
from fusewright_cpu.run.launch import Launcher
from fusewright_cpu.run.sources import Source


@cache
def launcher(kernel: Source) -> Launcher:
    return compile_kernels([kernel]).launcher(kernel)
