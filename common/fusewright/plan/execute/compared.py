"""Never slower than eager, by measurement: some of a graph's first calls run in eager, and a plan that is slower is dropped.

Every call runs once, by the plan or in eager, so random numbers are drawn and inputs written as the program expects. Calls
alternate until one side has won LEAD more turns than the other; a plan loses a turn if it takes more than SLOWER times eager's
time. Without such a lead the plan stays and no verdict is stored. Forward decides for both halves of a training step: a
backward runs as the latest forward did, and its time counts as part of it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import filelock
import torch
from torch.fx import Graph, GraphModule

from fusewright.cache import store
from fusewright.interface import HOST, Phase
from fusewright.plan.ir import Run

log = logging.getLogger("fusewright")

clock = time.perf_counter

Way = Literal["plan", "eager"]

SETTLED = 3
"""First calls that always run the plan: the first is checked, the second recorded."""

LEAD = 3
"""Lead in turns that decides."""

MOST_TURNS = 7

SLOWER = 1.03

BUDGET = 5.0
"""Limit on the extra time of eager's calls, in calls of the plan: 5% of a hundred. Two always run: a warm-up, which does not
count, and one to measure eager."""

MOST_CLASSES = 16
"""Number of size classes that are measured; all others run the plan."""


@dataclass
class Trial:
    """The comparison for one class of sizes. `lost` and `won` are turns of the plan, `spent` the extra time of eager's calls.
    Only a `sure` verdict is stored."""

    verdict: Way | None = None
    sure: bool = False
    calls: int = 0
    won: int = 0
    lost: int = 0
    spent: float = 0.0
    best: dict[Way, float] = field(default_factory=dict)
    _turn: dict[Way, _Sample] = field(default_factory=dict)

    def way(self) -> tuple[Way, bool]:
        """Which side runs the next call, and whether to measure it."""
        if self.verdict is not None:
            return self.verdict, False
        self.calls += 1
        after = self.calls - SETTLED
        if after <= 0:
            return "plan", False
        return ("eager" if after % 2 else "plan"), after > 1

    def add(self, sample: _Sample) -> None:
        """Count a measured call; a turn is one call of each side."""
        self._turn[sample.way] = sample
        self.best[sample.way] = min(sample.seconds, self.best.get(sample.way, sample.seconds))
        if len(self._turn) < 2:
            return
        plan, eager = self._turn["plan"], self._turn["eager"]
        self._turn = {}
        if plan.phases != eager.phases:  # only one of them ran a backward
            return
        self.spent += max(0.0, eager.seconds - plan.seconds)
        slower = plan.seconds > SLOWER * eager.seconds
        self.lost, self.won = self.lost + slower, self.won + (not slower)
        self._decide()

    def _decide(self) -> None:
        lead = self.won - self.lost
        if abs(lead) >= LEAD:
            self.verdict, self.sure = ("plan" if lead > 0 else "eager"), True
        elif self.won + self.lost >= MOST_TURNS or self._costly():
            self.verdict, self.sure = "plan", self.won > 1 and not self.lost

    def _costly(self) -> bool:
        """Whether one more call of eager would exceed the budget."""
        next_one = max(0.0, self.best["eager"] - self.best["plan"])
        return self.spent + next_one > BUDGET * self.best["plan"]


@dataclass
class _Sample:
    way: Way
    seconds: float = 0.0
    phases: tuple[Phase, ...] = ()


class Comparison:
    """The graphs that one traced graph becomes: one for inference, or a forward and its backward.

    `may` tells at each call whether measuring is allowed (not while other processes wait or the device's work is being
    captured); `name` is the backend's, `scope` is part of a stored verdict's key.
    """

    def __init__(self, name: str, scope: str, persist: bool, may: Callable[[], bool]) -> None:
        self.name, self.scope, self._persist, self._may = name, f"{scope}|never_slower", persist, may
        self._trials: dict[Hashable, Trial] = {}
        self._lock = threading.RLock()
        self._running = 0
        self._open: tuple[Hashable, _Sample] | None = None
        self._latest: Way = "plan"
        self._text = ""

    def add(self, phase: Phase, text: str, plan: Run, eager: Run, sizes: Callable[[list[Any]], Hashable]) -> Run:
        """Return `plan`, or `eager` if that turns out faster. `text` is the graph's, `sizes` maps the arguments of a call to a
        class."""
        self._text = text if phase != "backward" else self._text
        runs: dict[Way, Run] = {"plan": plan, "eager": eager}
        if phase == "backward":
            return lambda args: self._follow(runs, args)
        return lambda args: self._lead(phase, runs, sizes(args), args)

    def _lead(self, phase: Phase, runs: dict[Way, Run], sizes: Hashable, args: list[Any]) -> Any:
        with self._lock:
            self._close()
            trial = self._trial(sizes)
            way, measured = trial.way() if trial is not None and (trial.verdict or self._may()) else ("plan", False)
            self._latest = way
            sample = _Sample(way)
            self._open = (sizes, sample) if measured else None
        return self._run(phase, runs[way], args, sample if measured else None)

    def _follow(self, runs: dict[Way, Run], args: list[Any]) -> Any:
        with self._lock:
            opened = self._open
            again = opened is not None and "backward" in opened[1].phases
            if (
                again
            ):  # a retained graph, or several forwards before their backwards: the time cannot be attributed
                self._open = opened = None
        return self._run("backward", runs[self._latest], args, opened[1] if opened is not None else None)

    def _run(self, phase: Phase, run: Run, args: list[Any], sample: _Sample | None) -> Any:
        """Run, and measure for `sample`. Calls that overlap another one are not counted."""
        wait = _waiting(args) if sample is not None else None
        self._running += 1
        try:
            if sample is None or wait is None:
                return run(args)
            alone = self._running == 1
            wait()
            start = clock()
            result = run(args)
            wait()
            sample.seconds += clock() - start
            sample.phases += (phase,)
            if not alone or self._running != 1:
                self._open = None
            return result
        except BaseException:  # whatever ends a call early, including an interrupt: no measurement
            self._open = None
            raise
        finally:
            self._running -= 1

    def _close(self) -> None:
        """Count the latest measured call, which is complete when the next one begins."""
        opened, self._open = self._open, None
        if opened is None or not opened[1].phases:
            return
        trial = self._trials[opened[0]]
        if trial.verdict is None:
            trial.add(opened[1])
            if trial.verdict is not None:
                self._tell(opened[0], trial)

    def _trial(self, sizes: Hashable) -> Trial | None:
        if sizes not in self._trials and len(self._trials) < MOST_CLASSES:
            known = store.read_choices().get(self.scope) if self._persist else None
            told = known.get(self._key(sizes)) if isinstance(known, dict) else None
            self._trials[sizes] = Trial(told if told in ("plan", "eager") else None)
        return self._trials.get(sizes)

    def _key(self, sizes: Hashable) -> str:
        return hashlib.sha256(f"{self._text}\n{sizes}".encode()).hexdigest()

    def _tell(self, sizes: Hashable, trial: Trial) -> None:
        plan, eager = (trial.best[w] * 1e3 for w in ("plan", "eager"))
        log.info("%s: plan %.3f ms, eager %.3f ms: %s", self.name, plan, eager, trial.verdict)
        if trial.verdict == "eager":
            log.warning(
                "fusewright: %s: a graph takes %.3f ms compiled and %.3f ms in eager; eager runs it from now on",
                self.name, plan, eager,
            )  # fmt: skip
        if trial.sure and self._persist:
            self._remember(self._key(sizes), str(trial.verdict))

    def _remember(self, key: str, verdict: str) -> None:
        def add(everything: dict[str, Any]) -> None:
            held = everything.get(self.scope)
            everything[self.scope] = {**(held if isinstance(held, dict) else {}), key: verdict}

        try:
            store.write_choices(add)
        except (OSError, filelock.Timeout) as e:
            log.info("a comparison with eager was not saved: %s", e)


def _waiting(args: Sequence[Any]) -> Callable[[], None]:
    """A function that waits for work on the device of a call's arguments; it does nothing on the host."""
    device = next((a.device for a in args if isinstance(a, torch.Tensor) and a.device.type != HOST), None)
    if device is None:
        return lambda: None
    module = torch.get_device_module(device)
    return lambda: module.synchronize(device)


