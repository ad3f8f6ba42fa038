"""Inference whose weights change from call to call: teachers that follow a student, networks that play between two steps.

What a plan prepares from its weights (packed copies, folded norms) would be made anew in every call, and may take several times
as long as the rest. Such a graph is compiled once more without constants. That plan runs until the weights rest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fusewright.config import Options
from fusewright.plan.execute.prepare import LIMIT, watch
from fusewright.plan.ir import Run
from fusewright.report import GraphReport
from fusewright.stages.compilation import Compilation

log = logging.getLogger("fusewright")

RESTLESS, CHANGED = 16, 2
"""The plan without constants takes over at RESTLESS points. A call after a change gives CHANGED of them, any other takes one:
eight such calls in a row are enough, and one in three is too few."""

AT_REST = 64
"""Calls in a row without a change after which constants are prepared again."""


def may_change(options: Options, mode: str) -> bool:
    """Whether a graph may be compiled again while it runs: what is saved has no graph, and options that check what is compiled
    are about the plan that was asked for."""
    return mode != "export" and options.fallback != "error" and not options.check


class Changing:
    """`run`, or a plan without constants while the weights change. `beside` completes that plan as `run` was completed."""

    def __init__(self, c: Compilation, run: Run, beside: Callable[[Run], Run]) -> None:
        self._c, self._run, self._beside = c, run, beside
        self._without: Run | None = None
        self._moves = False
        self._points = self._changes = self._rest = 0
        self._seen: dict[int, Callable[[Any], bool]] = {}
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> Any:
        if self._moves and self._without is not None:
            self._look(args)
            return self._without(args)
        result = self._run(args)
        changes = self._c.changes()
        if changes != self._changes:
            self._changes, self._points = changes, self._points + CHANGED
            if self._points >= RESTLESS:
                self._leave_constants()
        elif self._points:
            self._points -= 1
        return result

    def _leave_constants(self) -> None:
        """Let a plan without constants run from the next call on, and free those that were prepared."""
        if not self._lock.acquire(blocking=False):  # another thread is compiling it
            return
        try:
            if self._without is None:
                log.info("%s: weights change from call to call: compiling without constants", self._c.backend.name)
                self._without = self._beside(self._compiled())
            self._moves, self._points, self._rest = True, 0, 0
            self._seen.clear()
            for cache, _ in self._c.prepared:
                cache.forget()
        finally:
            self._lock.release()

    def _compiled(self) -> Run:
        c, options = self._c, replace(self._c.options, fallback="allow")  # what eager runs has been said
        report = GraphReport(c.backend.name, c.phase, c.report.capture)
        return c.again(
            replace(c, const=frozenset(), options=options, report=report, compiled=[], carried=set(), prepared=[], slot=None)
        )

    def _look(self, args: list[Any]) -> None:
        """Count calls whose weights are those of the call before, for each set of weights. Back to constants if there were many."""
        for _, places in self._c.prepared:
            key = id(args[places[0]])
            same = self._seen.get(key)
            if same is not None and same(args):
                self._rest += 1
                self._moves = self._rest < AT_REST
                return
            self._rest = 0
            if len(self._seen) >= LIMIT:
                self._seen.clear()
            self._seen[key] = watch(args, places)
