"""The support matrix, from the committed coverage of each backend (`tests/conformance/coverage`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fusewright import ops
from fusewright.conformance.coverage import Coverage

FOLDER = Path(__file__).resolve().parents[1] / "tests/conformance/coverage"
DTYPES = ("float32", "bfloat16", "int64", "bool")


def read() -> dict[str, Coverage]:
    """Every committed file, by the backend's name."""
    return {c.backend: c for c in map(Coverage.read, sorted(FOLDER.glob("*.json")))}


def matrix() -> str:
    """A row for each backend: where it was checked, calls that are right and that are lowered, rows of the opset by dtype."""
    head = ["backend", "checked on", "rows tried", "correct", "lowered", *(f"rows in {d}" for d in DTYPES)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(_cells(c))} |" for c in read().values())])


def _cells(c: Coverage) -> Sequence[str]:
    where = f"simulated `{c.device}`" if c.simulated else f"`{c.device}`"
    rows = [sum(d in found for found in c.rows.values()) for d in DTYPES]
    tried = [str(n) if d in c.dtypes else "not tried" for d, n in zip(DTYPES, rows, strict=True)]
    return (f"`{c.backend}`", where, _of((c.tried, len(ops.ROWS))), _of(c.correct), _of(c.lowered), *tried)


def _of(figure: tuple[int, int]) -> str:
    return f"{figure[0]} of {figure[1]}"
