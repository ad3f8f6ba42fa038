"""Rows of a transposed tensor are gathered from a copy, if they are read several times."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.interface import Value
from fusewright.plan.ir import Launch
from fusewright.toolkit.ir import Kernel
from fusewright_triton.select import gathers
from tests.backends.triton.select.test_calls import BF16, SIMULATED, Net, check, lowered


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


def edges(g: Net, x: Value, near: int = 6) -> Value:
    """Edge features of DGCNN: neighbours less the points, beside the points, whose features are [2, 16, 10]."""
    rows = g.op("transpose", x, 1, 2)
    index = g.input(torch.randint(0, 10, (2, 10 * near)))
    at = g.op("expand", g.op("unsqueeze", index, -1), [2, 10 * near, 16])
    found = g.op("view", g.op("gather", rows, 1, at), (2, 10, near, 16))
    own = g.op("expand", g.op("unsqueeze", rows, 2), [2, 10, near, 16])
    return g.op("cat", [g.op("sub", found, own), own], -1)


def test_points_are_expanded_from_the_copy_that_their_neighbours_are_gathered_from() -> None:
    g = Net(BF16)
    x = g.op("relu", g.input(torch.randn(2, 16, 10)))
    fragment = check(g, [edges(g, x)])
    (last,) = [i for i in fragment.instructions if isinstance(i, Launch)][-1:]
    kernel = fragment.kernels[last.kernel]
    assert isinstance(kernel, Kernel) and len(last.inputs) == 2, "the copy and the positions"


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("how", ["amax", "mean", "max_with_indices"])
def test_a_maximum_over_neighbours_lies_as_they_do(monkeypatch: pytest.MonkeyPatch, how: str, keep: bool) -> None:
    """Channels-last images [2, 16, 10, 6] become points whose features are contiguous; nothing is copied for the gather behind."""
    monkeypatch.setattr(gathers, "LEAST", 1)
    g = Net(BF16)
    image = g.op("relu", g.images(2, 16, 10, 6))
    dim = -1 if how == "max_with_indices" else [-1]
    most = g.op(how, image, dim, keep)
    most = most[0] if isinstance(most, tuple | list) else most
    x = g.op("squeeze", most, [3]) if keep else most
    fragment = check(g, [edges(g, x), g.op("sum", g.op("mul", x, x), [1], False)])
    assert "reduction, in its operand's order" in fragment.notes.values()
    assert not any("clone" in k.name for k in fragment.kernels.values() if isinstance(k, Kernel))


@pytest.mark.parametrize("why", ["it leaves", "a view of it leaves", "small", "rows"])
def test_other_reductions_lie_as_in_the_graph(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(gathers, "LEAST", 321 if why == "small" else 1)
    g = Net(BF16)
    image = g.op("relu", g.tensor(2, 16, 10, 6) if why == "rows" else g.images(2, 16, 10, 6))
    most = g.op("amax", image, [-1], False)
    other = {"it leaves": most, "a view of it leaves": g.op("transpose", most, 1, 2)}.get(why)
    outs = [g.op("exp", most), *([other] if other is not None else [])]
    fragment = lowered(g, outs, device=SIMULATED)
    for ours, eager in zip(g.run(fragment, outs), g.expected(outs), strict=True):
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager)
    assert why == "a view of it leaves" or "reduction, in its operand's order" not in fragment.notes.values()
