"""Gradients of views whose shape differs from the view's: eager copies them into zeros and broadcasts smaller ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusewright import ops, report
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


PIECES: dict[str, Callable[[Tensor], Tensor]] = {
    "between symbols": lambda x: x[:, 1:-1].exp(),
    "from the end": lambda x: x[:, -3:].exp(),
    "half": lambda x: x[:, : x.shape[1] // 2].exp() + x[:, -(x.shape[1] // 2) :],
    "from a symbol": lambda x: x[:, x.shape[0] :].exp(),
    "up to a symbol": lambda x: x[1:, : x.shape[0]].exp(),
    "in steps": lambda x: x[:, 1::3].exp() + x[:, : x[:, 1::3].shape[1]],
    "beyond the end": lambda x: x[:, 2:99].exp(),
    "first and last": lambda x: x[:, 0].exp() * x[:, -1].sin() + x[-1, 2],
    "in the middle": lambda x: x[:, x.shape[1] // 2].exp() + x[:, -x.shape[0]],
}


def pads(mode: str, by: Callable[[Tensor], list[int]]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        pad = by(x)
        more = (None,) * (1 + len(pad) // 2 - x.dim())  # these modes want dims in front
        made = functional.pad((x * 2)[more], pad, mode)
        return made * torch.arange(made.shape[-1], dtype=x.dtype)

    return run


PADS = {
    **{f"{mode}, one dim": pads(mode, lambda x: [3, 2]) for mode in ("reflect", "replicate")},
    **{f"{mode}, two dims": pads(mode, lambda x: [0, 4, 1, 1]) for mode in ("reflect", "replicate", "constant")},
    **{f"{mode}, none": pads(mode, lambda x: [0, 0]) for mode in ("reflect", "replicate")},
    "constant, cut": pads("constant", lambda x: [-2, 3]),
    "constant, by symbols": pads("constant", lambda x: [x.shape[0], x.shape[1] // 2]),
    "constant, cut by symbols": pads("constant", lambda x: [-x.shape[0], x.shape[0] - 1, 1, 0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*PIECES, *PADS])
def test_pieces_and_pads_of_symbolic_sizes_are_kernels_and_so_are_gradients(name: str, dtype: torch.dtype) -> None:
    run = {**PIECES, **PADS}[name]
    compiled = torch.compile(run, backend="x86_onednn", dynamic=True, options={"cache": False})
    with report.recording() as reports:
        for shape in ((3, 8), (4, 11), (2, 9)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
            x[0, 0], x[1, 2] = torch.nan, torch.inf
            found = [_gradient(f, x.clone().requires_grad_()) for f in (compiled, run)]
            wide = _gradient(run, x.double().requires_grad_())
            assert all(_same(f, wide) for f in found), (found, wide)
    assert "backward" in [graph.phase for graph in reports]
    assert not [r.op for graph in reports for r in graph.fallbacks]


def _gradient(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    made = run(x)
    made.backward(torch.full_like(made, 0.5))
    assert x.grad is not None
    return x.grad


def _same(found: Tensor, wide: Tensor) -> bool:
    """Whether a gradient has the values of one in fp64, rounded once or twice."""
    eps = torch.finfo(found.dtype).eps
    return torch.allclose(found.double(), wide, rtol=4 * eps, atol=4 * eps, equal_nan=True)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_a_forward_pad_by_symbols(mode: str) -> None:
    run = pads(mode, lambda x: [x.shape[0], x.shape[1] // 2])
    compiled = torch.compile(run, backend="x86_onednn", dynamic=True, options={"cache": False})
    with report.recording() as reports:
        for shape in ((3, 8), (4, 11), (2, 9)):
            x = torch.randn(shape)
            x[0, 0], x[1, 2] = torch.nan, torch.inf
            torch.testing.assert_close(compiled(x), run(x), equal_nan=True)
    assert not [r.op for graph in reports for r in graph.fallbacks]
