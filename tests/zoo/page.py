"""Write `docs/zoo.md` from records of `python -m tests.zoo --json`: one table per backend, made by

    python -m tests.zoo.page RECORD.json ... > docs/zoo.md
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.zoo.check import MODES, Verdict

MARKS = {"right": "✓", "not run": "–", "not built": "", "wrong in aot_eager too": "≈"}
"""Symbols for statuses; all others are written out."""

HEAD = """# The zoo

Models at small geometry with random weights, each mode of each model in a process of its own; `python -m tests.zoo` makes the
records and this page is generated from them (`tests/zoo/page.py`).

Right (✓) is within twice eager's own error against fp64, with eager's shapes and strides, in a first and a second call. Where one
draw exceeds that, and the largest of eight of eager's too, wrong is what exceeds it in six of seven draws of both, and in six of
seven fresh ones (`tests/zoo/check.py`).
What that sees (20,000 simulated models, log-normal draws): a steady error of three times eager's in 98 of 100 where draws vary by a
tenth, in one of seven where they vary by a third; four times in three of five there, six times in 94 of 100; ten times in five of
six where they vary by a factor of 1.8, as behind batch norms over eight values. Up to 2.5 times it sees two of 100 unless draws
hardly vary, twice never: that is right.
≈: exceeds that under `aot_eager` too, which has none of our kernels. –: eager does not run this mode, or sizes are fixed.
The last columns: seconds of the first call, number of graphs, ops that were lowered, ops that ran in eager.
"""


def page(records: Iterable[dict[str, Any]]) -> str:
    """Format the page as Markdown."""
    return "\n".join([HEAD, *(_section(r) for r in records)])


def _section(record: dict[str, Any]) -> str:
    verdicts = [Verdict(**v) for v in record["zoo"]]
    by_model: dict[str, dict[str, Verdict]] = {}
    for v in verdicts:
        by_model.setdefault(v.model, {})[v.mode] = v
    missing = sorted(n for n, row in by_model.items() if all(v.status == "not built" for v in row.values()))
    built = [n for n in by_model if n not in missing]
    modes = [m for m in MODES if any(m in row for row in by_model.values())]
    lines = [
        f"## {record['backend']}\n",
        f"{record.get('where', '')}\n",
        f"{len(built)} models.\n",
        *_counts(verdicts, modes),
        "",
        *_others(verdicts),
        f"| model | {' | '.join(modes)} | first call s | graphs | lowered | eager |",
        "| --- |" + " --- |" * (len(modes) + 4),
        *(_row(n, by_model[n], modes) for n in built),
        "",
        f"Not built at a small geometry ({len(missing)}): {', '.join(n.partition('/')[2] for n in missing)}.\n",
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
    first = row.get("inference") or next(iter(row.values()))
    marks = [MARKS.get(row[m].status, row[m].status) if m in row else "" for m in modes]
    return f"| {name} | {' | '.join(marks)} | {first.first_s:.1f} | {first.graphs} | {first.lowered} | {first.eager} |"


if __name__ == "__main__":
    print(page(json.loads(Path(p).read_text()) for p in sys.argv[1:]))
