"""Choose between equivalent computations by short measurements, which are stored across processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import filelock
import torch

from fusewright import _torch_compat as compat
from fusewright.cache import store
from fusewright.interface import Decline

log = logging.getLogger(__name__)

clock = time.perf_counter

ROUNDS = 2
"""Independent measurements per choice, if they agree."""

MOST_ROUNDS = 7
MOST_SECONDS = 50e-3
"""If rounds disagree, the machine is busy; new rounds start only until this much time was spent on a key."""

BUDGET_SECONDS = 4e-3
"""Time of one round over all candidates. A second pass may exceed it, since the first may have been disturbed."""

MAX_PASSES = 24

CLOSE = 1.05
"""Two candidates whose times differ by less than this factor count as equal."""

Run = Callable[[], Any]

_doubtful: dict[tuple[str, str], str] = {}
"""(scope, key) -> a choice made under noise, kept for this process so that all its graphs agree."""


class Tuner:
    """Chooses by measuring, and stores the results. `scope` is the backend's fingerprint; choices from other machines or with
    another number of `workers` do not count.

    If rounds disagree, the choice was made on a busy machine. It is not stored, since that would make it permanent; `settled`
    then tells the host not to store plans made with it either.
    """

    def __init__(self, scope: str, persist: bool = True, workers: int = 1) -> None:
        self.scope = f"{scope}|workers={workers}"
        self.settled = True
        self._persist = persist
        self._known = _of_scope(store.read_choices(), self.scope) if persist else {}
        self._new: dict[str, str] = {}

    def choose(self, key: str, candidates: Mapping[str, Run]) -> str:
        """Return the name of the fastest candidate. A single candidate is not measured; candidates that raise are excluded.

        Raises `Decline` with the reasons if none runs, e.g. for lack of memory.
        """
        names = list(candidates)
        if len(names) == 1:
            return names[0]
        remembered = self._known.get(key) or self._new.get(key)
        if remembered is not None and remembered in candidates:
            return remembered
        doubtful = _doubtful.get((self.scope, key))
        if doubtful is not None and doubtful in candidates:
            self.settled = False
            return doubtful
        failures: dict[str, str] = {}
        rounds = measure(candidates, failures)
        if not rounds[0]:
            raise Decline(f"no candidate for {key} ran: " + "; ".join(f"{n}: {why}" for n, why in failures.items()))
        best, sure = verdict(rounds)
        log.info("%s: %s%s", key, "; ".join(map(_text, rounds)), "" if sure else "; too noisy to keep")
        if sure:
            self._new[key] = best
        else:
            _doubtful[self.scope, key] = best
            self.settled = False
        return best

    def save(self) -> None:
        """Store new measurements. Failures are not raised."""
        if not self._new or not self._persist:
            return
        try:
            store.write_choices(self._add)
        except (OSError, filelock.Timeout) as e:
            log.info("choices were not saved: %s", e)
        self._known.update(self._new)
        self._new = {}

    def _add(self, everything: dict[str, Any]) -> None:
        everything[self.scope] = {**_of_scope(everything, self.scope), **self._new}


def _of_scope(everything: Mapping[str, Any], scope: str) -> dict[str, str]:
    """The stored choices of a scope: names by key. A name that is no longer a candidate will be ignored."""
    found = everything.get(scope)
    pairs = found.items() if isinstance(found, dict) else ()
    return {key: name for key, name in pairs if isinstance(name, str)}


def verdict(rounds: Sequence[Mapping[str, float]]) -> tuple[str, bool]:
    """The fastest over all rounds, and whether two thirds of them, at least two, find it fastest or close to that."""
    times = {name: min(r[name] for r in rounds) for name in rounds[0]}
    best = min(times, key=times.__getitem__)
    agreeing = sum(r[best] <= CLOSE * min(r.values()) for r in rounds)
    return best, agreeing >= ROUNDS and 3 * agreeing >= 2 * len(rounds)


def measure(candidates: Mapping[str, Run], failures: dict[str, str]) -> list[dict[str, float]]:
    """Best time in seconds of each working candidate, once per round; all rounds have the same candidates. `failures` receives
    the reasons of the others.

    Candidates alternate, so that a disturbance affects all of them. A key costs each candidate's first run, plus at most
    `2 * ROUNDS * BUDGET_SECONDS` or, for slow candidates, `ROUNDS` runs of each; if rounds disagree, `MOST_SECONDS` and one round.
    """
    with torch.no_grad(), compat.real_tensors():
        found = {name: _failure(run) for name, run in candidates.items()}
        failures.update({name: why for name, why in found.items() if why})
        for name, why in failures.items():
            log.info("candidate %s does not run: %s", name, why)
        running = {name: run for name, run in candidates.items() if name not in failures}
        start = clock()
        rounds = [_round(running) for _ in range(ROUNDS)]
        while running and not verdict(rounds)[1] and len(rounds) < MOST_ROUNDS and clock() - start < MOST_SECONDS:
            rounds.append(_round(running))
        return rounds


def _failure(run: Run) -> str:
    """Why a candidate does not run, or ""."""
    try:
        run()
    except (RuntimeError, NotImplementedError, TypeError) as e:  # unsupported arguments, or too little memory
        return f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
    return ""


def _round(running: Mapping[str, Run]) -> dict[str, float]:
    times = {name: _timed(run) for name, run in running.items()}
    left = BUDGET_SECONDS - sum(times.values())
    passes = 1
    while passes < MAX_PASSES and left > (sum(times.values()) if passes > 1 else 0):
        passes += 1
        for name, run in running.items():
            t = _timed(run)
            left -= t
            times[name] = min(times[name], t)
    return times


def _timed(run: Run) -> float:
    start = clock()
    run()
    return clock() - start


def _text(times: Mapping[str, float]) -> str:
    return ", ".join(f"{n} {t * 1e6:.1f} us" for n, t in times.items())
