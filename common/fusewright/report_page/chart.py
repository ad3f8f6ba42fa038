"""Comparisons as a picture: SVG that follows the reader's light or dark theme, deterministic for the same figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from fusewright.bench.cases.kernels import is_kernel
from fusewright.bench.stats import geomean

Row = Mapping[str, Any]

WIDTH, LEFT, RIGHT = 860, 190, 70
BAR, GAP, TOP = 11, 9, 62
_LIGHT = ("#ffffff", "#1d2125", "#646b73", "#d9dce0", ("#2367b8", "#8d9299", "#b0631b", "#7a3fb0", "#2b7d4f", "#b3261e"))
_DARK = ("#15181b", "#e4e6e8", "#9aa2aa", "#4a5259", ("#6aa5ee", "#878e96", "#dd9a55", "#c99af0", "#63bd8c", "#ff8a80"))


@dataclass(frozen=True)
class Bars:
    """A group of bars: its name, and (series, length, label) of each. A label with length None says why there is no bar."""

    name: str
    bars: tuple[tuple[int, float | None, str], ...]


def of_bench(document: Row) -> str:
    """The speed-up of each contender over eager, by model, with the geometric mean. Noisy rows are marked."""
    ours = document["backend"]
    rows = [r for r in document["rows"] if not is_kernel(r["model"])]
    names = [n for n in dict.fromkeys(n for r in rows for n in r["contenders"]) if n not in ("eager", ours)]
    series = [ours, *names]
    groups = [_group(f"{r['model']} {r['dtype']}{' (noisy)' * (r['noise'] == 'high')}", r, series) for r in rows]
    means = [[e["speedup"] for r in rows if (e := r["contenders"].get(n, {})).get("status") == "ok"] for n in series]
    if len(rows) > 1:
        each = ((k, geomean(m), f"{geomean(m):.2f}x") if m else (k, None, "") for k, m in enumerate(means))
        groups.append(Bars("geometric mean", tuple(each)))
    where = f"{document['machine']['cpu']}, {document['settings']['threads']} threads, {document['date'][:10]}"
    modes = " and ".join(dict.fromkeys(r["mode"] for r in rows))
    return draw(f"Times as fast as eager, {modes}", where, series, groups, line=1.0)


def _group(name: str, row: Row, series: Sequence[str]) -> Bars:
    def bar(k: int, contender: str) -> tuple[int, float | None, str]:
        entry = row["contenders"].get(contender, {})
        if entry.get("status") != "ok":
            return k, None, entry.get("status", "not measured")
        return k, entry["speedup"], f"{entry['speedup']:.2f}x"

    return Bars(name, tuple(bar(k, n) for k, n in enumerate(series)))


def of_verdicts(title: str, where: str, verdicts: Iterable[tuple[str, str]]) -> str:
    """How many models have which status, by mode; `verdicts` are (mode, status) pairs."""
    counts = Counter(verdicts)
    series = list(dict.fromkeys(["right", *sorted({status for _, status in counts})]))
    modes = list(dict.fromkeys(mode for mode, _ in counts))

    def bars(mode: str) -> tuple[tuple[int, float, str], ...]:
        return tuple((k, float(n), str(n)) for k, s in enumerate(series) if (n := counts[mode, s]))

    return draw(title, where, series, [Bars(m, bars(m)) for m in modes])


def draw(title: str, where: str, series: Sequence[str], groups: Sequence[Bars], line: float | None = None) -> str:
    """Draw groups of horizontal bars below each other. `line` marks a reference length."""
    most = max([line or 0.0, *(b for g in groups for _, b, _ in g.bars if b is not None)], default=0.0) or 1.0

    def x(length: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * length / most

    body, y = _legend(series), float(TOP)
    for group in groups:
        body.append(_text(LEFT - 10, y + len(group.bars) * BAR / 2 + 4, group.name, 'text-anchor="end"'))
        for k, length, text in group.bars:
            if length is not None:
                body.append(
                    f'<rect class="s{k % 6}" x="{LEFT}" y="{y:.0f}" width="{x(length) - LEFT:.1f}" height="{BAR - 2}"/>'
                )
            body.append(_text(x(length or 0.0) + 5, y + BAR - 2.5, text, 'class="dim end"'))
            y += BAR
        y += GAP
    if line is not None:
        body.append(f'<line x1="{x(line):.1f}" x2="{x(line):.1f}" y1="{TOP - 6}" y2="{y - GAP + 4:.0f}"/>')
    return _svg(title, where, y + 8, body)


def _svg(title: str, where: str, height: float, body: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img">'
    )
    dark = f"@media (prefers-color-scheme: dark) {{ {_style(*_DARK)} }}"
    texts = [
        f"<title>{escape(title)}</title>",
        f"<style>text {{ font: 12px system-ui, sans-serif; }} .end {{ font-size: 10px; }} {_style(*_LIGHT)} {dark}</style>",
        _text(10, 20, title, 'style="font-size:15px;font-weight:600"'),
        _text(10, 37, where, 'class="dim"'),
    ]
    return "\n".join([head, *texts, *body, "</svg>"]) + "\n"


def _style(back: str, fg: str, dim: str, grid: str, colors: Sequence[str]) -> str:
    series = " ".join(f".s{k} {{ fill: {c}; }}" for k, c in enumerate(colors))
    ground = f"svg {{ background: {back}; }} line {{ stroke: {grid}; stroke-width: 1.5; }}"
    return f"{ground} text {{ fill: {fg}; }} .dim {{ fill: {dim}; }} {series}"


def _legend(series: Sequence[str]) -> list[str]:
    found, x = [], float(LEFT)
    for k, name in enumerate(series):
        found.append(f'<rect class="s{k % 6}" x="{x:.0f}" y="44" width="10" height="10"/>')
        found.append(_text(x + 14, 53, name, 'class="dim"'))
        x += 28 + 7 * len(name)
    return found


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(_drawable(text))}</text>'


def _drawable(text: str) -> str:
    """Remove characters that XML does not allow."""
    return "".join(c if c.isprintable() else " " for c in text)
