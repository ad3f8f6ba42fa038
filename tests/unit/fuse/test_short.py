"""Reductions of a few elements are unrolled and fused with their consumers, and equal eager's."""

from __future__ import annotations

import math

import pytest
import torch

from fusewright.toolkit.lower import movement
from tests.fragments import Sketch
from tests.unit.fuse.running import LOADERS, kernel_count, run_sketch

NAN = math.nan


def check(g: Sketch, name: str, *args: object) -> None:
    y = g.op(name, *args)
    for loader in LOADERS.values():
        fragment, (got,) = run_sketch(g, [y], loader)
        (eager,) = g.expected([y])
        torch.testing.assert_close(got, eager, equal_nan=True)
        assert got.stride() == eager.stride()
        assert kernel_count(fragment) == 1
        assert all(not k.r for k in fragment.kernels.values()), "no loop over rows"


@pytest.mark.parametrize("name", ["amax", "amin", "sum", "mean", "argmax", "argmin", "any", "all", "logsumexp"])
@pytest.mark.parametrize("keepdim", [False, True])
def test_short_rows(name: str, keepdim: bool) -> None:
    x = torch.randn(33, 5)
    x[3, 2], x[4] = NAN, torch.tensor([1.0, 7.0, NAN, 7.0, 7.0])
    x[5], x[6] = 2.0, torch.tensor([0.0, -math.inf, math.inf, math.inf, -math.inf])
    g = Sketch()
    source = g.input(x if name not in ("any", "all") else x > 0.5)
    check(g, name, source, 1 if name.startswith("arg") else [1], keepdim)


@pytest.mark.parametrize("order", [0, 1, 2, 3, math.inf])
def test_short_vector_norms(order: float) -> None:
    g = Sketch()
    check(g, "vector_norm", g.input(torch.randn(21, 3)), order, [1])


def test_over_an_outer_dim_of_integers() -> None:
    g = Sketch()
    check(g, "argmin", g.input(torch.randint(-3, 3, (6, 40))), 0)


def test_over_two_dims() -> None:
    g = Sketch()
    check(g, "sum", g.input(torch.randn(9, 2, 11, 3)), [1, 3])


def test_variance() -> None:
    g = Sketch()
    x = g.input(torch.randn(9, 4))
    y = g.op("var", x, [1], correction=1)
    for loader in LOADERS.values():
        _, (got,) = run_sketch(g, [y], loader)
        torch.testing.assert_close(got, g.expected([y])[0])


def test_nearest_point_is_one_kernel() -> None:
    g = Sketch()
    points, centres = g.input(torch.randn(50, 1, 3)), g.input(torch.randn(1, 4, 3))
    distances = g.op("vector_norm", g.op("sub", points, centres), 2, [2])
    check(g, "argmin", distances, 1)


@pytest.mark.parametrize("join", ["stack", "cat"])
def test_rows_of_joined_earlier_rows_are_computed_once(join: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step sums up all earlier ones. With a mask for each piece, a step was computed once for each path to it."""
    calls: list[object] = []
    monkeypatch.setattr(movement, "out_type", lambda op, of=movement.out_type: calls.append(op) or of(op))
    g = Sketch()
    steps = [g.input(torch.randn(3, 4) if join == "stack" else torch.randn(3, 1, 4))]
    for _ in range(6):
        joined = g.op(join, list(steps), 1)
        steps.append(g.op("sum", joined, [1], join == "cat"))
    for loader in LOADERS.values():
        calls.clear()
        _, (got,) = run_sketch(g, [steps[-1]], loader)
        torch.testing.assert_close(got, g.expected([steps[-1]])[0])
        assert len(calls) < 100
