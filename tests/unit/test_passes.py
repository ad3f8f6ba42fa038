"""Every pass of the list is verified: an error names a pass whose result is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import singledispatch
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

from fusewright.forms.passes import PASSES
from fusewright.forms.spec import Pass, Spec
from fusewright.interface import Fragment, Region, RuleLog, TensorSpec
from fusewright.partition.partition import Partition
from fusewright.plan.build import Plan
from fusewright.plan.ir import Call, Ref
from fusewright.plan.memory import Placement
from fusewright.plan.replay.inference import Parts
from fusewright.plan.replay.pieces import Piece
from fusewright.toolkit.ir import Builder, Kernel, Scalar
from fusewright.toolkit.ir.symbols import Step
from fusewright.toolkit.region.graph import RegionGraph
from fusewright.toolkit.region.pattern import p as pattern
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.transform.split import Split
from fusewright.toolkit.transform.split_columns import Steps
from tests.unit.ir.test_moments import variance
from tests.unit.ir.test_split_columns import norm, total
from tests.unit.region.drawn import branches, claim

ALL = [p for _, _, passes in PASSES for p in passes]


@singledispatch
def broken(result: Any) -> Any:
    """Corrupt the result of a pass."""
    raise NotImplementedError(type(result))


@broken.register
def _(graph: Graph) -> Graph:
    (out,) = graph.find_nodes(op="output")
    with graph.inserting_before(out):
        graph.create_node("call_method", "sin", (next(iter(graph.nodes)),))
    return graph


@broken.register
def _(found: tuple) -> Any:  # type: ignore[type-arg]
    return (broken(found[0]), *found[1:])


@broken.register
def _(region: Region) -> Region:
    return replace(region, ops=(*region.ops, region.ops[0]))


@broken.register
def _(found: Partition) -> Partition:
    return replace(found, regions=[broken(r) for r in found.regions])


@broken.register
def _(graph: RegionGraph) -> None:
    graph._producer.clear()


@broken.register
def _(fragment: Fragment) -> Fragment:
    return replace(fragment, instructions=(*fragment.instructions, fragment.instructions[0]))


@broken.register
def _(kernel: Kernel) -> Kernel:
    return replace(kernel, scalars=(*kernel.scalars, Scalar("half", "f16")))


@broken.register
def _(split: Split) -> Split:
    return replace(split, second=broken(split.second))


@broken.register
def _(step: Step) -> Step:
    return replace(step, kernel=broken(step.kernel))


@broken.register
def _(steps: Steps) -> Steps:
    return replace(steps, steps=(*steps.steps[:-1], broken(steps.steps[-1])))


@broken.register
def _(plan: Plan) -> Plan:
    return replace(plan, outputs=(*plan.outputs, Ref(99999)))


@broken.register
def _(parts: Parts) -> Parts:
    return replace(parts, head=broken(parts.head))


@broken.register
def _(piece: Piece) -> Piece:
    return replace(piece, plan=broken(piece.plan))


@broken.register
def _(placement: Placement) -> Placement:
    return replace(placement, arena_bytes=-1)


def breaking(p: Pass[Any, Any]) -> Callable[..., Any]:
    """Wrap a pass so that its result breaks its spec."""
    run = p.run

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        if result is None or isinstance(result, bool | int | list):  # it modifies its first argument
            broken(args[0])
            return result
        return broken(result)

    return wrong


class Net(nn.Module):
    """A product with a bias, a composite to expand, temporaries, a factor of one, and a sum computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        a, b = (y + x).exp() * 1, (y + x).sin()
        return (a @ b.t()) @ (b @ a.t()) + nn.functional.softmax(x @ x.t(), -1)


def compiled(**options: object) -> None:
    torch.compiler.reset()
    options = {"cache": False, "strict": True, **options}
    with torch.no_grad():
        torch.compile(Net().eval(), backend="x86_onednn", options=options)(torch.randn(8, 16))


def recorded() -> Builder:
    b = Builder("sum", p=[8], r=[32])
    i, j = b.axes
    b.store(b.output("y", "f32"), i, b.reduce("sum", b.load(b.input("x", "f32"), i * 32 + j)))
    return b


def counted() -> Kernel:
    b = Builder("counted", p=[2], r=[1 << 16])
    i, j = b.axes
    b.store(b.output("y", "i64"), i * (1 << 16) + j, b.scan("sum", b.load(b.input("x", "i64"), i * (1 << 16) + j)))
    return b.build()


def divided() -> Plan:
    specs = {1: TensorSpec((4,), (1,), torch.float32)}
    return Plan((1,), (Ref(2),), [Call("aten::sin.default", (Ref(1),), (2,))], [], (), (), specs)


def summed() -> Kernel:
    return recorded().build()


RELU = [Row("test.relu", pattern("relu", "x"), lambda match, context: None, "")]

EXAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "claims": lambda: (branches()[1], RuleLog(), claim),
    "rewrite": lambda: (branches()[1], RELU, None, RuleLog()),
    "schedule": lambda: (recorded(),),
    "simplify_axes": lambda: (summed(),),
    "in_order": lambda: (summed(),),
    "close": lambda: (summed(), {}),
    "with_buffers": lambda: (summed(), (0, 1)),
    "without_moments": lambda: (variance(),),
    "split_rows": lambda: (total(1 << 17, 4),),
    "split_columns": lambda: (norm(),),
    "split_scan": lambda: (counted(),),
    "division for replay": lambda: (divided(), {}, "cuda"),
    "pieces of a recording": lambda: (divided(), {}),
}
"""Arguments for passes that verify themselves; the others run when a model is compiled."""


@pytest.mark.hardware("x86_onednn")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("p", ALL, ids=lambda p: p.name)
def test_a_pass_that_breaks_what_it_gives_is_named(p: Pass[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        if p.name in EXAMPLES:
            p(*EXAMPLES[p.name]())
        else:
            compiled()

    run()
    monkeypatch.setattr(p, "run", breaking(p))
    with pytest.raises(Exception, match=rf"the {p.gives.form}\b.* is not valid after {p.name}:"):
        run()


@pytest.mark.parametrize(("takes", "gives", "passes"), PASSES)
def test_the_list_says_what_a_pass_takes_and_gives(takes: str, gives: str, passes: tuple[Pass[Any, Any], ...]) -> None:
    assert {(p.takes, p.gives.form) for p in passes} == {(takes, gives)}


@pytest.mark.hardware("x86_onednn")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("verify", [True, False])
def test_an_option_says_whether_graphs_fragments_and_plans_are_verified(
    verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: set[str] = set()
    monkeypatch.setattr(Spec, "check", lambda spec, form, after: verified.add(spec.form))
    compiled(verify=verify)
    assert "memory of a plan" in verified
    assert bool(verified & {"graph", "fragment", "plan"}) is verify
