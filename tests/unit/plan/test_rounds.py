"""The planning loop: what a round finds impossible is a fact for all later rounds, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph

from fusewright import pipeline
from fusewright.capture import capture
from fusewright.config import Options
from fusewright.graph.parser import parse
from fusewright.interface import CompileContext, Compiled, Decline, Device, KernelCode, Region, Verdict, Why
from fusewright.partition.facts import TRIALS, Facts
from fusewright.plan.verify import PlanError
from fusewright.report import recording
from fusewright.stages import planning, rounds
from fusewright.stages.compilation import Compilation
from fusewright.toolkit.backend.fused import FusedBackend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
OPTIONS = Options.parse({"cache": False, "fallback": "allow"})
NO = Verdict(Why.DECLINED, "on purpose")


@torch.library.custom_op("fusewright_tests::untrue", mutates_args=())
def untrue(x: Tensor) -> Tensor:
    return x.double()


@untrue.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fusewright_tests::half_untrue", mutates_args=())
def half_untrue(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x.double()


@half_untrue.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


class Difficult(FusedBackend):
    """Declines one op of `declines` per round, and fails to build kernels that contain an op of `unbuilt`. `asked_again` are
    ops that it received again after declining them."""

    name, device_type = "difficult", "cpu"

    def __init__(self, declines: tuple[str, ...] = (), unbuilt: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.declines, self.unbuilt = list(declines), unbuilt
        self.declined: list[str] = []
        self.asked_again: list[str] = []

    @classmethod
    def probe(cls) -> Device:
        return Device("cpu", "test")

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        self.asked_again += [op.op for op in region.ops if op.op in self.declined]
        for op in region.ops:
            if self.declines and op.op == self.declines[0]:
                self.declined.append(self.declines.pop(0))
                raise Decline("on purpose", ops=(op.id,))
        return super().compile(region, ctx)

    def load(self, kernels: Mapping[str, Any]) -> Mapping[str, KernelCode]:
        for k in kernels.values():
            if any(name in k.name for name in self.unbuilt):
                raise RuntimeError(f"no code for {k.name}")
        return super().load(kernels)


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Facts]]:
    """Collect the facts of each completed compilation."""
    found: list[Facts] = []
    account = rounds.account

    def noting(c: Any) -> None:
        found.append(c.facts)
        account(c)

    monkeypatch.setattr(rounds, "account", noting)
    yield found


def compiled(fn: Callable[..., Any], backend: FusedBackend, options: Options = OPTIONS) -> Any:
    def dynamo(gm: Any, inputs: Any) -> Any:
        return capture.capture(gm, inputs, lambda *a: pipeline.compile_graph(backend, options, *a))

    return torch.compile(fn, backend=dynamo)


def all_at_once(x: Tensor) -> Tensor:
    return untrue(x.sin() + 1).exp() * x.cos() + (x * 2).sigmoid().abs()


@pytest.mark.faulty
def test_declines_kernels_that_cannot_be_built_and_untrue_metadata_at_once(facts: list[Facts]) -> None:
    backend = Difficult(("sin", "cos", "sigmoid"), unbuilt=("mul",))
    x = torch.randn(3, 4)
    run = compiled(all_at_once, backend)
    for _ in range(2):
        torch.testing.assert_close(run(x), all_at_once(x))
    assert facts[0] is facts[-1] and len(facts) == 2, "compiled again with all that was known"
    refused = {n.split("_")[0] for n in facts[-1].refused}
    assert {"sin", "cos", "sigmoid", "mul"} <= refused and facts[-1].mended.total() == 1
    assert not backend.declines and not backend.asked_again


@pytest.mark.parametrize("item", [0, 1])
def test_untrue_metadata_matters_only_where_it_is_read(facts: list[Facts], item: int) -> None:
    """An attention's unread seed may be on the host, whatever was traced."""

    def program(x: Tensor) -> Tensor:
        return half_untrue(x.sin())[item].exp() * 2

    x = torch.randn(3, 4)
    with recording() as graphs:
        torch.testing.assert_close(compiled(program, Difficult())(x), program(x))
    assert [g.superseded for g in graphs] == [True] * item + [False]


