"""`full_like` and its kin become fills of a size, where the result is the same."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.graph.fills import size_fills

X = torch.randn(3, 4)


@pytest.mark.parametrize(
    "fn",
    [torch.zeros_like, torch.ones_like, lambda x: torch.full_like(x, 2, dtype=torch.int64), lambda x: x.new_ones(2)],
)
def test_nothing_waits_for_the_tensor(fn: object) -> None:
    gm = make_fx(lambda x: x.sum() + fn(x), tracing_mode="fake")(X)  # type: ignore[operator]
    size_fills(gm.graph)
    gm.recompile()
    (x,) = gm.graph.find_nodes(op="placeholder")
    assert [n.target for n in x.users] == [torch.ops.aten.sum.default]
    wanted, got = X.sum() + fn(X), gm(X)  # type: ignore[operator]
    assert torch.equal(got, wanted) and got.dtype == wanted.dtype


def test_strides_that_a_size_does_not_say_stay() -> None:
    gm = make_fx(torch.zeros_like, tracing_mode="fake")(X.t())
    size_fills(gm.graph)
    assert gm.graph.find_nodes(op="call_function", target=torch.ops.aten.zeros_like.default)
