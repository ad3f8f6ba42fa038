"""Calls with graph breaks are compared with eager as a whole, with a fake clock: a call takes what the test says of who runs it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from fusewright.plan.execute import broken, compared, turns
from fusewright.plan.execute.broken import LOOKED
from fusewright.plan.execute.compared import Verdict
from fusewright.plan.execute.turns import CALLS, FEW_ROUNDS, FIRST, GAP, LONGER, ROUNDS, STEPS, Trial

DECIDED = FIRST + ROUNDS * (2 * CALLS + GAP)
"""A call after the last round."""

TRAINED = FIRST + ROUNDS * (2 * STEPS + GAP + LONGER * ROUNDS // 2)
"""A step after the last round."""


class World:
    """A fake clock, and what ran the calls: "plan" if Dynamo's code did."""

    def __init__(self) -> None:
        self.now, self.ran = 0.0, list[Verdict]()
        self.takes: dict[Verdict, float] = {"plan": 2.0, "eager": 1.0}
        self.fails, self.room = False, True

    def works(self, function: Callable[..., Tensor]) -> None:
        """Take the time of a call of `function`, which called this."""
        frame = sys._getframe()
        while frame.f_code.co_name not in (function.__name__, f"torch_dynamo_resume_in_{function.__name__}"):
            assert frame.f_back is not None
            frame = frame.f_back
        self.ran.append("eager" if frame.f_code is function.__code__ else "plan")
        self.now += self.takes[self.ran[-1]]
        if self.fails:
            raise ValueError("a user's error")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    torch.compiler.reset()
    made = World()
    monkeypatch.setattr(broken, "clock", lambda: made.now)
    monkeypatch.setattr(broken, "has_room", lambda device: made.room)
    monkeypatch.setattr(compared, "turn", compared.Turn())
    with torch.no_grad():
        yield made
    torch.compiler.reset()


def in_two_parts(world: World) -> Callable[[Tensor], Tensor]:
    @torch.compiler.disable
    def works() -> None:
        world.works(in_parts)

    def in_parts(x: Tensor) -> Tensor:
        x = x.sin()
        works()
        return x.cos()

    return in_parts


def compiled(f: Callable[[Tensor], Tensor], **options: bool) -> Callable[[Tensor], Tensor]:
    return torch.compile(f, backend="fusewright_null", options=dict(options))


X = torch.linspace(0, 1, 8)


def test_eager_runs_calls_with_breaks_if_it_is_faster(world: World, caplog: pytest.LogCaptureFixture) -> None:
    f = in_two_parts(world)
    g = compiled(f)
    with caplog.at_level(logging.WARNING, "fusewright"):
        results = [g(X) for _ in range(DECIDED)]
    assert all(torch.equal(r, X.sin().cos()) for r in results)
    assert world.ran[: FIRST + CALLS] == ["plan"] * (FIRST + CALLS)
    assert world.ran[FIRST + CALLS :][: CALLS + GAP] == ["eager"] * CALLS + ["plan"] * GAP
    assert world.ran[-5:] == ["eager"] * 5
    (said,) = [r.getMessage() for r in caplog.records if "graph breaks" in r.getMessage()]
    assert "2000.000 ms compiled and 1000.000 ms in eager" in said


@pytest.mark.parametrize(("eager", "calls"), [(2.6, FEW_ROUNDS * CALLS), (4.0, (FEW_ROUNDS + 1) * 2), (10.0, FEW_ROUNDS + 1)])
def test_calls_stay_compiled_if_that_is_clearly_faster_after_a_few_rounds(world: World, eager: float, calls: int) -> None:
    world.takes["eager"] = eager
    g = compiled(in_two_parts(world))
    for _ in range(3 * DECIDED):
        g(X)
    assert world.ran.count("eager") == calls


@pytest.mark.parametrize(("eager", "verdict"), [(0.96, "eager"), (0.98, "plan"), (1.05, "plan")])
def test_what_is_close_is_decided_by_the_fastest_of_all_rounds(eager: float, verdict: str) -> None:
    trial = Trial()
    while trial.verdict is None:
        trial.calls += 1
        if trial.due():  # every second call is disturbed
            trial.add((eager if trial.who() == "eager" else 1.0) + trial.calls % 2)
    assert (trial.verdict, trial.rounds) == (verdict, ROUNDS)


