"""A backend's coverage of the opset, as a committed file that only grows: `coverage.json`, renewed by a whole run of a level.

Schema: {"schema": 2, "backend": name, "device": its architecture, "simulated": bool, "torch": [releases],
"entries": {dtype: OpInfo entries that there are}, "tried": rows, "untried": {row: reason},
"levels": {title: {"dtypes": {dtype: checks}, "correct": [x, y], "lowered": [x, y], "skipped": {reason: checks}}},
"rows": {row: {dtype: [variants of which every sample is lowered]}}}.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fusewright import ops
from fusewright.conformance.ops import entries
from fusewright.conformance.record import Record
from fusewright.conformance.verdicts import Check, Verdict, summary

SCHEMA = 2
ROWS, OPINFO = "C2 rows", "C2 OpInfo"
"""The two parts of C2, as levels in a file."""

Rows = Mapping[str, Mapping[str, Sequence[str]]]
"""Row of the opset -> dtype -> call variants for which every sample is lowered."""


@dataclass(frozen=True)
class Level:
    """The figures of a level: (x, y)."""

    dtypes: Mapping[str, int]
    """Number of checks per dtype, for C2 only."""
    correct: tuple[int, int]
    lowered: tuple[int, int]
    skipped: Mapping[str, int]
    """Number of checks that eager or torch could not run, by reason."""

    @classmethod
    def of(cls, checks: Sequence[Check]) -> Level:
        figures = summary(checks)
        return cls(
            dict(sorted(Counter(d for c in checks if (d := _dtype(c))).items())), (figures.correct.of, figures.correct.total),
            (figures.lowered.of, figures.lowered.total), dict(sorted(_skips(checks).items())),
        )  # fmt: skip

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Level:
        return cls(**{**found, **{k: tuple(found[k]) for k in ("correct", "lowered")}})


@dataclass(frozen=True)
class Coverage:
    """The content of the file."""

    backend: str
    device: str
    simulated: bool
    torch: tuple[str, ...]
    entries: Mapping[str, int]
    """Number of OpInfo entries per dtype on that device; a run may have tried fewer."""
    levels: Mapping[str, Level]
    tried: int
    """Number of opset rows in the run."""
    untried: Mapping[str, str]
    """Rows without a call that eager runs there, with the reason."""
    rows: Rows

    @classmethod
    def of(cls, record: Record) -> Coverage:
        """Compute the coverage from the checks of a run."""
        parts: dict[str, list[Check]] = {}
        for c in record.checks:
            parts.setdefault(_part(c), []).append(c)
        found = [c for c in parts.get(ROWS, ()) if _is_row(c)]
        return cls(
            record.backend, record.arch, record.simulated, record.torch, record.entries,
            {title: Level.of(checks) for title, checks in sorted(parts.items())}, len({_key(c)[0] for c in found}),
            {c.name: c.detail for c in parts.get(ROWS, ()) if c.name in ops.OPS and c.verdict is Verdict.SKIPPED},
            lowered_rows(found),
        )  # fmt: skip

    @classmethod
    def read(cls, path: Path) -> Coverage:
        """Read a file. ValueError for another schema."""
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("schema", None) != SCHEMA:
            raise ValueError(
                f"{path.name} is of another version; renew it by a whole run (--coverage {path.name} --renew)"
            )
        levels = {title: Level.from_json(level) for title, level in found["levels"].items()}
        return cls(**{**found, "torch": tuple(found["torch"]), "levels": levels})

    def write(self, path: Path) -> None:
        """Write each level and each opset row on its own line, so that a diff shows the progress."""
        found = asdict(self)
        head = json.dumps({"schema": SCHEMA, **{k: v for k, v in found.items() if k not in ("levels", "rows")}})
        levels, rows = _lines(found["levels"]), _lines(found["rows"])
        path.write_text(f'{head[:-1]}, "levels": {levels}, "rows": {rows}}}\n', encoding="utf-8")

    def over(self, before: Coverage) -> Coverage:
        """This run's coverage, with missing parts taken from the file, if that is for the same device."""
        if (before.device, before.simulated) != (self.device, self.simulated):
            return self
        kept = {title: level for title, level in before.levels.items() if title not in self.levels}
        calls, entries = (before if part in kept else self for part in (ROWS, OPINFO))
        return replace(
            self, torch=tuple(sorted({*self.torch, *before.torch})) if kept else self.torch,
            levels=dict(sorted({**kept, **self.levels}.items())), entries=entries.entries,
            tried=calls.tried, untried=calls.untried, rows=calls.rows,
        )  # fmt: skip

    def lost(self, checks: Iterable[Check]) -> list[str]:
        """Lowerings in the file that these checks, which may be partial, tried and did not find."""
        found = [c for c in checks if _is_row(c)]
        tried, now = {_key(c) for c in found}, set(_keys(lowered_rows(found)))
        return [" ".join(key) for key in _keys(self.rows) if key in tried and key not in now]


def lowered_rows(checks: Iterable[Check]) -> dict[str, dict[str, list[str]]]:
    """By row and dtype, the variants for which every sample is lowered."""
    by_key: dict[tuple[str, str, str], bool] = {}
    for c in checks:
        by_key[_key(c)] = by_key.get(_key(c), True) and c.verdict is Verdict.LOWERED_OK
    rows: dict[str, dict[str, list[str]]] = {}
    for (row, dtype, variant), all_lowered in by_key.items():
        if all_lowered:
            rows.setdefault(row, {}).setdefault(dtype, []).append(variant)
    return rows


def _lines(found: Mapping[str, object]) -> str:
    """Format a JSON object with one member per line."""
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(found.items())) + "\n}"


def _part(c: Check) -> str:
    """The level of a check, with C2 split into its two parts."""
    return c.level if c.level != "C2" else OPINFO if c.name.startswith(entries.PREFIX) else ROWS


def _dtype(c: Check) -> str:
    """The dtype of a C2 check."""
    return {OPINFO: c.name.split()[-1], ROWS: _key(c)[1] if _is_row(c) else ""}.get(_part(c), "")


def _skips(checks: Iterable[Check]) -> Counter[str]:
    """Count skipped checks by the start of their details."""
    return Counter(c.detail.partition(":")[0] for c in checks if c.verdict is Verdict.SKIPPED)


def _is_row(c: Check) -> bool:
    """Whether this is a call of a row; a row without calls is a single check with its name."""
    return _part(c) == ROWS and len(c.name.split()) > 3


def _key(c: Check) -> tuple[str, str, str]:
    """Split "add float32 not finite 0" into (row, dtype, variant)."""
    row, dtype, *variant, _ = c.name.split()
    return row, dtype, " ".join(variant)


def _keys(rows: Rows) -> Iterator[tuple[str, str, str]]:
    return ((row, dtype, v) for row, found in rows.items() for dtype, variants in found.items() for v in variants)
