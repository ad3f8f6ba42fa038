"""Generate the support matrix from the committed coverage of each backend (`tests/conformance/coverage`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fusewright import ops
from fusewright.conformance.coverage import OPINFO, ROWS, Coverage

FOLDER = Path(__file__).resolve().parents[2] / "tests/conformance/coverage"
DTYPES = ("float32", "bfloat16", "int64", "bool")


def read() -> dict[str, Coverage]:
    """Return every committed file by name: the backend's, with a suffix if a backend has files for several devices."""
    return {path.stem: Coverage.read(path) for path in sorted(FOLDER.glob("*.json"))}


def matrix() -> str:
    """Return three tables: the lowered part of the opset, the results of each level, and what no level could check."""
    found = list(read().values())
    return "\n\n".join((_opset(found), _levels(found), _left_out(found)))


def _opset(found: Sequence[Coverage]) -> str:
    """Return the table of correct and lowered calls, and of opset rows by dtype."""
    head = ["backend", "checked on", "torch", "rows tried", "correct", "lowered", *(f"rows in {d}" for d in DTYPES)]
    return _table(head, [_cells(c) for c in found])


def _cells(c: Coverage) -> Sequence[str]:
    calls = c.levels[ROWS]
    rows = [sum(d in found for found in c.rows.values()) for d in DTYPES]
    tried = [str(n) if d in calls.dtypes else "not tried" for d, n in zip(DTYPES, rows, strict=True)]
    release, of_all = ", ".join(c.torch), _of((c.tried, len(ops.ROWS)))
    return (f"`{c.backend}`", _where(c), release, of_all, _of(calls.correct), _of(calls.lowered), *tried)


def _levels(found: Sequence[Coverage]) -> str:
    """Return the table of correct results per level; for OpInfo also what is lowered, and how far the run got in each dtype."""
    plain = ("C0", "C1", "C3", "C4")
    head = ["backend", "OpInfo entries tried", "correct", "lowered", *(f"correct in {level}" for level in plain)]
    return _table(head, [[_name(c), *_entries(c), *(_right(c, level) for level in plain)] for c in found])


def _entries(c: Coverage) -> Sequence[str]:
    if OPINFO not in c.levels:
        return "not tried", "", ""
    level = c.levels[OPINFO]
    tried = (f"{d} {_of((n, c.entries[d])) if d in c.entries else n}" for d, n in level.dtypes.items())
    return ", ".join(tried), _of(level.correct), _of(level.lowered)


def _name(c: Coverage) -> str:
    return f"`{c.backend}`, {_where(c)}"


def _where(c: Coverage) -> str:
    return f"simulated `{c.device}`" if c.simulated else f"`{c.device}`"


def _right(c: Coverage, level: str) -> str:
    return _of(c.levels[level].correct) if level in c.levels else "not tried"


def _left_out(found: Sequence[Coverage]) -> str:
    """Return the table of checks excluded from both figures, by reason, and the rows without a call."""
    rows = []
    for c in found:
        skipped = [f"{n} {title}: {why}" for title, level in c.levels.items() for why, n in level.skipped.items()]
        untried = [f"`{row}`: {why}" for row, why in c.untried.items()]
        rows.append([_name(c), "<br>".join(skipped) or "none", "<br>".join(untried) or "none"])
    return _table(["backend", "checks skipped", "rows without a call"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def _of(figure: tuple[int, int]) -> str:
    return f"{figure[0]} of {figure[1]}"
