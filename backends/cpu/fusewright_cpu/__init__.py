"""Shared parts of CPU backends: loop kernels as LLVM IR with explicit vectors, compiled in process, run on torch's own threads."""

from fusewright_cpu.loader import llvm_loader

__all__ = ["llvm_loader"]
