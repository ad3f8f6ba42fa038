"""A graph's first calls are timed against eager, with a fake clock."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright import pipeline, registry
from fusewright.config import Options
from fusewright.interface import Phase
from fusewright.plan.execute import compared
from fusewright.plan.execute.compared import BUDGET, LEAD, MOST_TURNS, SETTLED, Comparison


class World:
    """A fake clock, and graphs that take the given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.ran: Counter[str] = Counter()
        self.spent = 0.0
        monkeypatch.setattr(compared, "clock", lambda: self.now)

    def graph(
        self, c: Comparison, plan: list[float], eager: list[float], phase: Phase = "infer", sizes: Any = lambda args: ()
    ) -> Any:
        """Make a graph whose compiled and eager calls take these times in turn."""

        def taking(name: str, seconds: list[float]) -> Any:
            def run(args: list[Any]) -> str:
                took = seconds[self.ran[name, phase] % len(seconds)]  # type: ignore[index]
                self.ran[name, phase] += 1  # type: ignore[index]
                self.now += took
                self.spent += took
                args.clear()
                return name

            return run

        return c.add(phase, "the graph", taking("plan", plan), taking("eager", eager), sizes)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEWRIGHT_STATE_DIR", str(tmp_path / "state"))
    return World(monkeypatch)


def comparison(persist: bool = False, may: bool = True) -> Comparison:
    return Comparison("x", "a scope", persist, lambda: may)


def test_what_is_slower_is_given_back_and_said_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    run = world.graph(comparison(), plan=[1.2e-3], eager=[1e-3])
    with caplog.at_level(logging.WARNING):
        ways = [run([1]) for _ in range(40)]
    assert ways[:SETTLED] == ["plan"] * SETTLED
    assert set(ways[SETTLED + 2 * LEAD + 2 :]) == {"eager"}
    assert caplog.text.count("1.200 ms compiled and 1.000 ms in eager") == 1 == len(caplog.records)


@pytest.mark.parametrize("plan", [1e-3, 1.02e-3, 0.2e-3])
def test_what_is_not_slower_stays_without_a_word(world: World, plan: float, caplog: pytest.LogCaptureFixture) -> None:
    run = world.graph(comparison(), plan=[plan], eager=[1e-3])
    ways = [run([1]) for _ in range(100)]
    assert set(ways[SETTLED + 2 * MOST_TURNS :]) == {"plan"}
    assert not caplog.records


@pytest.mark.parametrize("eager", [1.0, 1.5, 2.0, 3.0, 6.0])
def test_it_costs_five_calls_in_a_hundred_and_a_warm_up(world: World, eager: float) -> None:
    run = world.graph(comparison(), plan=[1.0], eager=[eager])
    for _ in range(100):
        run([1])
    beyond = world.spent - 100
    warm_up = eager - 1
    assert beyond <= BUDGET + warm_up


def test_a_disturbed_comparison_decides_nothing_and_is_not_remembered(world: World) -> None:
    turns: list[Hashable] = []
    for _ in range(2):
        c = comparison(persist=True)
        run = world.graph(c, plan=[1.0], eager=[0.5, 1.5], phase="infer")
        ways = [run([1]) for _ in range(60)]
        assert ways[-1] == "plan"
        turns.append(ways.count("eager"))
        world.ran.clear()
    assert turns[0] == turns[1] == MOST_TURNS + 1, "the second process looks again"


def test_a_verdict_is_remembered_for_its_scope_graph_and_sizes(world: World) -> None:
    run = world.graph(comparison(persist=True), plan=[1.2], eager=[1.0])
    for _ in range(20):
        run([1])
    assert world.graph(comparison(persist=True), [1.2], [1.0])([1]) == "eager"
    assert world.graph(Comparison("x", "another", True, lambda: True), [1.2], [1.0])([1]) == "plan"
    assert world.graph(comparison(persist=True), [1.2], [1.0], sizes=lambda args: 7)([1]) == "plan"
    assert world.graph(comparison(persist=False), [1.2], [1.0])([1]) == "plan"


def test_each_class_of_sizes_has_its_own_verdict(world: World) -> None:
    c = comparison()

    def timed(name: str) -> Any:
        def run(args: list[int]) -> str:
            world.now += args[0] if name == "eager" else 10
            return name

        return run

    run = c.add("infer", "g", timed("plan"), timed("eager"), lambda args: args[0].bit_length())
    for _ in range(20):
        small, large = run([5]), run([30])
    assert (small, large) == ("eager", "plan")


def test_backward_counts_with_its_forward_and_goes_its_way(world: World) -> None:
    c = comparison()
    forward = world.graph(c, [1.0], [1.0], "forward")
    backward = world.graph(c, [1.5], [1.0], "backward")
    pairs = [(forward([1]), backward([1])) for _ in range(20)]
    assert all(f == b for f, b in pairs) and pairs[-1] == ("eager", "eager")


