"""The table of library calls that differ from eager's own: what they take, and where their code is."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from fusewright.interface import OpView, Value
from fusewright.plan.ir import Call
from fusewright.toolkit.builder import contiguous_strides
from fusewright.toolkit.library import LoweringTable
from fusewright_triton import convolutions, products
from fusewright_triton.calls import Calls, Found, OpCode, spec_of

LOWERINGS: LoweringTable[OpCode] = LoweringTable()
"""Of both vendors."""

CUDNN: LoweringTable[OpCode] = LoweringTable()
"""Of NVIDIA alone: cuDNN's fused convolutions."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

for table in (LOWERINGS, CUDNN):
    table.add("linear", dtypes=FLOATS, when=products.reason)(products.lower)
    table.add("mm", dtypes=products.HALF, when=products.mm_reason)(products.lower_mm)
# In fp32 cuDNN's channels-last kernels round to TF32 where its others do not: 20 to 80 times eager's error on ViT and Swin.
CUDNN.add("conv", dtypes=products.HALF, when=convolutions.reason)(convolutions.lower)


def _broadcast_mask(op: OpView) -> str | None:
    """Only masks whose last dimension is not dense: flash, memory-efficient and cuDNN attention all refuse those."""
    mask = op.arg("attn_mask")
    if mask is None or mask.spec.stride[-1:] == (1,):
        return "the mask suits torch's kernels as it is"
    return None


@CUDNN.add("sdpa", when=_broadcast_mask)
@LOWERINGS.add("sdpa", when=_broadcast_mask)
def sdpa(op: OpView, c: Calls) -> Found:
    """Attention with the mask copied to dense memory: torch would else compute in fp32 products and a softmax.

    A mask made of constants is copied once, when the plan is first run.
    """
    return Found((op,), op, partial(_masked, op), "attention with a dense mask")


def _masked(op: OpView, c: Calls) -> None:
    mask: Value = op.arg("attn_mask")
    spec = spec_of(mask)
    dense = c.ctx.value(replace(spec, stride=contiguous_strides(spec.shape), const=False))  # type: ignore[arg-type]
    clone = Call("aten::clone.default", (c.exact(mask),), (dense.id,), (("memory_format", torch.contiguous_format),))
    c.b.append(clone)
    given = c.b.at_hand(op)
    place = op.argnames.index("attn_mask")
    c.b.append(c.ctx.aten(replace(given, args=(*given.args[:place], dense, *given.args[place + 1 :]))))
