"""Write `docs/zoo.md` from the records in `docs/results/zoo`, one table per backend:

    python -m tests.zoo.page

A record is what `python -m tests.zoo --json` writes, with the machine, versions and commit under `where`; its name begins with
its date. The newest verdict of a model's mode counts; one that says nothing (out of time, not built) replaces none.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.zoo.check import MODES, Verdict

ROOT = Path(__file__).parents[2]
RECORDS, PAGE = ROOT / "docs" / "results" / "zoo", ROOT / "docs" / "zoo.md"

MARKS = {"right": "✓", "not run": "–", "not built": "", "wrong in aot_eager too": "≈"}
"""Symbols for statuses; all others are written out."""

HEAD = """# The zoo

Models at small geometry with random weights, each mode of each model in a process of its own; `python -m tests.zoo` makes the
[records](results/zoo) and this page is generated from them (`python -m tests.zoo.page`): the newest verdict of each pair, where a
run that was out of time or could not build the model counts only if no other reached it.

Right (✓) is within twice eager's own error against fp64, with eager's shapes and strides, in a first and a second call. Where one
draw exceeds that, and the largest of eight of eager's too, wrong is what exceeds it in six of seven draws of both, and in six of
seven fresh ones (`tests/zoo/check.py`). Integers equal eager's; where rounding makes up to a quarter of eager's differ from
fp64's (codes of the nearest vector), twice as many may, none always at its place.
What that sees (20,000 simulated models, log-normal draws): a steady error of three times eager's in 98 of 100 where draws vary by a
tenth, in one of seven where they vary by a third; four times in three of five there, six times in 94 of 100; ten times in five of
six where they vary by a factor of 1.8, as behind batch norms over eight values. Up to 2.5 times it sees two of 100 unless draws
hardly vary, twice never: that is right.
calls, steps: seven later calls with other inputs, training steps with other weights too, results kept: what is stale would show
(`tests/zoo/later.py`); on a GPU most are replayed.
≈: right beside `aot_eager`, which has none of our kernels, in eager's place: it has the same error.
–: eager does not run this mode, or sizes are fixed.
The last columns: seconds of the first call, number of graphs, ops that were lowered, ops that ran in eager.
"""


SILENT = ("out of time", "not built")


def page(given: Iterable[Mapping[str, Any]]) -> str:
    """Format the page as Markdown, of records from the oldest to the newest."""
    by_backend: dict[str, list[Mapping[str, Any]]] = {}
    for record in given:
        by_backend.setdefault(record["backend"], []).append(record)
    return "\n".join([HEAD, *(_section(backend, found) for backend, found in sorted(by_backend.items(), reverse=True))])


def newest(given: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """Merge the verdicts of records from the oldest to the newest: the last one of a pair that says something."""
    found: dict[tuple[str, str], Verdict] = {}
    for verdict in (Verdict(**v) for record in given for v in record["zoo"]):
        pair = verdict.model, verdict.mode
        if pair not in found or found[pair].status in SILENT or verdict.status not in SILENT:
            found[pair] = verdict
    built = {v.model for v in found.values() if v.status != "not built"}
    return sorted((v for v in found.values() if v.status != "not built" or v.model not in built), key=lambda v: v.model)


def _section(backend: str, given: Sequence[Mapping[str, Any]]) -> str:
    verdicts = newest(given)
    by_model: dict[str, dict[str, Verdict]] = {}
    for v in verdicts:
        by_model.setdefault(v.model, {})[v.mode] = v
    missing = [n for n, row in by_model.items() if all(v.status == "not built" for v in row.values())]
    built = [n for n in by_model if n not in missing]
    unbuilt = f"Not built at a small geometry ({len(missing)}): {', '.join(n.partition('/')[2] for n in missing)}.\n"
    modes = [m for m in MODES if any(m in row for row in by_model.values())]
    lines = [
        f"## {backend}\n",
        *(f"- {record['where']}" for record in reversed(given)),
        f"\n{len(built)} models.\n",
        *_counts(verdicts, modes),
        "",
        *_others(verdicts),
        f"| model | {' | '.join(modes)} | first call s | graphs | lowered | eager |",
        "| --- |" + " --- |" * (len(modes) + 4),
        *(_row(n, by_model[n], modes) for n in built),
        "",
        *([unbuilt] if missing else []),
    ]
    return "\n".join(lines)


def _counts(verdicts: Sequence[Verdict], modes: Sequence[str]) -> list[str]:
    counts = Counter((v.status, v.mode) for v in verdicts)
    kinds = [k for k in dict.fromkeys(["right", *sorted({v.status for v in verdicts})]) if k != "not built"]
    lines = [f"| | {' | '.join(modes)} |", "| --- |" + " --- |" * len(modes)]
    lines += [f"| {k} | {' | '.join(str(counts[k, m]) for m in modes)} |" for k in kinds]
    firsts = {m: [v.first_s for v in verdicts if v.mode == m and v.first_s] for m in modes}
    return [*lines, f"| first call, median s | {' | '.join(f'{median(firsts[m]):.1f}' if firsts[m] else '' for m in modes)} |"]


def _others(verdicts: Sequence[Verdict]) -> list[str]:
    """List verdicts that are neither right nor excused, with the reason."""
    found = [v for v in verdicts if v.status not in MARKS or v.bugs]
    said = [(v.reason or "; ".join(v.bugs)).splitlines() or [""] for v in found]
    lines = [f"- `{v.model}`, {v.mode}: {v.status}: {text[0]}" for v, text in zip(found, said, strict=True)]
    return [*lines, ""] if lines else []


def _row(name: str, row: dict[str, Verdict], modes: Sequence[str]) -> str:
    first = max((row[m] for m in modes if m in row), key=lambda v: v.first_s > 0)
    marks = [MARKS.get(row[m].status, row[m].status) if m in row else "" for m in modes]
    return f"| {name} | {' | '.join(marks)} | {first.first_s:.1f} | {first.graphs} | {first.lowered} | {first.eager} |"


def records() -> list[dict[str, Any]]:
    """Return the records that are kept, from the oldest to the newest."""
    return [json.loads(p.read_text()) for p in sorted(RECORDS.glob("*.json"))]


if __name__ == "__main__":
    PAGE.write_text(page(records()))