def test_a_verdict_is_for_sizes_and_for_one_compiled_function(world: World) -> None:
    f = in_two_parts(world)
    g = compiled(f)
    for _ in range(DECIDED):
        g(X)
    for _ in range(LOOKED):
        g(torch.zeros(100))
    assert world.ran.pop() == "plan", "after a few calls"
    for shape, who in ((8, "eager"), (100, "plan")) * 3:
        g(torch.zeros(shape))
        assert world.ran.pop() == who, "at once, since both are known"
    compiled(f)(X)
    assert world.ran.pop() == "plan"


def test_a_large_graph_without_breaks_is_not_watched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken.BrokenCalls, "__call__", lambda self: pytest.fail("watched"))
    g = compiled(lambda x: x.sin())
    for shape in (1, 2, 3):  # also compiled again
        for _ in range(3):
            g(torch.zeros(broken.SHORT + shape))
    assert len(broken._known) >= 1


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("option", ["never_slower", "strict"])
def test_options_that_want_the_plan_keep_it(world: World, option: str, training: bool) -> None:
    g = compiled(in_two_parts(world), **{option: option == "strict"})
    with torch.set_grad_enabled(training):
        for _ in range(TRAINED):
            g(X)
    assert set(world.ran) == {"plan"}


def step(g: Callable[[Tensor], Tensor], world: World, x: Tensor = X) -> Tensor:
    """A step of training, with a backward that takes as long as the call. Return the gradient."""
    x = x.clone().requires_grad_()
    g(x).sum().backward()
    world.now += world.takes[world.ran[-1]]
    assert x.grad is not None
    return x.grad


def nodes_of(result: Tensor) -> set[str]:
    """The names of what autograd has recorded."""
    found, todo = set[str](), [result.grad_fn]
    while todo:
        if (node := todo.pop()) is not None:
            found.add(node.name())
            todo += [n for n, _ in node.next_functions]
    return found


def test_eager_runs_steps_with_breaks_if_it_is_faster(world: World, caplog: pytest.LogCaptureFixture) -> None:
    f = in_two_parts(world)
    g = compiled(f)
    with torch.enable_grad(), caplog.at_level(logging.WARNING, "fusewright"):
        wanted = step(f, world)
        world.ran.clear()
        gradients = [step(g, world) for _ in range(TRAINED)]
        assert world.ran[FIRST:][: 2 * STEPS] == ["plan"] * STEPS + ["eager"] * STEPS
        assert world.ran[-5:] == ["eager"] * 5
    for grad in gradients:
        torch.testing.assert_close(grad, wanted)
    (said,) = [r.getMessage() for r in caplog.records if "graph breaks" in r.getMessage()]
    assert "a step with graph breaks takes 4000.000 ms compiled and 2000.000 ms in eager" in said
    g(X)
    assert world.ran[-1] == "plan", "without gradients, calls have a verdict of their own"


_worlds: list[World] = []


