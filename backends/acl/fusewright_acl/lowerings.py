"""The lowering table of graviton_acl: which ops become library calls, under which conditions, and how.

A lowering gets a match (the op and the neighbours fused into its call) and writes into the fragment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from fusewright.interface import OpView
from fusewright.toolkit.backend.library import LoweringTable
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.pattern import Match, chain, maybe
from fusewright_acl import convolutions, products
from fusewright_acl.convolutions import takes_neighbours
from fusewright_cpu.onednn import lowerings as shared
from fusewright_cpu.onednn.patterns import ATTENTION, POST_OPS, folds_batch_norm, same_type

OpCode: TypeAlias = Callable[[Match, Builder], None]

FLOATS = {torch.float32: "", torch.bfloat16: "mkldnn_bf16"}

LOWERINGS: LoweringTable[OpCode] = LoweringTable()
LOWERINGS.add("linear", dtypes=FLOATS, dynamic=True, when=shared.linear_reason)(products.lower)
LOWERINGS.add("mm", "addmm", dtypes=FLOATS, dynamic=True, when=shared.mm_reason)(products.lower)
LOWERINGS.add("conv_backward", dtypes=FLOATS, when=convolutions.backward_reason)(convolutions.backward)
LOWERINGS.add("sdpa", "sdpa_with_lse", dtypes=FLOATS, dynamic=True, when=shared.sdpa_reason)(products.attention)


def _bmm_reason(op: OpView) -> str | None:
    return "an empty tensor" if any(0 in v.spec.shape for v in op.inputs() if v.spec is not None) else None


def _conv_reason(op: OpView) -> str | None:
    specs = [v.spec for v in (*op.inputs(), op.out) if v.spec is not None]
    if any(0 in s.shape for s in specs):
        return "an empty tensor"
    x, w = shared.spec_of(op.arg("input")), shared.spec_of(op.arg("weight"))
    if x.rank not in (3, 4, 5) or x.rank != w.rank:
        return "only 1-d, 2-d and 3-d convolutions of a batch"
    return "mixed dtypes" if len({s.dtype for s in specs}) > 1 else None


LOWERINGS.add("bmm", dtypes=FLOATS, when=_bmm_reason)(products.batched)
LOWERINGS.add("conv", dtypes=FLOATS, when=_conv_reason)(convolutions.lower)


RIDES = frozenset({"relu", "gelu", "tanh", "sigmoid"})
"""Unary ops that ACL fuses into an fp32 product, as accurately as eager and with the same NaNs. With any other op, or in bf16,
oneDNN uses its reference implementation."""
RIDES_ON_CONV = frozenset({"relu", "clamp"})


def _unary(op: OpView, m: Match, b: Builder) -> bool:
    out = m.out.spec
    fits = op.args[0] == m.out and same_type(op.out, m.out) and out is not None and out.dtype is torch.float32
    scalars = POST_OPS[op.op].scalars(op) if fits else None
    return scalars is not None and POST_OPS[op.op].algorithm(op) in ("", "none") and b.ctx.options["fpmath"] != "bf16"


def _batch_norm(op: OpView, m: Match, b: Builder) -> bool:
    """Whether to fold a batch norm: only in fp32, because in bf16 the activation's kernel fuses it."""
    out = m.out.spec
    fits = folds_batch_norm(op, m, b) and out is not None and out.dtype is torch.float32
    return fits and takes_neighbours(m.anchor, b)


def _unary_of_conv(op: OpView, m: Match, b: Builder) -> bool:
    return _unary(op, m, b) and takes_neighbours(m.anchor, b)


PRODUCT = chain(("linear", "addmm", "mm"), maybe(RIDES, _unary, "unary", rule="acl.product.unary"))
CONV = chain(
    "conv",
    maybe("batch_norm", _batch_norm, "batch_norm", rule="acl.conv.batch_norm"),
    maybe(RIDES_ON_CONV, _unary_of_conv, "unary", rule="acl.conv.unary"),
)


ROWS = tuple(
    shared.of_table(LOWERINGS, id, pattern, note)
    for id, pattern, note in (
        ("acl.product", PRODUCT, "product"),
        ("acl.batched", chain("bmm"), "product of batches"),
        ("acl.conv", CONV, "convolution"),
        ("acl.conv_backward", chain("conv_backward"), "gradients of a convolution"),
        ("acl.attention", ATTENTION, "attention"),
    )
)
"""The rewrite rows, in the order in which they are tried."""
