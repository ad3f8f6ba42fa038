"""Gradients of views whose shape differs from the view's: eager copies them into zeros and broadcasts smaller ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.conformance.ops.calls import valid
from tests.ops.test_kernels_vs_eager import check

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CALLS: dict[str, tuple[Any, ...]] = {
    "slice_backward": ([3, 4], 1, 0, 4, 2),
    "slice_backward, from the end": ([3, 4], -1, -2, 2**63 - 1, 1),
    "slice_backward, all": ([3, 4], 0, 0, 9, 1),
    "slice_backward, nothing": ([3, 4], 1, 3, 2, 1),
    "select_backward": ([3, 4], 1, -1),
}
SHAPES = [s for rank in range(4) for s in itertools.product((1, 2, 3), repeat=rank)] + [(3, 4), (1, 4), (3, 0)]


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_of_any_shape_that_eager_takes(name: str) -> None:
    op = ops.OPS[name.partition(",")[0]]
    grads = [torch.randn(s, generator=torch.Generator().manual_seed(0)) for s in SHAPES]
    taken = [g for g in grads if valid(op, [g, *CALLS[name]], {})]
    assert len(taken) > 2
    for g in taken:
        check(op, [g, *CALLS[name]], {})


@pytest.mark.parametrize("name", ["slice_backward", "select_backward"])
def test_the_gradient_that_autograd_makes_is_lowered(name: str) -> None:
    grad = torch.randn(3, 2) if name == "slice_backward" else torch.randn(3)
    assert check(ops.OPS[name], [grad, *CALLS[name]], {})


def test_a_column_is_repeated_over_a_slice_whose_end_is_a_symbol() -> None:
    def fn(grad: Tensor, like: Tensor) -> Tensor:
        return torch.ops.aten.slice_backward(grad.exp(), [3, 8], 1, 0, like.shape[0], 1) * 2

    compiled = torch.compile(fn, backend="fusewright_interp", options={"cache": False})
    grad = torch.randn(3, 1)
    for n in (4, 6):
        like = torch.empty(n)
        torch._dynamo.mark_dynamic(like, 0)
        torch.testing.assert_close(compiled(grad, like), fn(grad, like))
