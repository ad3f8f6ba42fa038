"""Never slower than eager where graphs break, and in short steps: whole calls are compared, and eager runs them if it is faster.

What Dynamo does around each graph (guards, the call, resume functions, entries of its cache that do not match) is in no graph's
time. A function in whose call a second graph is compiled has a break; Dynamo then calls a hook at the start and the end of each
call. Such a call cannot run twice, as its code between the graphs may have effects, so in a few calls eager runs *instead*
(`turns.py` says in which). Where gradients are recorded, backward comes after the call, so that steps are compared, from the start
of a call to the start of the next one. The backward of a call is eager's, or the plans', as the call was, whenever it runs.

In steps of small tensors, what AOTAutograd does around a graph and its backward takes longer than both. They are compared too,
until the plan has won.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from fusewright import _torch_compat as compat
from fusewright.interface import HOST
from fusewright.plan.execute import compared
from fusewright.plan.execute.compared import MOST_CLASSES, Tally, Verdict, at_once
from fusewright.plan.execute.shadow import can_wait, has_room
from fusewright.plan.execute.turns import Trial

log = logging.getLogger("fusewright")

clock = time.perf_counter

LOOKED = 16
"""As long as all calls had the same sizes, the sizes of one call in this many are checked, unless it is part of a round: in
the caches that a step leaves cold, the check takes longer than everything else here."""

SEEN = 8
"""Calls before the first that pass unseen: functions that call themselves are known by then."""

SHORT = 1 << 18
"""The most elements of all tensors that a graph reads in a short step: multiplied with a few rows, they keep a core busy for a
millisecond."""

LEFT = 10.0
"""Seconds without a call after which others may measure. A pause this long is no work of Dynamo's around graphs."""


