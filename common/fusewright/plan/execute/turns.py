"""Decides who runs whole calls, while eager runs some of them *instead* of what is compiled: times in, verdict out.

A round is a few compiled calls, then as many of eager. Its times are those of calls or, in training, of steps: from the start
of a call to the start of the next one, with backward and optimizer in between. A step may call the function several times, and
backward then comes after the last of these calls. So steps are compared by the sum of a round's times, whose number is a
multiple of 1, 2, 3, 4 and 6. The best round of each side counts: a pause (evaluation, a saved checkpoint) spoils a round, not
the verdict.

Eager's part ends early if it takes far longer than as many compiled calls of the round in a row. The next round waits until the
excess of eager's time, with the cost of comparing the graphs alone, is one in SHARE of all calls. One call of eager cannot be
stopped. So before eager's part the figures of the call's own graphs (`compared.py`) tell what it will take: there is none if it
cannot win, or cost too much so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fusewright.plan.execute.compared import SHARE, SLOWER, TINY, Tally, Verdict
from fusewright.plan.execute.compared import Trial as GraphTrial

FIRST = 27
"""The call that the first round begins with: after the first comparisons of single graphs, of which many save the round."""

CALLS, STEPS = 4, 12
"""Times of each side in a round."""

MANY = 16
"""The same for calls that take less than TINY: eager's code, which has not run for some calls, is slow in the first few of them."""

SPARE = 5e-4
"""Seconds of eager's excess that are granted in all, however short the calls: compiling took hundreds of times as long."""

GAP = 13
"""Calls between rounds at least: a disturbance lasts for several calls. Rounds begin at different calls of a step then."""

LONGER = 2
"""Calls by which each gap of steps is longer than the one before: what comes as often as rounds do meets another part of each."""

ROUNDS = 6
"""The best of so many rounds decide: on a busy machine, one round tells little."""

FEW_ROUNDS, FASTER = 2, 0.9
"""So many are enough if what is compiled is this much faster, its calls alone too; one more if eager's part ended early in all, as
a cold one may, and if eager is this much faster in its worst round than what is compiled in its best one, and all were even."""

EVEN = 1.08
"""The highest ratio of mean to median of a round's steps if each has a backward: one more in a round then makes less of a
difference than FASTER."""

LESS = 0.8
"""There is no round if what is compiled takes less than this share of eager's time for the graphs alone. The margin is there
because few of eager's times are known."""

AHEAD, ESTIMATED = 3.2, 1.4
"""Eager's excess at once, in compiled calls, at most: less than the share of the first hundred. An estimate counts ESTIMATED
times."""

UNKNOWN = 50.0
"""The assumed excess of one call of eager, in compiled calls, if its graphs were never measured."""

STOPPED, COLD = 1.4, 3.0
"""Eager's part ends once it takes STOPPED times as long as the longest of as many compiled calls in a row; after its first call,
which warms up, only if that took COLD times as long."""

TYPICAL = 0.6
"""The least share of the mean time from call to call that the best compiled steps of a round take: if backward comes once for
many calls, most rounds have none."""


