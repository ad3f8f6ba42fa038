"""Tensors that loops fill piece by piece: stacks and cats of the pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright import report
from fusewright.graph import verify
from fusewright.graph.canonicalize import canonicalize
from fusewright.graph.cse import merge_common
from fusewright.interface import RuleLog
from fusewright.rewrite.engine import READER
from fusewright.rewrite.loops.filled import ID, fill

STEPS = 9
X = torch.randn(3, STEPS, 4)
Fn = Callable[[Tensor], Tensor]


def _filled(fn: Fn, log: RuleLog | None = None) -> tuple[int, list[str]]:
    """Rewrite what `fn` fills and compare its results; return hits and the names of the rows left."""
    graph, log = make_fx(torch.func.functionalize(fn), tracing_mode="fake")(X).graph, log or RuleLog()
    canonicalize(graph)
    merge_common(graph)
    expected = GraphModule({}, graph)(X)
    fill(graph, log)
    verify.check(graph, "filled")
    got = GraphModule({}, graph)(X)
    assert torch.equal(got, expected) and (got.dtype, got.stride()) == (expected.dtype, expected.stride())
    return log.hits[ID], [READER.name(n) for n in graph.nodes if n.op == "call_function"]


def _loop(write: Callable[[Tensor, int, Tensor], None], out: Callable[[], Tensor] = lambda: torch.zeros(3, STEPS, 4)) -> Fn:
    def fn(x: Tensor) -> Tensor:
        made = out()
        for t in range(STEPS):
            write(made, t, x[:, t].sin())
        return made

    return fn


def _put(out: Tensor, t: int, y: Tensor) -> None:
    out[:, t] = y


def _put_back(out: Tensor, t: int, y: Tensor) -> None:
    out[:, -1 - t] = y


def _put_slice(out: Tensor, t: int, y: Tensor) -> None:
    out[:, 2 * t : 2 * t + 2] = y[:, None]


def _put_row(out: Tensor, t: int, y: Tensor) -> None:
    out[t] = y[0]


_like = torch.zeros_like
"""Keeps the order of a view's dims in memory."""

JOINED: dict[str, tuple[Fn, str]] = {
    "rows": (_loop(_put), "stack"),
    "rows from the last": (_loop(_put_back), "stack"),
    "of the first dim": (_loop(_put_row, lambda: torch.empty(STEPS, 4)), "stack"),
    "broadcast": (_loop(_put_row, lambda: torch.empty(STEPS, 2, 4)), "stack"),
    "of another type": (_loop(_put, lambda: torch.zeros(3, STEPS, 4, dtype=torch.bfloat16)), "stack"),
    "slices": (_loop(_put_slice, lambda: torch.zeros(3, 2 * STEPS, 4)), "cat"),
    "like a transposed view": (_loop(_put, lambda: _like(torch.zeros(STEPS, 3, 4).transpose(0, 1))), "stack"),
    "with the steps innermost": (_loop(_put, lambda: _like(torch.zeros(4, 3, STEPS).permute(1, 2, 0))), "stack"),
    "slices of a permuted one": (_loop(_put_slice, lambda: _like(torch.zeros(4, 2 * STEPS, 3).permute(2, 1, 0))), "cat"),
}


@pytest.mark.parametrize("name", JOINED)
def test_pieces_are_joined(name: str) -> None:
    fn, how = JOINED[name]
    hits, names = _filled(fn)
    assert hits == names.count(how) == 1 and not [n for n in names if "scatter" in n]


def _but(t: int, other: int) -> Callable[[Tensor, int, Tensor], None]:
    return lambda out, k, y: _put(out, other if k == t else k, y)


def _read_between(out: Tensor, t: int, y: Tensor) -> None:
    out[:, t] = y if t < 5 else y + out.sum(1)


KEPT: dict[str, Fn] = {
    "a gap": _loop(_but(4, 3)),
    "a longer tensor": _loop(_put, lambda: torch.zeros(3, STEPS + 1, 4)),
    "a tensor read between the writes": _loop(_read_between),
}


@pytest.mark.parametrize("name", KEPT)
def test_others_stay(name: str) -> None:
    assert _filled(KEPT[name])[0] == 0


def test_the_rule_can_be_switched_off() -> None:
    assert _filled(JOINED["rows"][0], RuleLog(disabled={ID}))[0] == 0


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(STEPS)), doubled=st.none() | st.integers(0, STEPS - 1))
def test_the_last_write_counts(order: list[int], doubled: int | None) -> None:
    def fn(x: Tensor) -> Tensor:
        out = torch.zeros(3, STEPS, 4)
        for t in order:
            out[:, t] = x[:, t].cos()
        if doubled is not None:
            out[:, doubled] = x[:, 0]
        return out

    assert _filled(fn)[0] == (doubled is None)


@pytest.mark.parametrize("dynamic", [False, True])
def test_all_rows_but_the_place_of_a_piece_may_be_symbols(dynamic: bool) -> None:
    """Torch takes a slice of all rows first, `out[:][:, t]`, where their number is a symbol."""
    def loop(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for t in range(x.shape[1]):
            out[:, t] = x[:, t].exp()
        return out

    torch._dynamo.reset()
    compiled = torch.compile(loop, backend="fusewright", dynamic=dynamic)
    with torch.no_grad(), report.recording() as graphs:
        for rows in (3, 5, STEPS):
            x = torch.randn(rows, STEPS, 4)
            torch.testing.assert_close(compiled(x), x.exp())
    assert len(graphs) == (1 if dynamic else 3) and all(g.rules[ID] == 1 for g in graphs)
