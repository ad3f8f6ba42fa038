"""Linear recurrences: which become one scan, and that values, types, strides and memory stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from fusewright.rewrite.loops.recurrence import ID, recur
from fusewright.rewrite.loops.unrolled import roll
from fusewright.rewrite.rules import RULES as HOST_RULES

STEPS = 11
Traced = Literal["fake", "symbolic"]


def graph_of(fn: Callable[..., Any], inputs: list[Tensor], mode: Traced = "fake") -> Graph:
    graph = make_fx(fn, tracing_mode=mode)(*inputs).graph
    canonicalize(graph)
    Rewriter(graph).run(HOST_RULES)
    merge_common(graph)
    return graph


def scanned(fn: Callable[..., Any], inputs: list[Tensor]) -> tuple[int, list[str]]:
    """Rewrite the recurrences of `fn` and compare its results; return hits and the names of the rows left."""
    graph, log = graph_of(fn, inputs), RuleLog()
    expected = GraphModule({}, graph)(*inputs)
    before = {n for n in graph.nodes}
    recur(graph, log)
    verify.check(graph, "recurrences")
    if not log.hits[ID]:
        assert set(graph.nodes) == before, "what was tried is left behind"
    roll(graph, log)
    verify.check(graph, "rolled")
    got = GraphModule({}, graph)(*inputs)
    for x, y in zip(*((r if isinstance(r, list | tuple) else [r]) for r in (got, expected)), strict=True):
        assert (x.dtype, x.stride()) == (y.dtype, y.stride())
        loose = x.dtype in (torch.bfloat16, torch.float16)  # states are carried in fp32
        torch.testing.assert_close(x, y, equal_nan=True, rtol=0.05 if loose else None, atol=0.1 if loose else None)
    return log.hits[ID], [READER.name(n) for n in graph.nodes if n.op == "call_function"]


def loop_of(step: Callable[..., Tensor], x: Tensor, *given: Tensor, first: Tensor | None = None) -> list[Tensor]:
    """The states of a loop along dim 0 of the given tensors."""
    h, hs = torch.zeros_like(x[0]) if first is None else first, []
    for t in range(len(x)):
        h = step(h, x[t], *(g[t] for g in given))
        hs.append(h)
    return hs


A, B, C, H = torch.rand(STEPS, 5, 4), torch.randn(STEPS, 5, 4), torch.randn(STEPS, 4, 3), torch.randn(5, 4)


def _begun_with_b(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    h = b[0]
    hs = [h]
    for t in range(1, len(a)):
        h = a[t] * h + b[t]
        hs.append(h)
    return torch.stack(hs)


def _backwards(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    hs = []
    for t in reversed(range(len(a))):
        h = a[t] * h + b[t]
        hs.append(h)
    return torch.stack(hs[::-1], 1)


def _layers(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    """The second recurrence reads the states of the first."""
    return torch.stack(loop_of(lambda h, x, y: y * h + x, torch.stack(loop_of(lambda h, x, y: x * h + y, a, b)), a))


def _interleaved(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    g, gs = h, []
    for t in range(len(a)):
        h = a[t] * h + b[t]
        g = a[t] * g + h * 2
        gs.append(g)
    return torch.stack(gs)


def _with_products(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    read = []
    for t in range(len(a)):
        product = a[t] * h
        h = product + b[t]
        read.append(product.relu() + h)
    return torch.stack(read)


LOOPS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Any]] = {
    "states": lambda a, b, c, h: torch.stack(loop_of(lambda h, x, y: x * h + y, a, b)),
    "from a state": lambda a, b, c, h: torch.stack(loop_of(lambda h, x, y: y + h * x, a, b, first=h), 1),
    "from a row": lambda a, b, c, h: torch.stack(loop_of(lambda h, x, y: x * h + y, a, b, first=h[0]), 2),
    "from the first summand": _begun_with_b,
    "addcmul": lambda a, b, c, h: torch.stack(loop_of(lambda h, x, y: torch.addcmul(y, h, x), a, b)),
    "the last state": lambda a, b, c, h: loop_of(lambda h, x, y: x * h + y, a, b, first=h)[-1],
    "and the last state": lambda a, b, c, h: (lambda hs: (torch.stack(hs, 1), hs[-1]))(loop_of(lambda h, x, y: x * h + y, a, b)),
    "a view of the last": lambda a, b, c, h: (lambda hs: (torch.stack(hs), hs[-1].t()))(loop_of(lambda h, x, y: x * h + y, a, b)),
    "the first state too": lambda a, b, c, h: torch.stack([h, *loop_of(lambda h, x, y: x * h + y, a, b, first=h)]),
    "states before the steps": lambda a, b, c, h: torch.stack(
        [s.exp() * x for s, x in zip([h, *loop_of(lambda h, x, y: x * h + y, a, b, first=h)], a, strict=False)]
    ),
    "products": lambda a, b, c, h: torch.stack([s @ w for s, w in zip(loop_of(lambda h, x, y: x * h + y, a, b), c, strict=True)]),
    "a number": lambda a, b, c, h: torch.stack(loop_of(lambda h, y: 0.9 * h + y, b)),
    "a moving average": lambda a, b, c, h: torch.stack(loop_of(lambda h, y: 0.9 * h + 0.1 * y, b)),
    "one factor": lambda a, b, c, h: torch.stack(loop_of(lambda h, y: h * h0 + y, b)) if (h0 := h.sigmoid()) is not None else None,
    "a factor per column": lambda a, b, c, h: torch.stack(loop_of(lambda h, x, y: x[0] * h + y, a, b)),
    "one summand": lambda a, b, c, h: torch.stack(loop_of(lambda h, x: x * h + c[0, 0, 0], a)),
    "gates": lambda a, b, c, h: torch.stack(loop_of(lambda h, x, y: (1 - x.sigmoid()) * h + x.sigmoid() * y.tanh(), a, b)),
    "linear": lambda a, b, c, h: torch.stack(loop_of(lambda h, x: (x @ c[0]).sigmoid() * h + x @ c[1], a, first=h[:, :3])),
    "outer products": lambda a, b, c, h: torch.stack(
        loop_of(lambda h, x, y: x[:, :1, None] * h + x[:, :, None] * y[:, None, :], a, b, first=a[0, :, :, None] * b[0, :, None, :])
    ),
    "products that others read": _with_products,
    "backwards": _backwards,
    "layers": _layers,
    "interleaved": _interleaved,
    "transposed": lambda a, b, c, h: torch.stack(loop_of(lambda h, x, y: x.t() * h + y.t(), a, b, first=h.t())),
    "transposed products": lambda a, b, c, h: torch.stack(
        [s.relu().sum(0) for s in loop_of(lambda h, x, y: x.t() * h + y.t(), a, b, first=h.t())]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recurrence_is_a_scan(name: str, dtype: torch.dtype) -> None:
    hits, names = scanned(LOOPS[name], [x.to(dtype) for x in (A, B, C, H)])
    assert hits == names.count("linear_scan") == (2 if name in ("layers", "interleaved") else 1)
    assert len(names) < (6 if name == "products that others read" else 3) * STEPS, names


KEPT: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Any]] = {
    "few steps": lambda a, b, c, h: torch.stack(loop_of(lambda h, x, y: x * h + y, a[:7], b[:7])),
    "a gap": lambda a, b, c, h: torch.stack(loop_of(lambda h, x, y: x * h + y, a, [*b[:5], *b[6:], b[5]])),
    "a scaled sum": lambda a, b, c, h: torch.stack(loop_of(lambda h, x, y: torch.add(y, x * h, alpha=2), a, b)),
    "another order": lambda a, b, c, h: torch.stack(
        loop_of(lambda h, t: a[t] * h + b[t], [3, 0, 1, 2, 5, 4, 7, 6, 9, 8], first=h)  # type: ignore[arg-type]
    ),
    "all states are results, as in training": lambda a, b, c, h: loop_of(lambda h, x, y: x * h + y, a, b),
    "integers": lambda a, b, c, h: torch.stack(loop_of(lambda h, x, y: x * h + y, (a * 3).int(), (b * 3).int())),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_other_loops_stay(name: str) -> None:
    assert scanned(KEPT[name], [A, B, C, H])[0] == 0


def test_a_state_of_another_type_is_converted_exactly() -> None:
    """As Mamba's first state, of the model's type where states are fp32."""
    def loop(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        return torch.stack(loop_of(lambda h, x, y: x * h + y, a, b, first=h))

    assert scanned(loop, [A, B, H.bfloat16()])[0] == 1
    assert scanned(loop, [A.bfloat16(), B, H])[0] == 1
    assert scanned(loop, [A, B.bfloat16(), H])[0] == 1
    assert scanned(loop, [A.bfloat16(), B, H.bfloat16()])[0] == 0, "the first product is rounded to bf16"


def test_nan_inf_and_zero_stay_where_they_are() -> None:
    """Products of the factors overflow, a zero resets a state, and an infinite factor of the first step is not used without one."""
    a, b = torch.full((STEPS, 3), 1e30), torch.zeros(STEPS, 3)
    a[4], b[4], a[6, 1], b[7, 0], b[8, 2] = 0.0, 1e-30, math.inf, math.nan, -math.inf
    a[0] = math.inf
    for name in ("states", "from the first summand"):
        assert scanned(LOOPS[name], [a, b, a, a])[0] == 1


def test_no_elements() -> None:
    """Fills have taken the place of the steps."""
    assert scanned(LOOPS["states"], [torch.rand(STEPS, 0, 4), torch.rand(STEPS, 0, 4), C, H])[0] == 0





@pytest.mark.parametrize("name", LOOPS)
def test_sizes_other_than_the_number_of_steps_may_be_symbols(name: str) -> None:
    inputs = [A, B, C, H]
    graph, log = graph_of(LOOPS[name], inputs, "symbolic"), RuleLog()
    guards = len(compat.shape_env_of(GraphModule({}, graph)).guards)
    recur(graph, log)
    roll(graph, log)
    verify.check(graph, "rolled")
    assert log.hits[ID] == (2 if name in ("layers", "interleaved") else 1)
    assert len(compat.shape_env_of(GraphModule({}, graph)).guards) == guards
    for rows in (5, STEPS, 2):  # as many rows as steps: nothing mistakes one for the other
        again = [torch.rand(STEPS, rows, 4), torch.randn(STEPS, rows, 4), C, torch.randn(rows, 4)]
        got, expected = GraphModule({}, graph)(*again), LOOPS[name](*again)
        for x, y in zip(*((r if isinstance(r, list | tuple) else [r]) for r in (got, expected)), strict=True):
            assert x.stride() == y.stride()
            torch.testing.assert_close(x, y)


def test_what_is_written_before_the_last_step_is_not_read_early() -> None:
    def loop(a: Tensor, b: Tensor) -> Tensor:
        h = torch.zeros_like(a[0])
        for t in range(STEPS):
            if t == 5:
                b.copy_(a)
            h = a[t] * h + b[t]
        return h.relu()

    graph, log = graph_of(loop, [A.clone(), B.clone()]), RuleLog()
    recur(graph, log)
    assert log.hits[ID] == 0


def _mamba(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    h, ys = torch.zeros_like(a[:, :, 0]), []
    for t in range(a.shape[2]):
        h = a[:, :, t] * h + b[:, :, t]
        ys.append((h @ c[:, t].unsqueeze(-1))[:, :, 0])
    return torch.stack(ys, -1), h


@settings(max_examples=8, deadline=None)
@given(
    steps=st.integers(8, 20), sizes=st.tuples(*[st.integers(1, 5)] * 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_compiled_recurrence_is_as_exact_as_eager(
    steps: int, sizes: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    batch, inner, state = sizes
    a, b = torch.rand(batch, inner, steps, state), torch.randn(batch, inner, steps, state)
    inputs = [x.to(dtype) for x in (a, b, torch.randn(batch, steps, state))]
    compiled = torch.compile(_mamba, backend="fusewright", dynamic=False)
    with torch.no_grad(), report.recording() as graphs:
        got, expected, exact = compiled(*inputs), _mamba(*inputs), _mamba(*(x.double() for x in inputs))
    assert graphs[0].rules[ID] == 1
    floor = 4 * torch.finfo(dtype).eps
    for x, y, z in zip(got, expected, exact, strict=True):
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + floor * (1 + z.abs().max())


def test_a_state_that_is_updated_in_place_is_a_recurrence() -> None:
    def loop(a: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        state, seen = h.clone(), []
        for t in range(STEPS):
            state.mul_(a[t]).add_(b[t])
            seen.append(state.sum(-1))
        return torch.stack(seen), state

    torch._dynamo.reset()
    with torch.no_grad(), report.recording() as graphs:
        got = torch.compile(loop, backend="fusewright", dynamic=False)(A, B, H)
    assert graphs[0].rules[ID] == 1
    for x, y in zip(got, loop(A, B, H), strict=True):
        torch.testing.assert_close(x, y)


def test_the_rule_can_be_switched_off() -> None:
    for disabled in ((), (ID,)):
        torch._dynamo.reset()
        compiled = torch.compile(LOOPS["states"], backend="fusewright", dynamic=False, options={"disable_rules": disabled})
        with torch.no_grad(), report.recording() as graphs:
            assert torch.equal(compiled(A, B, C, H), LOOPS["states"](A, B, C, H))
        assert graphs[0].rules[ID] == (0 if disabled else 1)
