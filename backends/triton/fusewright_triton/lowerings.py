"""The table of library calls that differ from eager's own: which calls each row takes, and the code of the row."""

from __future__ import annotations

import torch

from fusewright.toolkit.backend.library import LoweringTable
from fusewright_triton.select import (
    aligned,
    conv_layouts,
    convolutions,
    depthwise,
    few_channels,
    gathers,
    grouped,
    more_channels,
    narrow,
    norms,
    products,
    quantized,
)
from fusewright_triton.select.attention import decode, sdpa, short_sequence, unfused, varying
from fusewright_triton.select.calls import OpCode, by_rows

LOWERINGS: LoweringTable[OpCode] = LoweringTable()
"""Rows of both vendors."""

CUDNN: LoweringTable[OpCode] = LoweringTable()
"""Rows of NVIDIA alone: cuDNN's fused convolutions, and what runs instead of its attention."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

for table in (LOWERINGS, CUDNN):
    table.add("linear", "mm", dtypes=FLOATS, dynamic=True, when=narrow.reason)(by_rows(narrow.ROWS))
    table.add("linear", dtypes=FLOATS, dynamic=True, when=products.reason)(by_rows(products.ROWS))
    table.add("mm", dtypes=FLOATS, dynamic=True, when=quantized.mm_reason)(by_rows(quantized.MM))
    table.add("bmm", "addmm", "baddbmm", dtypes=FLOATS, when=aligned.rows_reason)(by_rows((aligned.ROWS,)))
    table.add("int_mm", dynamic=True, when=quantized.int_mm_reason)(by_rows(quantized.INT_MM))
    table.add("sdpa", when=decode.reason)(by_rows((*decode.ROWS, *sdpa.ROWS)))
    table.add("sdpa", when=short_sequence.reason)(by_rows(short_sequence.ROWS))
    table.add("sdpa", when=sdpa.sdpa_reason)(by_rows(sdpa.ROWS))
    table.add("batch_norm", dtypes=FLOATS, dynamic=True)(by_rows(norms.BATCH))
    table.add("group_norm", "group_norm_backward", dtypes=FLOATS)(by_rows(norms.GROUPS))
    table.add("softmax", dtypes=FLOATS, when=unfused.reason)(by_rows(unfused.ROWS))
    table.add(*gathers.OPS, dtypes=FLOATS, when=gathers.reason)(by_rows(gathers.ROWS))
    table.add(*gathers.REDUCTIONS, dtypes=FLOATS, when=gathers.reduced_reason)(by_rows(gathers.REDUCED))
CUDNN.add("sdpa", dtypes=aligned.HALF, dynamic=True, when=varying.reason)(by_rows(varying.ROWS))
CUDNN.add("conv", dtypes=aligned.HALF, when=depthwise.reason)(by_rows(depthwise.ROWS))
CUDNN.add("conv", dtypes=aligned.HALF, when=convolutions.reason)(
    by_rows((*few_channels.ROWS, *grouped.ROWS, conv_layouts.PLANES, *more_channels.ROWS, *convolutions.ROWS))
)
CUDNN.add("conv_backward", dtypes=aligned.HALF, when=grouped.backward_reason)(by_rows((grouped.BACKWARD,)))
CUDNN.add("conv_backward", dtypes=aligned.HALF, when=convolutions.patches_backward_reason)(
    by_rows((convolutions.PATCHES_BACKWARD,))
)
CUDNN.add("conv_backward", dtypes=aligned.HALF, when=more_channels.backward_reason)(
    by_rows((more_channels.BACKWARD, convolutions.BACKWARD))
)
CUDNN.add("conv", dtypes=(torch.float32,), when=convolutions.reason)(by_rows(conv_layouts.ROWS))
for table in (LOWERINGS, CUDNN):
    table.add("conv", dtypes=FLOATS, dynamic=True, when=convolutions.bias_reason)(by_rows((convolutions.BIAS,)))
    table.add("conv_backward", dtypes=FLOATS, dynamic=True, when=convolutions.backward_reason)(by_rows((convolutions.BACKWARD,)))
