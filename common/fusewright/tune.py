"""Short measurements that choose between equivalent ways to compute the same thing, remembered across processes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import filelock
import torch

from fusewright import _torch_compat as compat
from fusewright import cachedir

log = logging.getLogger(__name__)

BUDGET_SECONDS = 5e-3
"""Time spent on one candidate after its first run."""

MAX_RUNS = 12


class Tuner:
    """Chooses by measuring, and remembers. `scope` is the backend's fingerprint: choices of another machine do not
    count.
    """

    def __init__(self, scope: str, persist: bool = True) -> None:
        self.scope = f"{scope}|threads={torch.get_num_threads()}"
        self._path = cachedir.file("choices.json") if persist else None
        self._known: dict[str, str] = self._read().get(self.scope, {}) if self._path else {}
        self._new: dict[str, str] = {}

    def choose(self, key: str, candidates: Mapping[str, Callable[[], Any]]) -> str:
        """The name of the fastest candidate. One candidate is not measured; a candidate that raises is out."""
        names = list(candidates)
        if len(names) == 1:
            return names[0]
        remembered = self._known.get(key) or self._new.get(key)
        if remembered is not None and remembered in candidates:
            return remembered
        times = measure(candidates)
        if not times:
            raise RuntimeError(f"no candidate for {key} ran: {', '.join(names)}")
        best = min(times, key=times.__getitem__)
        log.info("%s: %s", key, ", ".join(f"{n} {t * 1e6:.1f} us" for n, t in times.items()))
        self._new[key] = best
        return best

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            found = json.loads(self._path.read_text()) if self._path else {}
        except (OSError, ValueError):
            return {}  # nothing remembered, or a damaged file: measure again
        ok = isinstance(found, dict) and all(isinstance(v, dict) for v in found.values())
        return found if ok else {}

    def save(self) -> None:
        """Add what was measured to the file. A cache that cannot be written costs only time."""
        if not self._new or self._path is None:
            return
        try:
            with filelock.FileLock(f"{self._path}.lock", timeout=5):
                everything = self._read()
                everything.setdefault(self.scope, {}).update(self._new)
                cachedir.write(self._path, json.dumps(everything, indent=0, sort_keys=True).encode())
        except (OSError, filelock.Timeout) as e:
            log.info("choices were not saved: %s", e)
        self._known.update(self._new)
        self._new = {}


def measure(candidates: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Best time in seconds of each candidate that runs, interleaved so that a disturbance hits all of them."""
    times: dict[str, float] = {}
    with torch.no_grad(), compat.real_tensors():
        for name, run in candidates.items():
            try:
                run()
                times[name] = _timed(run)
            except (RuntimeError, NotImplementedError, TypeError) as e:  # torch's way to say "not with these arguments"
                log.info("candidate %s does not run: %s", name, e)
        if not times:
            return times
        runs = max(2, min(MAX_RUNS, int(BUDGET_SECONDS / max(times.values()))))
        for _ in range(runs):
            for name in times:
                times[name] = min(times[name], _timed(candidates[name]))
    return times


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
