"""A graph's first calls are timed beside eager, with a fake clock."""

from __future__ import annotations

import gc
import logging
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.utils.flop_counter import FlopCounterMode

from fusewright import pipeline, registry
from fusewright.config import Options
from fusewright.interface import Phase
from fusewright.plan.execute import compared
from fusewright.plan.execute.compared import (
    FEWEST,
    LOSSES,
    MANY,
    MOST_CLASSES,
    SAMPLED,
    SHARE,
    STOPPED,
    TIMED,
    WARM_UP,
    Comparison,
)
from fusewright.plan.execute.shadow import Eager, TooLong, Unfit

aten = torch.ops.aten


def traced(op: Any = aten.sin.default) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3)
    graph.output((graph.call_function(op, (x,)),))
    return GraphModule(torch.nn.Module(), graph)


class World:
    """A fake clock, and graphs that take the given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.ran: Counter[tuple[str, Phase]] = Counter()
        self.calls: list[int] = []
        monkeypatch.setattr(compared, "clock", lambda: self.now)
        monkeypatch.setattr(compared, "turn", compared.Turn())

    def graph(
        self, c: Comparison, plan: list[float], eager: list[float], phase: Phase = "infer", sizes: Any = None,
        gm: GraphModule | None = None, changes: int = 0,
    ) -> Callable[[list[Any]], str]:  # fmt: skip
        """Make a graph whose compiled and eager calls take these times in turn. A call returns whose result it is."""
        half = c.half(gm or traced(), phase)
        if half is None:
            return lambda args: "plan"

        def next_of(name: str, seconds: list[float]) -> float:
            self.ran[name, phase] += 1
            return seconds[(self.ran[name, phase] - 1) % len(seconds)]

        class Fake:
            def build(fake, args: list[Any]) -> None:
                pass

            def seconds(fake, args: list[Any], limit: float, wait: Callable[[], None], before: float) -> float:
                self.calls.append(self.ran["plan", phase] + 1)
                took = next_of("eager", eager)
                self.now += min(took, limit)
                if took > limit:
                    raise TooLong(limit / took, limit if before else 0.0)
                return took

            def run(fake, args: list[Any]) -> str:
                self.now += next_of("eager", eager)
                return "eager"

        def compiled(args: list[Any]) -> str:
            self.now += next_of("plan", plan)
            return "plan"

        half.eager, half.sizes, half.changes = Fake(), sizes, lambda: changes  # type: ignore[assignment]
        return c.add(half, compiled)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEWRIGHT_STATE_DIR", str(tmp_path / "state"))
    return World(monkeypatch)


def comparison(persist: bool = False, may: bool = True) -> Comparison:
    return Comparison("x", "a scope", persist, lambda: may)


def verdict(c: Comparison) -> str | None:
    return c._trials[()].verdict


@pytest.mark.parametrize("plan", [1.05e-3, 1.2e-3])
def test_what_is_slower_is_given_back_and_said_once(world: World, plan: float, caplog: pytest.LogCaptureFixture) -> None:
    run = world.graph(comparison(), plan=[plan], eager=[1e-3])
    with caplog.at_level(logging.WARNING):
        ways = [run([1]) for _ in range(150)]
    first = ways.index("eager")
    assert set(ways[:first]) == {"plan"} and set(ways[first:]) == {"eager"}
    assert len(world.calls) == 1 + LOSSES, "and a warm-up"
    assert caplog.text.count(f"{plan * 1e3:.3f} ms compiled and 1.000 ms in eager") == 1 == len(caplog.records)


@pytest.mark.parametrize(
    ("calls", "timed", "eager", "expected"),
    [
        (100, [1.3] * FEWEST, (1.0, 1.1), "eager"),
        (99, [1.3] * FEWEST, (1.0, 1.1), None),
        (100, [1.3] * FEWEST + [1.15], (1.0, 1.1), None),
        (100, [1.3] * FEWEST, (1.0, 1.25), None),
        (100, [1.3] * (FEWEST - 1), (1.0, 1.1), None),
        (100, [1.3, *[1.8] * FEWEST], (1.0, 1.1), None),
    ],
    ids=["clear", "early", "a call near eager's worst", "eager near the plan", "too few calls", "calls that differ as much"],
)  # fmt: skip
def test_two_pairs_are_enough_if_the_plans_own_calls_tell_that_it_is_not_noise(
    world: World, calls: int, timed: list[float], eager: tuple[float, ...], expected: str | None
) -> None:
    for alike in (True, False):
        trial = compared.Trial(alike=alike, calls=calls)
        for seconds in timed:
            trial.times["infer"].add(seconds)
        for seconds in eager:
            trial.add(compared.Pair(eager=seconds, plan=1.4, cost=seconds))
        assert trial.verdict == (expected if alike else None), "calls of several sizes say nothing about noise"
        assert trial.sure == (trial.verdict is not None)


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(("spread", "slow"), [(0.2, 0.0), (0.03, 0.5)])
def test_noise_does_not_drop_a_plan_as_fast_as_eager(
    monkeypatch: pytest.MonkeyPatch, world: World, spread: float, slow: float, device: bool
) -> None:
    """All calls are noisy, or every other one is disturbed. By margins alone 27 in 1000 were dropped on a device."""
    draw = random.Random(0)
    if device:
        monkeypatch.setattr(compared, "waiting", lambda found: lambda: None)

    def times() -> list[float]:
        return [(1.4 if draw.random() < slow else 1.0) + spread * abs(draw.gauss(0, 1)) for _ in range(150)]

    dropped = 0
    for _ in range(300):
        run = world.graph(comparison(), times(), times())
        dropped += "eager" in {run([1]) for _ in range(150)}
    assert dropped == 0


@pytest.mark.parametrize("lost", [0, 1])
def test_a_device_is_waited_for_in_some_more_calls_of_a_plan_that_lost(
    monkeypatch: pytest.MonkeyPatch, world: World, lost: int
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(compared, "waiting", lambda found: lambda: waits.append(1))
    c = comparison()
    run = world.graph(c, plan=[1.3], eager=[1.0])
    for _ in range(WARM_UP + TIMED - 1):
        run([1])
    waits.clear()
    trial = c._trials[()]
    trial.lost, trial.next = lost, 1000
    for _ in range(SAMPLED):
        run([1])
    assert len(waits) == 2 * lost, "before and after one of these calls"
    for _ in range(900):
        run([1])
    assert len(waits) == 2 * lost * (MANY - TIMED)


@pytest.mark.parametrize("plan", [1e-3, 1.02e-3, 0.2e-3])
def test_what_is_not_slower_stays_without_a_word(world: World, plan: float, caplog: pytest.LogCaptureFixture) -> None:
    c = comparison()
    run = world.graph(c, plan=[plan], eager=[1e-3])
    assert {run([1]) for _ in range(100)} == {"plan"}
    assert verdict(c) == "plan" and not caplog.records


@pytest.mark.parametrize("eager", [0.1, 0.5, 0.95, 1.0, 1.5, 2.0, 6.0, 100.0])
def test_it_costs_five_calls_in_a_hundred(world: World, eager: float) -> None:
    run = world.graph(comparison(), plan=[1.0], eager=[eager])
    starts = []
    for _ in range(120):
        starts.append(world.now)
        run([1])
    ran = world.ran["plan", "infer"]
    for window, allowed in ((100, 5.0), (20, STOPPED)):
        for k in range(WARM_UP, ran - window):
            assert starts[k + window] - starts[k] <= window + allowed + 1e-9
    assert starts[100] <= 100 + 5
    assert all(b - a >= SHARE for a, b in zip(world.calls[1:], world.calls[2:], strict=False))


def test_a_disturbed_comparison_does_not_drop_the_plan(world: World) -> None:
    """Equal speed, and every other measurement is disturbed."""
    c = comparison()
    run = world.graph(c, plan=[1.0, 1.6, 1.0], eager=[1.0, 1.0, 1.4])
    assert {run([1]) for _ in range(400)} == {"plan"} and verdict(c) == "plan"


def test_a_plan_whose_best_call_is_as_fast_as_eager_stays(world: World) -> None:
    """Each pair finds it slower, because something else always runs then."""
    c = comparison()
    run = world.graph(c, plan=[1.0], eager=[1.0])
    for _ in range(WARM_UP):
        run([1])
    half_plan, trial = 1.0, c._trials[()]
    trial.times["infer"].best = half_plan
    for _ in range(LOSSES):
        trial.add(compared.Pair(eager=1.0, plan=1.3, cost=1.0))
    assert verdict(c) == "plan" and not trial.sure


def test_disturbed_calls_of_eager_do_not_keep_a_slower_plan(world: World) -> None:
    """Two of six pairs find the plan no slower, one of them because eager was stopped."""
    c = comparison()
    run = world.graph(c, plan=[1.2], eager=[1.0, 1.4, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0])
    ways = [run([1]) for _ in range(300)]
    assert ways[-1] == "eager" and verdict(c) == "eager" and c._trials[()].sure


def test_a_plan_that_wins_but_has_no_call_as_fast_as_eager_stays_for_this_process(world: World) -> None:
    trial = compared.Trial()
    trial.times["infer"].add(1.2)
    trial.add(compared.Pair(eager=1.0, plan=1.2, cost=1.0))
    for _ in range(LOSSES):
        assert trial.verdict is None
        trial.add(compared.Pair(eager=1.3, plan=1.2, cost=1.3))
    assert trial.verdict == "plan" and not trial.sure


@pytest.mark.parametrize("second", [0.7, 1.0])
def test_one_fast_call_of_eager_does_not_replace_the_plan(world: World, second: float) -> None:
    trial = compared.Trial()
    trial.times["infer"].add(1.0)
    for eager in (0.7, second, 1.0, 1.0, 1.0):
        trial.add(compared.Pair(eager=eager, plan=1.2, cost=1.0))
    assert trial.verdict == ("plan" if second == 1.0 else "eager")


def test_eager_that_was_stopped_in_a_slow_call_tells_nothing(world: World) -> None:
    trial = compared.Trial()
    trial.times["infer"].add(1.0)
    trial.add(compared.Pair(eager=STOPPED, plan=3.0, cost=STOPPED, stopped=True))
    assert (trial.won, trial.lost) == (0, 0)
    trial.add(compared.Pair(eager=STOPPED, plan=1.0, cost=STOPPED, stopped=True))
    assert (trial.won, trial.lost) == (1, 0)


@pytest.mark.parametrize("winner", ["plan", "eager"])
def test_a_verdict_is_remembered_for_its_scope_and_graph(world: World, winner: str) -> None:
    seconds = [1.2] if winner == "eager" else [0.8]
    run = world.graph(comparison(persist=True), plan=seconds, eager=[1.0])
    for _ in range(150):
        run([1])
    shadows = len(world.calls)
    assert {world.graph(comparison(persist=True), seconds, [1.0])([1]) for _ in range(60)} == {winner}
    assert len(world.calls) == shadows, "the second process does not look again"
    assert world.graph(Comparison("x", "another", True, lambda: True), seconds, [1.0])([1]) == "plan"
    assert world.graph(comparison(persist=True), seconds, [1.0], gm=traced(aten.cos.default))([1]) == "plan"
    assert world.graph(comparison(persist=False), seconds, [1.0])([1]) == "plan"


@pytest.mark.parametrize(("changes", "kept"), [(0, "eager"), (2, "eager"), (120, "plan")])
def test_what_changing_weights_cost_is_no_verdict_on_the_graph(world: World, changes: int, kept: str) -> None:
    c = comparison(persist=True)
    run = world.graph(c, plan=[1.2], eager=[1.0], changes=changes)
    assert [run([1]) for _ in range(150)][-1] == "eager"
    assert world.graph(comparison(persist=True), [1.2], [1.0])([1]) == kept, "the next process"


def test_a_plan_without_constants_has_a_verdict_of_its_own(world: World) -> None:
    c = comparison(persist=True)
    half = c.half(traced(), "infer")
    assert half is not None
    beside = c.without_constants(half, traced())
    run = world.graph(c, plan=[1.2], eager=[1.0])
    for _ in range(150):
        run([1])
    assert verdict(c) == "eager"
    assert beside(lambda args: "without")([torch.ones(3)]) == "without"


def test_each_class_of_sizes_has_its_own_verdict(world: World) -> None:
    c = comparison()
    half = c.half(traced(), "infer")
    assert half is not None

    class Fake:
        def build(self, args: list[int]) -> None:
            pass

        def seconds(self, args: list[int], *rest: Any) -> float:
            return float(args[0])

        def run(self, args: list[int]) -> str:
            return "eager"

    def plan(args: list[int]) -> str:
        world.now += 10
        return "plan"

    half.eager, half.sizes = Fake(), lambda args: args[0].bit_length()  # type: ignore[assignment]
    run = c.add(half, plan)
    for _ in range(120):
        small, large = run([5]), run([30])
    assert (small, large) == ("eager", "plan")
    assert {run([1 << k]) for k in range(8, 8 + MOST_CLASSES)} == {"plan"} and len(c._trials) == MOST_CLASSES


def test_backward_counts_with_its_forward_and_goes_its_way(world: World) -> None:
    c = comparison()
    forward = world.graph(c, [1.0], [1.0], "forward")
    backward = world.graph(c, [1.5], [1.0], "backward")
    pairs = [(forward([1]), backward([1])) for _ in range(150)]
    assert all(f == b for f, b in pairs[:-1] if f == "eager"), "eager's results never reach a plan of the other half"
    assert pairs[0] == ("plan", "plan") and pairs[-1] == ("eager", "eager")


def test_a_fast_backward_makes_up_for_a_slow_forward(world: World) -> None:
    c = comparison()
    forward, backward = world.graph(c, [1.4], [1.0], "forward"), world.graph(c, [1.0], [2.0], "backward")
    assert {way for _ in range(150) for way in (forward([1]), backward([1]))} == {"plan"}
    assert verdict(c) == "plan"


def test_a_forward_that_nobody_differentiates_gets_one_shadow(world: World) -> None:
    c = comparison()
    forward, backward = world.graph(c, [1.0], [1.0], "forward"), world.graph(c, [5.0], [1.0], "backward")
    for _ in range(60):
        forward([1])
    assert world.ran["eager", "forward"] == 1 and verdict(c) is None
    for _ in range(TIMED + 3):
        backward([1])
    assert world.ran["eager", "backward"] == 1, "one shadow of each half makes a pair"


def test_a_backward_with_effects_ends_the_comparison(world: World) -> None:
    c = comparison()
    forward = world.graph(c, [5.0], [1.0], "forward")
    assert c.half(traced(torch.manual_seed), "backward") is None
    assert {forward([1]) for _ in range(60)} == {"plan"} and world.ran["eager", "forward"] == 0


def test_nothing_is_measured_where_it_must_not_be(world: World) -> None:
    run = world.graph(comparison(may=False), plan=[5.0], eager=[1.0])
    assert {run([1]) for _ in range(40)} == {"plan"} and not world.calls


@pytest.mark.parametrize("error", [ValueError("eager's own"), Unfit("it may need 3 MiB"), torch.OutOfMemoryError()])
def test_eager_that_cannot_run_ends_the_comparison(
    world: World, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: freed.append(1))
    c = comparison(persist=True)
    half = c.half(traced(), "infer")
    assert half is not None

    def fails(*args: Any) -> float:
        world.calls.append(1)
        raise error

    half.eager.seconds = fails  # type: ignore[union-attr,method-assign]
    run = c.add(half, lambda args: "plan")
    assert {run([1]) for _ in range(60)} == {"plan"}
    assert len(world.calls) == 1 and verdict(c) == "plan" and half.eager is None
    assert len(freed) == isinstance(error, torch.OutOfMemoryError)
    again = comparison(persist=True).half(traced(), "infer")
    assert again is not None and again.eager is not None, "another process tries again"


def test_a_plan_that_fails_counts_for_nothing(world: World) -> None:
    c = comparison()
    half = c.half(traced(), "infer")
    assert half is not None
    half.eager.seconds = lambda *args: 1.0  # type: ignore[union-attr,method-assign]

    def fails(args: list[Any]) -> Any:
        raise ValueError("the plan's own error")

    run = c.add(half, fails)
    for _ in range(30):
        with pytest.raises(ValueError, match="own error"):
            run([1])
    assert c._trials[()].won == c._trials[()].lost == 0 and compared.turn.take(object())


def test_threads_are_not_compared(world: World) -> None:
    c = comparison()
    run = world.graph(c, plan=[5.0], eager=[1.0])
    for _ in range(5):
        run([1])
    other = threading.Thread(target=run, args=([1],))
    other.start()
    other.join()
    shadows = len(world.calls)
    assert {run([1]) for _ in range(100)} == {"plan"} and len(world.calls) == shadows


@pytest.mark.parametrize("options", [{"never_slower": False}, {"strict": True}, {"fallback": "error"}, {"check": ("contract",)}])
def test_it_is_off_where_all_must_run_as_compiled(options: dict[str, Any]) -> None:
    parsed = Options(**options)
    assert pipeline.comparison(registry.create("fusewright_null", parsed), parsed) is None


def test_it_is_off_in_a_process_group_while_profiling_and_under_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = Options()
    found = pipeline.comparison(registry.create("fusewright_null", parsed), parsed)
    assert found is not None and found.may()
    with torch.profiler.profile():
        assert not found.may()
    with FlopCounterMode(display=False):
        assert not found.may()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert not found.may()
    assert pipeline.comparison(registry.create("fusewright_null", parsed), parsed) is None


def test_nothing_is_measured_while_another_does(world: World) -> None:
    """Such as a round of calls with graph breaks; one that does not go on has left."""
    run = world.graph(comparison(), plan=[1.0], eager=[1.0])
    assert compared.turn.take(other := object(), 60)
    assert {run([1]) for _ in range(40)} == {"plan"} and not world.calls
    assert compared.turn.take(other, 0), "it goes on, and has left at once"
    run([1])
    assert world.calls


@pytest.mark.parametrize("takes", [True, False], ids=["several devices", "one device"])
def test_a_device_is_waited_for_as_its_module_takes_it(monkeypatch: pytest.MonkeyPatch, takes: bool) -> None:
    """`torch.cuda.synchronize` takes the device, `torch.mps.synchronize` does not."""
    waited: list[Any] = []
    module = SimpleNamespace(synchronize=waited.append if takes else lambda: waited.append("the only one"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    compared.Half("infer", Eager(traced())).waiting([1, torch.empty(3, device="meta")])()
    assert waited == [torch.device("meta") if takes else "the only one"]


def test_a_device_that_torch_has_no_module_for_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = registry.create("fusewright_null", Options())
    monkeypatch.setattr(type(backend), "device_type", "unheard_of")
    found = pipeline.comparison(backend, Options())
    assert found is not None
    gm = traced()
    next(iter(gm.graph.nodes)).meta["val"] = torch.empty(3, device="meta")
    half = found.half(gm, "infer")
    assert half is not None and half.eager is None


@pytest.fixture
def stepping(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A clock that advances by itself, so that shadows come when they are due."""

    def clock() -> float:
        world.now += 1
        return world.now

    monkeypatch.setattr(compared, "clock", clock)
    torch.compiler.reset()
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    torch.compiler.reset()


