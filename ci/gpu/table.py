"""What `ci/gpu/check.py` prints last: the table of models, and the bars that it is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ci.gpu.models import MODELS
from fusewright.bench.stats import geomean

Row = dict[str, Any]
CONTENDERS = ("eager", "inductor", "reduce-overhead", "ours")


@dataclass(frozen=True)
class Bar:
    """`first` must be reached, `goal` is where it should go. An aim that is no bar is shown, and fails nothing."""

    id: str
    what: str
    first: float
    goal: float
    bar: bool = True


BARS = (
    Bar("G1", "bf16 inference, geomean over Inductor", 1.25, 2.0),
    Bar("G2", "bf16 inference, geomean over reduce-overhead", 1.0, 1.3),
    Bar("G3", "training step, geomean over Inductor", 0.97, 1.15),
    Bar("G4", "cold first call, geomean over Inductor's", 3.0, 6.0),
    Bar("bert", "BERT, inference over eager", 1.5, 1.5, bar=False),
    Bar("vit", "ViT, inference over eager", 1.5, 1.5, bar=False),
    Bar("share", "decoding, share of the bandwidth of a copy", 0.75, 0.75, bar=False),
    Bar("decode", "decoding over reduce-overhead", 1.0, 1.0, bar=False),
)


def ratios(rows: Sequence[Row], part: str, other: str, what: str = "ms") -> dict[str, float]:
    """How many times less ours takes than another contender, by model; only where both were measured."""
    found = {r["model"]: r.get(part, {}).get(what, {}) for r in rows}
    return {m: v[other] / v["ours"] for m, v in found.items() if other in v and "ours" in v}


def values(rows: Sequence[Row], decode: Row, full: bool) -> dict[str, list[float]]:
    """The numbers whose geometric mean a bar is held to. Warm first calls say nothing of cold ones."""
    parts = ("inference", "training") if full else ("inference",)
    eager, ms = ratios(rows, "inference", "eager"), decode.get("ms", {})
    both = "reduce-overhead" in ms and "ours" in ms
    return {
        "G1": list(ratios(rows, "inference", "inductor").values()),
        "G2": list(ratios(rows, "inference", "reduce-overhead").values()),
        "G3": list(ratios(rows, "training", "inductor").values()),
        "G4": [x for p in parts for x in ratios(rows, p, "inductor", "first_s").values()],
        "bert": [eager[m] for m in ("bert",) if m in eager],
        "vit": [eager[m] for m in ("vit",) if m in eager],
        "share": [decode["share"]] if "share" in decode else [],
        "decode": [ms["reduce-overhead"] / ms["ours"]] if both else [],
    }


def judged(rows: Sequence[Row], decode: Row, full: bool) -> list[Row]:
    """The bars that something was measured for, with "goal", "pass", "MISS" (a bar) or "below" (an aim)."""
    found = values(rows, decode, full)
    out = []
    for b in BARS:
        if not found[b.id]:
            continue
        value = geomean(found[b.id])
        reached = next((w for w, at in (("goal", b.goal), ("pass", b.first)) if value >= at), "MISS" if b.bar else "below")
        out.append(
            {"id": b.id, "what": b.what, "value": value, "of": len(found[b.id]), "first": b.first, "goal": b.goal}
            | {"verdict": reached}
        )
    return out


def table_text(rows: Sequence[Row], bars: Sequence[Row], full: bool) -> str:
    """Times in ms, first calls in s, then the bars."""
    lines = []
    for part in ("inference", "training"):
        timed = "   cold first call, s" if full or part == "inference" else ""
        title = {"inference": "inference, bf16, ms", "training": "training step, autocast, ms"}[part]
        lines += ["", f"{title:30}" + "".join(f"{c:>16}" for c in CONTENDERS) + timed]
        for row in rows:
            ms, first = (row.get(part, {}).get(k, {}) for k in ("ms", "first_s"))
            cells = "".join(f"{ms[c]:16.2f}" if c in ms else f"{'':16}" for c in CONTENDERS)
            firsts = " / ".join(f"{c} {first[c]:.1f}" for c in CONTENDERS if c in first)
            lines.append(f"{MODELS[row['model']].label:30}{cells}   {firsts}".rstrip())
    lines.append("")
    for b in bars:
        aim = f"first bar {b['first']:g}, goal {b['goal']:g}" if b["verdict"] != "below" else f"aim {b['first']:g}"
        lines.append(f"{b['id']:7}{b['what']:48}{b['value']:6.2f}  of {b['of']}  {b['verdict']:6} ({aim})")
    return "\n".join(lines)


def decode_text(found: Row) -> str:
    """One line: times when tokens follow each other, in brackets those of one step on an idle GPU."""
    alone = found.get("alone_ms", {})
    times = ", ".join(f"{c} {ms:.2f}" + (f" ({alone[c]:.2f})" if c in alone else "") for c, ms in found.get("ms", {}).items())
    share = f"; {found['share']:.0%} of {found['copy_gb_s']:.0f} GB/s" if "share" in found else ""
    same = "; {equal} of {tokens} tokens are eager's, {wrong} wrong".format(**found["agreed"]) if "agreed" in found else ""
    return f"decoding a token of 1 B parameters, ms: {times}{share}{same}"
