"""Statistics of timings: summaries, paired ratios, geometric means and the noise verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = dict[str, Any]

# Upper bounds of the spread for each verdict; beyond the second, do not trust the figures.
NOISE = ((0.03, "low"), (0.08, "some"), (math.inf, "high"))


_QUARTILES_OF_NORMAL = 1.349  # interquartile range of a normal distribution, in standard deviations


@dataclass(frozen=True)
class Summary:
    """Times of one contender in milliseconds; variation is that of the rounds' medians.

    `cv` is the coefficient of variation. `spread` estimates it from the quartiles, so that a few disturbed rounds do not count
    (they do not move the median either).
    """

    median_ms: float
    p10_ms: float
    p90_ms: float
    cv: float
    spread: float
    calls: int
    rounds_ms: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0..1) with linear interpolation. Raises `ValueError` if empty."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(rounds: Sequence[Sequence[float]]) -> Summary:
    """Summarize the calls (seconds) of each round."""
    calls = [seconds * 1e3 for block in rounds for seconds in block]
    medians = [statistics.median(block) * 1e3 for block in rounds]
    cv = spread = math.nan
    if len(medians) > 1:
        cv = statistics.stdev(medians) / statistics.fmean(medians)
        between_quartiles = quantile(medians, 0.75) - quantile(medians, 0.25)
        spread = between_quartiles / _QUARTILES_OF_NORMAL / statistics.median(medians)
    return Summary(
        median_ms=statistics.median(calls),
        p10_ms=quantile(calls, 0.1),
        p90_ms=quantile(calls, 0.9),
        cv=cv,
        spread=spread,
        calls=len(calls),
        rounds_ms=tuple(medians),
    )


def paired_ratio(base: Sequence[float], other: Sequence[float]) -> float:
    """How many times faster `other` is than `base`: the median of the ratios per round.

    Each has one time per round. Both times of a round were measured in succession, so slow drift of the machine cancels.
    """
    return statistics.median(b / o for b, o in zip(base, other, strict=True))


def geomean(values: Sequence[float]) -> float:
    """Geometric mean of positive values; NaN if there are none."""
    return math.exp(statistics.fmean(math.log(value) for value in values)) if values else math.nan


def noise_verdict(spreads: Sequence[float]) -> str:
    """`low`, `some` or `high` for the largest spread of a row; `unknown` if there is none."""
    known = [spread for spread in spreads if not math.isnan(spread)]
    if not known:
        return "unknown"
    return next(word for bound, word in NOISE if max(known) <= bound)


def over(row: Row, ours: str, other: str) -> float | None:
    """How many times faster `ours` is than `other`, paired by rounds; None if either is missing."""
    mine, theirs = (row["contenders"].get(name, {}) for name in (ours, other))
    if mine.get("status") != "ok" or theirs.get("status") != "ok":
        return None
    return paired_ratio(theirs["steady"]["rounds_ms"], mine["steady"]["rounds_ms"])


def speedups(rows: Iterable[Row], ours: str, other: str, dtypes: Sequence[str], mode: str = "inference") -> list[float]:
    """`over` for each row of the mode and dtypes in which both ran."""
    chosen = (row for row in rows if row["mode"] == mode and row["dtype"] in dtypes)
    return [ratio for row in chosen if (ratio := over(row, ours, other)) is not None]
