"""Variances of numbers far from zero are as exact as eager's, which adds in fp64; the mean's rounding is no part of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

Variance = Callable[[torch.Tensor], torch.Tensor]

pytestmark = [pytest.mark.hardware("x86_onednn"), pytest.mark.usefixtures("fresh_dynamo")]

VARIANCES: dict[str, Variance] = {
    "var": lambda x: x.var(1),
    "of columns": lambda x: x.t().contiguous().std(0),
    "std": lambda x: x.std(1, correction=0),
    "var_mean": lambda x: torch.var_mean(x, 1)[0],
}


def ours(f: Variance, x: torch.Tensor, dynamic: bool = False) -> torch.Tensor:
    """Run `f` compiled, all of it lowered."""
    return torch.compile(f, backend="x86_onednn", dynamic=dynamic, options={"strict": True, "fallback": "error"})(x)


@pytest.mark.parametrize("name", VARIANCES)
@pytest.mark.parametrize(("length", "dynamic"), [(5, False), (64, False), (64, True), (100_000, False)])
def test_far_from_zero(name: str, length: int, dynamic: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, length) + 1e6
    exact = VARIANCES[name](x.double())
    torch.testing.assert_close(ours(VARIANCES[name], x, dynamic).double(), exact, rtol=3e-7, atol=0.0)


@pytest.mark.parametrize(
    "row",
    [[0.1] * 5, [0.0, -0.0, 0.0], [1e30, -1e30, 3e30, 2e30], [1.0, math.inf, 0.0], [math.nan, 1.0], [7.0]],
)
def test_equal_infinite_and_single_elements_follow_eager(row: list[float]) -> None:
    """The correction of a total that overflows, or of no deviation at all, changes nothing."""
    x = torch.tensor([row, row])
    torch.testing.assert_close(ours(VARIANCES["var"], x), VARIANCES["var"](x), rtol=1e-6, atol=1e-15, equal_nan=True)