def eager_of(gm: GraphModule) -> Run:
    """A traced graph as eager runs it. Copies the graph now, and generates code at the first call."""
    copied = Graph()
    result = copied.graph_copy(gm.graph, {}, return_output_node=True)
    value = result[0] if isinstance(result, tuple) else result
    copied.output(value)
    held: list[GraphModule] = []

    def run(args: list[Any]) -> Any:
        if not held:
            held.append(GraphModule(gm, copied))
        given = tuple(args)
        args.clear()
        return held[0].forward(*given)

    return run


def text_of(graph: Graph) -> str:
    """The key of a verdict: the calls of a traced graph, and the types and layouts of its values."""
    return "\n".join(
        f"{n.op} {n.name} {n.target} {n.args} {n.kwargs} {_metadata(n.meta.get('val'))}" for n in graph.nodes
    )


def _metadata(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        stride = tuple(value.stride()) if value.layout is torch.strided else value.layout
        return f"{value.dtype} {tuple(value.shape)} {stride} {value.device}"
    return str([_metadata(v) for v in value]) if isinstance(value, tuple | list) else str(value)


def classes(graph: Graph) -> Callable[[list[Any]], Hashable]:
    """Map a call to its size class: for each symbolic input size, its power of two."""
    numbers: list[int] = []
    shapes: list[tuple[int, int]] = []
    for k, n in enumerate(graph.find_nodes(op="placeholder")):
        value = n.meta.get("val")
        if isinstance(value, torch.SymInt):
            numbers.append(k)
        elif isinstance(value, torch.Tensor):
            shapes += [(k, d) for d, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
    if not numbers and not shapes:
        return lambda args: ()
    return lambda args: (
        *(int(args[k]).bit_length() for k in numbers), *(args[k].shape[d].bit_length() for k, d in shapes)
    )  # fmt: skip