@torch.library.custom_op("fusewright_tests::works", mutates_args=())
def works_inside(x: Tensor) -> Tensor:
    """Take the time of a call without leaving the graph."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not in_one_part.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    world = _worlds[-1]
    world.ran.append("plan" if frame is None else "eager")
    world.now += world.takes[world.ran[-1]]
    return x.clone()


works_inside.register_fake(torch.empty_like)
works_inside.register_autograd(lambda context, grad: grad)


def in_one_part(x: Tensor) -> Tensor:
    return works_inside(x.sin()).cos()


@pytest.mark.parametrize(("eager", "who"), [(1.0, "eager"), (4.0, "plan")])
def test_short_steps_without_breaks_are_compared_until_the_plan_has_won(
    world: World, caplog: pytest.LogCaptureFixture, eager: float, who: Verdict
) -> None:
    """What AOTAutograd does around a small graph and its backward takes longer than both."""
    _worlds.append(world)
    world.takes["eager"] = eager
    wanted = -X.cos() * X.sin().sin()
    g = compiled(in_one_part)
    with torch.enable_grad(), caplog.at_level(logging.WARNING, "fusewright"):
        gradients = [step(g, world) for _ in range(TRAINED + LOOKED)]
    torch.testing.assert_close(gradients[0], wanted)
    torch.testing.assert_close(gradients[-1], wanted)
    assert world.ran[:FIRST] == ["plan"] * FIRST and world.ran[-5:] == [who] * 5 and "eager" in world.ran
    said = any("a step takes 4000.000 ms compiled and 2000.000 ms in eager" in r.getMessage() for r in caplog.records)
    assert said == (who == "eager")
    *_, calls = broken._known.values()
    assert (calls in calls.hooks) == (who == "eager"), "looking at calls costs a part of what they take"


@pytest.mark.parametrize("training", [True, False])
def test_long_steps_and_calls_without_breaks_are_not_watched(
    world: World, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    monkeypatch.setattr(broken.BrokenCalls, "__call__", lambda self: pytest.fail("watched"))
    with torch.set_grad_enabled(training):
        g = compiled(lambda x: x.sin())
        for _ in range(3):
            g(torch.zeros(broken.SHORT + 1, requires_grad=True))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(("eager", "who"), [(1.0, "eager"), (4.0, "plan")])
def test_short_calls_without_breaks_are_compared_until_the_plan_has_won(
    world: World, caplog: pytest.LogCaptureFixture, eager: float, who: Verdict, fullgraph: bool
) -> None:
    """What Dynamo does around a small graph takes longer than it does. With `fullgraph`, torch wants a call to find its graph."""
    _worlds.append(world)
    world.takes["eager"] = eager
    g = torch.compile(in_one_part, backend="fusewright_null", fullgraph=fullgraph)
    with caplog.at_level(logging.WARNING, "fusewright"):
        results = [g(X) for _ in range(DECIDED + LOOKED)]
    assert all(torch.equal(r, X.sin().cos()) for r in results)
    assert world.ran[:FIRST] == ["plan"] * FIRST and world.ran[-5:] == [who] * 5
    assert any("a call takes 2000.000 ms compiled and 1000.000 ms in eager" in r.getMessage() for r in caplog.records) == (
        who == "eager"
    )
    *_, calls = broken._known.values()
    assert (calls in calls.hooks) == (who == "eager"), "looking at calls costs a part of what they take"


def test_the_backward_of_a_call_is_of_its_side_whenever_it_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of many calls, of which eager runs some, are differentiated together at the end."""
    monkeypatch.setattr(turns, "UNKNOWN", 0.0)  # the graphs' own comparisons, by the real clock, may not have ended
    f = in_two_parts(world)
    g, x, same = compiled(f), X.clone().requires_grad_(), X.clone().requires_grad_()
    with torch.enable_grad():
        results = [g(x) for _ in range(FIRST + 2 * STEPS)]
        for who, result in zip(world.ran, results, strict=True):
            assert any("Compiled" in name for name in nodes_of(result)) == (who == "plan")
        assert world.ran.count("eager") == STEPS
        torch.stack(results).square().sum().backward()
        torch.stack([f(same) for _ in results]).square().sum().backward()
    torch.testing.assert_close(x.grad, same.grad)


