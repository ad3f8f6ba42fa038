"""Variances of numbers far from zero are as exact as eager's, which adds in fp64; the mean's rounding is no part of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

Variance = Callable[[torch.Tensor], torch.Tensor]

pytestmark = [pytest.mark.hardware("x86_onednn"), pytest.mark.usefixtures("fresh_dynamo")]

VARIANCES: dict[str, Variance] = {
    "var": lambda x: x.var(1),
    "of columns": lambda x: x.t().contiguous().std(0),
    "of a formula that is dear to compute twice": lambda x: (x - 1e6).exp().log().add(1e6).std(1, correction=0),
    "var_mean": lambda x: torch.var_mean(x * 0.5, 1)[0],
}


def ours(f: Callable[..., torch.Tensor], x: torch.Tensor, dynamic: bool = False) -> torch.Tensor:
    """Run `f` compiled, all of it lowered."""
    return torch.compile(f, backend="x86_onednn", dynamic=dynamic, options={"strict": True, "fallback": "error"})(x)


@pytest.mark.parametrize(("length", "dynamic"), [(5, False), (64, False), (64, True), (3000, False)])
def test_far_from_zero(length: int, dynamic: bool) -> None:
    def every(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([f(x) for f in VARIANCES.values()])

    torch.manual_seed(0)
    x = (torch.randn(3, length) + 1e6).round(decimals=1)
    exact = torch.stack([f(x.double()) for f in VARIANCES.values()])
    torch.testing.assert_close(ours(every, x, dynamic).double(), exact, rtol=4e-7 if length > 5 else 8e-7, atol=0.0)


@pytest.mark.parametrize("length", [64, 100_000])
def test_a_layer_norm_has_no_more_than_the_error_of_the_rounded_mean(length: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, length) + 1e5
    found = ours(lambda x: F.layer_norm(x, x.shape[-1:]), x)
    torch.testing.assert_close(found.double(), F.layer_norm(x.double(), x.shape[-1:]), rtol=1e-6, atol=2.0**-8)  # ulp / 2


@pytest.mark.parametrize("length", [5, 64, 3000])
def test_the_mean_beside_a_variance_is_as_exact_as_alone(length: int) -> None:
    """Around zero the rounding of an element would be seen in it."""
    torch.manual_seed(0)
    x = torch.randn(50, length)
    found, exact = ours(lambda x: torch.var_mean(x, 1)[1], x).double(), x.double().mean(1)
    assert (found - exact).abs().max() <= 2 * (x.mean(1) - exact).abs().max()


def test_equal_infinite_and_single_elements_follow_eager() -> None:
    """A total that overflows, or no deviation at all, has nothing to correct."""
    rows = [[0.1] * 5, [0.0, -0.0, 0.0, 0.0, 0.0], [1e30, -1e30, 3e30, 2e30, 0.0], [1.0, math.inf, 0.0, 1.0, 1.0], [math.nan] * 5]
    for x in (torch.tensor(rows), torch.tensor(rows).repeat(1, 4), torch.tensor(rows).repeat(1, 200), torch.tensor([[7.0]])):
        eager = VARIANCES["var"](x)
        torch.testing.assert_close(ours(VARIANCES["var"], x), eager, rtol=1e-6, atol=1e-20, equal_nan=True)
