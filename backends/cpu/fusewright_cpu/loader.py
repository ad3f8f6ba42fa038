"""Kernels compiled for this CPU, as a `Loader` of `FusedBackend`. llvmlite is imported with the backend, which is unavailable
without it; the emitters are imported when a new kernel is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from fusewright import machine
from fusewright.interface import KernelCode
from fusewright.toolkit.ir import Kernel
from fusewright_cpu.policy import CPU
from fusewright_cpu.run import archive
from fusewright_cpu.run.jit import compile_kernels
from fusewright_cpu.run.launch import Launcher, error
from fusewright_cpu.run.sources import Source, hash_of
from fusewright_cpu.target import host_target

__all__ = ["llvm_loader"]


class LlvmLoader:
    """Compile and load kernels for this CPU."""

    policy = CPU

    def __call__(self, kernels: Mapping[str, Kernel]) -> Mapping[str, KernelCode]:
        module = compile_kernels(list(kernels.values()))
        return {h: _native(module.launcher(k)) for h, k in kernels.items()}

    def pack(self, kernels: Mapping[str, Kernel]) -> bytes | None:
        return archive.pack(kernels)

    def unpack(self, data: bytes) -> Mapping[str, KernelCode]:
        return {h: _native(launcher) for h, launcher in archive.unpack(data).items()}

    def fingerprint(self) -> str:
        return f"{host_target().fingerprint}-{machine.sources('fusewright_cpu')[:16]}"


def _native(launcher: Launcher) -> KernelCode:
    kernel = launcher.kernel
    return KernelCode(launcher, launcher.address, partial(_error, kernel), kernel, partial(_text, kernel))


def _text(kernel: Source) -> str:
    """Return the LLVM IR of a kernel for this CPU, before LLVM's passes."""
    from fusewright_cpu.run.codegen import kernels_to_text

    return kernels_to_text({hash_of(kernel): kernel}, host_target(), parallel=True)[0]


def _error(kernel: Source, code: int, block: Sequence[int]) -> Exception:
    return error(kernel, code, block[len(kernel.buffers) :])


llvm_loader = LlvmLoader()
