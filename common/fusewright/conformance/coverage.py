"""What a backend lowers of the opset, as a committed file that only grows: `coverage.json`, renewed by a whole run.

Schema: {"schema": 1, "backend": name, "device": its architecture, "simulated": bool, "dtypes": [..],
"tried": rows, "correct": [x, y],
"lowered": [x, y], "rows": {row: {dtype: [variants of which every sample is lowered]}}}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fusewright.conformance.verdicts import Check, Verdict, summary

SCHEMA = 1

Rows = Mapping[str, Mapping[str, Sequence[str]]]
"""Row of the opset -> dtype -> variants of a call, each sample of which is lowered."""


@dataclass(frozen=True)
class Coverage:
    """What the file holds. Figures are of the computations of C2's rows: (x, y)."""

    backend: str
    device: str
    simulated: bool
    dtypes: tuple[str, ...]
    tried: int
    """How many rows of the opset the run had."""
    correct: tuple[int, int]
    lowered: tuple[int, int]
    rows: Rows

    @classmethod
    def of(cls, backend: str, device: str, simulated: bool, checks: Iterable[Check]) -> Coverage:
        """From the checks of a run; only those of the opset's rows count."""
        found = [c for c in checks if _is_row(c)]
        figures = summary(found)
        return cls(
            backend, device, simulated, tuple(sorted({_key(c)[1] for c in found})),
            len({_key(c)[0] for c in found}), (figures.correct.of, figures.correct.total),
            (figures.lowered.of, figures.lowered.total), lowered_rows(found),
        )  # fmt: skip

    @classmethod
    def read(cls, path: Path) -> Coverage:
        """The file's content. ValueError for another schema."""
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("schema", None) != SCHEMA:
            raise ValueError(
                f"{path.name} is of another version; renew it by a whole run (--coverage {path.name} --renew)"
            )
        return cls(**{**found, **{k: tuple(found[k]) for k in ("dtypes", "correct", "lowered")}})

    def write(self, path: Path) -> None:
        """One row of the opset on a line, so that a diff shows what was won."""
        head = json.dumps({"schema": SCHEMA, **{k: v for k, v in asdict(self).items() if k != "rows"}})
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(self.rows.items()))
        path.write_text(f'{head[:-1]}, "rows": {{\n{rows}\n}}}}\n', encoding="utf-8")

    def lost(self, checks: Iterable[Check]) -> list[str]:
        """Lowerings of the file that these checks, which need not be all, have tried and no longer find."""
        found = [c for c in checks if _is_row(c)]
        tried, now = {_key(c) for c in found}, set(_keys(lowered_rows(found)))
        return [" ".join(key) for key in _keys(self.rows) if key in tried and key not in now]


def lowered_rows(checks: Iterable[Check]) -> dict[str, dict[str, list[str]]]:
    """By row and dtype the variants of which every sample is lowered."""
    by_key: dict[tuple[str, str, str], bool] = {}
    for c in checks:
        by_key[_key(c)] = by_key.get(_key(c), True) and c.verdict is Verdict.LOWERED_OK
    rows: dict[str, dict[str, list[str]]] = {}
    for (row, dtype, variant), all_lowered in by_key.items():
        if all_lowered:
            rows.setdefault(row, {}).setdefault(dtype, []).append(variant)
    return rows


def _is_row(c: Check) -> bool:
    return c.level == "C2" and not c.name.startswith("OpInfo ") and len(c.name.split()) > 3


def _key(c: Check) -> tuple[str, str, str]:
    """(row, dtype, variant) of "add float32 not finite 0"."""
    row, dtype, *variant, _ = c.name.split()
    return row, dtype, " ".join(variant)


def _keys(rows: Rows) -> Iterator[tuple[str, str, str]]:
    return ((row, dtype, v) for row, found in rows.items() for dtype, variants in found.items() for v in variants)