@pytest.mark.usefixtures("stepping")
@pytest.mark.parametrize("eager_wins", [False, True])
def test_random_numbers_writes_and_gradients_are_those_of_one_call_each(
    monkeypatch: pytest.MonkeyPatch, eager_wins: bool
) -> None:
    monkeypatch.setattr(compared, "SLOWER", 0.0 if eager_wins else 1e9)
    monkeypatch.setattr(compared, "WINS", 1000)
    monkeypatch.setattr(compared, "SHARE", SHARE // 20)
    ran: Counter[str] = Counter()
    seconds = compared.Eager.seconds

    def counting(self: Any, *rest: Any) -> float:
        ran["shadow"] += 1
        return seconds(self, *rest)

    monkeypatch.setattr(compared.Eager, "seconds", counting)
    run = compared.Eager.run
    monkeypatch.setattr(compared.Eager, "run", lambda self, args: ran.update(["eager"]) or run(self, args))

    def step(x: torch.Tensor, w: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        held.add_(x.detach().mean())
        return torch.nn.functional.dropout(torch.nn.functional.gelu(x @ w), 0.4).sum(0)

    fast = torch.compile(step, backend="fusewright_interp", options={"fallback": "allow", "cache": False}, dynamic=True)
    held, same = torch.zeros(3), torch.zeros(3)
    for k in range(24):
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
    assert ran["shadow"] >= 2 * LOSSES and bool(ran["eager"]) == eager_wins


@pytest.mark.usefixtures("stepping")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_the_ragged_size_of_a_nested_tensor_has_no_class() -> None:
    """It stands only for itself, and is no number."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.exp() * x.sin()

    compiled = torch.compile(f, backend="fusewright_interp", options={"fallback": "allow", "cache": False})
    for lengths in ((3, 5), (1, 4), (2, 2), (6, 1)):
        x = torch.nested.nested_tensor([torch.randn(n, 4) for n in lengths], layout=torch.jagged)
        torch.testing.assert_close(compiled(x).values(), f(x).values())


def test_results_die_with_their_last_reference(fresh_dynamo: None) -> None:
    """Looking at the call that is timed leaves no cycle of frames, which would hold its tensors and the caller's."""
    fast = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), backend="x86_onednn")
    gc.disable()
    try:
        results = [weakref.ref(fast(torch.randn(2, 4))) for _ in range(4)]
    finally:
        gc.enable()
    assert [r() for r in results] == [None] * 4