def test_a_forward_that_nobody_differentiates_is_not_compared_with_one_that_is(world: World) -> None:
    c = comparison()
    forward, backward = world.graph(c, [1.0], [1.0], "forward"), world.graph(c, [5.0], [5.0], "backward")
    for _ in range(40):
        if forward([1]) == "plan":
            backward([1])
    assert forward([1]) == "plan" or c._trials[()].verdict is None
    assert c._trials[()].won == c._trials[()].lost == 0


def test_two_backwards_of_one_forward_count_for_nothing(world: World) -> None:
    c = comparison()
    forward, backward = world.graph(c, [1.0], [1.0], "forward"), world.graph(c, [5.0], [1.0], "backward")
    for _ in range(40):
        forward([1])
        backward([1])
        backward([1])
    assert c._trials[()].verdict is None and not c._trials[()].best


def test_nothing_is_measured_where_it_must_not_be(world: World) -> None:
    run = world.graph(comparison(may=False), plan=[5.0], eager=[1.0])
    assert {run([1]) for _ in range(40)} == {"plan"}


def test_a_call_that_fails_counts_for_nothing(world: World) -> None:
    c = comparison()

    def fails(args: list[Any]) -> Any:
        raise ValueError("eager's own error")

    run = c.add("infer", "g", lambda args: "plan", fails, lambda args: ())
    for k in range(12):
        if k < SETTLED or (k - SETTLED) % 2:
            assert run([1]) == "plan"
        else:
            with pytest.raises(ValueError, match="own error"):
                run([1])
    assert not c._open and not c._running


def test_calls_within_calls_are_not_measured(world: World) -> None:
    c = comparison()
    inner: list[Any] = []

    def plan(args: list[Any]) -> str:
        world.now += 1
        if args and args.pop():
            inner[0]([False])
        return "plan"

    inner.append(c.add("infer", "g", plan, plan, lambda args: ()))
    for _ in range(30):
        inner[0]([True])
    assert c._trials[()].won + c._trials[()].lost <= MOST_TURNS
    assert c._running == 0


@pytest.mark.parametrize(
    "options", [{}, {"never_slower": True, "strict": True}, {"never_slower": True, "check": ("contract",)}]
)
def test_it_is_off_by_default_and_where_all_must_run_as_compiled(options: dict[str, Any]) -> None:
    parsed = Options(**options)
    assert pipeline.comparison(registry.create("fusewright_null", parsed), parsed) is None


def test_it_is_off_in_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = Options(never_slower=True)
    found = pipeline.comparison(registry.create("fusewright_null", parsed), parsed)
    assert found is not None and found._may()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert not found._may()


@pytest.mark.parametrize("eager_wins", [False, True])
def test_random_numbers_writes_and_gradients_are_those_of_one_call_each(
    world: World, monkeypatch: pytest.MonkeyPatch, eager_wins: bool
) -> None:
    ways: list[str] = []

    def clock() -> float:
        world.now += 1
        return world.now

    monkeypatch.setattr(compared, "clock", clock)
    monkeypatch.setattr(compared, "SLOWER", 0.0 if eager_wins else 1e9)
    run_ = Comparison._run

    def noting(self: Comparison, phase: Phase, *rest: Any) -> Any:
        ways.append(f"{phase} {self._latest}")
        return run_(self, phase, *rest)

    monkeypatch.setattr(Comparison, "_run", noting)

    def step(x: torch.Tensor, w: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        held.add_(x.detach().mean())
        return torch.nn.functional.dropout(torch.nn.functional.gelu(x @ w), 0.4).sum(0)

    torch.compiler.reset()
    fast = torch.compile(
        step, backend="fusewright_interp", options={"never_slower": True, "fallback": "allow"}, dynamic=True
    )
    held, same = torch.zeros(3), torch.zeros(3)
    state = torch.get_rng_state()
    try:
        for k in range(14):
            x, w = torch.randn(4 + k % 3, 8), torch.randn(8, 5, requires_grad=True)
            again = w.detach().clone().requires_grad_()
            torch.manual_seed(k)
            found = fast(x, w, held)
            drawn = torch.get_rng_state()
            torch.manual_seed(k)
            wanted = step(x, again, same)
            assert torch.equal(drawn, torch.get_rng_state())
            found.square().sum().backward()
            wanted.square().sum().backward()
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(w.grad, again.grad)
            torch.testing.assert_close(held, same)
    finally:
        torch.set_rng_state(state)
        torch.compiler.reset()
    assert {"forward plan", "backward plan", "forward eager", "backward eager"} <= set(ways)
    assert ways[-1] == f"backward {'eager' if eager_wins else 'plan'}"
