"""A backend out of parts: a table of library calls, loop kernels for everything around them, a loader for the kernels.

    class MyCpu(FusedBackend):
        name, device_type = "my_cpu", "cpu"
        lowerings = LOWERINGS                  # library calls, op by op
        loader = staticmethod(llvm_loader)     # kernels -> code

        @classmethod
        def probe(cls) -> Device | Unavailable: ...

A backend whose library calls take neighbours in overrides `library`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

from fusewright.interface import (
    Backend,
    CompileContext,
    Compiled,
    Device,
    KernelCode,
    OpView,
    Region,
    Unavailable,
    Verdict,
    Why,
)
from fusewright.toolkit.fuse.fuser import LibraryCall, fuse
from fusewright.toolkit.fuse.tables import RULES
from fusewright.toolkit.fuse.tables import verdict as kernel_verdict
from fusewright.toolkit.kernel import Kernel, interpret
from fusewright.toolkit.library import LoweringTable, OpLowering

__all__ = ["FusedBackend", "LibraryCall", "Loader", "interpreter_loader", "llvm_loader"]

Loader: TypeAlias = Callable[[Mapping[str, Kernel]], Mapping[str, KernelCode]]


def interpreter_loader(kernels: Mapping[str, Kernel]) -> Mapping[str, KernelCode]:
    """Kernels run by the reference interpreter: slow, on CPU tensors, on every machine."""
    return {h: KernelCode(_interpreted(k)) for h, k in kernels.items()}


def _interpreted(kernel: Kernel) -> Callable[..., None]:
    return lambda tensors, sizes=(), scalars=(): interpret(kernel, tensors, sizes, scalars)


def llvm_loader(kernels: Mapping[str, Kernel]) -> Mapping[str, KernelCode]:
    """Kernels compiled for this CPU."""
    from fusewright.toolkit.llvm import compile_kernels
    from fusewright.toolkit.llvm.launch import raise_error

    def error(code: int, name: str) -> Exception:
        try:
            raise_error(code, name)
        except (IndexError, RuntimeError) as e:
            return e
        raise AssertionError(f"code {code} of {name} stands for no error")

    module = compile_kernels(list(kernels.values()))
    out = {}
    for h, k in kernels.items():
        out[h] = KernelCode(module.launcher(k), module.addresses[h], partial(error, name=k.name))
    return out


class FusedBackend(Backend):
    """See the module. What its library table does not take, a kernel computes where there is a rule for it."""

    lowerings: ClassVar[LoweringTable[Any]] = LoweringTable[OpLowering]()
    loader: ClassVar[Loader] = staticmethod(llvm_loader)

    @classmethod
    def lowers(cls) -> Sequence[str]:
        return tuple(dict.fromkeys([*cls.lowerings, *RULES]))

    def prefers_library(self, op: OpView) -> bool:
        """Whether eager's own code for `op` is better than a kernel, though there is a rule for it."""
        return False

    def supports(self, op: OpView) -> Verdict:
        """By the library table, else by a kernel rule."""
        by_library = self.lowerings.supports(op, self.running_on())
        if by_library or self.prefers_library(op):
            return by_library
        wrong = self._elsewhere(op)
        by_kernel = Verdict(Why.DEVICE, wrong) if wrong else kernel_verdict(op)
        return by_library if not by_kernel and by_library.why is not Why.NO_LOWERING else by_kernel

    def library(self, region: Region, ctx: CompileContext) -> Sequence[LibraryCall]:
        """The library calls of a region. Default: every op that the table takes, on its own, by `OpLowering` code."""
        calls = []
        for op in region.ops:
            row = self.lowerings.find(op, self.running_on())
            if not isinstance(row, Verdict):
                made = row.code(op, ctx)
                calls.append(LibraryCall((op.id,), tuple(made) if isinstance(made, Iterable) else (made,)))
        return calls

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        return fuse(region, ctx, self.library(region, ctx))

    def load(self, kernels: Mapping[str, Any]) -> Mapping[str, KernelCode]:
        """Code for kernels; on a simulated device by the interpreter."""
        loader = interpreter_loader if self.running_on().simulated else type(self).loader
        return loader(kernels)

    def running_on(self) -> Device:
        """The device, probed when first needed. RuntimeError when there is none."""
        if self.device is None:
            found = self.probe()
            if isinstance(found, Unavailable):
                raise RuntimeError(found.reason)
            self.device = found
        return self.device

    def _elsewhere(self, op: OpView) -> str | None:
        device = self.running_on()
        if device.simulated:
            return None
        for v in (*op.inputs(), *op.outs):
            if v.spec is not None and v.spec.device.partition(":")[0] != device.type:
                return f"a tensor is on {v.spec.device}, the backend runs on {device.type}"
        return None
