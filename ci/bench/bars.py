r"""The project's performance bars as data, and a check whether a run of `fusewright bench` reaches them.

    fusewright bench --suite --dtype fp32,bf16 --json suite.json
    python -m ci.bench.bars suite.json

    fusewright bench --large decode:llama --device cuda --dtype bf16 --backend nvidia_triton \
      --against inductor,reduce-overhead --json gpu.json
    fusewright bench --large --train --device cuda --dtype amp --backend nvidia_triton --json gpu.json --append
    python -m ci.bench.bars gpu.json

A row is what `fusewright.bench.measure.measure` returns and the JSON holds. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fusewright.bench.cases.decoding import is_decoding
from fusewright.bench.cases.graphs import is_graph
from fusewright.bench.cases.kernels import is_kernel
from fusewright.bench.report import load
from fusewright.bench.stats import geomean, over, speedups
from fusewright.interface import HOST

Row = dict[str, Any]
SLOWER = 0.97
"""A model counts as slower than eager below this speed-up; 3% are allowed for noise."""


@dataclass(frozen=True)
class Figure:
    """The measurement for a bar: the value, the number of models, and the models that miss it."""

    value: float
    models: int
    detail: str = ""


@dataclass(frozen=True)
class Bar:
    """A promise: `first` must be reached, `goal` is the target. `better` gives the direction."""

    id: str
    what: str
    first: float
    goal: float
    figure: Callable[[Sequence[Row], str], Figure | None]
    better: Literal["higher", "lower"] = "higher"

    def judge(self, rows: Sequence[Row], ours: str) -> Row:
        """Return a JSON-ready verdict: "goal", "pass", "miss" or "not measured"."""
        found = self.figure(rows, ours)
        verdict: Row = {"id": self.id, "what": self.what, "first": self.first, "goal": self.goal}
        if found is None:
            return {**verdict, "verdict": "not measured"}
        sign = 1 if self.better == "higher" else -1
        reached = next(
            (w for w, at in (("goal", self.goal), ("pass", self.first)) if sign * found.value >= sign * at),
            "miss",
        )
        value = (
            found.value if math.isfinite(found.value) else None
        )  # JSON has no infinity; None means a divisor of zero
        return {**verdict, "verdict": reached, "value": value, "models": found.models, "detail": found.detail}


def _geomean_over(other: str, *dtypes: str, mode: str = "inference") -> Callable[[Sequence[Row], str], Figure | None]:
    def figure(rows: Sequence[Row], ours: str) -> Figure | None:
        ratios = speedups(rows, ours, other, dtypes, mode)
        return Figure(geomean(ratios), len(ratios)) if ratios else None

    return figure


def _slower_than_eager(rows: Sequence[Row], ours: str) -> Figure | None:
    ratios = {f"{r['model']} {r['dtype']}": over(r, ours, "eager") for r in rows if r["mode"] == "inference"}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    slow = [f"{name} {ratio:.2f}x" for name, ratio in known.items() if ratio < SLOWER]
    return Figure(len(slow), len(known), ", ".join(slow)) if known else None


def _first(row: Row, contender: str, kind: str) -> float | None:
    return row.get("first_call", {}).get(contender, {}).get(f"{kind}_s")


def _first_calls(kind: str) -> Callable[[Sequence[Row], str], Figure | None]:
    def figure(rows: Sequence[Row], ours: str) -> Figure | None:
        pairs = [(_first(row, "inductor", kind), _first(row, ours, kind)) for row in rows]
        ratios = [theirs / mine for theirs, mine in pairs if theirs is not None and mine is not None]
        return Figure(geomean(ratios), len(ratios)) if ratios else None

    return figure


def share(row: Row, contender: str) -> float | None:
    """Return the seconds of the cold first call that the backend adds to `aot_eager`'s. May be negative."""
    mine, base = _first(row, contender, "cold"), _first(row, "aot_eager", "cold")
    return None if mine is None or base is None else mine - base


def _shares(rows: Sequence[Row], ours: str) -> Figure | None:
    pairs = [(share(row, "inductor"), share(row, ours)) for row in rows]
    known = [(theirs, mine) for theirs, mine in pairs if theirs is not None and mine is not None]
    if not known:
        return None
    # Sums, not a mean of ratios: a share near zero (or negative, with the direct capture) would dominate all others.
    theirs, mine = (sum(side) for side in zip(*known, strict=True))
    return Figure(theirs / mine if mine > 0 else math.inf, len(known), f"{theirs:.1f} s against {mine:.1f} s")


def _tokens_over(other: str) -> Callable[[Sequence[Row], str], Figure | None]:
    """Return a figure of decoding speed over another contender; over "copy" it is the share of a copy's bandwidth."""

    def figure(rows: Sequence[Row], ours: str) -> Figure | None:
        ratios = [r for row in rows if is_decoding(row["model"]) and (r := over(row, ours, other)) is not None]
        return Figure(geomean(ratios), len(ratios)) if ratios else None

    return figure


