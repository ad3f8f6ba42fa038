"""Rows of a transposed tensor are gathered from a copy, if they are read several times."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.interface import Value
from tests.backends.triton.select.test_calls import BF16, Net, check


def gathered(g: Net, how: str, count: int, transposed: bool = True, channels: int = 16) -> list[Value]:
    """Features of neighbours [2, count, channels], as in nets on clouds of points, less a number."""
    x = g.op("relu", g.input(torch.randn(2, channels, 10) if transposed else torch.randn(2, 10, channels)))
    x = g.op("transpose", x, 1, 2) if transposed else x
    index = torch.randint(0, 10, (2, count))
    if how == "gather":
        near = g.op("gather", x, 1, g.op("expand", g.op("unsqueeze", g.input(index), -1), [2, count, channels]))
    elif how == "index":
        near = g.op("index", x, [g.input(torch.arange(2)[:, None]), g.input(index)])
    else:
        near = g.op("index_select", x, 1, g.input(index[0]))
    return [g.op("sub", near, 0.5), g.op("exp", x)]


@pytest.mark.parametrize("how", ["gather", "index", "index_select"])
def test_rows_read_several_times_are_gathered_from_a_copy(how: str) -> None:
    g = Net(BF16)
    fragment = check(g, gathered(g, how, 60))
    assert "rows gathered from a copy" in fragment.notes.values()


@pytest.mark.parametrize("how", [{"count": 20}, {"count": 60, "transposed": False}, {"count": 60, "channels": 4}], ids=str)
def test_others_are_read_where_they_lie(how: dict[str, Any]) -> None:
    g = Net(BF16)
    fragment = check(g, gathered(g, "gather", **how))
    assert "rows gathered from a copy" not in fragment.notes.values()
