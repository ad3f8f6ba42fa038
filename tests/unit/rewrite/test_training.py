"""Unrolled loops of training steps: rewritten before gradients are traced, with eager's results and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fusewright import report
from fusewright.capture.capture import through_aot
from fusewright.capture.loops import may_loop
from fusewright.interface import RuleLog
from fusewright.ops.semantics.recurrence import linear_scan_op
from fusewright.rewrite.loops import associative, recurrence
from fusewright.rewrite.training import rolled

STEPS = 9
Fn = Callable[..., Any]


def _step(fn: Fn, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The results of a training step and the gradients of its inputs."""
    torch.manual_seed(1)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    got = fn(*leaves)
    results = list(got) if isinstance(got, list | tuple) else [got]
    weights = [torch.linspace(-1, 2, r.numel(), dtype=r.dtype).reshape(r.shape) for r in results]
    sum((r * w).sum() for r, w in zip(results, weights, strict=True)).backward()  # type: ignore[union-attr]
    return [*(r.detach() for r in results), *(x.grad for x in leaves)]


def rolling(log: RuleLog, calls: list[str]) -> Callable[[GraphModule, Sequence[Any]], Any]:
    """A backend that rewrites the loops of a training step and runs its graphs as they are; it notes the hits, and all calls."""

    def keep(aten: GraphModule, *_: Any) -> Any:
        calls.extend(str(n.target) for n in aten.graph.nodes if n.op == "call_function")
        return lambda args: aten(*args)

    def backend(gm: GraphModule, given: Sequence[Any]) -> Any:
        new = rolled(gm, given, log) if may_loop(gm, given) else None
        return through_aot(new or gm, given, keep, "test")

    return backend


def _rolled(fn: Fn, inputs: Sequence[Tensor], log: RuleLog | None = None) -> tuple[RuleLog, list[str]]:
    """Run a training step whose loops are rewritten and compare it with eager's; return the hits and the calls of both graphs."""
    log, calls = log or RuleLog(), list[str]()
    backend = rolling(log, calls)
    torch._dynamo.reset()
    got, expected = _step(torch.compile(fn, backend=backend, dynamic=False), inputs), _step(fn, inputs)
    for x, y in zip(got, expected, strict=True):
        if x is None or y is None:
            assert x is y, "a gradient that nobody needs, or that is missing"
            continue
        assert (x.dtype, x.stride()) == (y.dtype, y.stride())
        loose = x.dtype in (torch.bfloat16, torch.float16)  # states are carried in fp32
        torch.testing.assert_close(x, y, rtol=0.05 if loose else None, atol=0.2 if loose else None)
    return log, calls


def _inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((STEPS, 5, 4), (STEPS, 5, 4), (STEPS, 4, 3), (5, 4))
    return [torch.rand(s).to(dtype).requires_grad_() for s in shapes]


def _states(a: Tensor, b: Tensor, h: Tensor) -> list[Tensor]:
    hs = []
    for t in range(len(a)):
        h = a[t] * h + b[t]
        hs.append(h)
    return hs


