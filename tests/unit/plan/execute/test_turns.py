"""Eager runs some calls instead of what is compiled: which ones, what that costs, and who runs the others in the end. Programs with
a fake clock call a function that is watched; nothing is compiled."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import CodeType

import pytest
import torch

from fusewright.plan.execute import broken, compared
from fusewright.plan.execute.broken import LOOKED, SEEN, BrokenCalls
from fusewright.plan.execute.compared import Verdict
from fusewright.plan.execute.turns import AHEAD, CALLS, FIRST, GAP, LONGER, ROUNDS, SPARE, STEPS, Trial

DECIDED = FIRST + ROUNDS * (2 * STEPS + GAP + LONGER * ROUNDS // 2)
"""A call after the last round."""


class Program:
    """A training program with a fake clock. `forward` and `backward` are seconds of either side; `ran` says who ran the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ran = 0.0, list[Verdict]()
        self.forward: dict[Verdict, float] = {"plan": 1.0, "eager": 1.0}
        self.backward: dict[Verdict, float] = {"plan": 2.0, "eager": 2.0}
        self.noise: Callable[[], float] = lambda: 1.0
        self.allowed, self.room = True, True
        self.calls = self.watched()
        self.skipped: dict[CodeType, bool] = {}
        self.waits = list[float]()
        monkeypatch.setattr(compared, "turn", compared.Turn())
        monkeypatch.setattr(broken, "clock", lambda: self.now)
        monkeypatch.setattr(broken, "has_room", self.has_room)
        monkeypatch.setattr(broken.compat, "around_compilations", lambda start, end: True)  # no reset
        monkeypatch.setattr(broken.compat, "arguments_of_call", list)
        skips = self.skipped.__setitem__
        monkeypatch.setattr(broken.compat, "skips", lambda code: [partial(skips, code, s) for s in (True, False)])
        monkeypatch.setattr(compared, "waiting", lambda devices: lambda: self.waits.append(self.now))

    def watched(self) -> BrokenCalls:
        """The hook of a compiled function."""
        made = BrokenCalls("backend", lambda: self.allowed)
        made.codes.add((lambda: None).__code__.replace(co_name=f"f{id(made)}"))
        return made

    def has_room(self, device: str) -> bool:
        assert self.allowed, "a device in a capture is not asked"
        return self.room

    def in_round(self, calls: BrokenCalls) -> bool:
        return any(t.times or t.begun is not None for t in calls._trials.values())

    def call(self, calls: BrokenCalls | None = None, takes: dict[Verdict, float] | None = None) -> Verdict:
        """Call the function. Return who ran it."""
        watched = calls or self.calls
        end = watched()
        (code,) = watched.codes
        who: Verdict = "eager" if self.skipped.get(code) else "plan"
        self.ran.append(who)
        self.now += (takes or self.forward)[who] * self.noise()
        end()
        assert not self.skipped.get(code), "Dynamo sees the code again"
        return who

    def step(self, calls: int = 1, each: bool = False) -> None:
        """Call the function so many times, with a backward after each of them, or one for all at the end; then the optimizer."""
        ran = list[Verdict]()
        for k in range(calls):
            ran.append(self.call())
            if each or k == calls - 1:
                self.now += sum(self.backward[who] * self.noise() for who in (ran[-1:] if each else ran))
        self.now += 0.5

    def steps(self, count: int, calls: int = 1, each: bool = False) -> None:
        for _ in range(count):
            self.step(calls, each)

    def eager_takes(self, forward: float, backward: float) -> None:
        """So many times as long as what is compiled."""
        self.forward["eager"], self.backward["eager"] = forward, 2 * backward

    def disturbed(self, most: float, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.noise = lambda: 1 + most * rng.random()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch)


SLOWER = [(1.0, 1.0), (1.3, 0.9), (0.95, 1.3), (1.1, 1.1), (5.0, 5.0)]
"""Times of eager's forward and backward, of which the sum is not below that of what is compiled."""