def test_what_a_graph_is_given_is_found_untrue_at_once(facts: list[Facts]) -> None:
    """Eager's statistics of a bf16 batch norm with fp32 weights are fp32, traced as bf16 and read by backward."""

    def norms(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = F.batch_norm(x.sin(), None, None, w, torch.zeros(4), training=True)
        return x.float().square().sum()

    x = torch.randn(2, 4, 8, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    weights = [torch.ones(4, requires_grad=True) for _ in range(3)]
    run = compiled(norms, Difficult())
    got, want = (torch.autograd.grad(fn(x, *weights), weights) for fn in (run, norms))
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    of_the_backward = [f for f in facts if f is facts[-1]]
    assert len(of_the_backward) == 2, "planned once more, with all that was known"
    assert facts[-1].mended.total() == 6, "a mean and a deviation a norm"


@pytest.mark.faulty
def test_a_backend_that_declines_in_every_round_is_given_up(facts: list[Facts], monkeypatch: pytest.MonkeyPatch) -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(12):
            x = x.sin() + x
        return x

    monkeypatch.setattr(rounds, "MAX_ROUNDS", 3)
    backend, x = Difficult(("sin",) * 12), torch.randn(5)
    torch.testing.assert_close(compiled(chain, backend)(x), chain(x))
    assert backend.declines and any("still gives ops back" in str(v) for v in facts[-1].refused.values())
    torch.compiler.reset()
    strict = Options.parse({"cache": False, "fallback": "allow", "strict": True})
    with pytest.raises(Exception, match="BackendCrashError: backend 'difficult' still gives ops back after 3 rounds"):
        compiled(chain, Difficult(("sin",) * 12), strict)(x)


@pytest.mark.faulty
def test_a_graph_that_has_no_valid_plan_at_all_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(c: Compilation) -> None:
        raise PlanError("by hand")

    monkeypatch.setattr(planning, "_make_plan", refused)
    x = torch.randn(5)
    with recording() as reports:
        torch.testing.assert_close(compiled(lambda x: x.sin().cos(), Difficult())(x), x.sin().cos())
    assert "by hand" in reports[-1].bugs and reports[-1].count("lowered") == 0


def test_a_decline_of_an_op_that_was_not_asked_for_gives_the_region_back(facts: list[Facts]) -> None:
    class Elsewhere(Difficult):
        def compile(self, region: Region, ctx: CompileContext) -> Compiled:
            raise Decline("on purpose", ops=(10**6,))

    x = torch.randn(5)
    torch.testing.assert_close(compiled(lambda x: x.sin().cos(), Elsewhere())(x), x.sin().cos())
    assert {n.split("_")[0] for n in facts[-1].refused} == {"sin", "cos"}


GRAPH = "%0: f32[4] = input('x')\n%1: f32[4] = sin(%0)\n%2: f32[4] = exp(%1)\n%3: f32[4] = neg(%0)\nreturn [%2, %3]\n"


@pytest.fixture
def graph() -> Graph:
    return parse(GRAPH)


def test_refusing_what_was_refused_is_an_error_of_the_host(graph: Graph) -> None:
    facts = Facts()
    facts.refuse({"sin": NO})
    with pytest.raises(AssertionError, match="had been refused before"):
        facts.refuse({"sin": NO})


def test_suspects_are_acquitted_when_what_they_are_made_of_is_mended(graph: Graph) -> None:
    sin, exp, neg = (n for n in graph.nodes if n.op == "call_function")
    facts = Facts()
    facts.suspect({exp.name: Verdict(Why.CRASHED, "region0")})
    facts.suspect({neg.name: Verdict(Why.CRASHED, "region1")})
    assert facts.mend([sin]) and list(facts.suspects()) == [neg.name]
    assert facts.denied(graph).keys() == {neg.name}


def test_facts_only_grow_and_end_in_eager(graph: Graph) -> None:
    """A region is suspected again after each acquittal, and a value never matches its corrected metadata."""
    sin, *_ = (n for n in graph.nodes if n.op == "call_function")
    facts, sizes = Facts(), [0]
    while sin.name not in facts.refused:
        facts.suspect({sin.name: NO})
        sizes.append(len(facts))
        if sin.name not in facts.refused:
            facts.mend([sin])
            sizes.append(len(facts))
    assert sizes == sorted(set(sizes)) and len(sizes) <= 2 * TRIALS + 2
    assert not facts.mend([sin]) and sin.name in facts.distrusted