@dataclass(eq=False)
class Trial:
    """The comparison for calls with arguments of about the same sizes.

    The current round: `times` in seconds, `begun` is when the current call or step began, `first` and `latest` when the first
    and the latest one of the round did, with the number of the call, and `tallies` are the graphs of its compiled calls. All
    rounds: `best` are the figures of the best ones, `won` counts those in which eager was faster, `alone` are the fastest
    calls, without what follows them, and `worst` is eager's slowest round. `even` tells whether the steps of each round took
    about the same time, and `longest` are the shortest of the rounds' longest ones. Costs in compiled calls: `costs` are the
    excess of eager's time in each round, and `shadows` what comparing the graphs alone took.
    """

    steps: bool = False
    verdict: Verdict | None = None
    calls: int = 0
    next: int = FIRST
    rounds: int = 0
    won: int = 0
    begun: float | None = None
    first: tuple[float, int] = (0.0, 0)
    latest: tuple[float, int] = (0.0, 0)
    times: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    shadows: float = 0.0
    best: dict[Verdict, float] = field(default_factory=dict)
    alone: dict[Verdict, float] = field(default_factory=dict)
    worst: float = 0.0
    even: bool = True
    longest: dict[Verdict, float] = field(default_factory=dict)
    tallies: list[Tally] = field(default_factory=list)

    @property
    def length(self) -> int:
        if self.steps:
            return STEPS
        return MANY if self.times and self.times[0] < TINY else CALLS

    def due(self) -> bool:
        """Whether the latest call is part of a round."""
        return self.verdict is None and self.calls >= self.next

    def who(self) -> Verdict:
        """Who runs the next call of the round."""
        return "plan" if len(self.times) < self.length else "eager"

    def edge(self) -> bool:
        """Whether the side changes with the call that begins now, or the round ends."""
        return (len(self.times) + (self.begun is not None)) % self.length == 0

    def begin(self, now: float) -> None:
        """Note the time at which a call of a round begins."""
        self.begun, self.latest = now, (now, self.calls)
        if not self.first[1]:
            self.first = self.latest

    def ran(self, who: Verdict, seconds: float) -> None:
        """Note the time of a call alone."""
        self.alone[who] = min(self.alone.get(who, math.inf), seconds)

    def add(self, seconds: float) -> None:
        """Count a time of the round. Decide after the last one of enough rounds."""
        self.times.append(seconds)
        eager = self.times[self.length :]
        if len(self.times) == self.length:
            self._weigh()
        elif len(eager) == self.length:
            self._end(eager, self._figure(eager))
        elif eager and self._is_too_long(eager):
            self._end(eager, math.inf)

    def drop(self) -> None:
        """Give the round up."""
        self.times.clear()
        self.tallies.clear()
        self.begun, self.next = None, self.calls + GAP + (LONGER * self.rounds if self.steps else 0)

    def _weigh(self) -> None:
        """Before eager's part: leave it out if eager cannot be faster, and put it off if it may cost too much."""
        compiled, calls = self._figure(self.times), max(1, len(self.tallies))
        plan, least, about = (sum(getattr(t, name) for t in self.tallies) / calls for name in ("plan", "least", "about"))
        if compiled < LESS * least:
            self.best, self.verdict = {"plan": compiled, "eager": least}, "plan"
            self.drop()
            return
        self.shadows = sum(t.spent * t.usual() for t in self._graphs()) / max(compiled, 1e-9)
        more = max(0.0, about - plan) / max(compiled, 1e-9) if about < math.inf else UNKNOWN  # of one call
        cost = ESTIMATED * more * (1 if 1 + more > COLD else 2 if 1 + more > STOPPED else self.length)
        due = self._spent() + max(self.costs, default=cost)
        if due > max(AHEAD, self.calls / SHARE) and due * compiled > SPARE:
            self.drop()
            self.next = max(self.next, min(math.ceil(SHARE * due) - self.length, 2 * self.calls))  # more may be known until then

    def _graphs(self) -> set[GraphTrial]:
        """The comparisons of the round's graphs alone."""
        return {g for t in self.tallies for g in t.trials}

    def _spent(self) -> float:
        """The cost of all comparisons so far, in compiled calls."""
        return self.shadows + sum(self.costs)

    def _is_too_long(self, eager: list[float]) -> bool:
        """Whether eager's part ends before it is complete."""
        longest, usual = self._longest(len(eager)), sum(self.times[: self.length]) / self.length
        if sum(eager) - longest + self._spent() * usual <= SPARE:
            return False
        return sum(eager) > (COLD if len(eager) == 1 else STOPPED) * longest or self._spends(eager)

    def _longest(self, count: int) -> float:
        """Seconds of so many compiled calls in a row, wherever in a step they begin."""
        return max(sum(self.times[k : k + count]) for k in range(self.length - count + 1))

    def _spends(self, eager: list[float]) -> bool:
        """Whether eager's part costs more than it may if one more call is as slow, by chance or a wrong estimate."""
        return self._cost(eager) * (1 + 1 / len(eager)) > max(AHEAD, self.calls / SHARE) - self._spent()

    def _cost(self, eager: list[float]) -> float:
        """The excess of eager's time in its part, in compiled calls of the round: on a busy machine, both sides take longer."""
        usual = sum(self.times[: self.length]) / self.length
        return max(0.0, sum(eager) / max(usual, 1e-9) - len(eager))  # clocks may stand still

    def _figure(self, times: list[float]) -> float:
        """Of one side of a round, in seconds per call: the mean of steps, or the fastest of calls, the first of which warms up."""
        return sum(times) / len(times) if self.steps else min(times[1:])

    def _end(self, eager: list[float], figure: float) -> None:
        compiled = self._figure(self.times[: self.length])
        plan = min(self.best.get("plan", math.inf), compiled)
        self.best = {"plan": plan, "eager": min(self.best.get("eager", math.inf), figure)}
        self.won, self.worst = self.won + (figure < compiled), max(self.worst, figure)
        sides: dict[Verdict, list[float]] = {"plan": self.times[: self.length], "eager": eager}
        self.longest = {who: min(self.longest.get(who, math.inf), max(times)) for who, times in sides.items()}
        self.even = self.even and (not self.steps or max(map(_mean_to_median, sides.values())) <= EVEN)
        self.costs.append(self._cost(eager))
        for graph in self._graphs():
            graph.around += self.costs[-1]
        self.rounds += 1
        self.drop()
        due = self._spent() + max(self.costs)
        if due * compiled > SPARE:
            self.next = max(self.next, math.ceil(SHARE * due))
        if self.rounds >= FEW_ROUNDS + math.isinf(self.best["eager"]) and plan < FASTER * self.best["eager"] and self._agrees():
            self.verdict = "plan"
        elif self.rounds > FEW_ROUNDS and self.even and self.worst < FASTER * plan and self._loses():
            self.verdict = "eager"
        elif self.rounds >= ROUNDS:
            self.verdict = "eager" if self._loses() else "plan"

    def _agrees(self) -> bool:
        """Whether calls alone do not tell the contrary of steps: what disturbs eager's parts of two rounds is no verdict."""
        return not self.steps or self.alone.get("plan", 0.0) <= self.alone.get("eager", math.inf)

    def _loses(self) -> bool:
        """Whether eager is faster. Steps may wait for anything, so eager must win most rounds of them, and by its calls alone."""
        if self.best["plan"] <= SLOWER * self.best["eager"]:
            return False
        if not self.steps:
            return True
        (began, first), (ended, latest) = self.first, self.latest
        typical = self.best["plan"] * (latest - first) >= TYPICAL * (ended - began)
        alone = self.alone.get("plan", 0.0) > self.alone.get("eager", math.inf)
        margin = 1.0 if self.won == self.rounds else SLOWER  # a pause in some steps makes their ratio close to one
        backward = self.even or self.longest["plan"] > margin * self.longest["eager"]  # else sides may differ in how many they have
        return typical and alone and backward and 2 * self.won > self.rounds


def _mean_to_median(times: list[float]) -> float:
    return sum(times) / len(times) / max(sorted(times)[len(times) // 2], 1e-9)
