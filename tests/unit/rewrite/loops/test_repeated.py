"""Training loops whose steps no scan says: one call while gradients are traced, with eager's results and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.capture import repeated as calls
from fusewright.interface import RuleLog
from fusewright.rewrite.loops.repeated import ID
from tests.unit.rewrite.test_training import rolling

STEPS, BATCH, WIDTH = 16, 2, 4
Fn = Callable[..., Any]


def _inputs() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (BATCH, STEPS, WIDTH), (WIDTH, WIDTH), (WIDTH,), (3, WIDTH)
    return [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]


def _step(fn: Fn, inputs: Sequence[Tensor]) -> list[Any]:
    """The results of a training step, and the gradients of its inputs."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    torch.manual_seed(1)
    got = fn(*leaves)
    results = list(got) if isinstance(got, list | tuple) else [got]
    wanted = [r for r in results if r.requires_grad]
    sum((r * torch.linspace(-1, 2, r.numel()).reshape(r.shape)).sum() for r in wanted).backward()  # type: ignore[union-attr]
    return [*results, *(x.grad for x in leaves)]


def _hits(fn: Fn, inputs: Sequence[Tensor]) -> int:
    """Compare a training step with eager's; return how many loops were traced as one call."""
    log, names = RuleLog(), list[str]()
    backend = rolling(log, names)
    torch._dynamo.reset()
    got, expected = _step(torch.compile(fn, backend=backend, dynamic=False), inputs), _step(fn, inputs)
    for x, y in zip(got, expected, strict=True):
        assert (x is None) == (y is None), "a gradient that nobody needs, or that is missing"
        if x is not None:
            assert (x.dtype, x.stride(), x.requires_grad) == (y.dtype, y.stride(), y.requires_grad)
            torch.testing.assert_close(x, y)
    assert not any("repeated" in n for n in names), "steps that are not written out"
    assert not calls.BODIES, "what is kept after a compilation"
    return log.hits[ID]


def _rnn(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    h, out = x.new_zeros(BATCH, WIDTH), []
    for t in range(STEPS):
        h = torch.tanh(F.linear(x[:, t], w, b) + h @ w)
        out.append(h)
    return torch.stack(out, 1)


def _softmax(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    h, out = x.new_zeros(BATCH, WIDTH), []
    for t in reversed(range(STEPS)):
        h = 0.9 * h + torch.softmax(h + x[:, t], -1)
        out.append(h)
    return torch.cat(out, -1), h


def _last(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    h = x[:, 0]
    for _ in range(STEPS):
        h = F.layer_norm(h @ w, (WIDTH,), b)
    return h


def _norm(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> list[Tensor]:
    h, out = torch.ones_like(x[:, 0]), []
    for t in range(STEPS):
        h = h + x[:, t]
        h = h / h.norm(dim=-1, keepdim=True)
        out.append(h.unsqueeze(0))
    return [torch.cat(out), out[3], h]


def _delta(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    k, v = x @ w, x * b
    state, out = x.new_zeros(BATCH, WIDTH, WIDTH), []
    for t in range(STEPS):
        read = (state @ k[:, t].unsqueeze(-1)).squeeze(-1)
        state = state + (v[:, t] - read).unsqueeze(-1) * k[:, t].unsqueeze(-2)
        out.append((state @ x[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(out, 1)


def _memory(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    h, out = x.new_zeros(BATCH, WIDTH), torch.zeros(BATCH, STEPS, WIDTH, dtype=x.dtype)
    for t in range(STEPS):
        h = torch.tanh(h @ w + torch.softmax((h + x[:, t]) @ m.t(), -1) @ m)
        out[:, t] = h
    return out


def _gates(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    h = c = x.new_zeros(BATCH, WIDTH)
    wide, out = torch.cat([w, w.t(), m[:1], m[1:2], m[:2]]), []
    for t in range(STEPS):
        i, f, o = (x[:, t].repeat(1, 3) + F.linear(h, wide)).chunk(3, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i)
        h = torch.sigmoid(o) * torch.tanh(c)
        out.append(h)
    return torch.stack(out)


def _middle(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    h, out = x.new_zeros(BATCH, WIDTH), []
    for t in range(STEPS):
        h = torch.sin(h @ w) + x[:, t]
        out.append(h)
    return out[5] + out[-1]


def _expanded(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    """A first state of another shape."""
    h = b.unsqueeze(0)
    for t in range(STEPS):
        h = torch.tanh(x[:, t] + h @ w)
    return h


def _complex(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    """The state reaches the result through complex numbers alone."""
    h, out = torch.zeros(BATCH, WIDTH, dtype=torch.complex128), []
    for t in range(STEPS):
        h = h * (0.5 + 0.2j) + x[:, t] * b
        out.append(h)
    return torch.stack(out).abs()


def _masked(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    h, kept = x.new_zeros(BATCH, WIDTH), x > 0
    for t in range(STEPS):
        h = torch.where(kept[:, t], torch.tanh(h @ w + x[:, t]), h)
    return h


def _ode(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    h = x[:, 0]
    for _ in range(STEPS):
        h = h + 0.1 * torch.tanh(F.linear(h, w, b))
    return h


ALIKE = [_rnn, _softmax, _last, _norm, _delta, _memory, _gates, _middle, _expanded, _complex, _masked, _ode]


@pytest.mark.parametrize("fn", ALIKE)
def test_a_loop_is_one_call_while_gradients_are_traced(fn: Fn) -> None:
    assert _hits(fn, _inputs()) == 1


@pytest.mark.parametrize("without", [(0,), (1,), (2, 3), (1, 2, 3)])
def test_inputs_without_gradients(without: Sequence[int]) -> None:
    inputs = _inputs()
    for k in without:
        inputs[k].requires_grad_(False)
    assert _hits(_memory, inputs) == 1


def test_the_gradient_of_one_step_of_each_kind_is_traced() -> None:
    ran = list[int]()
    run = calls.Body.run

    def counted(body: calls.Body, inputs: Sequence[Any]) -> list[Any]:
        ran.append(body.steps)
        return run(body, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls.Body, "run", counted)
        assert _hits(_softmax, _inputs()) == 1
        assert _hits(_gates, _inputs()) == 1
    assert 2 <= len(ran) <= 4, "one or two kinds each: a cell after the last step has no gradient"


def _dropout(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        h = F.dropout(torch.tanh(h @ w), 0.5) + x[:, t]
    return h


def _few(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(9):
        h = torch.tanh(h @ w) + x[:, t]
    return h


def _other_numbers(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        h = torch.tanh(h @ w * (t + 1)) + x[:, t]
    return h


@pytest.mark.parametrize("fn", [_dropout, _few, _other_numbers])
def test_other_loops_stay(fn: Fn) -> None:
    assert _hits(fn, _inputs()) == 0


def test_gradients_that_lie_otherwise_in_memory_than_those_that_were_traced() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
        h, out = x[:, 0], []
        for _ in range(STEPS):
            h = (h.view(BATCH, 2, 2) * 2).view(BATCH, WIDTH) + torch.softmax(h @ w, -1)
            h = h / h.sum(-1, keepdim=True)
            out.append(h.t())
        return torch.cat([o.reshape(-1) for o in out])

    assert _hits(fn, _inputs())
