"""Choices by measurement, on a fake clock that the candidates advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest
import torch

from fusewright.cache import tune
from fusewright.cache.tune import Tuner
from fusewright.interface import Decline

SLOW = 1.0  # so long that a round is a single pass


class Clock:
    """A fake clock that only candidates advance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs = 0

    def __call__(self) -> float:
        return self.now

    def takes(self, *seconds: float) -> Callable[[], None]:
        """Make a candidate whose runs take these times, the first being untimed; the last figure repeats."""
        times: Iterator[float] = chain(seconds, repeat(seconds[-1]))

        def run() -> None:
            self.runs += 1
            self.now += next(times)

        return run


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(tune, "clock", made)
    monkeypatch.setattr(tune, "_doubtful", {})
    return made


@pytest.fixture
def scope(request: pytest.FixtureRequest) -> str:
    return request.node.name


def remembered(scope: str) -> Tuner:
    """A tuner as in another process, which reads choices from disk."""
    tune._doubtful.clear()
    return Tuner(scope)


def test_the_fastest_is_chosen_and_remembered(clock: Clock, scope: str) -> None:
    tuner = Tuner(scope)
    assert tuner.choose("k", {"a": clock.takes(2e-3), "b": clock.takes(1e-3)}) == "b" and tuner.settled
    tuner.save()
    runs = clock.runs
    assert remembered(scope).choose("k", {"a": clock.takes(1e-3), "b": clock.takes(2e-3)}) == "b"
    assert clock.runs == runs


def test_rounds_that_disagree_choose_for_this_process_only(clock: Clock, scope: str) -> None:
    tuner = Tuner(scope)
    candidates = {"a": clock.takes(SLOW, SLOW, 3 * SLOW), "b": clock.takes(SLOW, 2 * SLOW, 1.5 * SLOW)}
    assert tuner.choose("k", candidates) == "a" and not tuner.settled
    tuner.save()
    runs = clock.runs
    again = Tuner(scope)
    assert again.choose("k", candidates) == "a" and not again.settled and clock.runs == runs
    quiet = remembered(scope)
    assert quiet.choose("k", {"a": clock.takes(3 * SLOW), "b": clock.takes(SLOW)}) == "b" and quiet.settled


def test_where_rounds_disagree_more_of_them_decide(clock: Clock, scope: str) -> None:
    tuner = Tuner(scope)
    b = clock.takes(0.0, 5e-3, 1e-3)  # disturbed once by other work
    assert tuner.choose("k", {"a": clock.takes(2e-3), "b": b}) == "b" and tuner.settled


def test_rounds_without_end_are_not_tried(clock: Clock, scope: str) -> None:
    noise = [1e-3, 3e-3, 2e-3, 5e-3, 1.5e-3, 4e-3] * 40
    Tuner(scope).choose("k", {"a": clock.takes(0.0, *noise), "b": clock.takes(0.0, *noise[1::2], *noise)})
    assert clock.now < tune.MOST_SECONDS + 20e-3


def test_a_round_that_finds_both_equal_agrees(clock: Clock, scope: str) -> None:
    tuner = Tuner(scope)
    close = 1.04 * SLOW
    assert tuner.choose("k", {"a": clock.takes(SLOW, 0.9 * SLOW, close), "b": clock.takes(SLOW)}) == "a"
    assert tuner.settled


def test_one_disturbed_run_does_not_matter(clock: Clock, scope: str) -> None:
    tuner = Tuner(scope)
    assert tuner.choose("k", {"a": clock.takes(0.0, 5e-3, 1e-4), "b": clock.takes(2e-4)}) == "a" and tuner.settled


@pytest.mark.parametrize("seconds", [1e-5, 1e-4, 1e-3, 1.9e-3])
def test_a_key_costs_little(clock: Clock, scope: str, seconds: float) -> None:
    Tuner(scope).choose("k", {n: clock.takes(0.0, seconds) for n in ("a", "b", "c")})
    assert clock.now < 25e-3


def test_a_candidate_that_raises_is_out(clock: Clock, scope: str) -> None:
    def broken() -> None:
        raise RuntimeError("not with these arguments")

    assert Tuner(scope).choose("k", {"a": broken, "b": clock.takes(1.0)}) == "b"


def test_what_never_runs_is_given_back_with_the_reasons(clock: Clock, scope: str) -> None:
    def too_big() -> None:
        raise torch.OutOfMemoryError("Tried to allocate 1 GiB.\nGPU 0 has 0 free.")

    with pytest.raises(Decline, match=r"no candidate for k ran: a: OutOfMemoryError: Tried to allocate 1 GiB.; b: O"):
        Tuner(scope).choose("k", {"a": too_big, "b": too_big})


def test_a_single_candidate_is_not_measured(clock: Clock, scope: str) -> None:
    assert Tuner(scope).choose("k", {"a": clock.takes(1.0)}) == "a" and clock.runs == 0
