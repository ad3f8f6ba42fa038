"""The lowering table: claims with their reasons, and lowering op by op."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusewright.interface import CompileContext, Device, Dim, OpView, Why
from fusewright.plan.ir import Call, Instruction
from fusewright.toolkit.backend.library import LoweringTable, OpLowering, lower, ref
from fusewright.toolkit.rules.space import layout_of
from tests.fragments import Context, Sketch, spec_of

DEVICE = Device("cpu", "test", frozenset({"fast_bf16"}))


def _table() -> LoweringTable[OpLowering]:
    table: LoweringTable[OpLowering] = LoweringTable()

    @table.add("relu", dtypes={torch.float32: "", torch.bfloat16: "fast_bf16", torch.float16: "fp16"})
    @table.add("neg", dynamic=True, layouts={"contiguous"})
    def unary(op: OpView, ctx: CompileContext) -> Instruction:
        return Call(op.target, (ref(op.arg("self")),), (op.out.id,), op_id=op.id)

    @table.add("abs", when=lambda op: "wide" if op.out.spec.shape[-1] > 8 else None)  # type: ignore[union-attr]
    def two(op: OpView, ctx: CompileContext) -> list[Instruction]:
        middle = ctx.value(op.out.spec)
        return [
            Call("aten::neg.default", (ref(op.arg("self")),), (middle.id,)),
            Call("aten::abs.default", (ref(middle),), (op.out.id,)),
        ]

    return table


def _op(name: str, x: torch.Tensor) -> OpView:
    g = Sketch()
    g.op(name, g.input(x))
    return g.ops[0]


def _symbolic(op: OpView) -> OpView:
    (x,) = op.args
    return replace(op, args=(replace(x, spec=replace(x.spec, shape=(Dim("s0", 4),), stride=(1,))),))


@pytest.mark.parametrize(
    ("op", "why", "words"),
    [
        (_op("relu", torch.ones(4)), Why.OK, ""),
        (_op("relu", torch.ones(4, dtype=torch.bfloat16)), Why.OK, ""),
        (_op("relu", torch.ones(4, dtype=torch.float16)), Why.DEVICE_FEATURE, "fp16"),
        (_op("relu", torch.ones(4, dtype=torch.float64)), Why.DTYPE, "float64 is not among float32"),
        (_op("relu", torch.ones(4, dtype=torch.int64)), Why.DTYPE, "int64"),
        (_symbolic(_op("relu", torch.ones(4))), Why.DYNAMIC_SHAPE, "[s0]"),
        (_symbolic(_op("neg", torch.ones(4))), Why.OK, ""),
        (_op("neg", torch.ones(4, 4).t()), Why.LAYOUT, "strided"),
        (_op("abs", torch.ones(9)), Why.ATTR, "wide"),
        (_op("exp", torch.ones(4)), Why.NO_LOWERING, "exp"),
    ],
)
def test_claims_carry_their_reason(op: OpView, why: Why, words: str) -> None:
    verdict = _table().supports(op, DEVICE)
    assert verdict.why is why and words in verdict.detail


def test_a_later_row_may_take_what_an_earlier_one_refuses() -> None:
    table = _table()
    table.add("relu", dtypes={torch.int64})(lambda op, ctx: Call(op.target, (ref(op.args[0]),), (op.out.id,)))
    assert table.supports(_op("relu", torch.ones(4, dtype=torch.int64)), DEVICE)
    assert not table.supports(_op("relu", torch.ones(4, dtype=torch.float64)), DEVICE)


def test_a_region_is_lowered_op_by_op() -> None:
    g = Sketch()
    y = g.op("abs", g.op("relu", g.input(torch.tensor([-1.0, 2.0]))))
    fragment = lower(_table(), g.region([y]), Context({}, DEVICE))
    assert g.run(fragment, [y])[0].tolist() == [0.0, 2.0]
    assert len(fragment.instructions) == 3


def test_another_device_is_refused() -> None:
    op = _op("relu", torch.ones(4))
    assert _table().supports(op, Device("cuda", "sm_90")).why is Why.DEVICE
    assert _table().supports(op, Device("cuda", "sm_90", simulated=True))


@pytest.mark.parametrize(
    ("tensor", "layout"),
    [
        (torch.ones(2, 3, 4, 5), "contiguous"),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), "channels_last"),
        (torch.ones(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), "channels_last"),
        (torch.ones(2, 3, 4, 5, 6).permute(0, 2, 1, 3, 4), "strided"),
        (torch.ones(2, 1, 4, 5), "contiguous"),
        (torch.ones(3, 4).t(), "strided"),
        (torch.ones(4).expand(3, 4), "strided"),
        (torch.ones(()), "contiguous"),
    ],
)
def test_layouts(tensor: torch.Tensor, layout: str) -> None:
    assert layout_of(spec_of(tensor)) == layout
