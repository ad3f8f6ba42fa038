"""Inference whose weights change from call to call: teachers that follow a student, networks that play between two steps.

What a plan prepares from its weights (packed copies, folded norms) would be made anew in every call, and may take several times
as long as the rest. Such a graph is compiled once more without constants. That plan runs until the weights rest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusewright.config import Options
from fusewright.plan.execute.prepare import PreparedCache, watch
from fusewright.plan.ir import Run
from fusewright.report import GraphReport
from fusewright.stages.compilation import Compilation

log = logging.getLogger("fusewright")

RESTLESS, CHANGED = 16, 2
"""The plan without constants takes over at RESTLESS points. A call after a change gives CHANGED of them, any other takes one:
eight such calls in a row are enough, and one in three is too few."""

AT_REST = 64
"""Calls in a row without a change after which constants are prepared again."""

MOST = 1024
"""Sets of weights that are told apart."""


def may_change(options: Options, mode: str) -> bool:
    """Whether a graph may be compiled again while it runs: what is saved has no graph, and options that check what is compiled
    are about the plan that was asked for."""
    return mode != "export" and options.fallback != "error" and not options.check


@dataclass(eq=False, slots=True)
class _Weights:
    """One set of weights: layers may share a plan, and a teacher its student's. `same` tells whether they are those of the call
    before, in the `rest` latest calls they were."""

    moves: bool = False
    points: int = 0
    rest: int = 0
    same: Callable[[Any], bool] | None = None


class Changing:
    """`run`, or a plan without constants for weights that change. `beside` completes that plan as `run` was completed."""

    def __init__(self, c: Compilation, run: Run, beside: Callable[[Run], Run]) -> None:
        self._c, self._run, self._beside = c, run, beside
        self._without: Run | None = None
        self._sets: dict[int, _Weights] = {}
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> Any:
        if not self._c.prepared:  # the first run had it compiled again
            return self._run(args)
        ((cache, places),) = self._c.prepared
        key = id(args[places[0]])
        weights = self._sets.get(key) or self._new(key)
        if weights.moves and self._without is not None:
            self._look(weights, cache, [args[k] for k in places])
            return self._without(args)
        before = cache.changes
        result = self._run(args)
        if cache.changes != before:
            weights.points += CHANGED
            if weights.points >= RESTLESS:
                self._leave_constants(weights)
        elif weights.points:
            weights.points -= 1
        return result

    def _new(self, key: int) -> _Weights:
        if len(self._sets) >= MOST:
            self._sets.pop(next(iter(self._sets)), None)
        return self._sets.setdefault(key, _Weights())

    def _leave_constants(self, weights: _Weights) -> None:
        """Let a plan without constants run from the next call on."""
        if not self._lock.acquire(blocking=False):  # another thread is compiling it
            return
        try:
            if self._without is None:
                log.info("%s: weights change from call to call: compiling without constants", self._c.backend.name)
                self._without = self._beside(self._compiled())
            weights.moves, weights.points, weights.rest, weights.same = True, 0, 0, None
        finally:
            self._lock.release()

    def _compiled(self) -> Run:
        c, options = self._c, replace(self._c.options, fallback="allow")  # what eager runs has been said
        report = GraphReport(c.backend.name, c.phase, c.report.capture)
        return c.again(
            replace(c, const=frozenset(), options=options, report=report, compiled=[], carried=set(), prepared=[], slot=None)
        )

    def _look(self, weights: _Weights, cache: PreparedCache, found: list[torch.Tensor]) -> None:
        """Count calls in a row without a change. Back to constants after many."""
        if weights.same is not None and weights.same(found):
            weights.rest += 1
            weights.moves = weights.rest < AT_REST
            return
        if weights.same is None:
            cache.forget(frozenset(map(id, found)))  # what was prepared
        weights.rest, weights.same = 0, watch(found)
