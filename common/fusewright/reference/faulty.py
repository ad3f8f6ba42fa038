"""The backend that misbehaves in the way that its option `fault` names. The host must stay right, or say what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from fusewright.errors import OptionError, nearest
from fusewright.interface import CompileContext, Compiled, Decline, Device, Opaque, OpView, Region, Verdict
from fusewright.reference.interp import Interp


class Faulty(Interp):
    """Like `interp`, but with one fault. Faults: see `FAULTS`."""

    name = "fusewright_faulty"
    options: ClassVar = {"fault": "decline"}

    FAULTS: ClassVar[tuple[str, ...]] = (
        "decline", "crash", "supports_raises", "supports_lies", "wrong_shape", "wrong_dtype", "mutates_input", "drops_result",
        "returns_input", "raises_at_run_time", "group_not_convex",
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        fault = self.values["fault"]
        if fault not in self.FAULTS:
            raise OptionError(
                f"option 'fault' of {self.name}: there is no fault {fault!r}; {nearest(fault, self.FAULTS)}"
            )

    @classmethod
    def probe(cls) -> Device:
        return Device("cpu", "any")

    def supports(self, op: OpView) -> Verdict:
        if self.values["fault"] == "supports_raises":
            raise KeyError("a bug in supports()")
        if self.values["fault"] == "supports_lies":
            return True  # type: ignore[return-value]
        return super().supports(op)

    def group(self, graph: Any, claimed: frozenset[int]) -> Sequence[frozenset[int]] | None:
        if self.values["fault"] == "group_not_convex" and len(claimed) > 2:
            return [frozenset((min(claimed), max(claimed)))]
        return None

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        fault = self.values["fault"]
        if fault == "decline":
            raise Decline("declined on purpose")
        if fault == "crash":
            raise RuntimeError("crashed on purpose")
        right = super().compile(region, ctx)
        assert isinstance(right, Opaque)
        return Opaque(_broken(fault, right.fn))


def _broken(fault: str, fn: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Sequence[torch.Tensor]]:
    def run(*args: Any) -> Sequence[torch.Tensor]:
        results = tuple(fn(*args))
        if fault == "wrong_shape":
            return (results[0].unsqueeze(0), *results[1:])
        if fault == "wrong_dtype":
            return (results[0].to(torch.float16), *results[1:])
        if fault == "returns_input":
            largest = max((a for a in args if isinstance(a, torch.Tensor)), key=torch.Tensor.numel)
            return (largest.as_strided(results[0].shape, results[0].stride()), *results[1:])
        if fault == "drops_result":
            return results[:-1]
        if fault == "raises_at_run_time":
            raise RuntimeError("failed on purpose")
        if fault == "mutates_input":
            next(a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()).add_(1)
        return results

    return run
