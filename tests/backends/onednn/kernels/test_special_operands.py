"""Ops of NaN, infinities, both zeros and numbers that a half type lacks give what eager gives, in vectors and in what is left."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytestmark = [pytest.mark.hardware("x86_onednn"), pytest.mark.usefixtures("fresh_dynamo")]

Tensors = tuple[torch.Tensor, ...]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
VALUES = [0.0, -0.0, 1.0, -1.0, 2.0, -2.5, 0.5, math.inf, -math.inf, math.nan, 3.0, 1e4, 1e-4]
EXPONENTS = [0.5, -0.5, 2, 3, -1, 0, -2, 1.5, math.inf, math.nan]
BASES = [-0.0, -2.5, math.inf, 7e4]

OF_ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, 0.0, 1.0),
    "clamp_min": lambda x: x.clamp_min(0),
    "clamp_min of -0.0": lambda x: x.clamp(min=-0.0),
    "clamp_max": lambda x: x.clamp(max=0.0),
    "relu of a sum": lambda x: -F.relu(x + 0.0 * x),
    "remainder": lambda x: x.remainder(0.1),
    "fmod": lambda x: x.fmod(-0.3),
    "floor": lambda x: torch.div(x, 0.1, rounding_mode="floor"),
    "trunc": lambda x: torch.div(x, 0.1, rounding_mode="trunc"),
    **{f"x ** {n}": lambda x, n=n: x**n for n in EXPONENTS},  # type: ignore[misc]
    **{f"{n} ** x": lambda x, n=n: n**x for n in BASES},  # type: ignore[misc]
}
OF_TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "pow": torch.pow,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "where": lambda x, y: torch.where(x > y, -x, y),
    "copysign": torch.copysign,
    "atan2": torch.atan2,
}


def assert_follows(ours: Tensors, eager: Tensors, names: list[str]) -> None:
    """Assert that results are eager's, the signs of zeros and infinities too."""
    for found, wanted, name in zip(ours, eager, names, strict=True):
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE[wanted.dtype], atol=0.0, equal_nan=True, msg=name)
        signed = ~wanted.isnan()
        assert torch.equal(found.signbit()[signed], wanted.signbit()[signed]), f"{name}: {found} instead of {wanted}"


def ours(f: Callable[..., Tensors], *args: torch.Tensor) -> Tensors:
    """Run `f` compiled, all of it lowered."""
    return torch.compile(f, backend="x86_onednn", options={"strict": True, "fallback": "error"})(*args)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_operand(dtype: torch.dtype) -> None:
    def every(x: torch.Tensor) -> Tensors:
        return tuple(f(x) for f in OF_ONE.values())

    x = torch.tensor(VALUES * 5, dtype=dtype)
    assert_follows(ours(every, x), every(x), [*OF_ONE])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_two_operands(dtype: torch.dtype) -> None:
    def every(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        return tuple(f(x, y) for f in OF_TWO.values())

    x, y = torch.tensor(list(itertools.product(VALUES, VALUES)), dtype=dtype).t().contiguous()
    assert_follows(ours(every, x, y), every(x, y), [*OF_TWO])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_quotient_of_a_half_type_is_rounded_before_it_is_truncated(dtype: torch.dtype) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        return (torch.div(x, y, rounding_mode="trunc") + 1,)

    x = torch.arange(1, 400, dtype=dtype) / 7
    assert torch.equal(ours(f, x, x.flip(0))[0], f(x, x.flip(0))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_of_two_zeros_the_first_is_the_extreme(dtype: torch.dtype) -> None:
    def every(x: torch.Tensor) -> Tensors:
        return torch.fmax(x[:, 0], x[:, 1]), torch.fmin(x[:, 0], x[:, 1]), x.amax(1), x.amin(1), x.max(1)[0], x.min(1)[0]

    pairs = torch.tensor(list(itertools.product([0.0, -0.0, math.nan, 1.0], repeat=2)) * 3, dtype=dtype)
    assert_follows(ours(every, pairs), every(pairs), ["fmax", "fmin", "amax", "amin", "max", "min"])
