"""Backends with one bug each, based on the reference interpreter; the conformance kit must catch them all."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusewright.interface import CompileContext, Compiled, GraphView, Opaque, OpView, Region
from fusewright.reference.interp import Interp

Change = Callable[[OpView, Sequence[Any], Tensor], Tensor]
"""(op, the tensors that its region receives, the right result) -> a wrong result."""


class Mutant(Interp):
    """Right except for `op`, whose results `change` corrupts. Every op is a region of its own."""

    op: ClassVar[str] = ""

    def group(self, graph: GraphView, claimed: frozenset[int]) -> Sequence[frozenset[int]]:
        return [frozenset((i,)) for i in sorted(claimed)]

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        right = super().compile(region, ctx)
        assert isinstance(right, Opaque)
        if region.ops[0].op != self.op:
            return right
        return Opaque(lambda *inputs: (self.change(region.ops[0], inputs, right.fn(*inputs)[0]),))

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        return result


class WrongStride(Mutant):
    name, op = "wrong_stride", "add"

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        order = tuple(reversed(range(result.dim())))
        return result.permute(order).contiguous().permute(order)


class WrongDtype(Mutant):
    name, op = "wrong_dtype", "mean"

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        return result.double()


class SwappedOperands(Mutant):
    name, op = "swapped_operands", "atan2"

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        return torch.atan2(inputs[1], inputs[0])


class MissingMask(Mutant):
    """Computes vectors of eight and never the remainder."""

    name, op = "missing_mask", "exp"

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        whole = result.numel() // 8 * 8
        memory = result.as_strided((result.numel(),), (1,))
        if whole:
            memory[whole:] = 0
        return result


class OffByOne(Mutant):
    """A scan that is exclusive instead of inclusive."""

    name, op = "off_by_one", "cumsum"

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        return (result - inputs[0]).to(result.dtype)


class StaleConstant(Mutant):
    """Caches the first weight forever."""

    name, op = "stale_constant", "mm"

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        right = super().compile(region, ctx)
        assert isinstance(right, Opaque)
        packed: list[Tensor] = []

        def run(*inputs: Any) -> Sequence[Tensor]:
            if region.ops[0].op != self.op:
                return right.fn(*inputs)
            packed.append(inputs[1].clone())
            return right.fn(inputs[0], packed[0])

        return Opaque(run)


class AliasingOutput(Mutant):
    """Returns the right values in the caller's memory."""

    name, op = "aliasing_output", "clone"

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        return inputs[0]  # type: ignore[no-any-return]


class DroppedNaN(Mutant):
    """A comparison that drops NaN."""

    name, op = "dropped_nan", "maximum"

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        return torch.fmax(inputs[0], inputs[1])


class WrongRounding(Mutant):
    """Casts to bf16 by truncation."""

    name, op = "wrong_rounding", "cast"

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        if result.dtype is not torch.bfloat16 or inputs[0].dtype is not torch.float32:
            return result
        bits = inputs[0].contiguous().view(torch.int32) & -65536
        return bits.view(torch.float32).to(torch.bfloat16)


class LostSign(Mutant):
    """Negates by subtracting from zero, which never gives negative zero."""

    name, op = "lost_sign", "neg"

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        return 0 - inputs[0]  # type: ignore[no-any-return]


class LostDigits(Mutant):
    """Uses the textbook formula, in which 1 + x keeps few digits of x near zero."""

    name, op = "lost_digits", "expm1"

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        return inputs[0].exp() - 1  # type: ignore[no-any-return]


class Overflow(Mutant):
    """A softmax that does not subtract the maximum."""

    name, op = "overflow", "softmax"

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        e = inputs[0].exp()
        return e / e.sum(op.arg("dim"), keepdim=True)  # type: ignore[no-any-return]


class IntegersAsFloats(Mutant):
    """Multiplies int64 in floating point."""

    name, op = "integers_as_floats", "mul"

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        if result.dtype is not torch.int64 or len(inputs) != 2:
            return result
        return (inputs[0].double() * inputs[1].double()).to(torch.int64)  # type: ignore[no-any-return]


class ReusedMemory(Mutant):
    """Each call overwrites the previous result."""

    name, op = "reused_memory", "exp"

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        right = super().compile(region, ctx)
        assert isinstance(right, Opaque)
        if region.ops[0].op != self.op:
            return right
        kept: dict[Any, Tensor] = {}

        def run(*inputs: Any) -> Sequence[Tensor]:
            (result,) = right.fn(*inputs)
            return (kept.setdefault((result.shape, result.stride()), result).copy_(result),)

        return Opaque(run)


class FingerprintOfOneProcess(Mutant):
    name = "fingerprint_of_one_process"

    def fingerprint(self) -> str:
        return f"{super().fingerprint()}-{','.join({'avx2', 'avx512', 'vnni', 'amx'})}"


class Crashing(Mutant):
    """Crashes its process."""

    name, op = "crashing", "exp"

    def change(self, op: OpView, inputs: Sequence[Any], result: Tensor) -> Tensor:
        os.kill(os.getpid(), 11)
        return result
