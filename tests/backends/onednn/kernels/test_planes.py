"""Linears over a few features in planes, such as the heads of attention, are sums in kernels."""

from __future__ import annotations

import pytest
import torch

from tests.backends.onednn.common import check
from tests.fragments import Sketch, targets
from tests.hosts import FLOATS


def mixed(heads: int, results: int, length: int, dtype: torch.dtype, bias: bool = True) -> tuple[Sketch, object]:
    """[1, heads, length, length] -> [1, results, length, length], mixed by a linear over the heads."""
    torch.manual_seed(0)
    g = Sketch()
    x = g.input(torch.randn(1, heads, length, length, dtype=dtype))
    w = g.input(torch.randn(results, heads, dtype=dtype) / 4, const=True)
    b = g.input(torch.randn(results, dtype=dtype), const=True) if bias else None
    y = g.op("linear", g.op("permute", x, [0, 2, 3, 1]), w, b)
    return g, g.op("permute", y, [0, 3, 1, 2])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("heads", "results"), [(4, 4), (8, 3), (2, 8)])
def test_heads_are_mixed_plane_by_plane(dtype: torch.dtype, bias: bool, heads: int, results: int) -> None:
    g, y = mixed(heads, results, 70, dtype, bias)
    assert not any("linear" in t for t in targets(check(g, [g.op("softmax", y, -1, False)])))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_product_reads_the_planes_in_place(dtype: torch.dtype) -> None:
    g, y = mixed(4, 4, 70, dtype)
    z = g.op("bmm", *(g.op("view", v, [4, 70, 70]) for v in (y, g.op("relu", g.inputs[0]))))
    ran = targets(check(g, [z]))
    assert "aten::bmm" in ran and not {"aten::clone", "aten::copy_", "kernel clone"} & {*ran}


@pytest.mark.parametrize(("heads", "length"), [(9, 70), (4, 16)])
def test_many_features_and_short_rows_stay_products(heads: int, length: int) -> None:
    g, y = mixed(heads, 4, length, torch.float32)
    assert any("linear" in t for t in targets(check(g, [y])))
