"""Loops that stack what each step computes: which are computed once, and that values, types and strides stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright import _torch_compat as compat
from fusewright import report
from fusewright.graph import verify
from fusewright.graph.canonicalize import canonicalize
from fusewright.graph.cse import merge_common
from fusewright.interface import RuleLog
from fusewright.rewrite.engine import READER, Rewriter
from fusewright.rewrite.loops.unrolled import roll
from fusewright.rewrite.rules import RULES as HOST_RULES

ID = "loop.rolled"
STEPS = 11


def _graph(fn: Callable[..., Any], inputs: list[Tensor], mode: Literal["fake", "symbolic"] = "fake") -> Graph:
    graph = make_fx(fn, tracing_mode=mode)(*inputs).graph
    canonicalize(graph)
    Rewriter(graph).run(HOST_RULES)
    merge_common(graph)
    return graph


def _rolled(fn: Callable[..., Any], inputs: list[Tensor]) -> tuple[int, list[str]]:
    """Roll the loops of `fn` and compare its results; return hits and the names of the rows left."""
    graph, log = _graph(fn, inputs), RuleLog()
    expected = GraphModule({}, graph)(*inputs)
    before = {n for n in graph.nodes}
    roll(graph, log)
    verify.check(graph, "rolled")
    got = GraphModule({}, graph)(*inputs)
    for x, y in zip(*((r if isinstance(r, list | tuple) else [r]) for r in (got, expected)), strict=True):
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y, equal_nan=True)
    if not log.hits[ID]:
        assert set(graph.nodes) == before, "what was tried is left behind"
    return log.hits[ID], [READER.name(n) for n in graph.nodes if n.op == "call_function"]


def _scan(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The sequential path of Mamba: a recurrence, and a product with its state at every step."""
    h, ys = torch.zeros_like(a[:, :, 0]), []
    for t in range(a.shape[2]):
        h = a[:, :, t] * h + b[:, :, t]
        ys.append((h @ c[:, t].unsqueeze(-1))[:, :, 0])
    return torch.stack(ys, -1), h


