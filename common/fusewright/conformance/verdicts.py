"""The result of a check, and the two figures of a run."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


class Verdict(enum.StrEnum):
    """The first six judge a computation. `PASSED` is for checks without a computation, or without one of the backend."""

    LOWERED_OK = "LOWERED_OK"
    """Correct, and the backend computed everything."""
    FALLBACK_OK = "FALLBACK_OK"
    """Correct, and eager computed some of it, in agreement with the backend's claims."""
    DECLINED_LATE = "DECLINED_LATE"
    """Correct, but the backend gave back something that it had claimed."""
    WRONG = "WRONG"
    """Values, dtypes, shapes, strides, aliasing or mutation differ from eager's."""
    CRASHED = "CRASHED"
    """The process died, or did not answer in time."""
    ERROR = "ERROR"
    """An error that eager does not raise, or a bug of the backend reported by the host."""
    PASSED = "PASSED"
    SKIPPED = "SKIPPED"
    """Not judged: eager itself cannot run it, or torch's own `aot_eager` is wrong too."""

    @property
    def bad(self) -> bool:
        return self in BAD


BAD = frozenset((Verdict.WRONG, Verdict.CRASHED, Verdict.ERROR))
COMPUTED = frozenset((Verdict.LOWERED_OK, Verdict.FALLBACK_OK, Verdict.DECLINED_LATE, *BAD))


@dataclass(frozen=True)
class Figure:
    """x of y."""

    of: int
    total: int

    def __str__(self) -> str:
        return f"{self.of} of {self.total}"


@dataclass(frozen=True)
class Check:
    """One check: the level, a unique name within it, and the verdict. `detail` says why, unless it is a plain yes."""

    level: str
    name: str
    verdict: Verdict
    detail: str = ""
    ops: Figure | None = None
    """Of a model: how many of its ops the backend computed. One op left to eager makes the whole model a fallback."""

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Check:
        ops = found.get("ops")
        return cls(**{**found, "verdict": Verdict(found["verdict"]), "ops": ops and Figure(**ops)})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Summary:
    """The headline figures, which are never added, and the verdicts by level."""

    correct: Figure
    lowered: Figure
    ops: Figure
    """Lowered ops of the models of C4."""
    verdicts: Mapping[str, Mapping[str, int]]

    @property
    def ok(self) -> bool:
        return self.correct.of == self.correct.total

    def as_json(self) -> dict[str, Any]:
        figures = {"correct": self.correct, "lowered": self.lowered, "ops": self.ops}
        return {**{k: asdict(v) for k, v in figures.items()}, "verdicts": self.verdicts}


LOWERING = ("C2", "C4")
"""Levels whose computations count as lowered or not. C1 removes the backend's claims, C3 breaks it."""


def summary(checks: Iterable[Check]) -> Summary:
    """The figures of a run. Skipped checks count in neither."""
    found = list(checks)
    judged = [c for c in found if c.verdict is not Verdict.SKIPPED]
    computed = [c for c in found if c.level in LOWERING and c.verdict in COMPUTED]
    ops = [c.ops for c in found if c.ops is not None]
    by_level: dict[str, Counter[str]] = {}
    for c in found:
        by_level.setdefault(c.level, Counter())[c.verdict.value] += 1
    return Summary(
        Figure(sum(not c.verdict.bad for c in judged), len(judged)),
        Figure(sum(c.verdict is Verdict.LOWERED_OK for c in computed), len(computed)),
        Figure(sum(o.of for o in ops), sum(o.total for o in ops)),
        {level: dict(sorted(counts.items())) for level, counts in sorted(by_level.items())},
    )
