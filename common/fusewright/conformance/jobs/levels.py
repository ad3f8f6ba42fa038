"""The levels: their jobs, and how to run a job. A job is the smallest unit that a crash can cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fusewright.conformance import contract, fallback, faults, trained
from fusewright.conformance.ops import entries, opset
from fusewright.conformance.settings import Settings
from fusewright.conformance.verdicts import Check, Verdict
from fusewright.interface import Unavailable


@dataclass(frozen=True)
class Part:
    """A level, or one of its parts."""

    level: str
    title: str
    names: Callable[[Settings], Sequence[str]]
    check: Callable[[str, Settings], Iterator[Check]]
    prefix: str = ""
    """Prefix of the names of its checks."""

    def failed(self, name: str, verdict: Verdict, why: str) -> Check:
        """The check for a job that gave no verdict of its own."""
        return Check(self.level, self.prefix + name, verdict, why)


PARTS: dict[str, Part] = {
    "contract": Part("C0", "contract", contract.names, contract.check),
    "fallback": Part("C1", "fallback", fallback.names, fallback.check),
    "opset": Part("C2", "rows of the opset", opset.names, opset.check),
    "opinfo": Part("C2", "torch's OpInfo database", entries.names, entries.check, entries.PREFIX),
    "faults": Part("C3", "faults", faults.names, faults.check),
    "models": Part("C4", "models", trained.names, trained.check),
}
LEVELS = {
    "C0": "contract: imports, probe, claims, fingerprint",
    "C1": "fallback: with no claims, the bits of aot_eager",
    "C2": "ops: every row of the opset, and torch's OpInfo database",
    "C3": "faults: a backend that misbehaves gives no wrong result",
    "C4": "models: ten small ones, inference and training",
}


def between(text: str) -> list[str]:
    """ "C1" is that level, "C0..C3" a range of levels. ValueError for anything else."""
    first, _, last = text.upper().partition("..")
    known = list(LEVELS)
    if first not in known or (last or first) not in known:
        raise ValueError(f"{text!r} is no level; write one of {', '.join(known)}, or C0..C3 for all from C0 to C3")
    return known[known.index(first) : known.index(last or first) + 1]


def jobs(levels: Sequence[str], settings: Settings) -> list[dict[str, str]]:
    """All jobs of the levels, or those that need no device if there is none."""
    if isinstance(settings.device(), Unavailable):  # listing the other parts may need packages
        names = [n for n in contract.names(settings) if n in contract.NEED_NO_DEVICE]
        return [{"part": "contract", "name": n} for n in names if PARTS["contract"].level in levels]
    return [{"part": p, "name": n} for p, part in PARTS.items() if part.level in levels for n in part.names(settings)]


def perform(job: dict[str, str], settings: Settings) -> list[Check]:
    """The checks of one job. A failure of the kit itself is an error, never a pass."""
    part = PARTS[job["part"]]
    try:
        return list(part.check(job["name"], settings))
    except Exception as e:  # usually from the backend, in a callback that the host does not guard
        return [part.failed(job["name"], Verdict.ERROR, f"{type(e).__name__}: {str(e).partition(chr(10))[0]}")]


def crashed(job: Any, why: str) -> Check:
    return PARTS[job["part"]].failed(job["name"], Verdict.CRASHED, why)
