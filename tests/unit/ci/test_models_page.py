"""`ci/docs/models.py`: the newest record of a model counts, and what is slower than eager is named."""

from __future__ import annotations

from typing import Any

from ci.docs import models


def record(date: str, **ms: float) -> dict[str, Any]:
    rows = [{"case": "large:bert:infer", "contender": name, "outcome": "timed", "ms": value} for name, value in ms.items()]
    left_out = {"case": "large:vit:infer", "contender": "nvidia_triton", "outcome": "left out", "ms": None}
    return {"date": date, "rows": [*rows, left_out]}


def test_the_newest_record_of_a_model_counts() -> None:
    old, new = record("2026-01-01", nvidia_triton=9.0, eager=3.0), record("2026-01-02", nvidia_triton=2.0, eager=3.0, inductor=4.0)
    text = models.page([("old.json", "gpus", old), ("new.json", "gpus", new)], {"gpus": "GPUs"})
    assert "1 rows of 1 models" in text and "slower than eager: none" in text
    assert "| large:bert | 2 | 3 | 1.50x | 2.00x | [new](new.json) |" in text


def test_a_model_slower_than_eager_is_named() -> None:
    text = models.page([("a.json", "gpus", record("2026-01-01", nvidia_triton=9.0, eager=3.0))], {"gpus": "GPUs"})
    assert "slower than eager: large:bert 0.33x" in text


def test_a_model_that_eager_was_not_timed_with_has_no_row() -> None:
    assert "0 rows of 0 models" in models.page([("a.json", "gpus", record("2026-01-01", nvidia_triton=9.0))], {"gpus": "GPUs"})
