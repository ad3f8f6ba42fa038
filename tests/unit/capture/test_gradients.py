"""Gradients of running products: those of eager, zeros included, in a few operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright import report
from fusewright.capture.gradients import running_product

OPTIONS = {"cache": False, "fallback": "allow"}


def rays(zeros: int, steps: int = 24) -> torch.Tensor:
    """Rows of factors; `zeros` in each, as behind an opaque sample."""
    torch.manual_seed(0)
    x = torch.rand(5, steps) + 0.5
    for row in x:
        row[torch.randperm(steps)[:zeros]] = 0
    return x.requires_grad_()


def gradient(run: Any, x: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, x.shape[1])
    (found,) = torch.autograd.grad((run(x) * weights).sum(), x)
    return found


@pytest.mark.parametrize("zeros", [0, 1, 3])
def test_gradients_are_exact_with_zeros(zeros: int) -> None:
    x = rays(zeros)
    compiled = torch.compile(lambda x: torch.cumprod(x, 1), backend="fusewright", options=OPTIONS)
    exact = gradient(lambda x: torch.cumprod(x, 1), x.detach().double().requires_grad_())
    torch.testing.assert_close(gradient(compiled, x).double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients_of_gradients(dim: int) -> None:
    x = torch.rand(3, 4, dtype=torch.float64) + 0.5
    x[1, 2] = 0
    x.requires_grad_()
    run = lambda x: running_product(x, dim % 2, torch.float64)  # noqa: E731
    assert torch.autograd.gradcheck(run, (x,)) and torch.autograd.gradgradcheck(run, (x,))


def test_the_graph_does_not_grow_with_the_steps() -> None:
    """Torch's own trace of 192 steps has more than 2,000 operations, and took 17 times eager's time."""
    found = []
    for steps in (24, 96):
        x = rays(0, steps)
        compiled = torch.compile(lambda x: x.cumprod(-1), backend="fusewright", options=OPTIONS, dynamic=False)
        with report.recording() as reports:
            gradient(compiled, x)
        found.append(sum(len(r.ops) for r in reports))
    assert found[0] == found[1] < 20


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_half_precision_and_a_given_type(dtype: torch.dtype | None) -> None:
    x = rays(1).detach().bfloat16().requires_grad_()
    compiled = torch.compile(lambda x: torch.cumprod(x, 1, dtype=dtype), backend="fusewright", options=OPTIONS)
    assert compiled(x).dtype == (dtype or torch.bfloat16)
    found, exact = gradient(compiled, x), gradient(lambda x: torch.cumprod(x, 1), x.detach().double().requires_grad_())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=3e-2, atol=3e-2)


def test_transforms_keep_their_own() -> None:
    def run(x: torch.Tensor) -> Any:
        return torch.func.vmap(torch.func.grad(lambda row: row.cumprod(0).sum()))(x)

    x = rays(0)
    torch.testing.assert_close(torch.compile(run, backend="fusewright", options=OPTIONS)(x), run(x))
