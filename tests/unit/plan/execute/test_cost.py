"""What the comparisons with eager cost, and when they end: simulated programs with a fake clock, whose times vary."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from fusewright.interface import Phase
from fusewright.plan.execute import broken, compared
from fusewright.plan.execute.broken import BrokenCalls
from fusewright.plan.execute.compared import Comparison, Verdict
from fusewright.plan.execute.shadow import TooLong
from fusewright.plan.execute.turns import SPARE

SHARE = 0.05
"""What both comparisons together may cost of the first hundred calls."""


def traced() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3)
    graph.output((graph.call_function(torch.ops.aten.sin.default, (x,)),))
    return GraphModule(torch.nn.Module(), graph)


class Program:
    """A function of `graphs` alike graphs, whose plans take `seconds` together and eager `ratio` times as long. In training
    backward takes as long. With a `hook`, calls are watched and take `around` more while they are compiled. Times vary by
    `noise`, and a few are twice as long. `shadows` and `rounds` are what the comparisons cost so far in seconds."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, ratio: float, *, seconds: float = 1e-3, graphs: int = 3, around: float = 0.0,
        noise: float = 0.0, training: bool = False, hook: bool = True, cold: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        self.now = self.shadows = self.rounds = self.typical = 0.0
        self.ratio, self.one, self.around, self.noise, self.training = ratio, seconds / graphs, around, noise, training
        self.cold, self.parts, self.rng = cold, int(100 + 10 * ratio), random.Random(seed)  # no part can be stopped
        monkeypatch.setattr(compared, "turn", compared.Turn())
        monkeypatch.setattr(compared, "clock", lambda: self.now)
        monkeypatch.setattr(broken, "clock", lambda: self.now)
        monkeypatch.setattr(broken, "has_room", lambda device: True)
        monkeypatch.setattr(broken.compat, "around_compilations", lambda start, end: True)
        monkeypatch.setattr(broken.compat, "arguments_of_call", list)
        monkeypatch.setattr(broken.compat, "skips", lambda code: [partial(setattr, self, "skipped", s) for s in (True, False)])
        self.skipped = False
        self.comparisons = list[Comparison]()
        self.graphs = [self.graph() for _ in range(graphs)]
        self.calls = BrokenCalls("backend", lambda: True) if hook else None
        if self.calls is not None:
            self.calls.codes.add(traced.__code__)

    def graph(self) -> list[Callable[[list[Any]], Verdict]]:
        """Forward and backward, or all of a graph for inference."""
        c = Comparison("backend", "scope", False, lambda: True)
        self.comparisons.append(c)
        phases: list[Phase] = ["forward", "backward"] if self.training else ["infer"]
        return [self.compiled(c, phase) for phase in phases]

    def varied(self) -> float:
        return self.one * (1 + self.noise * self.rng.random() + (self.rng.random() < self.noise / 5))

    def compiled(self, c: Comparison, phase: Phase) -> Callable[[list[Any]], Verdict]:
        half = c.half(traced(), phase)
        assert half is not None
        world, done = self, [0.0]

        class Fake:
            def build(fake, args: list[Any]) -> None:
                pass

            def seconds(fake, args: list[Any], limit: float, wait: Callable[[], None], before: float) -> float:
                """Run part by part, and look at the clock after each of them. The first time, each takes longer."""
                began, warm, part = world.now, 0.0, world.ratio * world.varied() / world.parts
                for k in range(1, world.parts + 1):
                    took = part + (world.cold * world.one / world.parts if k / world.parts > done[0] else 0.0)
                    world.now += took
                    world.shadows += took
                    done[0] = max(done[0], k / world.parts)
                    warm = world.now - began if k / world.parts <= before else warm
                    if world.now - began > limit and k < world.parts:
                        raise TooLong(k / world.parts, warm)
                return world.now - began

            def run(fake, args: list[Any]) -> Verdict:
                world.now += world.ratio * world.varied()
                return "eager"

        half.eager = Fake()  # type: ignore[assignment]

        def plan(args: list[Any]) -> Verdict:
            world.now += world.varied()
            return "plan"

        return c.add(half, plan)

    def call(self) -> Verdict:
        """A call, and in training its backward. Return who ran it."""
        halves = [self.graphs, [[backward] for _, backward in self.graphs]] if self.training else [self.graphs]
        end = self.calls() if self.calls is not None else lambda: None
        who: Verdict = "eager" if self.skipped else "plan"
        began, shadows = self.now, self.shadows
        for side, half in enumerate(halves):
            for run, *_ in half:
                if who == "eager":
                    self.now += self.ratio * self.varied()
                else:
                    run([1])
            if side == 0:
                self.now += 0.0 if who == "eager" else self.around
                end()
        took = self.now - began - (self.shadows - shadows)
        usual = len(halves) * len(self.graphs) * self.one * (1 + self.noise / 2 + self.noise / 5) + self.around
        self.typical += usual
        self.rounds += took - usual if who == "eager" else 0.0
        return who

    def many(self, count: int) -> list[Verdict]:
        with torch.set_grad_enabled(self.training):
            return [self.call() for _ in range(count)]