def _backwards(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    return torch.stack(_states(a.flip(0), b.flip(0), h)[::-1], 1)


def _updated_in_place(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    state, seen = h.clone(), []
    for t in range(STEPS):
        state = state.mul(a[t]).add_(b[t])
        seen.append(state.sum(-1))
    return torch.stack(seen)


def _filled(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    out = torch.empty_like(b)
    for t, s in enumerate(_states(a, b, h)):
        out[t] = s * a[0]
    return out


LOOPS: dict[str, Fn] = {
    "states": lambda a, b, c, h: torch.stack(_states(a, b, h)),
    "from zeros": lambda a, b, c, h: torch.stack(_states(a, b, torch.zeros_like(a[0]))),
    "from the first summand": lambda a, b, c, h: torch.stack(_states(a[1:], b[1:], b[0]), 1),
    "from a row": lambda a, b, c, h: torch.stack(_states(a, b, h[0])),
    "the last state": lambda a, b, c, h: _states(a, b, h)[-1],
    "and the last state": lambda a, b, c, h: (torch.stack(hs := _states(a, b, h), 1), hs[-1]),
    "the first state too": lambda a, b, c, h: torch.stack([h, *_states(a, b, h)], 1),
    "states before the steps": lambda a, b, c, h: torch.stack([s * x for s, x in zip([h, *_states(a, b, h)], a, strict=False)]),
    "a product per step": lambda a, b, c, h: torch.stack([s @ w for s, w in zip(_states(a, b, h), c, strict=True)], -1),
    "two readers": lambda a, b, c, h: torch.stack([s.sum(-1) + (s * b[0]).sum(-1) for s in _states(a, b, h)]),
    "gates": lambda a, b, c, h: torch.stack(_states(a.sigmoid(), (1 - a.sigmoid()) * b.tanh(), h)),
    "a factor per column": lambda a, b, c, h: torch.stack(_states(a[:, 0], b, h)),
    "a number": lambda a, b, c, h: torch.stack(_states([0.9] * STEPS, b, h)),  # type: ignore[arg-type]
    "transposed": lambda a, b, c, h: torch.stack(_states(a.mT, b.mT, h.t())),
    "backwards": _backwards,
    "two layers": lambda a, b, c, h: torch.stack(_states(torch.stack(_states(a, b, h)), a, h)),
    "updated in place": _updated_in_place,
    "written piece by piece": _filled,
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_a_recurrence_is_a_scan_forward_and_backward(name: str) -> None:
    log, calls = _rolled(LOOPS[name], _inputs())
    layers = 2 if name == "two layers" else 1
    assert log.hits[recurrence.ID] == layers
    assert calls.count("fusewright.linear_scan.default") == 2 * layers
    assert len(calls) < 80, "no part of the backward graph is unrolled"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_of_half_types_are_carried_in_fp32(dtype: torch.dtype) -> None:
    assert _rolled(LOOPS["a product per step"], _inputs(dtype))[0].hits[recurrence.ID] == 1


def _checkpoints(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Two layers, each of which is computed again in the backward pass."""

    def layer(a: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        hs = _states(a.sigmoid(), F.dropout(b, 0.5), h)
        return torch.stack(hs), hs[-1]

    x, last = checkpoint(layer, a, b, h, use_reentrant=False)
    y, last = checkpoint(layer, b, x.tanh(), last * 2, use_reentrant=False)
    return y * c[0, 0, 0], last


def test_what_a_checkpoint_holds_is_a_scan_that_is_computed_again() -> None:
    log, calls = _rolled(_checkpoints, _inputs(torch.float32))
    assert log.hits[recurrence.ID] == 2 and len(calls) < 150
    assert calls.count("fusewright.linear_scan.default") > 4, "forward, forward again, and backward"


def test_gradients_that_nobody_needs_are_not_computed() -> None:
    a, b, c, h = _inputs()
    for constant in (a, b, h):
        given = [x.detach() if x is constant else x for x in (a, b, c, h)]
        assert _rolled(LOOPS["states"], given)[0].hits[recurrence.ID] == 1


def test_autocast_is_recorded_once() -> None:
    def loop(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.stack([s @ w for s, w in zip(_states(a, b, h), c, strict=True)])

    def outside(*given: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return compiled(*given)

    inputs = _inputs(torch.float32)
    assert _rolled(loop, inputs)[0].hits[recurrence.ID] == 1
    torch._dynamo.reset()
    compiled = torch.compile(LOOPS["a product per step"], backend="fusewright", dynamic=False)
    with report.recording() as graphs:
        got = _step(outside, inputs)
    assert graphs[0].rules[recurrence.ID] == 1
    for x, y in zip(got, _step(torch.autocast("cpu", torch.bfloat16)(LOOPS["a product per step"]), inputs), strict=True):
        assert x is not None and y is not None and x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.1)


def test_weights_under_an_autocast_around_the_step() -> None:
    """Autocast caches casts of weights: those of Dynamo's run looked like tensors from outside the graph, and loops stayed."""

    product = torch.nn.Linear(4, 4)

    def loop(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
        return torch.stack(_states(a, product(b), h))

    inputs, compiled = _inputs(torch.float32), torch.compile(loop, backend="fusewright", dynamic=False)
    with torch.autocast("cpu", torch.bfloat16), report.recording() as graphs:
        got, expected = _step(compiled, inputs), _step(loop, inputs)
    assert [g.rules[recurrence.ID] for g in graphs] == [1, 0], "before gradients are traced"
    for x, y in zip(got, expected, strict=True):
        if x is not None and y is not None:
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.1)


def test_dropout_draws_eagers_numbers() -> None:
    def loop(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
        return F.dropout(torch.stack(_states(F.dropout(a, 0.2), b, h)), 0.5)

    assert _rolled(loop, _inputs(torch.float32))[0].hits[recurrence.ID] == 1


def _model(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """A state-space model: the batch comes first, then the steps, and a row of the state is read at each."""
    ys = []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        ys.append((h @ c[:, t].unsqueeze(-1))[..., 0])
    return torch.stack(ys, 1), h


def _gates_filled(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    out = torch.empty_like(b)
    for t in range(a.shape[1]):
        z = a[:, t].sigmoid()
        h = (1 - z) * h + z * b[:, t].tanh()
        out[:, t] = h
    return out.flatten(1)


@pytest.mark.parametrize("fn", [_model, _gates_filled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_size_of_batch_is_a_scan_too(fn: Fn, dtype: torch.dtype) -> None:
    """Dynamo makes it a symbol. All later sizes run that graph, but one or no row."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="fusewright")
    with report.recording() as graphs:
        for batch in (2, 3, STEPS, 7, 1, 0):
            torch.manual_seed(batch)
            shapes = ((batch, STEPS, 5, 4), (batch, STEPS, 5, 4), (batch, STEPS, 4), (batch, 5, 4))
            inputs = [torch.rand(s).to(dtype).requires_grad_() for s in shapes]
            exact = _step(fn, [x.detach().double().requires_grad_() for x in inputs])
            for got, eager, z in zip(_step(compiled, inputs), _step(fn, inputs), exact, strict=True):
                if got is None or eager is None or z is None:
                    assert got is eager
                    continue
                assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
                if batch:
                    floor = 4 * torch.finfo(dtype).eps
                    assert (got - z).abs().max() <= 2 * (eager - z).abs().max() + floor * (1 + z.abs().max())
    assert len(graphs) == 8, "a forward and a backward graph of two, of any number, of one and of no rows"
    assert sum(g.rules[recurrence.ID] for g in graphs) == 3 and any(g.rules["empty.result"] for g in graphs[-2:])


def _read_one_by_one(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> list[Tensor]:
    return _states(a, b, h)


def _detached(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    hs = []
    for t in range(STEPS):
        h = a[t] * (h.detach() if t == 4 else h) + b[t]
        hs.append(h)
    return torch.stack(hs)


def _hidden(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    """What clamps the lengths inside is hidden from gradients."""
    return torch.stack([F.cosine_similarity(s, h, dim=1) for s in _states(a, b, h)])


def _without_gradients(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        first = a[0] * h + b[0]
    return torch.stack(_states(a, b, first))


def _saving_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mul.Tensor])


def _checkpoint_in_autocast(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(lambda *x: torch.stack(_states(*x)), a, b, h, use_reentrant=False)


KEPT: dict[str, Fn] = {
    "few steps": lambda a, b, c, h: torch.stack(_states(a[:7], b[:7], h)),
    "states that are results": _read_one_by_one,
    "states that other loops read": lambda a, b, c, h: sum(s.sin() * k for k, s in enumerate(_states(a, b, h))),
    "a detached state": _detached,
    "a part that torch hides": _hidden,
    "a part without gradients": _without_gradients,
    "a checkpoint that chooses": lambda a, b, c, h: checkpoint(
        lambda *x: torch.stack(_states(*x)), a, b, h, use_reentrant=False, context_fn=_saving_products
    ),
    "a checkpoint in autocast": _checkpoint_in_autocast,
}


@pytest.mark.parametrize("name", KEPT)
def test_other_loops_stay(name: str) -> None:
    log, calls = _rolled(KEPT[name], _inputs())
    assert not log.hits and "fusewright.linear_scan.default" not in calls


def test_one_loop_stays_and_another_is_a_scan() -> None:
    def both(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        alone = sum(s.sin() * k for k, s in enumerate(_states(a, b, h)))
        return torch.stack(_states(b, a, h)), alone  # type: ignore[return-value]

    assert _rolled(both, _inputs())[0].hits[recurrence.ID] == 1


def test_the_rule_can_be_switched_off() -> None:
    log, calls = _rolled(LOOPS["states"], _inputs(), RuleLog(disabled={recurrence.ID}))
    assert not log.hits and "fusewright.linear_scan.default" not in calls
    assert not _rolled(LOOPS["states"], _inputs(), RuleLog(fuel=0))[0].hits


def test_a_tree_of_pairs_is_a_scan() -> None:
    scan = pytest.importorskip("torch._higher_order_ops.associative_scan", reason="this torch has no associative_scan")

    def tree(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
        pairs = scan.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, b), dim=0, combine_mode="generic")
        return pairs[1].tanh()

    log, calls = _rolled(tree, _inputs())
    assert log.hits[associative.ID] == 1 and calls.count("fusewright.linear_scan.default") == 2


def test_a_recording_that_fails_leaves_no_level_of_vmap() -> None:
    def mapped(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
        return torch.vmap(lambda x: x.sin() * x.detach())(torch.stack(_states(a, b, h)))

    assert not _rolled(mapped, _inputs())[0].hits
    assert torch._C._functorch.peek_interpreter_stack() is None


@pytest.mark.parametrize("shape", [(6, 2, 3), (6, 1, 3), (1, 2, 3), (3,)])
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_a_scan(shape: tuple[int, ...], dim: int) -> None:
    torch.manual_seed(0)
    a, b, h = torch.rand(shape, dtype=torch.float64), torch.randn(6, 2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    for initial in (None, h):
        given = [None if x is None else x.clone().requires_grad_() for x in (a, b, initial)]
        assert torch.autograd.gradcheck(lambda *x: linear_scan_op(*x, dim), given)


@settings(max_examples=10, deadline=None)
@given(
    steps=st.integers(8, 14), sizes=st.tuples(*[st.integers(1, 4)] * 3), needed=st.sets(st.integers(0, 3), min_size=1),
    last=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_step_of_a_state_space_model_is_eagers(
    steps: int, sizes: tuple[int, int, int], needed: set[int], last: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    batch, inner, state = sizes
    shapes = ((batch, inner, steps, state), (batch, inner, steps, state), (batch, steps, state), (batch, inner, state))
    inputs = [torch.randn(s, dtype=torch.float64).requires_grad_(k in needed) for k, s in enumerate(shapes)]

    def model(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Any:
        ys = []
        for t in range(steps):
            h = a[:, :, t] * h + b[:, :, t]
            ys.append((h @ c[:, t].unsqueeze(-1))[:, :, 0])
        return (torch.stack(ys, -1), h) if last else torch.stack(ys, -1)

    results = model(*inputs)
    if all(r.requires_grad for r in (results if last else [results])):
        assert _rolled(model, inputs)[0].hits[recurrence.ID] == 1


def test_a_tensor_that_is_filled_in_part_has_gradients() -> None:
    """Autograd has a derivative of copies in place only."""

    def fn(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        out, hs = a.new_zeros(5, STEPS, 4), _states(a, b, h)
        for t in range(1, STEPS):
            out[:, t] = hs[t].sum() * c[t].sum()
        return out, torch.stack(hs)

    _rolled(fn, _inputs())


def test_the_last_state_lies_in_memory_as_eagers() -> None:
    def fn(a: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        hs = _states(a, b, h)
        return torch.stack(hs, 1), hs[-1]

    a, b, _, h = _inputs()
    _rolled(fn, [a.detach().mT.contiguous().mT.requires_grad_(), b, h])


def test_a_chain_that_reads_a_later_state_of_another_stays() -> None:
    """What was made for its scan, and reads that state, is not left behind."""

    def fn(a: Tensor, b: Tensor, first: Tensor, other: Tensor, last: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ys = []
        for t in range(a.shape[2]):
            x, y = a[:, :, t], b[:, :, t]
            first, other, last = (
                torch.tanh(first) * y,
                torch.sigmoid(y) * other + (1 - torch.sigmoid(x)) * (last @ w),
                torch.clamp(x * last + y, -4, 4),
            )
            ys.append(last + first)
        return sum(ys), other, ys[1]  # type: ignore[return-value]

    torch.manual_seed(0)
    shapes = ((2, 4, 12), (2, 4, 12), (2, 4), (2, 4), (2, 4), (4, 4))
    _rolled(fn, [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes])
