"""Never slower than eager where graphs break, by measurement: whole calls are compared, and eager runs them if it is faster.

What Dynamo does around each graph (guards, the call, resume functions, entries of its cache that do not match) is in no graph's
time. A function in whose call a second graph is compiled has a break; Dynamo then calls a hook at the start and the end of each
call. Such a call cannot run twice, as its code between the graphs may have effects, so in a few calls eager runs *instead*. A
round is a few calls of eager, then a few compiled ones; the first of each warms up. The fastest calls of all rounds decide.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fusewright import _torch_compat as compat
from fusewright.plan.execute.compared import MOST_CLASSES, SHARE, SLOWER, Verdict, at_once

log = logging.getLogger("fusewright")

clock = time.perf_counter

FIRST = 25
"""The call that the first round begins with: after the first comparisons of single graphs."""

LENGTH = 4
"""Calls of eager in a round, and compiled calls after them."""

ROUNDS = 6
"""The fastest calls of so many rounds decide: on a busy machine, one round tells little."""

FEW_ROUNDS, FASTER = 2, 0.9
"""So many are enough if the compiled calls are this much faster."""


@dataclass
class Trial:
    """The comparison for calls with arguments of about the same sizes: seconds of the current round, and of the fastest calls."""

    verdict: Verdict | None = None
    calls: int = 0
    rounds: int = 0
    round: dict[Verdict, list[float]] = field(default_factory=lambda: defaultdict(list))
    best: dict[Verdict, float] = field(default_factory=dict)

    def turn(self) -> tuple[Verdict, bool]:
        """Who runs the next call, and whether it is part of a round."""
        self.calls += 1
        at = (self.calls - FIRST) % SHARE if self.calls >= FIRST else SHARE
        if at == 0:
            self.round.clear()
        return "eager" if at < LENGTH else "plan", at < 2 * LENGTH

    def add(self, who: Verdict, seconds: float) -> None:
        """Count a call of a round; decide after the last of enough rounds."""
        self.round[who].append(seconds)
        if len(self.round["plan"]) < LENGTH or len(self.round["eager"]) < LENGTH:
            return
        for by, times in self.round.items():
            self.best[by] = min(self.best.get(by, math.inf), *times[1:])
        self.rounds += 1
        plan, eager = self.best["plan"], self.best["eager"]
        if self.rounds >= ROUNDS:
            self.verdict = "eager" if plan > SLOWER * eager else "plan"
        elif self.rounds >= FEW_ROUNDS and plan < FASTER * eager:
            self.verdict = "plan"


class BrokenCalls:
    """The hook for calls of one compiled function. `codes` are those that its calls enter first: what eager runs by them, and all
    that they call, is out of Dynamo's sight."""

    def __init__(self, name: str, may: Callable[[], bool]) -> None:
        self.name, self.codes = name, set[CodeType]()
        self._may = may
        self._call: int | None = None
        self._traced = set[CodeType]()
        self._trials: dict[Hashable, Trial] = {}
        self._thread: int | None = None

    def has_another(self, call: compat.DynamoCall) -> bool:
        """Note a graph that is compiled in a call. Return whether the call has another one."""
        running = {_place(code) for code in call.running}
        inside = any(_place(code) in running for code in self._traced)
        another = inside or (self._call == call.id and call.code not in self._traced)
        self._call = call.id
        self._traced.add(call.code)
        entered = _code_of(call.entered)
        self.codes.add(entered if entered is not None and _place(entered) in running else call.code)
        return another

    def __call__(self) -> Callable[[], None]:
        """What Dynamo calls at the start of each call. Return what it calls at the end."""
        if not compat.around_compilations(_until_reset, _until_reset):
            self._forget()
        if torch.is_grad_enabled() or torch.are_deterministic_algorithms_enabled():  # backward would be in nobody's time
            return at_once
        trial = self._trial()
        if trial is None or trial.verdict == "plan":
            return at_once
        if trial.verdict == "eager":
            return self._in_eager()
        if self._thread not in (None, threading.get_ident()):
            trial.verdict = "plan"  # times of threads would mix
            return at_once
        self._thread = threading.get_ident()
        who, measured = trial.turn()
        if not measured or not self._may():
            return at_once
        end = self._in_eager() if who == "eager" else at_once
        return partial(self._ended, trial, who, end, clock())

    def _forget(self) -> None:
        """Begin anew after `torch.compiler.reset`, with new graphs."""
        self.codes.clear()
        self._traced.clear()
        self._trials.clear()
        self._thread = None

    def _trial(self) -> Trial | None:
        given = compat.arguments_of_call()
        sizes = tuple(x.numel().bit_length() for x in given if isinstance(x, torch.Tensor))
        if sizes not in self._trials and len(self._trials) < MOST_CLASSES:
            self._trials[sizes] = Trial()
        return self._trials.get(sizes)

    def _in_eager(self) -> Callable[[], None]:
        """Let eager run what is called now. Return what ends that, for the same code even if there is a reset until then."""
        codes = tuple(self.codes)
        for code in codes:
            compat.set_skipped(code, True)
        return partial(_compiled, codes)

    def _ended(self, trial: Trial, who: Verdict, end: Callable[[], None], start: float) -> None:
        seconds = clock() - start
        end()
        if sys.exc_info()[0] is not None:  # a call that fails is short
            return
        trial.add(who, seconds)
        if trial.verdict is not None:
            plan, eager = trial.best["plan"] * 1e3, trial.best["eager"] * 1e3
            log.info("%s: calls with graph breaks: compiled %.3f ms, eager %.3f ms: %s", self.name, plan, eager, trial.verdict)
        if trial.verdict == "eager":
            log.warning(
                "fusewright: %s: a call with graph breaks takes %.3f ms compiled and %.3f ms in eager; eager runs such calls from "
                "now on. See its breaks: fusewright explain", self.name, plan, eager,
            )  # fmt: skip


def _compiled(codes: Iterable[CodeType]) -> None:
    for code in codes:
        compat.set_skipped(code, False)


def _code_of(function: object) -> CodeType | None:
    """The code of a function, or of a module's `forward` if the function calls the module."""
    module = getattr(function, "__self__", None)
    return getattr(module.forward if isinstance(module, torch.nn.Module) else function, "__code__", None)


def _place(code: CodeType) -> tuple[str, int, str]:
    """What the code that Dynamo makes has in common with that of the function."""
    return code.co_filename, code.co_firstlineno, code.co_name


def _until_reset(_: object) -> None:
    """What Dynamo calls around compilations as long as there was no reset."""


_known: WeakKeyDictionary[Any, BrokenCalls] = WeakKeyDictionary()
"""By compiled function."""


def watch(name: str, may: Callable[[], bool]) -> None:
    """Compare calls of the function in whose call Dynamo is compiling a graph now, if it is not the only one."""
    call = compat.current_call()
    if call is None:
        return
    compat.around_compilations(_until_reset, _until_reset)
    calls = _known.setdefault(call.function, BrokenCalls(name, may))
    if calls.has_another(call) and calls not in call.hooks:
        call.hooks.append(calls)