def _models_only(figure: Callable[[Sequence[Row], str], Figure | None]) -> Callable[[Sequence[Row], str], Figure | None]:
    return lambda rows, ours: figure([row for row in rows if not is_decoding(row["model"])], ours)


def _call_memory(rows: Sequence[Row], ours: str) -> Figure | None:
    ratios: dict[str, float] = {}
    for row in rows:
        mine, eager = (row.get("memory", {}).get(name, {}).get("call_peak") for name in (ours, "eager"))
        if mine is not None and eager:
            ratios[f"{row['model']} {row['dtype']}"] = mine / eager
    return Figure(max(ratios.values()), len(ratios), max(ratios, key=ratios.__getitem__)) if ratios else None


BARS: tuple[Bar, ...] = (
    Bar("C1", "fp32 inference, geomean over Inductor", 1.8, 3.0, _geomean_over("inductor", "fp32")),
    Bar(
        "C2",
        "fp32 inference, geomean over Inductor with freezing",
        1.5,
        2.5,
        _geomean_over("inductor-freezing", "fp32"),
    ),
    Bar("C3", "bf16 inference, geomean over Inductor", 1.15, 1.6, _geomean_over("inductor", "bf16")),
    Bar("C4", "models slower than eager (beyond 3%)", 0, 0, _slower_than_eager, better="lower"),
    Bar("C5", "cold first call, geomean over Inductor", 4.0, 8.0, _first_calls("cold")),
    Bar("C6", "own share of the cold first call, over Inductor's", 8.0, 20.0, _shares),
    Bar("C7", "warm first call, geomean over Inductor", 1.5, 4.0, _first_calls("warm")),
    Bar(
        "C8",
        "training step, geomean over eager",
        1.2,
        2.0,
        _geomean_over("eager", "fp32", "bf16", "amp", mode="train"),
    ),
    Bar(
        "C9",
        "fp32 and bf16 inference, geomean over zentorch",
        0.95,
        1.2,
        _geomean_over("zentorch", "fp32", "bf16"),
    ),
    Bar("M1", "peak memory of a call, worst model, over eager", 1.1, 1.0, _call_memory, better="lower"),
)


DEVICE_BARS: tuple[Bar, ...] = (
    Bar("G1", "bf16 inference, geomean over Inductor", 1.25, 2.0, _models_only(_geomean_over("inductor", "bf16"))),
    Bar("G2", "bf16 inference, geomean over reduce-overhead", 1.0, 1.3, _models_only(_geomean_over("reduce-overhead", "bf16"))),
    Bar("G3", "training step, geomean over Inductor", 0.97, 1.15, _geomean_over("inductor", "amp", mode="train")),
    Bar("G4", "cold first call, geomean over Inductor", 3.0, 6.0, _models_only(_first_calls("cold"))),
    Bar("share", "decoding, share of the bandwidth of a copy", 0.75, 0.75, _tokens_over("copy")),
    Bar("decode", "decoding over reduce-overhead", 1.0, 1.0, _tokens_over("reduce-overhead")),
)
"""Bars for models on a GPU, from `large:` and `decode:` rows."""


def judge(rows: Sequence[Row], ours: str, bars: Sequence[Bar] = BARS) -> list[Row]:
    """Return every bar's verdict on the rows of models that are not noisy; kernels and graph networks are excluded."""
    models = [row for row in rows if not is_kernel(row["model"]) and not is_graph(row["model"])]
    calm = [row for row in models if row.get("noise") != "high"]
    left_out = len(models) - len(calm)
    verdicts = [bar.judge(calm, ours) for bar in bars]
    return [{**v, "noisy": left_out} if left_out else v for v in verdicts]


def line(verdict: Row) -> str:
    """Return a verdict in words."""
    value = verdict.get("value")
    shown = "-" if "value" not in verdict else "no share left" if value is None else f"{value:.3g}"
    return (
        f"{verdict['id']:3} {verdict['verdict']:12} {shown:>8}  bar {verdict['first']:g}, goal {verdict['goal']:g}  "
        f"{verdict['what']}{f' ({d})' if (d := verdict.get('detail')) else ''}"
        f"{f'; {n} noisy rows left out' if (n := verdict.get('noisy')) else ''}"
    )


def main(path: str) -> int:
    document = load(Path(path))
    bars = BARS if document["settings"].get("device", HOST) == HOST else DEVICE_BARS
    verdicts = judge(document["rows"], document["backend"], bars)
    print("\n".join(map(line, verdicts)))
    return int(any(v["verdict"] == "miss" for v in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