def test_random_numbers_are_drawn_once_by_whoever_runs_a_step(world: World) -> None:
    @torch.compiler.disable
    def works() -> None:
        world.works(drops)

    def drops(x: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(x, 0.5)
        works()
        return torch.nn.functional.dropout(x, 0.3) * x

    g = compiled(drops)
    with torch.enable_grad():
        torch.manual_seed(0)
        found = [step(g, world) for _ in range(FIRST + 2 * STEPS)]
        after = torch.get_rng_state()
        torch.manual_seed(0)
        wanted = [step(drops, world) for _ in found]
    torch.testing.assert_close(found, wanted)
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("reentrant", [False, True])
def test_both_calls_of_a_checkpoint_are_of_one_side(world: World, reentrant: bool) -> None:
    """What eager saves differs from what a plan does. With `use_reentrant`, autograd records only the second call."""
    f = in_two_parts(world)
    g = compiled(f)

    def checkpointed(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(g, x, use_reentrant=reentrant)

    with torch.enable_grad(), torch.utils.checkpoint.set_checkpoint_early_stop(False):  # stops a call by an error
        wanted = step(f, world)
        world.ran.clear()
        for _ in range(TRAINED):
            torch.testing.assert_close(step(checkpointed, world), wanted)
    assert ("eager" in world.ran) == reentrant


def test_a_device_is_waited_for_where_a_side_of_a_round_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked with a device that does nothing: its calls end at once."""
    waited = list[torch.device]()
    monkeypatch.setattr(broken, "can_wait", lambda device: True)
    monkeypatch.setattr(turns, "UNKNOWN", 0.0)  # graphs of this device are not measured
    monkeypatch.setattr(compared, "_waiting", lambda device: lambda: waited.append(device))
    g, x = compiled(in_two_parts(world)), X.to("meta")
    for _ in range(FIRST - 1):
        g(x)
    assert not waited
    for _ in range(DECIDED):
        g(x)
    assert waited == [torch.device("meta")] * ((FEW_ROUNDS + 1) * 4 * CALLS) and world.ran[-1] == "eager"


def test_a_device_that_torch_cannot_wait_for_is_not_watched(world: World) -> None:
    g = compiled(in_two_parts(world))
    for _ in range(DECIDED):
        g(X.to("meta"))
    assert set(world.ran) == {"plan"}


def test_calls_that_fail_are_not_counted(world: World) -> None:
    g = compiled(in_two_parts(world))
    g(X)
    world.fails = True
    for _ in range(DECIDED):
        with pytest.raises(ValueError, match="a user's error"):
            g(X)
    assert set(world.ran) == {"plan"}, "its first call ends a round"


def test_calls_from_several_threads_stay_compiled(world: World) -> None:
    g = compiled(in_two_parts(world))

    def calls() -> None:
        with torch.no_grad():
            for _ in range(FIRST):
                g(X)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:  # alive together, so of different identities
        for _ in range(DECIDED // FIRST):
            one.submit(calls).result()
            other.submit(calls).result()
    assert "eager" not in world.ran[FIRST:]


class Layer(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x - 1


def test_breaks_inside_of_modules_are_found_and_hooks_run_once_a_call(world: World) -> None:
    layers = torch.nn.Sequential(Layer(), Layer())
    seen = list[float]()
    layers[1].register_forward_hook(lambda m, given, result: seen.append(float(result.sum())))
    g = torch.compile(layers, backend="fusewright_null")
    results = [g(X) for _ in range(DECIDED)]
    assert all(torch.equal(r, 4 * X) for r in results)
    assert seen == [float((4 * X).sum())] * DECIDED


def test_eager_runs_all_of_a_call_whose_graphs_are_in_inner_functions(world: World) -> None:
    inner = in_two_parts(world)
    ran = list[Verdict]()

    def outer(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        ran.append("eager" if sys._getframe().f_code is outer.__code__ else "plan")
        return inner(x)

    g = compiled(outer)
    for _ in range(DECIDED):
        g(X)
    assert (ran[-1], world.ran[-1]) == ("eager", "eager")


def test_a_reset_begins_anew(world: World) -> None:
    g = compiled(in_two_parts(world))
    for _ in range(DECIDED):
        g(X)
    torch.compiler.reset()
    world.ran.clear()
    for _ in range(DECIDED):
        g(X)
    assert world.ran[0] == world.ran[FIRST - 2] == "plan" and world.ran[-1] == "eager"


def test_a_reset_while_eager_runs_a_call_leaves_no_code_skipped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may reset and call the function before this call ends."""
    skipped: dict[object, bool] = {}
    monkeypatch.setattr(broken.compat, "skips", lambda code: [partial(skipped.__setitem__, code, s) for s in (True, False)])
    calls, code = broken.BrokenCalls("backend", lambda: True), in_two_parts(world).__code__
    calls.codes.add(code)
    end = calls._in_eager()
    assert skipped == {code: True}
    calls._forget()
    end()
    assert skipped == {code: False}


@pytest.mark.parametrize("training", [False, True])
def test_calls_that_must_be_deterministic_stay_compiled(world: World, training: bool) -> None:
    g = compiled(in_two_parts(world))
    torch.use_deterministic_algorithms(True)
    try:
        with torch.set_grad_enabled(training):
            for _ in range(TRAINED):
                g(X)
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(world.ran) == {"plan"}


def test_layers_that_share_a_graph_are_compared_with_the_function_that_calls_them(world: World) -> None:
    """A break in a loop: the function that is called has no graph, and one is compiled for all layers."""

    def layer(x: Tensor) -> Tensor:
        return x.sin()

    @torch.compiler.disable
    def works() -> None:
        world.works(looped)

    def looped(x: Tensor) -> Tensor:
        for _ in range(3):
            x = layer(x)
            torch._dynamo.graph_break()
        works()
        return x

    g = compiled(looped)
    g(X)
    (calls,) = [c for c in broken._known.values() if looped.__code__ in c.codes]
    for _ in range(DECIDED):
        g(X)
    (trial,) = calls._trials.values()
    assert trial.verdict is not None


def test_calls_are_compared_while_an_error_is_handled(world: World) -> None:
    """Such as those of a program that goes on in an `except` clause."""
    g = compiled(in_two_parts(world))
    try:
        raise ValueError("handled")
    except ValueError:
        for _ in range(DECIDED):
            g(X)
    assert world.ran[-1] == "eager"


def test_sizes_inside_of_containers_and_numbers_have_verdicts_of_their_own(world: World) -> None:
    @torch.compiler.disable
    def works() -> None:
        world.works(of_dict)

    def of_dict(inputs: dict[str, list[Tensor]], count: int) -> Tensor:
        x = inputs["x"][0].sin()
        works()
        return x.cos() * count

    g = torch.compile(of_dict, backend="fusewright_null")
    for _ in range(DECIDED):
        g({"x": [X]}, 1)
    assert world.ran[-1] == "eager"
    for given, count in ((torch.zeros(100), 1), (X, 900)):
        for _ in range(LOOKED):
            g({"x": [given]}, count)
        assert world.ran[-1] == "plan"


def test_a_module_that_trains_and_one_that_does_not_have_verdicts_of_their_own(world: World) -> None:
    class Parts(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.nn.functional.dropout(x.sin(), 0.5, self.training)
            works()
            return x.cos()

    @torch.compiler.disable
    def works() -> None:
        world.works(Parts.forward)

    module = Parts().eval()
    g = torch.compile(module, backend="fusewright_null")
    for _ in range(DECIDED):
        g(X)
    assert world.ran[-1] == "eager"
    module.train()
    for _ in range(LOOKED):
        g(X)
    assert world.ran[-1] == "plan"


def scaled_in_two_parts(world: World, scale: list[float]) -> Callable[[Tensor], Tensor]:
    @torch.compiler.disable
    def works() -> None:
        world.works(scaled)

    def scaled(x: Tensor) -> Tensor:
        x = x.sin() * scale[0]
        works()
        return x.cos()

    return scaled


def test_a_function_that_finds_its_second_graph_compiled_is_watched(world: World) -> None:
    """By another one of the same code, which differs in the first part."""
    for scale in (1.0, 2.0):
        g = compiled(scaled_in_two_parts(world, [scale]))
        for _ in range(DECIDED):
            g(X)
        assert world.ran[-1] == "eager"


def test_a_reset_begins_anew_for_every_function(world: World) -> None:
    """Whichever is called first after it."""
    one, other = compiled(in_two_parts(world)), compiled(scaled_in_two_parts(world, [1.0]))
    for g in (one, other):
        for _ in range(DECIDED):
            g(X)
        assert world.ran[-1] == "eager"
    torch.compiler.reset()
    for g in (one, other):
        g(X)
        assert world.ran[-1] == "plan"


def test_a_round_in_which_a_graph_is_compiled_does_not_count(world: World) -> None:
    """That takes seconds, say for another value that the function's guards ask for."""
    scale = [1.0]
    scaled = scaled_in_two_parts(world, scale)
    g = compiled(scaled)
    for _ in range(FIRST + CALLS // 2):
        g(X)
    calls = [c for c in broken._known.values() if scaled.__code__ in c.codes][-1]
    (trial,) = calls._trials.values()
    assert trial.times
    scale[0] = 2.0
    assert torch.equal(g(X), (X.sin() * 2).cos())
    assert not trial.times and trial.next > trial.calls and compared.turn.take(object())


def test_another_size_is_noticed_within_a_few_calls(world: World) -> None:
    """The sizes of each call are looked at again from then on."""
    g = compiled(in_two_parts(world))
    for _ in range(DECIDED):
        g(X)
    world.ran.clear()
    for _ in range(LOOKED):
        g(torch.zeros(64))
    assert world.ran.count("eager") < LOOKED
    g(X)
    assert world.ran[-1] == "eager"
    g(torch.zeros(64))
    assert world.ran[-1] == "plan"


@pytest.mark.parametrize("what", ["checkpoint", "deterministic"])
def test_a_verdict_for_eager_does_not_hold_where_calls_must_stay_compiled(world: World, what: str) -> None:
    g = compiled(in_two_parts(world))
    with torch.enable_grad():
        for _ in range(TRAINED):
            step(g, world)
        assert world.ran[-1] == "eager"
        for _ in range(2 * LOOKED):
            if what == "deterministic":
                torch.use_deterministic_algorithms(True)
            try:
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                    g(X.clone().requires_grad_())
            finally:
                torch.use_deterministic_algorithms(False)
            assert world.ran[-1] == "plan"
