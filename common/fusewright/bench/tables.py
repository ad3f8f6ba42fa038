"""Tables of a document for the terminal (rich)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fusewright.bench.cases.kernels import bandwidth, is_kernel
from fusewright.bench.contenders import EAGER
from fusewright.bench.stats import geomean, over, speedups
from fusewright.errors import in_brief

Row = dict[str, Any]
DETAIL_MODELS = 2
"""Up to this many models each get their own table with a line per contender."""


INT8 = "int8"
"""The dtype of `fusewright bench --int8` rows, whose contenders are compared with their first."""
PUBLISHED = "published 1.76x, 1.80x, 2.04x and 1.34x at 1, 2, 4 and 32 cores"
"""Speed-ups of torch's newer engine over FBGEMM, according to its authors."""


def render(document: Row, width: int = 160) -> Iterator[RenderableType]:
    """Everything that a run prints, for a terminal of `width` columns: tables of models or kernels, failures."""
    ours = document["backend"]
    rows = [row for row in document["rows"] if not is_kernel(row["model"])]
    kernels = [row for row in document["rows"] if is_kernel(row["model"])]
    detailed = len({row["model"] for row in rows}) <= DETAIL_MODELS
    if detailed:
        for row in rows:
            yield from _detail(row, width)
    else:
        for mode, dtype in dict.fromkeys((row["mode"], row["dtype"]) for row in rows):
            chosen = [r for r in rows if (r["mode"], r["dtype"]) == (mode, dtype)]
            yield from _quantized(chosen, mode, width) if dtype == INT8 else _overview(chosen, ours, f"{dtype} {mode}", width)
    if kernels:
        yield from _kernels(kernels, ours, width)
    yield from _remarks(document["rows"])


GAP = 2
"""Columns between two cells."""


def _fitted(
    title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], width: int, last: Sequence[str] = ()
) -> Iterator[Table]:
    """The lines as one table or, if the terminal is too narrow, several below each other, each beginning with the first column.
    Words and figures are never broken."""
    cells = [*lines, *([last] if last else [])]
    widths = [max(len(columns[k]), *(len(line[k]) for line in cells), 0) + GAP for k in range(len(columns))]
    parts: list[list[int]] = [[0]]
    for k in range(1, len(columns)):
        if len(parts[-1]) > 1 and sum(widths[j] for j in parts[-1]) + widths[k] - GAP > width:
            parts.append([0])
        parts[-1].append(k)
    for part in parts:
        table = Table(
            title=title if part is parts[0] else None, title_justify="left", box=None, pad_edge=False, header_style="bold",
            padding=(0, GAP, 0, 0),
        )  # fmt: skip
        for k in part:
            table.add_column(columns[k], justify="right" if k else "left", no_wrap=True)
        for line in lines:
            table.add_row(*(line[k] for k in part))
        if last:
            table.add_section()
            table.add_row(*(last[k] for k in part), style="bold")
        yield table


def noisy(row: Row) -> bool:
    """Whether times vary too much for a verdict."""
    return bool(row["noise"] == "high")


NOISY = "noisy"
"""Shown in place of a ratio if times vary too much."""


def _detail(row: Row, width: int) -> Iterator[Table]:
    first, memory = row.get("first_call", {}), row.get("memory", {})
    title = f"{row['model']} {row['dtype']} {row['mode']}, noise: {row['noise']}"
    title += f", {tokens} tokens a call" if (tokens := row.get("extra", {}).get("tokens")) else ""
    title += ", first calls: cold / warm" if first else ""
    timed = any("device_ms" in entry for entry in row["contenders"].values())
    columns = ["", "median ms", "p10..p90", *["device ms"] * timed, "speed-up", *["first call s"] * bool(first), "error/eager's"]
    columns += ["call MB", "total MB"] * bool(memory)
    lines = []
    for name in dict.fromkeys((*row["contenders"], *first)):
        entry = row["contenders"].get(name, {"status": "first call only"})
        speedup = "1.00x" if name == EAGER.name else _verdict(row, entry.get("speedup"))
        cells = [name, *(_steady(entry["steady"]) if "steady" in entry else (entry["status"], ""))]
        cells += [_ms(entry["device_ms"]) if "device_ms" in entry else ""] * timed + [speedup]
        cells += [_first_cell(first.get(name, {}))] * bool(first) + [_error(entry)]
        cells += _memory_cells(memory.get(name, {})) if memory else []
        lines.append(cells)
    return _fitted(title, columns, lines, width)


