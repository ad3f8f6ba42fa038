"""Associative scans of linear recurrences: which become one scan, from torch's tree or from the higher-order op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import report
from fusewright.rewrite.loops.associative import ID

associative = pytest.importorskip("torch._higher_order_ops.associative_scan", reason="this torch has no associative_scan")

Combine = Callable[[Any, Any], Any]


def recurrence(left: Any, right: Any) -> Any:
    return left[0] * right[0], right[0] * left[1] + right[1]


def _ran(fn: Callable[..., Any], *inputs: Tensor, grad: bool = False) -> tuple[int, Any]:
    """Compile and run `fn`; return the rule's hits, and the results."""
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad), report.recording() as graphs:
        got = torch.compile(fn, backend="fusewright", dynamic=False)(*inputs)
    return sum(g.rules[ID] for g in graphs), got


def _states(a: Tensor, b: Tensor, dim: int) -> Tensor:
    h, hs = b.select(dim, 0), [b.select(dim, 0)]
    for x, y in zip(a.unbind(dim)[1:], b.unbind(dim)[1:], strict=True):
        h = x * h + y
        hs.append(h)
    return torch.stack(hs, dim)


def _inputs(steps: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(steps)
    return torch.rand(2, 3, steps, 4).to(dtype), torch.randn(2, 3, steps, 4).to(dtype)


@pytest.mark.parametrize("steps", [4, 5, 7, 8, 13, 33])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_tree_that_torch_writes_is_a_scan(steps: int, reverse: bool) -> None:
    def scan(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        h = associative.associative_scan(recurrence, (a, b), dim=2, reverse=reverse, combine_mode="generic")[1]
        return h, h[:, :, -1]

    a, b = _inputs(steps)
    hits, (got, last) = _ran(scan, a, b)
    assert hits == 1
    want = _states(a.flip(2), b.flip(2), 2).flip(2) if reverse else _states(a, b, 2)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(last, want[:, :, -1])


def _called(combine: Callable[..., Any]) -> Callable[..., Tensor]:
    def scan(a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = associative.associative_scan_op(combine, [a, b], ())[1]
        return found * 1

    return scan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_higher_order_op_is_a_scan(dtype: torch.dtype) -> None:
    """GPUs get it from `combine_mode="pointwise"`."""
    a, b = (x.movedim(2, 0).contiguous() for x in _inputs(9, dtype))
    for combine in (lambda p, q, r, s: [p * r, r * q + s], lambda p, q, r, s: [r * p, s + q * r]):
        hits, got = _ran(_called(combine), a, b)
        assert hits == 1
        exact, eager = _states(a.double(), b.double(), 0), _states(a, b, 0)
        assert (got - exact).abs().max() <= (eager - exact).abs().max() + torch.finfo(dtype).eps


@pytest.mark.parametrize("combine", [
    lambda p, q, r, s: [p * r, p * q + s],
    lambda p, q, r, s: [p * r, r * q - s],
    lambda p, q, r, s: [p + r, r * q + s],
    lambda p, q, r, s: [p * r, r * s + q],
])  # fmt: skip
def test_other_pairs_stay(combine: Callable[..., Any]) -> None:
    a, b = (x.movedim(2, 0).contiguous() for x in _inputs(8))
    hits, got = _ran(_called(combine), a, b)
    assert hits == 0
    want = torch.compile(_called(combine), backend="eager", dynamic=False)(a, b)
    torch.testing.assert_close(got, want)


TREES: dict[str, Combine] = {
    "products": lambda p, q: (p[0] * q[0], p[1] * q[1]),
    "sums": lambda p, q: (p[0] + q[0], p[1] + q[1]),
    "the other factor": lambda p, q: (p[0] * q[0], p[0] * q[1] + p[1]),
    "a square": lambda p, q: (p[0] * q[0], q[0] * q[0] * p[1] + q[1]),
}


@pytest.mark.parametrize("name", TREES)
def test_other_trees_stay(name: str) -> None:
    def scan(a: Tensor, b: Tensor) -> Any:
        return associative.associative_scan(TREES[name], (a, b), dim=2, combine_mode="generic")[1]

    assert _ran(scan, *_inputs(8))[0] == 0


def test_one_tensor_as_both_operands_stays() -> None:
    def scan(a: Tensor) -> Any:
        return associative.associative_scan(recurrence, (a, a), dim=2, combine_mode="generic")[1]

    a = _inputs(8)[0]
    hits, got = _ran(scan, a)
    assert hits == 0
    torch.testing.assert_close(got, _states(a, a, 2))


def test_states_stay_finite_where_products_of_factors_overflow() -> None:
    """The tree multiplies factors first, and infinity times zero is NaN; a loop over the steps has no such product."""
    a, b = torch.full((2, 3, 16, 4), 1e30), torch.zeros(2, 3, 16, 4)
    hits, got = _ran(lambda a, b: associative.associative_scan(recurrence, (a, b), dim=2, combine_mode="generic")[1], a, b)
    assert hits == 1 and torch.equal(got, b)
    a[0, 0, 3, 0], b[1, 1, 4, 1] = math.inf, math.nan
    hits, got = _ran(lambda a, b: associative.associative_scan(recurrence, (a, b), dim=2, combine_mode="generic")[1], a, b)
    torch.testing.assert_close(got, _states(a, b, 2), equal_nan=True)


def test_what_training_saves_of_a_tree_is_not_computed_twice() -> None:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        return associative.associative_scan(recurrence, (a, b), dim=2, combine_mode="generic")[1].square().sum()

    a, b = (x.requires_grad_() for x in _inputs(8))
    _, got = _ran(loss, a, b, grad=True)
    got.backward()
    want = torch.autograd.grad(_states(a, b, 2).square().sum(), [a, b])
    torch.testing.assert_close([a.grad, b.grad], list(want))


@pytest.mark.parametrize("dim", [0, 1])
def test_the_number_of_steps_may_be_a_symbol(dim: int) -> None:
    def scan(x: Tensor) -> Tensor:
        return associative.associative_scan(recurrence, (x.sigmoid(), x), dim=dim, combine_mode="generic")[1]

    torch._dynamo.reset()
    compiled = torch.compile(scan, backend="fusewright")
    for shape in ((5, 4), (6, 5), (7, 6)):  # torch has the number of rows as a number in one tensor, a symbol in another
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), _states(x.sigmoid(), x, dim))