class BrokenCalls:
    """The hook for calls of one compiled function. `codes` are those that its calls enter first: Dynamo does not see what eager
    runs by them, nor anything that they call. `devices` are those of its graphs."""

    def __init__(self, name: str, may: Callable[[], bool], function: object = None) -> None:
        self.name, self.codes = name, set[CodeType]()
        self._ways = dict[CodeType, _Ways]()
        self._allow = compat.without_frames(function)
        self.breaks, self.hooks = False, list[Callable[[], Callable[[], None]]]()
        self._may = may
        self._devices = dict[torch.device, None]()
        self._wait: Callable[[], None] = at_once
        self._call: int | None = None
        self._traced = set[CodeType]()
        self._trials: dict[Hashable, Trial] = {}
        self._thread: int | None = None
        self._inside = self._nested = False
        self._only: dict[bool, Trial | None] = {}
        self._rests: dict[bool, int] = {}
        self._decided: dict[bool, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._looked = 0
        self._resets = _resets()

    def runs_on(self, devices: Iterable[torch.device]) -> None:
        """Note devices, not the host, that a graph runs on."""
        self._devices.update(dict.fromkeys(devices))
        self._wait = compared.waiting(self._devices)

    def has_another(self, call: compat.DynamoCall) -> bool:
        """Note a graph that is compiled in a call. Return whether the call has another one."""
        if self._resets != _resets():
            self._forget()
        for trial in self._trials.values():
            if trial.times or trial.begun is not None:
                self._drop(trial)  # a call that compiles is long
        self._decided.clear()
        self._rests.clear()
        running = {_place(code) for code in call.running}
        inside = any(_place(code) in running for code in self._traced)
        entered = _code_of(call.entered)
        first = entered if entered is not None and _place(entered) in running else call.code
        # The graphs of layers may be one, compiled once, if the function that calls them has none.
        another = inside or _place(first) != _place(call.code) or (self._call == call.id and call.code not in self._traced)
        self._call = call.id
        self._traced.add(call.code)
        self.codes.add(first)
        if another:
            _parted.add(first)
        another = first in _parted
        self.breaks = self.breaks or another
        return another

    def __call__(self) -> Callable[[], None]:
        """What Dynamo calls at the start of each call. Return what it calls at the end."""
        training = torch.is_grad_enabled()
        decided = self._decided.get(training)
        self._looked += 1
        if torch.are_deterministic_algorithms_enabled() or (training and compat.saved_elsewhere()):
            return at_once  # a checkpoint's second call must save what its first one did
        if self._looked < self._rests.get(training, 0):
            return at_once
        if decided is None or self._looked % LOOKED == 0 or self._resets != _resets():
            return self._looked_at(training)
        begin, end = decided
        begin()
        return end

    def _looked_at(self, training: bool) -> Callable[[], None]:
        """A call before the verdict, or one whose sizes may not be those of the verdict."""
        if self._resets != _resets():
            self._forget()
        trial = self._only.get(training)
        if trial is None or self._looked % LOOKED == 0 or trial.calls + 1 >= trial.next:
            trial = self._trial(training)
        if trial is None or trial.verdict == "plan":
            settled = trial is not None and all(t.verdict == "plan" for t in self._trials.values())
            return self._leave_alone if settled and not self.breaks else at_once
        if trial.verdict is None:
            return self._timed(trial)
        if (decided := self._decided.get(training)) is None:
            return self._in_eager()
        begin, end = decided
        begin()
        return end

    def _timed(self, trial: Trial) -> Callable[[], None]:
        """A call before the verdict. Its time begins with what is called, not with what is done here."""
        if self._thread not in (None, threading.get_ident()):
            self._drop(trial)
            trial.verdict = "plan"  # times of threads would mix
            return at_once
        self._thread = threading.get_ident()
        if self._inside:  # a call in a call is part of it
            self._nested = True
            return at_once
        trial.calls += 1
        if trial.due() and not self._ready(trial):
            self._drop(trial)
        if trial.due():
            self._begin(trial)
        if trial.verdict == "eager":
            return self._in_eager()
        self._inside = True
        if trial.begun is None:
            self._rest(trial)
            return self._leave
        who = trial.who()
        if who == "plan":
            compared.tally = Tally()
            trial.tallies.append(compared.tally)
        end = self._in_eager() if who == "eager" else at_once
        ended = partial(self._ended, trial, who, end, sys.exc_info()[1])
        if not trial.steps:
            trial.begun = clock()
        return ended

    def _rest(self, trial: Trial) -> None:
        """Count the next calls now, up to one that is looked at, and let them pass: looking takes a fifth of a short call."""
        if self._only.get(trial.steps) is trial and not self._nested and trial.calls >= SEEN:
            count = max(0, min(trial.next - 1 - trial.calls, LOOKED - 1 - self._looked % LOOKED))
            self._rests[trial.steps] = self._looked + count + 1
            trial.calls += count

    def _begin(self, trial: Trial) -> None:
        """Note the time at which a call of a round begins, and a step ends, with which the round may end."""
        if not trial.steps or trial.edge():
            self._wait()
        now = clock()
        if trial.begun is not None:
            self._add(trial, now - trial.begun)
        if trial.due():
            trial.begin(now)

    def _ready(self, trial: Trial) -> bool:
        """Whether a round may begin or go on. Eager needs memory, as much as nobody knows before."""
        if not self._may():
            return False
        goes_on = trial.begun is not None or bool(trial.times)
        return (goes_on or all(map(has_room, map(str, self._devices or (HOST,))))) and compared.turn.take(trial, LEFT)

    def _drop(self, trial: Trial) -> None:
        trial.drop()
        compared.turn.leave(trial)

    def _forget(self) -> None:
        """Begin anew after `torch.compiler.reset`, with new graphs."""
        for trial in self._trials.values():
            compared.turn.leave(trial)
        self.codes.clear()
        self._traced.clear()
        self._trials.clear()
        self._devices.clear()
        self._only.clear()
        self._rests.clear()
        self._decided.clear()
        self._wait, self._thread, self._inside = at_once, None, False
        self._resets = _resets()

    def _trial(self, training: bool) -> Trial | None:
        key = (training, *_sizes(compat.arguments_of_call()))
        if key not in self._trials and len(self._trials) < MOST_CLASSES:
            self._trials[key] = Trial(steps=training)
        trial = self._trials.get(key)
        if trial is not None and training in self._decided and trial is self._only.get(training):
            return trial  # as it has been
        alone = sum(other.steps == training for other in self._trials.values()) == 1
        self._only[training] = trial if alone else None
        self._decided.pop(training, None)
        if trial is not None and alone and trial.verdict is not None:
            ways = list(self._known_ways().values()) if trial.verdict == "eager" else []
            begins = [self._allow, *(begin for begin, _ in ways)] if ways else []
            self._decided[training] = _all(begins), _all(end for _, end in ways)
        return trial

    def _in_eager(self) -> Callable[[], None]:
        """Let eager run what is called now. Return what ends that, for the same code even if there is a reset until then."""
        ways = self._known_ways()
        _skip(ways, 1)
        self._allow()
        return partial(_skip, ways, -1)

    def _known_ways(self) -> dict[CodeType, _Ways]:
        if self._ways.keys() != self.codes:
            self._ways = {code: compat.skips(code) for code in self.codes}
        return self._ways

    def _leave(self) -> None:
        self._inside = False

    def _leave_alone(self) -> None:
        """Watch the function no more: looking at its calls would cost a part of what they take."""
        if self in self.hooks:
            self.hooks.remove(self)

    def _ended(self, trial: Trial, who: Verdict, end: Callable[[], None], handled: BaseException | None) -> None:
        """The end of a call of a round, which `end` may take back from eager. An error may have been `handled` around it."""
        counts = sys.exc_info()[1] is handled and (self._wait is at_once or self._may())  # a call that fails is short
        if counts and not trial.steps:
            self._wait()
        now = clock()
        self._leave()
        compared.tally = None
        end()
        if trial.begun is None:  # another thread has ended the round
            return
        if not counts or not self._may():
            self._drop(trial)
            return
        seconds = now - trial.begun
        trial.ran(who, seconds)
        if not trial.steps:
            self._add(trial, seconds)

    def _add(self, trial: Trial, seconds: float) -> None:
        trial.begun = None
        trial.add(seconds)
        if not trial.times:
            compared.turn.leave(trial)
        if trial.verdict is not None:
            self._tell(trial)

    def _tell(self, trial: Trial) -> None:
        what, breaks = "step" if trial.steps else "call", " with graph breaks" if self.breaks else ""
        plan, eager = trial.best["plan"] * 1e3, trial.best["eager"] * 1e3
        log.info("%s: %ss%s: compiled %.3f ms, eager %.3f ms: %s", self.name, what, breaks, plan, eager, trial.verdict)
        if trial.verdict == "eager":
            why = "See its breaks: fusewright explain" if self.breaks else "It is too short for what torch.compile does around it"
            log.warning(
                "fusewright: %s: a %s%s takes %.3f ms compiled and %.3f ms in eager; eager runs such calls from now on. %s",
                self.name, what, breaks, plan, eager, why,
            )  # fmt: skip


_skipped: dict[CodeType, int] = {}
"""The number of calls that eager is running now, by the code that they enter."""

_one = threading.Lock()


_Ways = Sequence[Callable[[], None]]
"""Two functions: one lets eager run a code, one lets Dynamo see it again."""


def _skip(ways: Mapping[CodeType, _Ways], more: int) -> None:
    """Note that eager begins (1) or ends (-1) a call. A call may call itself: Dynamo sees the code again after the last one."""
    with _one:
        for code, way in ways.items():
            before = _skipped.pop(code, 0)
            if before + more:
                _skipped[code] = before + more
            if not before or not before + more:
                way[bool(before)]()


def _all(functions: Iterable[Callable[[], object]]) -> Callable[[], None]:
    """One function that calls all of these."""
    those = tuple(functions)

    def call() -> None:
        for function in those:
            function()

    return call if those else at_once


def _code_of(function: object) -> CodeType | None:
    """The code of a function, or of a module's `forward` if the function calls the module."""
    module = getattr(function, "__self__", None)
    return getattr(module.forward if isinstance(module, torch.nn.Module) else function, "__code__", None)


def _sizes(given: Iterable[Any]) -> Iterator[Hashable]:
    """What the time of a call depends on: the powers of two of sizes and numbers, and flags, also in containers."""
    for x in given:
        if isinstance(x, torch.Tensor):
            yield x.numel().bit_length()
        elif isinstance(x, bool):
            yield x
        elif isinstance(x, int):
            yield x.bit_length()
        elif isinstance(x, list | tuple | Mapping):
            yield from _sizes(x.values() if isinstance(x, Mapping) else x)


def _place(code: CodeType) -> tuple[str, int, str]:
    """The part of a code's identity that the code made by Dynamo shares with the function's own."""
    return code.co_filename, code.co_firstlineno, code.co_name


def _until_reset(_: object) -> None:
    """The callback that Dynamo runs around compilations until a reset, which removes it and so is noticed."""


_count = 0


def _resets() -> int:
    """The number of times that `torch.compiler.reset` was noticed here."""
    global _count
    _count += not compat.around_compilations(_until_reset, _until_reset)
    return _count


_parted: WeakSet[CodeType] = WeakSet()
"""Code that calls with breaks enter. Another function of the same code may find some of its graphs compiled already."""

_known: WeakKeyDictionary[Any, BrokenCalls] = WeakKeyDictionary()
"""By compiled function."""


def watch(name: str, may: Callable[[], bool], inputs: Sequence[Any]) -> None:
    """Compare calls of the function in whose call Dynamo is compiling a graph of these inputs now, if it is not the only one or
    if it is one of a short step."""
    call, devices = compat.current_call(), compared.devices(inputs)
    if call is None or not all(can_wait(d.type) for d in devices):
        return
    calls = _known.get(call.function) or _known.setdefault(call.function, BrokenCalls(name, may, call.function))
    calls.runs_on(devices)
    if (calls.has_another(call) or _is_short(inputs)) and calls not in call.hooks:
        call.hooks.append(calls)
        calls.hooks = call.hooks


def _is_short(inputs: Sequence[Any]) -> bool:
    sizes = [x.numel() for x in inputs if isinstance(x, torch.Tensor)]
    return all(isinstance(n, int) for n in sizes) and sum(sizes) <= SHORT