def _verdict(row: Row, ratio: float | None) -> str:
    return "" if ratio is None else NOISY if noisy(row) else f"{ratio:.2f}x"


def _steady(summary: Row) -> tuple[str, str]:
    return _ms(summary["median_ms"]), f"{_ms(summary['p10_ms'])}..{_ms(summary['p90_ms'])}"


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _first_cell(entry: Row) -> str:
    if "cold_s" not in entry:
        return "failed" if "reason" in entry else ""
    return f"{_ms(entry['cold_s'])} / {_ms(entry['warm_s']) if 'warm_s' in entry else '-'}"


def _error(entry: Row) -> str:
    found = entry.get("accuracy")
    if not found:
        return ""
    if "ratio_max" not in found:
        return "not compared"
    ratio = f"{max(found['ratio_max'], found['ratio_rms']):.2f}x"
    return ratio if found["passed"] else f"{ratio} FAILS"


def _memory_cells(entry: Row) -> list[str]:
    return [f"{entry[key] / 2**20:.0f}" if key in entry else "" for key in ("call_peak", "total_peak")]


def _overview(rows: Sequence[Row], ours: str, title: str, width: int) -> Iterator[Table]:
    others = list(dict.fromkeys(name for row in rows for name in row["contenders"] if name != ours))
    first = any("first_call" in row for row in rows)
    columns = [
        "model",
        *(f"{name} ms" for name in others),
        f"{ours} ms",
        *(f"over {name}" for name in others),
    ]
    columns += ["first call s", "Inductor's"] * first + ["error/eager's", "noise"]
    lines = []
    for row in rows:
        cells = [row["model"], *(_median(row, name) for name in (*others, ours))]
        cells += [_verdict(row, over(row, ours, name)) for name in others]
        if first:
            calls = row.get("first_call", {})
            cells += [_first_cell(calls.get(ours, {})), _first_cell(calls.get("inductor", {}))]
        lines.append([*cells, _error(row["contenders"].get(ours, {})), row["noise"]])
    dtype, mode = rows[0]["dtype"], rows[0]["mode"]
    calm = [row for row in rows if not noisy(row)]
    means = {name: speedups(calm, ours, name, [dtype], mode) for name in others}
    own = [_mean_over_eager(calm, name) for name in (*others, ours)]
    last = ["geomean", *own, *(_times(geomean(found) if found else None) for found in means.values())]
    left_out = f"{len(rows) - len(calm)} noisy" if len(calm) < len(rows) else ""
    return _fitted(title, columns, lines, width, [*last, *[""] * (len(columns) - len(last) - 1), left_out])


def _quantized(rows: Sequence[Row], mode: str, width: int) -> Iterator[RenderableType]:
    """The time of each contender and its speed-up over the first; for products also the published figures."""
    names = list(dict.fromkeys(name for row in rows for name in row["contenders"]))
    calm = [row for row in rows if not noisy(row)]
    ratios = {name: [r for row in calm if (r := _speedup(row, name)) is not None] for name in names}
    lines = [[row["model"], *(_beside(row, name) for name in names), row["noise"]] for row in rows]
    last = ["geomean", *(_times(geomean(ratios[name])) if ratios[name] else "" for name in names)]
    left_out = f"{len(rows) - len(calm)} noisy" if len(calm) < len(rows) else ""
    yield from _fitted(mode, ["", *(f"{name} ms" for name in names), "noise"], lines, width, [*last, left_out])
    if names[0] == "fbgemm" and ratios.get("x86"):
        own = [max(found) for row in calm if (found := [_speedup(row, name) or 0 for name in names if name.startswith("ours ")])]
        text = f"x86 over fbgemm: {geomean(ratios['x86']):.2f}x ({PUBLISHED})"
        yield Text(f"{text}; the better of ours: {geomean(own):.2f}x, worst {min(own):.2f}x" if own else text, style="bold")


