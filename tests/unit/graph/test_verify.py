"""The specification of graphs: traced graphs obey it, and each deliberate violation is found by its rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.forms.spec import Pass, in_place
from fusewright.graph.canonicalize import canonicalize
from fusewright.graph.parser import parse
from fusewright.graph.verify import GRAPH, RULES, VerifyError, check
from tests.unit.rewrite.test_property import _inputs, _program, dtypes, programs

TEXT = """\
%0: f32[2,3] = input('x')
%1: f32[2,3] = exp(%0)
%2: (f32[2], i64[2]) = max_with_indices(%1, -1, False)
%3: f32[2] = py.getitem(%2, 0)
%4: f32[2] = sin(%3)
%5: f32[2] = add(%4, %3, alpha=1)
return [%5, %1]
"""


def graph() -> Graph:
    return parse(TEXT)


class Nodes(NamedTuple):
    exp: Node
    top: Node
    first: Node
    sin: Node
    add: Node
    out: Node


def spoiled(change: Callable[[Nodes], None]) -> Graph:
    g = graph()
    change(Nodes(*list(g.nodes)[1:]))
    return g


def traced(node: Node, *shape: int, dtype: torch.dtype = torch.float32) -> None:
    node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")


def returned_early(n: Nodes) -> None:
    n.exp.append(n.out)


def returned_twice(n: Nodes) -> None:
    with n.out.graph.inserting_after(n.exp):
        n.out.graph.create_node("output", "output", (n.exp,))


def called_as_a_method(n: Nodes) -> None:
    n.sin.op, n.sin.target = "call_method", "sin"


def used_too_early(n: Nodes) -> None:
    n.add.append(n.sin)


def of_another_graph(n: Nodes) -> None:
    n.sin.args = (list(graph().nodes)[3],)


def user_forgotten(n: Nodes) -> None:
    del n.sin.users[n.add]


def user_of_nothing(n: Nodes) -> None:
    n.exp.users[n.sin] = None


def third_of_two(n: Nodes) -> None:
    n.first.args = (n.top, 2)


def traced_by_nobody(n: Nodes) -> None:
    del n.add.meta["val"]


def argument_too_many(n: Nodes) -> None:
    n.sin.args = (n.first, n.first)


def argument_of_no_name(n: Nodes) -> None:
    n.sin.kwargs = {"flavour": 1}


def another_dtype(n: Nodes) -> None:
    traced(n.sin, 2, dtype=torch.float64)


def another_shape(n: Nodes) -> None:
    traced(n.sin, 3)


def another_rank(n: Nodes) -> None:
    traced(n.exp, 6)


def another_operand(n: Nodes) -> None:
    n.sin.args = (n.exp,)


def another_operator(n: Nodes) -> None:
    n.sin.target = torch.ops.aten.isnan.default


MUTATIONS: dict[Callable[[Nodes], None], str] = {
    **dict.fromkeys((returned_early, returned_twice, called_as_a_method), "frame"),
    **dict.fromkeys((used_too_early, of_another_graph), "order"),
    **dict.fromkeys((user_forgotten, user_of_nothing), "users"),
    third_of_two: "projections",
    traced_by_nobody: "metadata",
    **dict.fromkeys((argument_too_many, argument_of_no_name), "arguments"),
    **dict.fromkeys((another_dtype, another_operator), "dtypes"),
    **dict.fromkeys((another_shape, another_rank, another_operand), "shapes"),
}
"""Changes -> the id of the rule that forbids them."""


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_change_by_hand_is_found_by_the_rule_that_forbids_it(mutate: Callable[[Nodes], None]) -> None:
    rule = MUTATIONS[mutate]
    assert rule in {v.rule for v in GRAPH.violations(spoiled(mutate))}
    with pytest.raises(VerifyError, match=rf"the graph is not valid after a change:(.|\n)*\[rule {rule}\]"):
        check(spoiled(mutate), "a change")


def test_every_rule_has_a_change_that_it_finds() -> None:
    assert set(MUTATIONS.values()) == {r.id for r in RULES}


def test_a_graph_as_it_is_traced_is_valid() -> None:
    assert not list(GRAPH.violations(graph()))


@given(programs, st.lists(st.integers(0, 20), min_size=1, max_size=3), dtypes)
def test_random_graphs_are_valid(steps: list[tuple[str, int, int]], outputs: list[int], dtype: torch.dtype) -> None:
    g = make_fx(_program(steps, outputs), tracing_mode="fake")(*_inputs(dtype)).graph
    canonicalize(g)
    assert not list(GRAPH.violations(g))


def test_only_a_pass_that_changes_a_graph_has_it_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[str] = []
    monkeypatch.setattr(type(GRAPH), "check", lambda spec, form, after: verified.append(after))
    g = graph()
    n = Nodes(*list(g.nodes)[1:])
    Pass("reading", "graph", GRAPH, lambda g: [n.all_input_nodes for n in g.nodes], in_place)(g)
    assert verified == []
    changes: dict[str, Callable[[Graph], object]] = {
        "target": lambda g: setattr(n.sin, "target", torch.ops.aten.cos.default),
        "arguments": lambda g: setattr(n.sin, "args", (n.exp,)),
        "metadata": lambda g: traced(n.sin, 2, 3),
        "order": lambda g: n.exp.append(n.sin),
    }
    for name, change in changes.items():
        Pass(name, "graph", GRAPH, change, in_place)(g)
    assert verified == list(changes)
