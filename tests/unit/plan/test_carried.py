"""Lowered, carried, left to eager: three counts of what runs, not of what was claimed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import pipeline, report
from fusewright.capture import capture
from fusewright.cli import explain
from fusewright.config import Options
from fusewright.errors import FallbackError
from fusewright.interface import YES, CompileContext, Compiled, Device, Fragment, OpView, Region, Verdict, Why
from fusewright.plan.ir import Call, Ref
from fusewright.report import GraphReport
from fusewright.toolkit.backend.fused import FusedBackend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Carrying(FusedBackend):
    """Kernels with eager's own products between them, reported as carried, or in a subclass as lowered."""

    name, device_type = "carrying", "cpu"
    product = Verdict(Why.CARRIED, "eager's product, between kernels")

    @classmethod
    def probe(cls) -> Device:
        return Device("cpu", "test")

    def supports(self, op: OpView) -> Verdict:
        return self.product if op.op == "mm" else super().supports(op)


class Boasting(Carrying):
    """The same, claimed as lowered."""

    product = YES


class Honest(Carrying):
    """Really lowers products: it computes that of the transposes and transposes the result."""

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        (mm,) = (op for op in region.ops if op.op == "mm")
        fragment = super().compile(region, ctx)
        assert isinstance(fragment, Fragment)
        rest = [i for i in fragment.instructions if mm.out.id not in i.outs]
        x, y, z, turned = (ctx.value(None).id for _ in range(4))
        a, b = ctx.aten(mm).args
        ours = [
            Call("aten::t.default", (a,), (x,)),
            Call("aten::t.default", (b,), (y,)),
            Call("aten::mm.default", (Ref(y), Ref(x)), (z,)),
            Call("aten::t.default", (Ref(z),), (turned,)),
            Call("aten::clone.default", (Ref(turned),), (mm.out.id,), (("memory_format", torch.contiguous_format),)),
        ]
        return Fragment((*ours, *rest), fragment.notes, fragment.kernels)


def f(x: Tensor, w: Tensor) -> Tensor:
    return (torch.mm(x, w) + 1) * 2


X, W = torch.randn(4, 8), torch.randn(8, 8)


def run(backend: FusedBackend, fn: Callable[..., Any] = f, fallback: str = "allow", *args: Tensor) -> GraphReport:
    options = Options.parse({"cache": False, "strict": True, "fallback": fallback})

    def dynamo(gm: Any, inputs: Any) -> Any:
        return capture.capture(gm, inputs, lambda *a: pipeline.compile_graph(backend, options, *a))

    given = args or (X, W)
    with report.recording() as reports, torch.no_grad():
        torch.testing.assert_close(torch.compile(fn, backend=dynamo)(*given), fn(*given))
    return reports[-1]


def counts(r: GraphReport) -> tuple[int, int, int]:
    return r.count("lowered"), r.count("carried"), r.count("eager")


@pytest.mark.parametrize("cls", [Carrying, Boasting])
def test_an_op_that_eagers_own_call_computes_is_carried_whatever_was_claimed(cls: type[Carrying]) -> None:
    r = run(cls())
    assert counts(r) == (2, 1, 0)
    (mm,) = (op for op in r.ops if op.where == "carried")
    assert mm.op == "mm" and mm.verdict.why is Why.CARRIED and bool(mm.verdict)


def test_an_op_that_was_to_be_carried_and_is_lowered_counts_as_lowered() -> None:
    r = run(Honest())
    assert counts(r) == (3, 0, 0) and {str(op.verdict) for op in r.ops} == {"ok"}
    run(Honest(), f, "error")


@pytest.mark.parametrize("cls", [Carrying, Boasting])
def test_a_carried_op_is_an_error_where_fallbacks_are(cls: type[Carrying]) -> None:
    with pytest.raises(Exception, match=r"mm float32\[4, 8\] at test_carried.py:\d+: carried: eager's") as e:
        run(cls(), f, "error")
    assert FallbackError.__name__ in f"{type(e.value).__name__}: {e.value}"


def test_a_carried_op_is_in_the_one_line_of_what_runs_in_eager_and_has_none_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fusewright"):
        run(Carrying(), f, "warn")
        assert not [r for r in caplog.records if r.name == "fusewright"]
        run(Carrying(), lambda x, w: torch.special.i0(f(x, w)), "warn")
    (line,) = (r.getMessage() for r in caplog.records if r.name == "fusewright")
    assert "1 of 4 ops of this infer graph run in eager, and 1 by eager's own calls inside of regions (2 reasons)" in line


def test_what_is_prepared_is_not_carried() -> None:
    """Eager computes the product, but from weights only, so no call waits for it."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Parameter(W.clone()), torch.nn.Parameter(W.clone())

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.mm(self.a, self.b) + 1

    r = run(Carrying(), Net(), "allow", torch.randn(8, 8))
    assert r.count("carried") == 0 and r.count("lowered") == 3


def test_explain_has_three_counts() -> None:
    e = explain.Explained("net", "carrying", "fp32", [run(Carrying())], {}, 0, 0.0)
    document = explain.as_document(e)
    assert document["graphs"][0]["ops"] == {"lowered": 2, "carried": 1, "eager": 0, "view": 0}
    assert [(g["op"], g["why"]) for g in document["carried"]] == [("mm", "eager's product, between kernels")]
    assert document["coverage"]["ops"] == pytest.approx(2 / 3) and document["coverage"]["carried_ops"] == pytest.approx(1 / 3)