def _speedup(row: Row, name: str) -> float | None:
    ratio: float | None = row["contenders"].get(name, {}).get("speedup")
    return ratio


def _beside(row: Row, name: str) -> str:
    ratio = _speedup(row, name)
    return _median(row, name) + (f" ({ratio:.2f}x)" if ratio is not None else "")


def _median(row: Row, name: str) -> str:
    entry = row["contenders"].get(name)
    if entry is None:
        return ""
    return _ms(entry["steady"]["median_ms"]) if entry["status"] == "ok" else entry["status"]


def _mean_over_eager(rows: Sequence[Row], name: str) -> str:
    found = [
        row["contenders"][name]["speedup"] for row in rows if row["contenders"].get(name, {}).get("status") == "ok"
    ]
    return f"({geomean(found):.2f}x)" if found else ""


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _kernels(rows: Sequence[Row], ours: str, width: int) -> Iterator[RenderableType]:
    others = list(dict.fromkeys(name for row in rows for name in row["contenders"] if name not in (ours, "copy")))
    names = (*others, ours)
    columns = ["kernel", *(f"{n} us" for n in names), f"over {others[-1]}"]
    columns += [*(f"{n} GB/s" for n in (*names, "copy")), "error/eager's", "noise"]
    ratios, lines = [], []
    for row in rows:
        _, kernel, size = row["model"].split(":")
        times = [row["contenders"].get(name, {}) for name in names]
        ratio = over(row, ours, others[-1])
        if ratio is not None and not noisy(row):
            ratios.append(ratio)
        rates = [bandwidth(row, name) for name in (*names, "copy")]
        lines.append([
            f"{kernel} {size} {row['dtype']}",
            *(_microseconds(entry) for entry in times),
            _verdict(row, ratio), *("" if rate is None else f"{rate:.1f}" for rate in rates),
            _error(row["contenders"].get(ours, {})), row["noise"],
        ])  # fmt: skip
    yield from _fitted("memory-bound kernels", columns, lines, width)
    if ratios:
        yield Text(f"geomean {geomean(ratios):.2f}x, worst {min(ratios):.2f}x over {others[-1]}", style="bold")


def _microseconds(entry: Row) -> str:
    return f"{entry['steady']['median_ms'] * 1e3:.1f}" if entry.get("status") == "ok" else entry.get("status", "")


def _remarks(rows: Sequence[Row]) -> Iterator[Text]:
    """One line for each problem."""
    for row in rows:
        where = f"{row['model']} {row['dtype']}"
        for name, entry in row["contenders"].items():
            if entry["status"] != "ok":
                yield Text(f"! {where}: {name} {entry['status']}: {in_brief(entry['reason'])}", style="yellow")
            elif not entry.get("accuracy", {}).get("passed", True):
                yield Text(f"! {where}: {name} is not accurate: {in_brief(entry['accuracy']['reason'])}", style="red")
            for note in entry.get("notes", ()):
                yield Text(f"  {where}: {note}", style="dim")
        for part in ("first_call", "memory"):
            for name, entry in row.get(part, {}).items():
                if "reason" in entry:
                    yield Text(f"! {where}: {part.replace('_', ' ')} of {name}: {in_brief(entry['reason'])}", style="yellow")
        if row.get("disturbed_rounds"):
            rounds = row["disturbed_rounds"]
            yield Text(f"! {where}: other processes were busy in {rounds} of the rounds counted", style="yellow")
        if row["noise"] == "high":
            yield Text(f"! {where}: times vary too much to be trusted; is the machine busy?", style="yellow")
