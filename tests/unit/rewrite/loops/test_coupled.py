"""Loops of several states that depend on each other: which become one scan, its gradient, and its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.interface import RuleLog
from fusewright.ops.semantics.coupled import coupled_scan_op
from fusewright.rewrite.loops.recurrence import ID, recur
from tests.unit.rewrite.loops.test_recurrence import STEPS, A, B, H, graph_of, scanned

Step = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


def _neuron(v: Tensor, limit: Tensor, x: Tensor, y: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate and fire, with a limit that adapts. What is shown is no state."""
    v = v * 0.9 + x
    spike = (v > limit).to(v.dtype)
    return v - spike * limit, limit * 0.95 + 0.05 + 0.2 * spike, spike


def _cell(h: Tensor, c: Tensor, x: Tensor, y: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
    c = torch.sigmoid(x + h) * c + torch.tanh(y - h)
    return torch.sigmoid(y * h) * torch.tanh(c), c, c


def _rotation(a: Tensor, b: Tensor, x: Tensor, y: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
    a, b = a * x.cos() - b * x.sin() + y, a * x.sin() + b * x.cos()
    return a, b, a


def _adam(m: Tensor, w: Tensor, x: Tensor, y: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """Corrections are numbers that differ from step to step."""
    m = 0.9 * m + 0.1 * (x + 0.1 * w)
    w = w - m / (1 - 0.9 ** (t + 1))
    return m, w, w


def _mutual(a: Tensor, b: Tensor, x: Tensor, y: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
    a, b = torch.tanh(b + x), torch.tanh(a + y)
    return a, b, a


LOOPS: dict[str, Step] = {
    "neurons": _neuron, "a cell without products": _cell, "a rotation": _rotation, "momentum": _adam, "two states": _mutual,
}  # fmt: skip


def _loop(step: Step, zeros: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A loop over steps, from states that are one tensor of zeros or are given."""

    def run(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        g, h = (torch.zeros_like(h), torch.zeros_like(h)) if zeros else (h + 1, h * 2)
        read = []
        for t in range(STEPS):
            g, h, shown = step(g, h, a[t], b[t], t)
            read.append(shown)
        return torch.stack(read, 1)

    return run


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_states_that_depend_on_each_other_are_one_scan(name: str, zeros: bool) -> None:
    hits, names = scanned(_loop(LOOPS[name], zeros), [A, B, H])
    assert hits == names.count("coupled_scan") == 1
    assert names.count("stack") == 0, "the stack is a piece of the scan, but for the first and the last step"
    assert len(names) < 4 * STEPS, names


def test_states_that_others_of_another_scan_read_are_known_first() -> None:
    """The gain of a Kalman filter follows its variances, and its estimates follow the gain."""

    def kalman(z: Tensor) -> Tensor:
        x, v, p, q, r, read = (torch.zeros_like(z[0]), torch.zeros_like(z[0]), *(torch.ones_like(z[0]),) * 3, [])
        for t in range(STEPS):
            p, q, r = p + 2 * q + r + 0.01, q + r, r + 0.01
            k, j = p / (p + 0.1), q / (p + 0.1)
            error = z[t] - x - v
            x, v = x + v + k * error, v + j * error
            p, q, r = (1 - k) * p, (1 - k) * q, r - j * q
            read.append(x)
        return torch.stack(read)

    hits, names = scanned(kalman, [A])
    assert hits == names.count("coupled_scan") == 2
    assert len(names) < 6 * STEPS


KEPT: dict[str, Step] = {
    "a product with the state": lambda g, h, x, y, t: (torch.tanh(h @ y[:4] + x), g + y, g),
    "a mean of the state": lambda g, h, x, y, t: (h - g.mean(-1, keepdim=True) + x, torch.tanh(g + y), g),
    "steps that are not alike": lambda g, h, x, y, t: (h + x, (g * y).sin() if t % 5 == 2 else torch.tanh(g * y), g),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_other_loops_stay(name: str) -> None:
    log = RuleLog()
    recur(graph_of(_loop(KEPT[name], False), [A, B, H]), log)
    assert log.hits[ID] == 0


@pytest.mark.parametrize("dim", [0, 1])
def test_the_gradient_is_a_scan_of_the_same_kind(dim: int) -> None:
    step = "t0=mul(h0, h1);n0=tanh(add(t0, x0));n1=sub(sigmoid(h0), mul(n0, x1));n2=mul(n0, h1)"
    x, y, g, h = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((9, 9), (9, 1), (9,), ()))
    assert torch.autograd.gradcheck(lambda *a: tuple(coupled_scan_op(a[0], [a[1]], [a[2], a[3]], dim, step)), (x, y, g, h))


@pytest.mark.parametrize("name", ["a cell without products", "two states"])
def test_a_training_step_is_never_unrolled(name: str) -> None:
    fn = _loop(LOOPS[name], True)
    given = [[x.clone().requires_grad_() for x in (A, B, H)] for _ in range(2)]
    compiled: Any = torch.compile(fn, backend="fusewright", dynamic=False)
    for run, inputs in zip((fn, compiled), given, strict=True):
        run(*inputs).square().sum().backward()
    for x, y in zip(*given, strict=True):
        torch.testing.assert_close(y.grad, x.grad)


def test_what_eager_gives_no_gradient_has_none() -> None:
    """Spikes are compared numbers, and a state that follows only them needs no gradient either."""

    def neurons(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v, limit, read = torch.zeros_like(x[0]), torch.ones_like(x[0]), []
        for t in range(STEPS):
            v = v * 0.9 + x[t]
            spike = (v > limit).to(v.dtype)
            v, limit = v - spike * limit, limit * 0.95 + 0.05 + 0.2 * spike
            read.append((spike, limit, v))
        a, b, c = zip(*read, strict=True)
        return torch.stack(a), torch.stack(b), torch.stack(c)

    hits, names = scanned(neurons, [A])
    assert hits == names.count("coupled_scan") == 1
    given = [A.clone().requires_grad_() for _ in range(2)]
    compiled: Any = torch.compile(neurons, backend="fusewright", dynamic=False)
    eager, ours = neurons(given[0]), compiled(given[1])
    assert [t.requires_grad for t in ours] == [t.requires_grad for t in eager] == [False, False, True]
    for found, x in zip((eager, ours), given, strict=True):
        found[2].square().sum().backward()
        assert x.grad is not None
    torch.testing.assert_close(given[1].grad, given[0].grad)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_loop_without_inputs_is_eagers(dtype: torch.dtype) -> None:
    def fn() -> tuple[Tensor, Tensor]:
        v, g, shown = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype), []
        for _ in range(STEPS):
            v, g = v * v * 0.1 + g, g * 0.5 + v
            shown.append(v)
        return torch.stack(shown), g

    compiled = torch.compile(fn, backend="nvidia_triton", options={"simulate": True, "fallback": "allow"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(), fn())
