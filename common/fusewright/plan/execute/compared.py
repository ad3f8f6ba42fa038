"""Never slower than eager, by measurement: a plan is compared with eager in its first calls, and dropped if it is slower.

Callers always get the plan's results until a verdict: eager runs in addition, as a shadow (`shadow.py`) whose results are
dropped. Shadows are stopped after STOPPED times the plan's time, and spread so that their time, with that of comparing whole
calls (`turns.py`), is at most one in SHARE of the plan's. A pair is the time of a shadow and of the plan's call after it, which
favours the plan: its inputs are then in the cache. The plan stays after WINS pairs in which it is not slower, unless its best call
is; eager replaces it after LOSSES pairs in which it is, or after WINS if none of its calls comes as near eager's as they differ
among themselves: once it lost, more of them are timed. What a shadow runs for the first time warms up, and is no pair: if it is
stopped there, the next one comes further. Forward and backward have one verdict, because kernels of one half rely on the layout of
what the other half hands over; a shadow of each makes a pair.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import filelock
import torch
from torch.fx import Graph, GraphModule

from fusewright.cache import store
from fusewright.graph.spec import extent
from fusewright.interface import HOST, Phase
from fusewright.plan.execute.shadow import Eager, TooLong, Unfit, why_not
from fusewright.plan.ir import Run

log = logging.getLogger("fusewright")

clock = time.perf_counter

Verdict = Literal["plan", "eager"]

WARM_UP = 3
"""The first call of the plan that is timed: before it, one is checked and one recorded."""

TIMED = 3
"""Timed calls of the plan after which eager's limit is known. Eager warms up in the call after them."""

SAMPLED = 4
"""On the host, one call in this many is timed: reading the clock costs little there. The device is not waited for."""

SHARE = 20
"""Calls of the plan in which shadows may take the time of one, and calls from pair to pair at least: a disturbance lasts for
several calls, and plans of layers are recorded one by one."""

AHEAD = 5.0
"""The cost of shadows at once, in calls of the plan, at most: the share of the first hundred calls."""

WINS, LOSSES = 2, 5

SLOWER, CLEARLY = 1.03, 1.1
"""How many times eager's seconds a plan takes that loses a pair; and its best call, if two such pairs are enough, of eager's
worst, at least: with more noise as many as its usual call takes of its best."""

FEWEST, MANY = 9, 40
"""Timed calls of the plan without which two pairs are not enough: of a few, all may be disturbed, and both of eager not. Until
there are `MANY`, a plan that lost a pair is timed in some calls without eager, on a device too."""

STOPPED = 1.5
"""Eager is stopped after this many times the plan's usual time: it has lost, and would cost too much."""

TINY = 2e-4
"""Seconds below which one call of eager among many of a plan may take up to twice what it takes in a row."""

MOSTLY = 0.9
"""Eager that was stopped has lost if calls that had run before took at least this share of the limit: it may come a little
further by chance."""

MOST_CLASSES = 16
"""Number of size classes that are measured; all others run the plan."""

MOST_STORED = 4096
"""Verdicts kept on disk for one device."""


