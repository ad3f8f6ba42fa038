"""Kernels written by hand, compiled once for the tests of a process: code that nobody holds is unloaded."""

from __future__ import annotations

from functools import cache

from fusewright_cpu.run import jit
from fusewright_cpu.run.launch import Launcher
from fusewright_cpu.run.sources import Source


def launcher(kernel: Source) -> Launcher:
    return _held(kernel, jit._process())


@cache
def _held(kernel: Source, process: jit._Process) -> Launcher:
    """Simulated instructions have a JIT of their own."""
    return jit.compile_kernels([kernel]).launcher(kernel)
