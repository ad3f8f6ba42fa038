"""Loop kernels on CPUs: LLVM IR with explicit vectors, compiled in process, run on torch's own threads."""

from fusewright.toolkit.llvm.entry import UnsupportedKernel
from fusewright.toolkit.llvm.jit import CompiledModule, compile_kernels, load_module
from fusewright.toolkit.llvm.launch import Launcher
from fusewright.toolkit.llvm.target import CpuTarget, host_target

__all__ = [
    "CompiledModule",
    "CpuTarget",
    "Launcher",
    "UnsupportedKernel",
    "compile_kernels",
    "host_target",
    "load_module",
]