@pytest.mark.parametrize(("calls", "each"), [(1, True), (2, False), (3, False), (4, False), (4, True), (8, True), (16, True)])
@pytest.mark.parametrize("eager", [(0.8, 0.9), (0.85, 0.9), *SLOWER])
def test_steps_are_compared_however_often_they_call(
    program: Program, calls: int, each: bool, eager: tuple[float, float]
) -> None:
    program.eager_takes(*eager)
    program.disturbed(0.02)
    program.steps(2 * DECIDED // calls, calls, each)
    assert set(program.ran[-20:]) == {"plan" if eager in SLOWER else "eager"}


def test_a_busy_machine_in_two_of_eagers_parts_is_no_verdict(program: Program) -> None:
    program.eager_takes(0.8, 0.8)
    rounds = {0}
    for _ in range(2 * DECIDED):
        program.step()
        rounds.add(sum(t.rounds for t in program.calls._trials.values()))
        program.now += 1.5 if program.ran[-1] == "eager" and max(rounds) < 2 else 0.0
    assert set(program.ran[-20:]) == {"eager"}


@pytest.mark.parametrize("every", [3, 4, 6])
def test_a_long_pause_in_some_steps_does_not_hide_that_eager_is_faster(program: Program, every: int) -> None:
    program.eager_takes(0.6, 0.8)
    program.disturbed(0.02)
    for k in range(DECIDED):
        program.step()
        program.now += 8.0 * every if k % every == 0 else 0.0
    assert set(program.ran[-20:]) == {"eager"}


@pytest.mark.parametrize("calls", [5, 7, 9, 16, 100])
@pytest.mark.parametrize("eager", SLOWER)
@pytest.mark.parametrize("seed", range(3))
def test_one_backward_for_many_calls_keeps_what_is_compiled(
    program: Program, calls: int, eager: tuple[float, float], seed: int
) -> None:
    """Rounds have more of the backwards of one side, or none at all."""
    program.eager_takes(*eager)
    program.disturbed(0.02, seed)
    for _ in range(seed * calls // 3):
        program.call()
    program.steps(3 * DECIDED // calls, calls)
    assert program.ran[-100:].count("eager") <= STEPS


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
@pytest.mark.parametrize("eager", [1.0, 1.1, 1.39, 1.6, 2.0, 2.9, 3.1, 5.0])
def test_it_costs_five_steps_in_a_hundred_at_most(program: Program, calls: int, eager: float) -> None:
    program.eager_takes(eager, eager)
    program.disturbed(0.01)
    program.steps(100, calls)
    assert program.now <= 1.05 * 100 * (3 * calls * 1.01 + 0.5)
    program.steps(200, calls)
    assert program.now <= 1.04 * 300 * (3 * calls * 1.01 + 0.5)


def test_it_costs_no_more_in_inference(program: Program) -> None:
    program.forward["eager"] = 5.0
    with torch.no_grad():
        for _ in range(100):
            program.call()
    assert program.now <= 105


@pytest.mark.parametrize("every", [37, 100])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_pauses_between_steps_decide_nothing(program: Program, every: int, calls: int) -> None:
    """Evaluation and checkpoints: eager stays out if it is not faster, and wins if it is and most rounds have no pause."""
    wins = calls == 1 and every == 100
    program.eager_takes(*((0.8, 0.9) if wins else (1.0, 1.0)))
    program.disturbed(0.02)
    for k in range(2 * DECIDED):
        program.now += 40.0 * (k % every == 0)
        program.step(calls)
    assert program.ran[-1] == ("eager" if wins else "plan")


@pytest.mark.parametrize("seed", range(5))
def test_evaluation_that_records_gradients_decides_nothing(program: Program, seed: int) -> None:
    """No backward follows its calls: a round is short if they fall into eager's part."""
    program.eager_takes(0.95, 1.1)
    program.disturbed(0.02, seed)
    for k in range(3 * DECIDED):
        program.step()
        for _ in range(20 * ((k + 7 * seed) % 120 == 0)):
            program.call()
    assert program.ran[-100:].count("eager") <= 3 * STEPS, "eager has no calls but those of rounds"


@pytest.mark.parametrize("seed", range(20))
def test_a_program_that_waits_between_calls_keeps_faster_calls(program: Program, seed: int) -> None:
    """A server that records gradients without need: no backward comes, and requests come at random."""
    program.forward["eager"] = 1.05
    rng = random.Random(seed)
    for _ in range(3 * DECIDED):
        program.call()
        program.now += rng.uniform(5, 15)
    assert program.ran[-100:].count("eager") <= 3 * STEPS


def test_a_backward_that_never_comes_is_missed_by_nobody(program: Program) -> None:
    program.forward["eager"] = 0.8
    for _ in range(DECIDED):
        program.call()
    assert program.ran[-1] == "eager"


@pytest.mark.parametrize("inference", [0.5, 2.0])
def test_calls_without_gradients_have_a_verdict_of_their_own(program: Program, inference: float) -> None:
    program.eager_takes(*((0.8, 0.8) if inference > 1 else (1.2, 1.2)))
    for _ in range(2 * DECIDED):
        program.step()
        with torch.no_grad():
            last = program.call(takes={"plan": 1.0, "eager": inference})
    assert last == ("plan" if inference > 1 else "eager")
    program.step()
    assert program.ran[-1] == ("eager" if inference > 1 else "plan")


def test_rounds_do_not_overlap(program: Program) -> None:
    """Two functions, say an encoder and a decoder, in each step."""
    other, active = program.watched(), list[tuple[bool, bool]]()
    program.eager_takes(0.8, 0.8)
    for _ in range(4 * DECIDED):
        program.step()
        program.call(other)
        active.append((program.in_round(program.calls), program.in_round(other)))
    assert (True, True) not in active and program.ran[-2:] == ["eager", "eager"]


def test_a_function_that_is_no_longer_called_gives_its_turn_away(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    program.steps(FIRST + 2)
    assert program.in_round(program.calls) and not compared.turn.take(object())
    monkeypatch.setattr(broken, "LEFT", 0.0)
    program.step()
    assert compared.turn.take(object())
    program.step()
    assert not program.in_round(program.calls), "another measures"


def test_a_reset_gives_the_turn_away(program: Program) -> None:
    program.steps(FIRST + 2)
    program.calls._forget()
    assert compared.turn.take(object())


def test_calls_inside_of_a_call_are_a_part_of_it(program: Program) -> None:
    """Of a function that calls itself."""
    program.eager_takes(0.8, 0.9)
    for _ in range(2 * DECIDED):
        end = program.calls()
        outer = "eager" if any(program.skipped.values()) else "plan"
        inner = program.calls()
        inner()
        program.now += program.forward[outer]
        end()
        program.now += program.backward[outer]
    assert outer == "eager" and not any(program.skipped.values())


@pytest.mark.parametrize("training", [True, False])
def test_a_device_is_waited_for_where_a_side_changes_and_never_outside_of_rounds(program: Program, training: bool) -> None:
    program.calls.runs_on([torch.device("meta")])
    waited = list[tuple[bool, int]]()
    with torch.set_grad_enabled(training):
        for _ in range(2 * DECIDED):
            before, at = len(program.waits), program.calls._trials and program.in_round(program.calls)
            program.step()
            waited.append((bool(at or program.in_round(program.calls)), len(program.waits) - before))
    assert not any(count for in_round, count in waited if not in_round)
    assert len(program.waits) == ROUNDS * (3 if training else 4 * CALLS)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_waited_for_while_that_is_not_allowed(program: Program, training: bool) -> None:
    """In a capture or a process group; also if that begins during a round, or a call."""
    program.calls.runs_on([torch.device("meta")])
    with torch.set_grad_enabled(training):
        program.steps(FIRST + 1)
        waits = len(program.waits)
        program.allowed = False
        program.steps(DECIDED)
        assert len(program.waits) == waits and "eager" not in program.ran
        program.allowed = True
        while not program.in_round(program.calls):
            end = program.calls()
            if not program.in_round(program.calls):
                end()
        program.allowed, waits = False, len(program.waits)
        end()
    assert len(program.waits) == waits


def test_eager_gets_no_call_while_memory_may_be_short(program: Program) -> None:
    program.room = False
    program.steps(DECIDED)
    assert set(program.ran) == {"plan"}
    program.room = True
    program.steps(GAP + 2 * STEPS)
    assert program.ran.count("eager") == STEPS


def judged(compiled: float, eager: Callable[[int], float]) -> Trial:
    """The comparison of calls that take so many seconds, those of eager by how many it has had in a row."""
    trial, row = Trial(), 0
    while trial.verdict is None:
        trial.calls += 1
        if trial.due():
            row = row + 1 if trial.who() == "eager" else 0
            trial.add(eager(row) if row else compiled)
    return trial


def test_eager_has_calls_to_warm_up_where_they_are_tiny() -> None:
    trial = judged(20e-6, lambda row: 40e-6 if row <= CALLS else 10e-6)
    assert (trial.verdict, trial.best["eager"]) == ("eager", 10e-6)
    assert judged(20e-3, lambda row: 40e-3 if row <= CALLS else 10e-3).verdict == "plan"


@pytest.mark.parametrize(("compiled", "eager"), [(20e-6, 60e-6), (20e-6, 2e-3), (2e-3, 20e-3)])
def test_what_eager_may_cost_does_not_depend_on_how_short_calls_are(compiled: float, eager: float) -> None:
    trial = judged(compiled, lambda row: eager)
    assert trial.verdict == "plan"
    assert sum(trial.costs) * compiled <= SPARE + max(eager, AHEAD * compiled) * trial.rounds


@pytest.mark.parametrize("training", [True, False])
def test_calls_between_rounds_pass_unseen_but_for_a_few(
    program: Program, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    looked, look = list[int](), BrokenCalls._looked_at
    monkeypatch.setattr(BrokenCalls, "_looked_at", lambda self, trains: (looked.append(self._looked), look(self, trains))[1])
    with torch.set_grad_enabled(training):
        program.steps(FIRST - 1)
        assert looked == [*range(1, SEEN + 1), LOOKED]
        program.step()
    assert program.in_round(program.calls)
