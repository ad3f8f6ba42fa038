"""Powers and limits of NaN, infinities and both zeros, by every dtype, in vectors and in what is left of them."""

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
BASES = [0.0, -0.0, 1.0, -1.0, 2.0, -2.5, 0.5, math.inf, -math.inf, math.nan, 3.0, 1e4, 1e-4]
EXPONENTS = [0.5, -0.5, 2, 3, -1, 0, -2, 1, -0.0, 1.5, -1.5, -3, 0.25, math.inf, -math.inf, math.nan]


def assert_follows(f: Callable[..., Tensors], *args: torch.Tensor) -> None:
    """Assert that the compiled function's results are eager's, the signs of zeros and infinities too."""
    ours = torch.compile(f, backend="x86_onednn", options={"strict": True, "fallback": "error"})(*args)
    for found, wanted in zip(ours, f(*args), strict=True):
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE[wanted.dtype], atol=0.0, equal_nan=True)
        signed = ~wanted.isnan()
        assert torch.equal(found.signbit()[signed], wanted.signbit()[signed]), f"{found} instead of {wanted}"


@pytest.mark.parametrize("copies", [1, 5])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_powers(dtype: torch.dtype, copies: int) -> None:
    """Eager computes some exponents by multiplications and roots, except for roots of half precision."""
    bases, exponents = (torch.tensor(v * copies, dtype=dtype) for v in (BASES, EXPONENTS))
    assert_follows(lambda x: tuple(x**n for n in EXPONENTS), bases)
    assert_follows(lambda n: tuple(x**n for x in BASES), exponents)
    pairs = torch.tensor(list(itertools.product(BASES, EXPONENTS)), dtype=dtype)
    assert_follows(lambda x, n: (x**n,), *pairs.t().contiguous())


LIMITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, 0.0, 1.0),
    "clamp_min": lambda x: x.clamp_min(0),
    "clamp_min of -0.0": lambda x: x.clamp(min=-0.0),
    "clamp_max": lambda x: x.clamp(max=0.0),
}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_limits_keep_zeros_and_nan(dtype: torch.dtype, name: str) -> None:
    x = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0] * 5, dtype=dtype)
    assert_follows(lambda x: (LIMITS[name](x),), x)


@pytest.mark.parametrize("name", ["fmax", "fmin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_the_first_of_two_zeros_is_the_larger_and_the_smaller(dtype: torch.dtype, name: str) -> None:
    pairs = torch.tensor(list(itertools.product([0.0, -0.0, math.nan, 1.0], repeat=2)) * 3, dtype=dtype)
    assert_follows(lambda x, y: (getattr(torch, name)(x, y),), *pairs.t().contiguous())
