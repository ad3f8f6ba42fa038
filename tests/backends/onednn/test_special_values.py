"""NaN and infinities in the post-ops of a product: `patterns.POST_OPS` lists which ones follow eager."""

from __future__ import annotations

import math

import pytest
import torch

from fusewright_cpu.onednn.patterns import POST_OPS
from tests.backends.onednn.common import BF16, F32, compiled
from tests.fragments import Sketch, targets
from tests.hosts import FLOATS

ARGS = {"clamp": (0.0, 6.0), "leaky_relu": (0.1,)}
VALUES = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -1.5, 90.0, -90.0, 1e30, -1e30]


def _through(name: str, dtype: torch.dtype, finite_math: bool) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Return our and eager's results of a product with ones, whose rows contain the special values, and the op after it."""
    g = Sketch()
    x = g.input(torch.tensor(VALUES, dtype=dtype).view(-1, 1))
    y = g.op(name, g.op("linear", x, g.input(torch.ones(32, 1, dtype=dtype), const=True)), *ARGS.get(name, ()))
    fragment = compiled(g, [y], finite_math=finite_math)
    return g.run(fragment, [y])[0], g.expected([y])[0], targets(fragment)


@pytest.mark.parametrize("name", POST_OPS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_follow_eager(name: str, dtype: torch.dtype) -> None:
    ours, eager, _ = _through(name, dtype, finite_math=False)
    if name == "gelu":  # eager itself returns inf or NaN for +inf, depending on the element's position in the vector
        ours, eager = (torch.cat([t[:1], t[2:]]) for t in (ours, eager))
    torch.testing.assert_close(ours, eager, rtol=1e-2 if dtype is BF16 else 1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", [n for n, post in POST_OPS.items() if not post.exact])
def test_the_inexact_ones_do_lose_nan(name: str) -> None:
    """If this fails, oneDNN now preserves NaN, and the post-op can be marked exact."""
    ours, eager, calls = _through(name, F32, finite_math=True)
    assert len(calls) == 1 and eager[0].isnan().all() and not ours[0].isnan().any()
