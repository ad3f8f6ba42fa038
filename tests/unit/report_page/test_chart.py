"""The comparison as a chart."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

from fusewright.report_page import chart

SVG = "{http://www.w3.org/2000/svg}"


def _document(*rows: dict[str, Any]) -> dict[str, Any]:
    where = {"machine": {"cpu": "a <CPU> & more"}, "settings": {"threads": 2}, "date": "2026-11-22T00:00:00+00:00"}
    return {"backend": "ours", "rows": list(rows), **where}


def _row(model: str, noise: str = "low", **speedups: float | None) -> dict[str, Any]:
    entries = {n: {"status": "ok", "speedup": s} if s else {"status": "failed", "reason": "it broke"} for n, s in speedups.items()}
    return {"model": model, "dtype": "fp32", "mode": "inference", "noise": noise, "contenders": entries}


def _parts(text: str) -> tuple[list[float], list[str]]:
    """Return the widths of all bars, without the legend's keys, and all texts."""
    root = ET.fromstring(text)
    bars = [float(r.attrib["width"]) for r in root.iter(f"{SVG}rect") if r.attrib["height"] != "10"]
    return bars, [t.text or "" for t in root.iter(f"{SVG}text")]


def test_bars_are_as_long_as_the_speed_ups() -> None:
    bars, texts = _parts(chart.of_bench(_document(_row("bert", eager=1.0, inductor=1.0, ours=2.0))))
    assert len(bars) == 2 and abs(bars[0] / bars[1] - 2) < 0.01
    assert {"bert fp32", "2.00x", "1.00x", "ours", "inductor"} <= set(texts)
    assert "geometric mean" not in texts, "of one model there is no mean"


def test_the_mean_is_geometric_and_leaves_out_what_failed() -> None:
    rows = (_row("a", ours=1.0, inductor=None), _row("b", ours=4.0, inductor=3.0))
    _, texts = _parts(chart.of_bench(_document(*rows)))
    assert texts[texts.index("geometric mean") + 1 :] == ["2.00x", "3.00x"]
    assert "failed" in texts


def test_a_noisy_row_is_named_so() -> None:
    assert "bert fp32 (noisy)" in _parts(chart.of_bench(_document(_row("bert", "high", ours=2.0))))[1]


def test_names_are_text_and_the_picture_is_the_same_every_time() -> None:
    document = _document(_row("<script>alert(1)</script>\x07", ours=2.0))
    text = chart.of_bench(document)
    assert "<script" not in text and _parts(text)[1].count("<script>alert(1)</script>  fp32") == 1
    assert text == chart.of_bench(document)
    assert "prefers-color-scheme: dark" in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_verdicts_are_counted_by_mode() -> None:
    found = [("inference", "right")] * 3 + [("inference", "wrong"), ("training", "right")]
    bars, texts = _parts(chart.of_verdicts("zoo", "here", found))
    assert len(bars) == 3 and abs(bars[0] / bars[1] - 3) < 0.01
    assert {"inference", "training", "right", "wrong", "3", "1"} <= set(texts)
