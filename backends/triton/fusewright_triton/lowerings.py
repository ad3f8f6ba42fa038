"""Library calls of the GPU backends that differ from eager's own: attention whose mask eager's fast kernels would refuse."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from fusewright.interface import CompileContext, OpView, Value
from fusewright.plan.ir import Call, Instruction, Ref
from fusewright.toolkit.library import LoweringTable, OpLowering

LOWERINGS: LoweringTable[OpLowering] = LoweringTable()


def _broadcast_mask(op: OpView) -> str | None:
    """Only masks whose last dimension is not dense: flash, memory-efficient and cuDNN attention all refuse those."""
    mask = op.arg("attn_mask")
    if mask is None or mask.spec.stride[-1:] == (1,):
        return "the mask suits torch's kernels as it is"
    return None


@LOWERINGS.add("sdpa", when=_broadcast_mask)
def sdpa(op: OpView, ctx: CompileContext) -> Iterable[Instruction]:
    """Attention with the mask copied to dense memory: torch would else compute in fp32 products and a softmax.

    A mask made of constants is copied once, when the plan is first run.
    """
    mask: Value = op.arg("attn_mask")
    assert mask.spec is not None
    strides, step = [], 1
    for size in reversed(mask.spec.shape):
        strides.append(step)
        step *= size  # type: ignore[operator]
    dense = ctx.value(replace(mask.spec, stride=tuple(reversed(strides)), const=False))
    copy = Call("aten::clone.default", (Ref(mask.id),), (dense.id,), (("memory_format", torch.contiguous_format),))
    call = ctx.aten(replace(op, args=tuple(dense if a is mask else a for a in op.args)))
    return copy, call
