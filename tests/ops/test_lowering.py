"""Determines again which rows loop kernels compute and compares it with the record that docs/ops.md shows."""

from __future__ import annotations

import json

import pytest

from tests.ops.lowering import RECORD, ROWS, Seen, seen

RECORDED: dict[str, Seen] = json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ROWS)
def test_record_is_true(name: str) -> None:
    assert seen(ROWS[name]) == RECORDED[name], "run python -m tests.ops.lowering"


def test_record_has_every_row() -> None:
    assert RECORDED.keys() == ROWS.keys()
