"""Calls whose results lie in tuples of tuples return one flat tuple, as the rest of the pipeline expects."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.nn.attention.flex_attention import flex_attention

from fusewright.graph.canonicalize import canonicalize

Nested = tuple[Tensor, tuple[Tensor, tuple[Tensor | None, Tensor]], Tensor]


def powers(x: Tensor) -> Nested:
    return x, (x**2, (None, x**3)), x**4


def selecting(*path: int) -> GraphModule:
    """A graph of one nested call that returns the element under `path` and the last one."""
    graph, x = Graph(), torch.tensor(2.0)
    call = graph.call_function(powers, (graph.placeholder("x"),))
    call.meta["val"] = value = powers(x)
    last = graph.call_function(operator.getitem, (call, -1))
    found: Any = (call, value)
    for k in path:
        node = graph.call_function(operator.getitem, (found[0], k))
        node.meta["val"] = found[1][k]
        found = (node, found[1][k])
    graph.output((found[0], last))
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(("path", "wanted"), [((0,), 2.0), ((1, 0), 4.0), ((1, -1, 1), 8.0), ((-1,), 16.0)])
def test_a_result_is_selected_by_one_getitem(path: tuple[int, ...], wanted: float) -> None:
    traced = selecting(*path)
    canonicalize(traced.graph)
    traced.graph.lint()
    traced.recompile()
    assert [float(v) for v in traced(torch.tensor(2.0))] == [wanted, 16.0]
    call = next(n for n in traced.graph.nodes if n.name == "powers")
    assert len(call.meta["val"]) == 5 and all(u.args[0] is call for u in call.users)


def test_a_tuple_that_is_read_whole_stays() -> None:
    traced = selecting(1)
    canonicalize(traced.graph)
    assert next(n for n in traced.graph.nodes if n.name == "powers").target is powers


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_has_gradients_of_what_its_functions_read() -> None:
    x, bias = torch.randn(1, 2, 16, 16), torch.randn(2, 31, requires_grad=True)

    def attend(x: Tensor, bias: Tensor) -> Tensor:
        return flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s + bias[h, i - j + 15])

    def gradient(fn: Any) -> Tensor:
        return torch.autograd.grad(fn(x, bias).square().sum(), bias)[0]

    compiled = torch.compile(attend, backend="fusewright_null", options={"fallback": "allow"})
    torch.testing.assert_close(gradient(compiled), gradient(attend))
