"""A ready-made backend: a table of library calls, loop kernels for the other ops, and a loader for the kernels.

    class Mine(FusedBackend):
        name, device_type = "mine", HOST
        lowerings = LOWERINGS                  # library calls, op by op
        loader = my_loader                     # kernels -> code; default: the interpreter

        @classmethod
        def probe(cls) -> Device | Unavailable: ...

A backend that fuses neighbouring ops into its library calls overrides `library`. Modules needed only for lowering are imported
inside the lowering methods, because a cached plan needs none of them; `imported_later` does this for class attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from fusewright.interface import (
    Backend,
    CompileContext,
    Compiled,
    Device,
    DevicePolicy,
    KernelCode,
    OpView,
    Region,
    Unavailable,
    Verdict,
    Why,
)
from fusewright.toolkit.backend.library import LoweringTable, OpLowering, elsewhere
from fusewright.toolkit.fuse.call import LibraryCall
from fusewright.toolkit.ir import Kernel, interpret

__all__ = ["FusedBackend", "LibraryCall", "Loader", "imported_later", "interpreter_loader"]

T = TypeVar("T")


class Loader(Protocol):
    """Compiles kernels. A loader that knows the device has its `policy`, a `DevicePolicy`.

    `pack` and `unpack` convert code for the plan cache and back; `pack` returns None for code that cannot be cached."""

    def __call__(self, kernels: Mapping[str, Kernel]) -> Mapping[str, KernelCode]: ...

    def pack(self, kernels: Mapping[str, Kernel]) -> bytes | None: ...

    def unpack(self, data: bytes) -> Mapping[str, KernelCode]: ...

    def fingerprint(self) -> str:
        """Identify what the code depends on besides the kernels: compilers and their target."""
        ...


class InterpreterLoader:
    """Runs kernels with the reference interpreter: slowly, on host tensors, on any machine."""

    def __call__(self, kernels: Mapping[str, Kernel]) -> Mapping[str, KernelCode]:
        return {h: KernelCode(_interpreted(k), kernel=k) for h, k in kernels.items()}

    def pack(self, kernels: Mapping[str, Kernel]) -> bytes | None:
        return None

    def unpack(self, data: bytes) -> Mapping[str, KernelCode]:
        raise ValueError("the interpreter stores no code")

    def fingerprint(self) -> str:
        return "interpreter"


def _interpreted(kernel: Kernel) -> Callable[..., None]:
    return lambda tensors, sizes=(), scalars=(): interpret(kernel, tensors, sizes, scalars)


interpreter_loader = InterpreterLoader()


class _ImportedLater(Generic[T]):
    def __init__(self, get: Callable[[Any], T]) -> None:
        self.get = get

    def __get__(self, backend: object, owner: type) -> T:
        return self.get(owner)


def imported_later(get: Callable[[Any], T]) -> T:
    """Decorate a function that imports and returns a class attribute, so that it runs when the attribute is read."""
    return cast(T, _ImportedLater(get))


class FusedBackend(Backend):
    """See the module docstring. Ops that the library table does not take are computed by kernels where a rule exists."""

    lowerings: ClassVar[LoweringTable[Any]] = LoweringTable[OpLowering]()
    loader: ClassVar[Loader] = interpreter_loader
    real_views: ClassVar[bool] = True

    def __init__(self, device: Device | None = None, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(device, options)
        self._loaded: dict[str, Any] = {}
        self.built: list[object] = []
        """Kernel code built for measuring before `load`; held until then so that it is not built twice."""

    @classmethod
    def lowers(cls) -> Sequence[str]:
        from fusewright.toolkit.lower.tables import RULES

        return tuple(dict.fromkeys([*cls.lowerings, *RULES]))

    def prefers_library(self, op: OpView) -> bool:
        """Whether eager's code for `op` is better than a kernel, even though a rule exists."""
        return False

    def supports(self, op: OpView) -> Verdict:
        """Ask the library table, then the kernel rules."""
        from fusewright.toolkit.lower.tables import verdict

        by_library = self.lowerings.supports(op, self.running_on())
        if by_library or self.prefers_library(op):
            return by_library
        wrong = self._elsewhere(op)
        by_kernel = Verdict(Why.DEVICE, wrong) if wrong else verdict(op)
        return by_library if not by_kernel and by_library.why is not Why.NO_LOWERING else by_kernel

    def library(self, region: Region, ctx: CompileContext) -> Sequence[LibraryCall]:
        """Return the library calls of a region. By default, one call per op that the table takes, by `OpLowering` code."""
        calls = []
        for op in region.ops:
            row = self.lowerings.find(op, self.running_on())
            if not isinstance(row, Verdict):
                made = row.code(op, ctx)
                calls.append(LibraryCall((op.id,), tuple(made) if isinstance(made, Iterable) else (made,)))
        return calls

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        from fusewright.toolkit.fuse.fuser import fuse

        return fuse(region, ctx, self.library(region, ctx), policy=self.policy())

    def policy(self) -> DevicePolicy:
        """The device policy, by default the loader's."""
        found: DevicePolicy = getattr(self._loader(), "policy", DevicePolicy())
        return found

    def load(self, kernels: Mapping[str, Any]) -> Mapping[str, KernelCode]:
        """Compile kernels; on a simulated device, interpret them."""
        self._loaded.update(kernels)  # one backend compiles forward and backward before either is stored
        code = self._loader()(kernels)
        self.built.clear()
        return code

    def store(self, kernels: Sequence[str]) -> bytes | None:
        return self._loader().pack({h: self._loaded[h] for h in kernels})

    def restore(self, data: bytes, kernels: Sequence[str]) -> Mapping[str, KernelCode]:
        found = self._loader().unpack(data)
        return {h: found[h] for h in kernels}

    def fingerprint(self) -> str:
        """The base fingerprint plus that of the loader."""
        self.running_on()
        return f"{super().fingerprint()}-{self._loader().fingerprint()}"

    def _loader(self) -> Loader:
        return interpreter_loader if self.running_on().simulated else type(self).loader

    def running_on(self) -> Device:
        """Return the device, probing it on first use. Raises RuntimeError if there is none."""
        if self.device is None:
            found = self.probe()
            if isinstance(found, Unavailable):
                raise RuntimeError(found.reason)
            self.device = found
        return self.device

    def _elsewhere(self, op: OpView) -> str | None:
        specs = (v.spec for v in (*op.inputs(), *op.outs) if v.spec is not None)
        return next((why for s in specs if (why := elsewhere(s, self.running_on()))), None)
