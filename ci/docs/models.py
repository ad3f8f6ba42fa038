"""The page of every model that was timed beside eager, from the newest record of each: docs/results/models.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

OURS = ("nvidia_triton", "x86_onednn")
SLOWER = 0.97
"""Times eager's speed below which a model counts as slower than eager."""
SAME = {"h200x2": "h200"}
"""Machines whose single GPU is another's."""
OTHERS = ("inductor", "reduce-overhead", "inductor-freezing")
INTRO = """\
# Models beside eager

Generated from the newest record of each model in this folder by `python -m ci.docs.tables`; do not edit. Published geometries with
random weights. Rows of different records are not compared: machines are shared, so read ratios.
[What they mean](../performance.md)
"""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Timed:
    """A model, and the medians in ms of those that one record timed."""

    model: str
    mode: str
    dtype: str
    machine: str
    file: str
    ms: Mapping[str, float]

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.machine, self.mode, self.dtype, self.model

    @property
    def ours(self) -> float:
        return next(self.ms[name] for name in OURS if name in self.ms)

    @property
    def over_eager(self) -> float:
        return self.ms["eager"] / self.ours


def timed(file: str, machine: str, record: Record) -> Iterator[Timed]:
    """Yield the models of a record that it timed both with one of ours and with eager."""
    rows = record.get("rows") or []
    if record.get("schema") == "fusewright.bench":
        found = [_of_bench(file, machine, row) for row in rows if not row["model"].startswith(("kernel:", "graph:", "decode:"))]
    else:
        found = list(_of_profiles(file, machine, record, rows))
    yield from (t for t in found if "eager" in t.ms and any(name in t.ms for name in OURS))


def _of_bench(file: str, machine: str, row: Record) -> Timed:
    ms = {name: c["steady"]["median_ms"] for name, c in row["contenders"].items() if "steady" in c}
    mode = "training" if row["mode"] == "train" else row["mode"]
    return Timed(row["model"], mode, row["dtype"], machine, file, ms)


def _of_profiles(file: str, machine: str, record: Record, rows: list[Record]) -> Iterator[Timed]:
    for case in dict.fromkeys(row["case"] for row in rows if "contender" in row):
        ms = {row["contender"]: row["ms"] for row in rows if row["case"] == case and row["outcome"] == "timed"}
        model, _, mode = case.rpartition(":")
        name = model.rpartition(":")[2] if ".py:" in model else model
        dtype, train = record.get("dtype", "bf16"), mode == "train"
        yield Timed(name, "training" if train else "inference", "amp" if train else dtype, machine, file, ms)


def page(records: list[tuple[str, str, Record]], titles: Mapping[str, str]) -> str:
    """Return the page for (file, machine, record)."""
    newest: dict[tuple[str, str, str, str], Timed] = {}
    for file, machine, record in sorted(records, key=lambda r: r[2].get("date") or r[0], reverse=True):
        for t in timed(file, SAME.get(machine, machine), record):
            newest.setdefault(t.key, t)
    groups: dict[tuple[str, str, str], list[Timed]] = {}
    for t in newest.values():
        groups.setdefault((t.machine, t.mode, t.dtype), []).append(t)
    models = {t.model.rpartition(":")[2] for t in newest.values()}
    head = f"{len(newest)} rows of {len(models)} models.\n"
    parts = [_group(f"{titles[m]}: {mode}, {dtype}", groups[m, mode, dtype]) for m, mode, dtype in sorted(groups)]
    return "\n".join([INTRO, head, *parts])


def _group(title: str, rows: list[Timed]) -> str:
    mean = statistics.geometric_mean(t.over_eager for t in rows)
    slower = [f"{t.model} {t.over_eager:.2f}x" for t in rows if t.over_eager < SLOWER]
    said = f"{len(rows)} models, {mean:.2f}x over eager (geometric mean); slower than eager: {', '.join(slower) or 'none'}."
    others = [name for name in OTHERS if any(name in t.ms for t in rows)]
    head = ["model", "ours, ms", "eager, ms", "over eager", *(f"over {name}" for name in others), "record"]
    lines = [_line([t.model, _ms(t.ours), _ms(t.ms["eager"]), f"{t.over_eager:.2f}x", *_over(t, others), _link(t)]) for t in rows]
    return "\n".join([f"## {title}", "", said, "", _line(head), "|" + "---|" * len(head), *sorted(lines), ""])


def _over(t: Timed, others: list[str]) -> list[str]:
    return [f"{t.ms[name] / t.ours:.2f}x" if name in t.ms else "" for name in others]


def _link(t: Timed) -> str:
    return f"[{t.file.removesuffix('.json')}]({t.file})"


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