RATIOS = [0.5, 0.9, 1.0, 1.1, 1.3, 1.45, 1.6, 2.5, 5.0, 10.0, 50.0]
"""Eager's times of the graphs, in terms of the plans'."""

AROUND = [0.0, 0.3e-3, 3e-3]
"""What breaks cost in a call whose graphs take 1 ms."""


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_both_comparisons_cost_five_calls_in_the_first_hundred_at_most(
    monkeypatch: pytest.MonkeyPatch, ratio: float, around: float, training: bool, noise: float
) -> None:
    """However much slower eager is: one call of it cannot be stopped."""
    p = Program(monkeypatch, ratio, around=around, training=training, noise=noise)
    p.many(100)
    assert p.shadows + p.rounds <= SHARE * p.typical
    p.many(300)
    assert p.shadows + p.rounds <= SHARE * p.typical


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("seconds", [50e-6, 2.0])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_it_does_so_for_calls_of_any_length_and_for_a_graph_alone(
    monkeypatch: pytest.MonkeyPatch, ratio: float, seconds: float, training: bool
) -> None:
    for hook in (False, True):
        p = Program(monkeypatch, ratio, seconds=seconds, graphs=1 + hook, training=training, hook=hook, noise=0.1)
        p.many(100)
        assert p.shadows + p.rounds <= SHARE * p.typical + (SPARE if hook else 0.0)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_is_slower_is_given_back_within_the_first_few_hundred_calls(
    monkeypatch: pytest.MonkeyPatch, around: float, training: bool, noise: float
) -> None:
    whole = 1e-3 * (2 if training else 1)
    p = Program(monkeypatch, 0.92 * (whole + around) / whole, around=around, training=training, noise=noise)
    p.many(330)
    began = p.now
    p.many(50)
    eager = (p.now - began) / 50 < 0.97 * (whole + around) * (1 + 0.7 * noise)
    assert eager, "whole calls, or each of the graphs"


@pytest.mark.parametrize("ratio", [1.6, 5.0, 50.0])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_the_figures_of_graphs_save_the_rounds(monkeypatch: pytest.MonkeyPatch, ratio: float, training: bool) -> None:
    p = Program(monkeypatch, ratio, around=0.1e-3, training=training)
    assert p.calls is not None and "eager" not in p.many(200)
    (trial,) = p.calls._trials.values()
    assert (trial.verdict, trial.rounds) == ("plan", 0)


def test_what_rounds_cost_is_the_budget_of_the_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Program(monkeypatch, 1.1, around=0.1e-3)
    p.many(200)
    assert p.calls is not None
    (whole,) = p.calls._trials.values()
    assert sum(whole.costs) > 0 and all(c._trials[()].around == sum(whole.costs) for c in p.comparisons)
    pair = compared.Pair(eager=1.0, plan=1.0, cost=1.0)
    for around, due in (0.0, 3 + compared.SHARE), (4.0, 6 * compared.SHARE):
        t = compared.Trial(around=around, calls=3)
        t.times["infer"].add(1.0)
        t.add(pair)
        assert t.next == due


def test_a_round_waits_for_long_if_nobody_knows_what_eager_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """If graphs have effects, or sizes that are not compared."""
    p = Program(monkeypatch, 40.0)
    unknown = compared.Trial(verdict="plan")

    def counted(args: list[Any]) -> Verdict:
        if compared.tally is not None:
            compared.tally.add(unknown)
        p.now += p.varied()
        return "plan"

    p.graphs = [[counted] for _ in p.graphs]
    p.many(900)
    assert p.rounds == 0
    p.many(1000)
    assert 0 < p.rounds <= SHARE * p.typical


@pytest.mark.parametrize("cold", [3.0, 30.0])
def test_eager_that_is_cold_at_first_loses_nothing(monkeypatch: pytest.MonkeyPatch, cold: float) -> None:
    """Kernels load and are chosen in its first run, which takes the time of many calls: it is stopped, and goes on later."""
    p = Program(monkeypatch, 0.8, cold=cold, hook=False, graphs=1)
    p.many(100)
    assert p.shadows <= SHARE * p.typical
    p.many(1400)
    assert p.shadows <= SHARE * p.typical
    began = p.now
    p.many(10)
    assert p.now - began == pytest.approx(10 * 0.8e-3), "eager"
