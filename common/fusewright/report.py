"""What happened to each graph, as `explain` shows it. The compile path itself fills this record, so the two cannot differ."""

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
    """One op of the final graph. `where` is "lowered", "carried" (eager's own call, inside a region of the backend), "eager",
    or "view" (eager's own, and free)."""

    op: str
    where: str
    verdict: Verdict
    note: str
    source: str
    shape: str
    seconds: float
    id: int = -1
    """Id of the op in its graph; instructions of the plan refer to it."""


@dataclass(frozen=True)
class Kept:
    """What was compiled, for recordings with `keep`: a `plan.build.Plan` with its kernels, the plan as a callable, the
    `GraphIndex` of the lowered graph, and the arguments of the first call."""

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
    """Each run of a stage: name, start (`time.perf_counter`) and duration in seconds."""
    texts: dict[str, str] = field(default_factory=dict)
    bugs: list[str] = field(default_factory=list)
    cached: bool = False
    superseded: bool = False
    """Whether the graph was compiled again because its first run contradicted the traced metadata."""
    kept: Kept | None = None
    replay: str = ""
    """How calls are replayed on the device, or why not; "" if the backend has no replay."""

    def tell_replay(self, text: str) -> None:
        """Record the outcome of replay; it is final only after some calls."""
        self.replay = text

    def count(self, where: str) -> int:
        return sum(1 for r in self.ops if r.where == where)

    def seconds(self, where: str) -> float:
        """Estimated seconds that a call spends in `where` (a roofline, not a measurement)."""
        return sum(r.seconds for r in self.ops if r.where == where)

    @property
    def fallbacks(self) -> list[OpRecord]:
        """Ops that the backend did not take."""
        return [r for r in self.ops if r.where == "eager"]

    @property
    def by_eager(self) -> list[OpRecord]:
        """All ops that eager's own kernels compute, inside and outside regions: what the option `fallback` is about."""
        return [r for r in self.ops if r.where in ("eager", "carried")]

    def summary(self) -> str:
        """The one line that a user sees if something runs in eager."""
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
"""Lines that this process has already logged."""


def warn_once(message: str) -> None:
    """Log a warning once per process: equal layers make equal graphs, whose notes are equal too."""
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
    """Collect the reports of every graph compiled inside the `with` block; with `keep`, also what was compiled."""
    recorder = _Recorder(keep)
    _recorders.append(recorder)
    try:
        yield recorder.reports
    finally:
        _recorders.remove(recorder)


def is_recording() -> bool:
    return bool(_recorders)


def is_keeping() -> bool:
    """Whether a recording wants the compiled plans, not only the reports."""
    return any(r.keep for r in _recorders)


def publish(report: GraphReport) -> None:
    """Pass a finished report to all active recordings."""
    for r in _recorders:
        r.reports.append(report)
