"""What happened to each graph: the record that `explain` shows. The compile path itself fills it, so the two cannot
differ.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fusewright.errors import counted
from fusewright.interface import KernelCode, Verdict


@dataclass(frozen=True)
class OpRecord:
    """One op of the final graph. `where` is "lowered"; "carried": eager's own call, inside a region of the backend; "eager"; or
    "view": eager's own, and free."""

    op: str
    where: str
    verdict: Verdict
    note: str
    source: str
    shape: str
    seconds: float
    id: int = -1
    """Of the op in its graph; instructions of the plan name it."""


@dataclass(frozen=True)
class Kept:
    """What was compiled, for those who record with `keep`: a `plan.build.Plan` with its kernels and the plan as a callable, the
    `GraphIndex` of the graph that was lowered, and the arguments of its first call."""

    plan: Any
    kernels: Mapping[str, KernelCode]
    run: Any
    index: Any
    args: list[Any]


@dataclass
class GraphReport:
    """One compiled graph."""

    backend: str
    phase: str
    capture: str = ""
    ops: list[OpRecord] = field(default_factory=list)
    regions: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    stages: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """Each run of a stage: its name, when it began (`time.perf_counter`) and how many seconds it took."""
    texts: dict[str, str] = field(default_factory=dict)
    bugs: list[str] = field(default_factory=list)
    cached: bool = False
    superseded: bool = False
    """Whether the graph was compiled again, since its first run found what was traced untrue."""
    kept: Kept | None = None
    replay: str = ""
    """How calls are replayed on the device, or why they are not; "" where the backend has no such thing."""

    def tell_replay(self, text: str) -> None:
        """Keep what became of replay; it is known for sure only after some calls."""
        self.replay = text

    def count(self, where: str) -> int:
        return sum(1 for r in self.ops if r.where == where)

    def seconds(self, where: str) -> float:
        """Estimated seconds a call spends there (a roofline, not a measurement)."""
        return sum(r.seconds for r in self.ops if r.where == where)

    @property
    def fallbacks(self) -> list[OpRecord]:
        """What the backend did not take."""
        return [r for r in self.ops if r.where == "eager"]

    @property
    def by_eager(self) -> list[OpRecord]:
        """All that eager's own kernels compute, inside of regions and outside: what the option `fallback` is about."""
        return [r for r in self.ops if r.where in ("eager", "carried")]

    def summary(self) -> str:
        """The one line that a user sees when something runs in eager."""
        lowered, carried, eager = map(self.count, ("lowered", "carried", "eager"))
        reasons = len({(r.verdict.why, r.verdict.detail) for r in self.by_eager})
        inside = f", and {carried} by eager's own calls inside of regions" if carried else ""
        ops = counted(lowered + carried + eager, "op")
        return (
            f"{self.backend}: {eager} of {ops} of this {self.phase} graph run in eager{inside} "
            f"({counted(reasons, 'reason')}); {SEE}"
        )


SEE = 'see "fusewright explain"'

log = logging.getLogger("fusewright")

SAID: set[str] = set()
"""Lines that this process has said."""


def warn_once(message: str) -> None:
    """Say a line, but not again: equal layers make equal graphs, whose notes are equal too."""
    if message not in SAID:
        SAID.add(message)
        log.warning("fusewright: %s", message)


@dataclass(eq=False)
class _Recorder:
    keep: bool
    reports: list[GraphReport] = field(default_factory=list)


_recorders: list[_Recorder] = []


@contextlib.contextmanager
def recording(keep: bool = False) -> Iterator[list[GraphReport]]:
    """Collect the reports of every graph that is compiled inside the `with` block; with what was compiled, if `keep`."""
    recorder = _Recorder(keep)
    _recorders.append(recorder)
    try:
        yield recorder.reports
    finally:
        _recorders.remove(recorder)


def is_recording() -> bool:
    return bool(_recorders)


def is_keeping() -> bool:
    """Whether somebody wants what is compiled, and not its record alone."""
    return any(r.keep for r in _recorders)


def publish(report: GraphReport) -> None:
    """Hand a finished report to whoever records."""
    for r in _recorders:
        r.reports.append(report)
