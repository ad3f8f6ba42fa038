"""Gradients of tensors that are taken apart: side by side instead of added up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from fusewright.capture.capture import through_aot

Fn = Callable[[Tensor], Tensor]


def _backward(fn: Fn, x: Tensor, dynamic: bool = False) -> list[str]:
    """Compare the gradient of `x` bit by bit with eager's; return what the backward graph calls."""
    found: dict[str, list[str]] = {}

    def keep(aten: GraphModule, phase: str, *_: Any) -> Any:
        found[phase] = [str(n.target) for n in aten.graph.nodes if n.op == "call_function"]
        return lambda args: aten(*args)

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=lambda gm, inputs: through_aot(gm, inputs, keep, "test"), dynamic=dynamic)
    (got,), (expected,) = (torch.autograd.grad(f(x).sum(), x) for f in (compiled, fn))
    assert torch.equal(got, expected) and got.stride() == expected.stride()
    return found["backward"]


def _sines(pieces: Any) -> Tensor:
    return sum((k + 1) * p.sin().sum() for k, p in enumerate(pieces))  # type: ignore[return-value]


JOINED: dict[str, tuple[Fn, str]] = {
    "rows": (lambda x: _sines(x[:, t] for t in range(6)), "stack"),
    "rows from the last": (lambda x: _sines(x[:, -1 - t] for t in range(6)), "stack"),
    "slices": (lambda x: _sines((x[:, :1], x[:, 1:2], x[:, 2:5], x[:, 5:])), "cat"),
    "rows and slices": (lambda x: _sines((x[:, 0], x[:, 1], x[:, 2], x[:, 3:5], x[:, 5])), "cat"),
    "some rows": (lambda x: _sines(x[:, t] for t in (1, 3, 4, 5)), "cat"),
    "pieces and the whole": (lambda x: _sines([*(x[:, t] for t in range(6)), x]), "stack"),
}


@pytest.mark.parametrize("name", JOINED)
def test_pieces_lie_side_by_side(name: str) -> None:
    fn, how = JOINED[name]
    calls = _backward(fn, torch.randn(3, 6, 4, requires_grad=True))
    assert f"aten.{how}.default" in calls
    assert not [c for c in calls if "_backward" in c] and calls.count("aten.add.Tensor") <= 1


KEPT: dict[str, Fn] = {
    "few": lambda x: _sines((x[:, 0], x[:, 1:])),
    "overlapping": lambda x: _sines(x[:, t : t + 2] for t in range(5)),
    "every other": lambda x: _sines((x[:, ::2], x[:, 1::2], x[:, :1], x[:, 1:2])),
    "of two dims": lambda x: _sines((x[:, 0], x[:, 1], x[0], x[1])),
    "between two others": lambda x: _sines([x.cos(), *(x[:, t] for t in range(6)), x.exp()]),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_pieces_are_added_up(name: str) -> None:
    calls = _backward(KEPT[name], torch.randn(3, 6, 4, requires_grad=True))
    assert [c for c in calls if c.startswith(("aten.select_backward", "aten.slice_backward"))]


def test_sizes_that_are_symbols_stay() -> None:
    assert _backward(lambda x: _sines(x[:, t] for t in range(6)), torch.randn(3, 6, 4, requires_grad=True), dynamic=True)


def test_infinite_gradients_stay_where_they_are() -> None:
    x = torch.zeros(3, 6, requires_grad=True)
    calls = _backward(lambda x: sum((x[:, t].sqrt() * (t + 1)).sum() for t in range(6)), x)  # type: ignore[return-value,arg-type]
    assert "aten.stack.default" in calls


@settings(max_examples=10, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 12), min_size=4, max_size=9, unique=True).map(sorted), dim=st.integers(0, 2),
    order=st.randoms(use_true_random=False),
)  # fmt: skip
def test_any_pieces_have_eagers_gradient(cuts: list[int], dim: int, order: Any) -> None:
    pieces = list(itertools.pairwise(cuts))
    order.shuffle(pieces)
    shape = [2, 3, 4]
    shape[dim] = 12

    def fn(x: Tensor) -> Tensor:
        return _sines(x.select(dim, a) if b == a + 1 else x.narrow(dim, a, b - a) for a, b in pieces)

    _backward(fn, torch.randn(shape, requires_grad=True))