def _state(steps: int = STEPS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    a, b = torch.rand(2, 6, steps, 4), torch.randn(2, 6, steps, 4)
    return [a.to(dtype), b.to(dtype), torch.randn(2, steps, 4).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_with_each_state_of_a_recurrence_are_one(dtype: torch.dtype) -> None:
    hits, names = _rolled(_scan, _state(dtype=dtype))
    assert hits == 1
    assert (names.count("bmm"), names.count("sum")) == ((0, 1) if dtype is torch.float32 else (1, 0))
    assert names.count("add") == STEPS, "the recurrence itself stays"


def test_nan_and_inf_stay_in_their_steps() -> None:
    a, b, c = _state()
    a[0, 1, 3, 2], b[1, 2, 4, 0], c[0, 7, 1] = math.nan, math.inf, -math.inf
    assert _rolled(_scan, [a, b, c])[0] == 1


def test_few_steps_stay() -> None:
    for steps in (1, 7):
        assert _rolled(_scan, _state(steps))[0] == 0


X, W = torch.randn(12, 5, 4), torch.randn(3, 4)

LOOPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "select": lambda x, w: torch.stack([x[t].relu() * 2 for t in range(12)]),
    "from the middle": lambda x, w: torch.stack([x[t].relu() for t in range(2, 11)], 1),
    "backwards": lambda x, w: torch.stack([x[t].relu() for t in reversed(range(12))], 2),
    "negative": lambda x, w: torch.stack([x[t - 12].relu() for t in range(12)]),
    "unbind": lambda x, w: torch.stack([(v * v).sum(-1) for v in x.unbind(0)], -1),
    "slices": lambda x, w: torch.cat([x[t : t + 1].exp() for t in range(12)], 1),
    "split": lambda x, w: torch.cat([v.softmax(-1) for v in x.split(1)]),
    "wider slices": lambda x, w: torch.cat([x.reshape(240)[20 * t : 20 * t + 20].tanh() for t in range(12)]),
    "linear": lambda x, w: torch.stack([torch.nn.functional.linear(x[t], w) for t in range(12)]),
    "product with a matrix": lambda x, w: torch.stack([x[t] @ w.reshape(4, 3).tanh() for t in range(12)]),
    "mv": lambda x, w: torch.stack([x[t] @ x[t, 0].unsqueeze(-1) for t in range(12)]),
    "mm": lambda x, w: torch.stack([x[t] @ x[t, :4].tanh() for t in range(12)], 1),
    "linears": lambda x, w: torch.stack([torch.nn.functional.linear(x[t], x[t]) for t in range(12)]),
    "broadcast": lambda x, w: torch.stack([x[t] + x[t, 0].sigmoid() for t in range(12)], 1),
    "keepdim": lambda x, w: torch.cat([x[t].amax(0, keepdim=True) for t in range(12)], 1),
    "t": lambda x, w: torch.stack([x[t].t().exp() for t in range(12)]),
    "all dims": lambda x, w: torch.stack([x[t].permute(1, 0).unsqueeze(-1).sum((0, 1)) for t in range(12)]),
    "expand": lambda x, w: torch.stack([x[t, :1].expand(5, 4) * x[t].transpose(0, 1).reshape(5, 4) for t in range(12)]),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_steps_compute_of_consecutive_pieces_is_computed_once(name: str) -> None:
    hits, names = _rolled(LOOPS[name], [X, W])
    assert hits == 1
    assert len(names) < 12


def _gated(x: Tensor, w: Tensor) -> Tensor:
    """A recurrence whose states are the result."""
    h, hs = torch.zeros_like(x[0]), []
    for t in range(12):
        z = (x[t] + h).sigmoid()
        h = (1 - z) * h + z * (x[t] * h).tanh()
        hs.append(h)
    return torch.stack(hs)


KEPT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "recurrence": _gated,
    "a gap": lambda x, w: torch.stack([x[t].relu() for t in range(12) if t != 5]),
    "a repeated step": lambda x, w: torch.stack([x[min(t, 10)].relu() for t in range(12)]),
    "another order": lambda x, w: torch.stack([x[t ^ 1].relu() for t in range(12)]),
    "unlike steps": lambda x, w: torch.stack([x[t].relu() if t % 2 else x[t].tanh() for t in range(12)]),
    "another number": lambda x, w: torch.stack([x[t] * t for t in range(12)]),
    "nothing but pieces": lambda x, w: torch.stack([x[t] for t in range(12)]),
    "scalars": lambda x, w: torch.stack([x[t, 0, 0] * 2 for t in range(12)]),
    "steps are results": lambda x, w: (lambda ys: [torch.stack(ys), *ys])([x[t].relu() for t in range(12)]),
    "pointwise only": lambda x, w: torch.stack([(x @ w.t())[min(t, 3)].exp().relu() for t in range(12)]),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_loops_stay(name: str) -> None:
    assert _rolled(KEPT[name], [X, W])[0] == 0


def test_states_that_are_results_stay() -> None:
    """As in training, where each state is saved: a stack would be one more copy."""

    def saved(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        h, ys, hs = torch.zeros_like(a[:, :, 0]), [], []
        for t in range(STEPS):
            h = a[:, :, t] * h + b[:, :, t]
            hs.append(h)
            ys.append((h @ c[:, t].unsqueeze(-1))[:, :, 0])
        return [torch.stack(ys, -1), *hs]

    assert _rolled(saved, _state())[0] == 0


def test_weights_are_not_copied() -> None:
    def experts(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.stack([x @ w for w in weights])

    assert _rolled(experts, [torch.randn(3, 4), *torch.randn(9, 4, 5)])[0] == 0


def test_no_elements() -> None:
    """Fills have taken the place of the steps."""
    assert _rolled(_scan, [torch.rand(0, 6, 9, 4), torch.rand(0, 6, 9, 4), torch.rand(0, 9, 4)])[0] == 0


_OF_NUMBERS = ("wider slices", "product with a matrix", "mm", "expand", "from the middle")
"""Loops that are written for numbers of rows and columns, or over a part of the steps."""


@pytest.mark.parametrize("name", [n for n in LOOPS if n not in _OF_NUMBERS])
def test_sizes_other_than_the_number_of_steps_may_be_symbols(name: str) -> None:
    def loop(x: Tensor, w: Tensor) -> Any:
        assert x.shape[0] == 12  # known from here on
        return LOOPS[name](x, w)

    graph, log = _graph(loop, [X, W], "symbolic"), RuleLog()
    guards = len(compat.shape_env_of(GraphModule({}, graph)).guards)
    with compat.python_dispatcher():  # as in compilations: the C++ form of matmul knows no symbols in torch 2.10
        roll(graph, log)
    verify.check(graph, "rolled")
    assert "slice" not in [READER.name(n) for n in graph.nodes if n.op == "call_function"], "its gradient has no kernel"
    assert log.hits[ID] == 1 and len(compat.shape_env_of(GraphModule({}, graph)).guards) == guards
    for rows in (7, 12, 2):  # as many rows as steps: nothing mistakes one for the other
        again = torch.randn(12, rows, 4)
        got, expected = GraphModule({}, graph)(again, W), LOOPS[name](again, W)
        assert got.stride() == expected.stride()
        torch.testing.assert_close(got, expected)


def test_a_loop_over_a_symbol_stays() -> None:
    graph, log = _graph(LOOPS["from the middle"], [X, W], "symbolic"), RuleLog()
    before = set(graph.nodes)
    roll(graph, log)
    assert not log.hits and set(graph.nodes) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_size_of_batch_is_rolled_too(dtype: torch.dtype) -> None:
    """Dynamo makes it a symbol. All later sizes run that graph, but one of a single row."""
    torch._dynamo.reset()
    compiled = torch.compile(_scan, backend="fusewright")
    with torch.no_grad(), report.recording() as graphs:
        for batch in (2, 3, STEPS, 5, 1, 0):
            inputs = [torch.rand(batch, 6, STEPS, 4), torch.randn(batch, 6, STEPS, 4), torch.randn(batch, STEPS, 4)]
            inputs = [x.to(dtype) for x in inputs]
            exact = _scan(*(x.double() for x in inputs))
            for got, eager, z in zip(compiled(*inputs), _scan(*inputs), exact, strict=True):
                assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
                if batch:
                    floor = 4 * torch.finfo(dtype).eps
                    assert (got - z).abs().max() <= 2 * (eager - z).abs().max() + floor * (1 + z.abs().max())
    *full, empty = graphs
    assert len(full) == 3 and all(g.rules[ID] == g.rules["loop.recurrence"] == 1 for g in full)
    assert empty.rules["empty.result"] and {r.op for r in empty.ops if r.where != "view"} == set()


def test_the_rule_can_be_switched_off() -> None:
    torch._dynamo.reset()
    inputs = _state()
    for disabled in ((), (ID,)):
        compiled = torch.compile(_scan, backend="fusewright", dynamic=False, options={"disable_rules": disabled})
        with torch.no_grad(), report.recording() as graphs:
            compiled(*inputs)
        assert graphs[0].rules[ID] == (0 if disabled else 1)


def test_a_compiled_recurrence_is_as_exact_as_eager() -> None:
    inputs = _state(13)
    compiled = torch.compile(_scan, backend="fusewright", dynamic=False)
    with torch.no_grad():
        got, expected, exact = compiled(*inputs), _scan(*inputs), _scan(*(x.double() for x in inputs))
    for x, y, z in zip(got, expected, exact, strict=True):
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_steps_copy_over_a_tensor_is_copied_in_its_shape_and_type(dtype: torch.dtype) -> None:
    x, base = torch.rand(STEPS, 4, dtype=dtype), torch.zeros(5, 4)

    def fn(x: Tensor, base: Tensor) -> Tensor:
        return torch.stack([torch.relu(torch.ops.aten.copy(base, x[t])) for t in range(STEPS)])

    assert _rolled(fn, [x, base])[0] == 1