@dataclass
class Times:
    """Of calls of a plan."""

    calls: int = 0
    best: float = math.inf
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=15))

    def add(self, seconds: float) -> None:
        self.calls += 1
        self.best = min(self.best, seconds)
        self.latest.append(seconds)

    def usual(self) -> float:
        """The median of the latest calls: on a busy machine some take many times longer."""
        return sorted(self.latest)[len(self.latest) // 2] if self.latest else 0.0


@dataclass(frozen=True)
class Pair:
    """Seconds of eager and of the plan in one call. If eager was `stopped`, its seconds are a lower bound and `whole` is an
    estimate. `cost` is what the call took longer; `cold`: eager ran something for the first time."""

    eager: float = 0.0
    plan: float = 0.0
    cost: float = 0.0
    whole: float = 0.0
    stopped: bool = False
    cold: bool = False

    def __add__(self, other: Pair) -> Pair:
        both = (self.eager + other.eager, self.plan + other.plan, self.cost + other.cost, self.whole + other.whole)
        return Pair(*both, self.stopped or other.stopped, self.cold or other.cold)


@dataclass(frozen=True)
class Ran:
    """A run of a shadow: when it began, after preparations, and its seconds, which are infinite if it was stopped. In that case
    also the part of its calls that it has run, and the seconds of those among them that had run before."""

    begin: float
    seconds: float
    done: float = 1.0
    warm: float = math.inf


@dataclass(eq=False)
class Trial:
    """The comparison for one class of sizes, which are all the same if `alike`. `spent` and `cheapest` are costs of pairs in calls
    of the plan, `around` is what comparing whole calls (`turns.py`) cost; `forward` is the first half of a pair whose backward is
    to come. `done` is the part of eager's calls that has run before. `plan` and `eager` are the least seconds of pairs, `eagers`
    all of eager; `whole` is an estimate where eager was always stopped. Only a `sure` verdict is stored."""

    sizes: Hashable = ()
    alike: bool = True
    verdict: Verdict | None = None
    sure: bool = False
    calls: int = 0
    next: int = WARM_UP
    won: int = 0
    lost: int = 0
    spent: float = 0.0
    cheapest: float = math.inf
    around: float = 0.0
    forward: Pair | None = None
    plan: float = math.inf
    eager: float = math.inf
    eagers: list[float] = field(default_factory=list)
    whole: float = math.inf
    done: dict[Phase, float] = field(default_factory=lambda: defaultdict(float))
    times: dict[Phase, Times] = field(default_factory=lambda: defaultdict(Times))

    def untimed(self, phase: Phase) -> bool:
        """Whether too little is known to limit eager."""
        return len(self.times[phase].latest) < TIMED

    def doubted(self, phase: Phase) -> bool:
        """Whether the plan lost a pair, and too little is known of its own times to tell noise."""
        return self.lost > 0 and self.times[phase].calls < MANY

    def usual(self) -> float:
        """Seconds that the plan takes."""
        return sum(t.usual() for t in self.times.values())

    def limit(self) -> float:
        """Seconds after which eager is stopped."""
        return STOPPED * self.usual() - (self.forward.eager if self.forward is not None else 0.0)

    def add(self, pair: Pair) -> None:
        """Count a pair; decide, or choose the call of the next one."""
        self.whole = min(self.whole, pair.whole)
        cost = pair.cost / max(self.usual(), 1e-9)  # clocks may stand still
        self.spent, self.cheapest = self.spent + cost, min(self.cheapest, cost)
        due = self.spent + self.around + max(self.cheapest, min(self.spent, STOPPED))
        self.next = max(self.calls + SHARE, math.ceil(SHARE * due) if due > AHEAD else 0)
        if pair.cold:
            return
        self.plan, self.eager = min(self.plan, pair.plan), min(self.eager, pair.eager)
        self.eagers.append(pair.eager)
        slower = pair.plan > SLOWER * pair.eager
        self.won += not slower
        self.lost += slower and not pair.stopped  # one that was stopped in a call that is slow anyway tells nothing
        if self.won >= WINS and not self._behind(0):
            self.verdict, self.sure = "plan", True
        elif self.lost >= LOSSES or self._clear():
            self.sure = self._behind(len(self.eagers) // LOSSES)  # one call of eager may be fast by chance
            self.verdict = "eager" if self.sure else "plan"
        elif self.won >= LOSSES:
            self.verdict = "plan"

    def _fastest(self) -> float:
        """Seconds of the plan's best call, of pairs alone if sizes differ."""
        return min(self.plan, sum(t.best for t in self.times.values()) if self.alike else math.inf)

    def _behind(self, but: int) -> bool:
        """Whether the plan's best call is slower than eager's best but so many: noise only adds time, to calls of either."""
        return self._fastest() > SLOWER * sorted(self.eagers)[but]

    def _clear(self) -> bool:
        """Whether two pairs are enough: the plan's best of many calls is slower than all of eager's by more than noise makes out
        among the plan's own. Not in the first calls, in which plans of layers are recorded one by one."""
        few = self.calls < SHARE * LOSSES or any(t.calls < FEWEST for t in self.times.values())
        if few or not self.alike or self.lost < WINS:
            return False
        fastest = self._fastest()
        noise = self.usual() / max(sum(t.best for t in self.times.values()), 1e-12)
        return fastest > max(CLEARLY, noise) * max(self.eagers)

    def end(self) -> None:
        """Keep the plan, though it is not known to be faster."""
        self.verdict = self.verdict or "plan"


class Half:
    """A graph that is compared: all of inference, or a forward or backward. `sizes` maps the arguments of a call to a class, None
    if there is only one. After a verdict for the plan, `eager` is None. `changes` tells how often constants were prepared again."""

    def __init__(self, phase: Phase, eager: Eager | None, sizes: Callable[[list[Any]], Hashable] | None = None) -> None:
        self.phase, self.sizes = phase, sizes
        self.changes: Callable[[], int] = lambda: 0
        self.eager = eager
        self.thread: int | None = None
        self._wait: Callable[[], None] | None = None

    def waiting(self, args: Sequence[Any]) -> Callable[[], None]:
        """A function that waits for the graph's devices, given the arguments of any call; `at_once` on the host."""
        if self._wait is None:
            self._wait = waiting(devices(args))
        return self._wait


def at_once() -> None:
    """Wait for nothing."""


def devices(values: Iterable[Any]) -> list[torch.device]:
    """The devices of tensors that are not on the host."""
    found = (v.device for v in values if isinstance(v, torch.Tensor))
    return list(dict.fromkeys(d for d in found if d.type != HOST))


def waiting(found: Iterable[torch.device]) -> Callable[[], None]:
    """A function that waits for these devices; `at_once` if there are none."""
    waits = [_waiting(d) for d in found]
    if len(waits) < 2:
        return waits[0] if waits else at_once

    def wait() -> None:
        for one in waits:
            one()

    return wait


def _waiting(device: torch.device) -> Callable[[], None]:
    """A function that waits for a device, which modules of a single device do not name."""
    wait = torch.get_device_module(device).synchronize
    return partial(wait, device) if inspect.signature(wait).parameters else partial(wait)


class Turn:
    """Who measures: two at a time, a shadow and a round of whole calls (`broken.py`) for example, would disturb each other."""

    def __init__(self) -> None:
        self._who: object = None
        self._until = 0.0
        self._lock = threading.Lock()

    def take(self, who: object, seconds: float = math.inf) -> bool:
        """Begin, or go on; return False if another measures. Who does not go on for so many `seconds` has left."""
        with self._lock:
            now = time.monotonic()
            if self._who is not None and self._who is not who and now < self._until:
                return False
            self._who, self._until = who, now + seconds
            return True

    def leave(self, who: object) -> None:
        with self._lock:
            if self._who is who:
                self._who = None


turn = Turn()
"""Of all that measure in this process."""


class Tally:
    """Seconds that the graphs run by this thread take: the plans, and eager at `least` and `about`, which is infinite if it was
    never measured. Backwards are counted with their forwards. `trials` are the graphs' own."""

    def __init__(self) -> None:
        self.plan = self.least = self.about = 0.0
        self.trials = set[Trial]()
        self._thread = threading.get_ident()

    def add(self, trial: Trial) -> None:
        if self._thread == threading.get_ident():
            self.trials.add(trial)
            known, tiny = trial.eager < math.inf, 2 if trial.eager < TINY else 1
            self.plan += trial.plan if known else 0.0
            self.least += trial.eager / tiny if known else 0.0
            self.about += trial.whole / (tiny if trial.whole <= STOPPED * trial.plan else 1)


tally: Tally | None = None
"""Of the call in which graphs are counted now."""


class Comparison:
    """The graphs that one traced graph becomes: one for inference, or a forward and its backward.

    `may` tells whether measuring is allowed here and now (not while other processes wait or the device's work is being
    captured); `name` is the backend's, `scope` is part of a stored verdict's key.
    """

    def __init__(self, name: str, scope: str, persist: bool, may: Callable[[], bool]) -> None:
        self.name, self.scope, self._persist, self.may = name, f"{scope}|never_slower", persist, may
        self._trials: dict[Hashable, Trial] = {}
        self._known: dict[str, str] = {}
        self._text = ""
        self._alike = True

    def half(self, gm: GraphModule, phase: Phase) -> Half | None:
        """A graph that is about to be compiled, for `add`. It has no eager if its plan stays in any case. None if nothing is to
        be compared."""
        why = why_not(gm.graph)
        if phase == "backward":
            trial = self._trials.get(())
            if trial is not None and why:
                trial.end()
            return Half(phase, Eager(gm)) if trial is not None and trial.verdict != "plan" else None
        self._trials = {}
        if why:
            log.info("%s: a graph is not compared with eager: %s", self.name, why)
            self._trials[()] = Trial(verdict="plan")
            return Half(phase, None)
        by_size = classes(gm.graph)
        self._begin(text_of(gm.graph), by_size is None)
        if by_size is not None and phase == "infer":
            return Half(phase, Eager(gm), by_size)
        return Half(phase, Eager(gm) if self._trial(()).verdict != "plan" else None)

    def _begin(self, text: str, alike: bool) -> None:
        """Compare a graph of this text, of which verdicts may be known."""
        self._text, self._alike = text, alike
        known = store.read_choices().get(self.scope) if self._persist else None
        self._known = known if isinstance(known, dict) else {}

    def without_constants(self, half: Half, gm: GraphModule) -> Callable[[Run], Run]:
        """What `add` is, for a plan of the same graph that prepares nothing, with its own verdict. `gm` is not compiled yet."""
        other = Comparison(self.name, f"{self.scope}|without constants", self._persist, self.may)
        other._begin(self._text, self._alike)
        return partial(other.add, Half(half.phase, half.eager or Eager(gm), half.sizes))

    def add(self, half: Half, plan: Run) -> Run:
        """Return `plan`, or what replaces it by eager if that is faster."""
        if half.sizes is not None:
            return partial(self._by_size, half, half.sizes, plan)
        trial = self._trial(())
        final: Run | None = None

        def call(args: list[Any]) -> Any:
            nonlocal final
            if tally is not None and half.phase != "backward":
                tally.add(trial)
            if final is not None:
                return final(args)
            if trial.verdict is None:
                return self._call(half, plan, trial, args)
            if trial.verdict == "eager" and half.eager is not None:
                final = half.eager.run
            else:
                final, half.eager = plan, None
            return final(args)

        return call

    def _by_size(self, half: Half, sizes: Callable[[list[Any]], Hashable], plan: Run, args: list[Any]) -> Any:
        found = sizes(args)
        if found not in self._trials and len(self._trials) >= MOST_CLASSES:
            if tally is not None:
                tally.add(Trial())
            return plan(args)
        trial = self._trial(found)
        if tally is not None:
            tally.add(trial)
        if trial.verdict == "plan":
            return plan(args)
        if trial.verdict == "eager" and half.eager is not None:
            return half.eager.run(args)
        return self._call(half, plan, trial, args)

    def _call(self, half: Half, plan: Run, trial: Trial, args: list[Any]) -> Any:
        """A call before the verdict."""
        if half.thread != threading.get_ident():
            if half.thread is not None:  # times and random numbers of threads would mix
                trial.end()
                return plan(args)
            half.thread = threading.get_ident()
        if half.phase != "backward":
            trial.calls += 1
            due = trial.calls >= trial.next and trial.forward is None
        else:
            due = trial.forward is not None or (trial.calls >= trial.next and trial.untimed("backward"))
        if due or trial.calls % SAMPLED == 0:
            return self._measured(half, plan, trial, args, due)
        return plan(args)

    def _measured(self, half: Half, plan: Run, trial: Trial, args: list[Any], due: bool) -> Any:
        """A call that is timed, beside eager if that is `due`."""
        if (due or trial.doubted(half.phase)) and self.may() and turn.take(me := object()):
            try:
                return self._compare(half, plan, trial, args) if due else self._alone(half, plan, trial, args)
            finally:
                turn.leave(me)
        if half.waiting(args) is not at_once or trial.calls < WARM_UP:  # a device would have to be waited for
            return plan(args)
        return self._timed(half, plan, trial, args, at_once)

    def _timed(self, half: Half, plan: Run, trial: Trial, args: list[Any], wait: Callable[[], None]) -> Any:
        start = clock()
        result = plan(args)
        wait()
        trial.times[half.phase].add(clock() - start)
        return result

    def _alone(self, half: Half, plan: Run, trial: Trial, args: list[Any]) -> Any:
        """The plan in a call without eager, which tells how much its times differ."""
        wait = half.waiting(args)
        wait()
        return self._timed(half, plan, trial, args, wait)

    def _compare(self, half: Half, plan: Run, trial: Trial, args: list[Any]) -> Any:
        """Run the shadow, then the plan."""
        if half.eager is None:  # another thread has ended the comparison
            return plan(args)
        wait = half.waiting(args)
        wait()
        if trial.untimed(half.phase):
            return self._timed(half, plan, trial, args, wait)
        trial.next, limit = trial.calls + SHARE, trial.limit()  # unless this call completes a pair
        before = trial.done[half.phase]
        ran = self._shadow(half.eager, args, limit, wait, before)
        begin = clock()
        result = plan(args)
        wait()
        end = clock()
        trial.times[half.phase].add(end - begin)
        if ran is None:
            trial.end()
            return result
        cold = before < 1 and (ran.done == 1 or ran.warm < MOSTLY * limit)
        trial.done[half.phase] = max(ran.done, before)
        eager, stopped = min(ran.seconds, limit), ran.seconds > limit
        pair = (trial.forward or Pair()) + Pair(eager, end - begin, begin - ran.begin, max(eager, 0.0) / ran.done, stopped, cold)
        trial.forward = None
        if half.phase == "forward":
            if not pair.stopped:
                trial.forward = pair
                return result
            rest = trial.times["backward"].usual()  # which need not be measured
            pair += Pair(plan=rest, whole=rest * pair.whole / max(pair.plan, 1e-9))
        trial.add(pair)
        if trial.verdict is not None:
            self._tell(trial, half.changes())
        return result

    def _shadow(
        self, eager: Eager, args: list[Any], limit: float, wait: Callable[[], None], before: float
    ) -> Ran | None:
        """Run eager; None if it cannot run, which ends the comparison."""
        begin = clock()
        try:
            eager.build(args)
            begin = clock()
            return Ran(begin, eager.seconds(args, limit, wait, before))
        except TooLong as e:
            wait()
            return Ran(begin, math.inf, e.done, e.warm)
        except Unfit as e:
            why = str(e)
        except Exception as e:  # eager may raise anything; a mistake of the caller is reported by the plan
            why = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
            if isinstance(e, torch.OutOfMemoryError):
                torch.accelerator.empty_cache()
        log.info("%s: a graph is no longer compared with eager: %s", self.name, why)
        return None

    def _trial(self, sizes: Hashable) -> Trial:
        """The comparison for a class of sizes, with what is known of it."""
        if sizes not in self._trials:
            made = self._trials[sizes] = Trial(sizes, self._alike)
            told = _told(self._known.get(self._key(sizes)))
            if told is not None:
                made.verdict, made.plan, made.eager, made.whole = told
        return self._trials[sizes]

    def _key(self, sizes: Hashable) -> str:
        return hashlib.sha256(f"{self._text}\n{sizes}".encode()).hexdigest()[:32]

    def _tell(self, trial: Trial, changes: int) -> None:
        plan, eager = trial.plan * 1e3, trial.eager * 1e3
        log.info("%s: plan %.3f ms, eager %.3f ms: %s", self.name, plan, eager, trial.verdict)
        if trial.verdict == "eager":
            log.warning(
                "fusewright: %s: a graph takes %.3f ms compiled and %.3f ms in eager; eager runs it from now on",
                self.name, plan, eager,
            )  # fmt: skip
        if trial.sure and self._persist and changes * SHARE <= trial.calls:  # else it is about these changes, not about the graph
            self._remember(self._key(trial.sizes), f"{trial.verdict} {trial.plan:.3g} {trial.eager:.3g} {trial.whole:.3g}")

    def _remember(self, key: str, verdict: str) -> None:
        def add(everything: dict[str, Any]) -> None:
            held = everything.get(self.scope)
            others = list(held.items())[-MOST_STORED:] if isinstance(held, dict) else []
            everything[self.scope] = {**dict(others), key: verdict}

        try:
            store.write_choices(add)
        except (OSError, filelock.Timeout) as e:
            log.info("a comparison with eager was not saved: %s", e)


def _told(text: object) -> tuple[Verdict, float, float, float] | None:
    """A stored verdict with its figures; None for anything else."""
    verdict, *figures = text.split() if isinstance(text, str) else ("",)
    try:
        plan, eager, whole = map(float, figures)
    except ValueError:
        return None
    return ("eager" if verdict == "eager" else "plan", plan, eager, whole) if verdict in ("eager", "plan") else None


def text_of(graph: Graph) -> str:
    """The key of a verdict: the calls of a traced graph, and the types and layouts of its values."""
    return "\n".join(
        f"{n.op} {n.name} {n.target} {n.args} {n.kwargs} {_metadata(n.meta.get('val'))}" for n in graph.nodes
    )


def _metadata(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        stride = _sizes(value.stride()) if value.layout is torch.strided else value.layout
        return f"{value.dtype} {_sizes(value.shape)} {stride} {value.device}"
    if isinstance(value, torch.SymInt):
        return str(extent(value))
    return str([_metadata(v) for v in value]) if isinstance(value, tuple | list) else str(value)


def _sizes(sizes: Sequence[int | torch.SymInt]) -> str:
    """Write sizes; torch's own text of a formula is an order of magnitude slower."""
    return f"({', '.join(str(extent(s)) for s in sizes)})"


def classes(graph: Graph) -> Callable[[list[Any]], Hashable] | None:
    """Map a call to its size class: for each symbolic input size, its power of two. None if all sizes are static. The ragged size
    of a nested tensor is no number, and has no class."""
    numbers: list[int] = []
    shapes: list[tuple[int, int]] = []
    for k, n in enumerate(graph.find_nodes(op="placeholder")):
        value = n.meta.get("val")
        if isinstance(value, torch.SymInt):
            numbers.append(k)
        elif isinstance(value, torch.Tensor):
            shapes += [(k, d) for d, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
    if not numbers and not shapes:
        return None
    return lambda args: (
        *(args[k].bit_length() for k in numbers if isinstance(args[k], int)), *(args[k].shape[d].bit_length() for k, d in shapes)
    )  # fmt: skip
