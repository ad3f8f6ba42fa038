"""States of random numbers that torch's checkpoints give to operators: they go where nothing is drawn."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright import machine
from fusewright.graph import retrace
from fusewright.graph.canonicalize import canonicalize
from fusewright.graph.effects import draws, drop_dead_code, has_collectives, held_in_order
from fusewright.graph.view import GraphIndex
from fusewright.plan import build
from fusewright.plan.ir import Ref

aten = torch.ops.aten
wrapper = torch._prims.rng_prims.graphsafe_run_with_rng_state


def wrapped(graph: Graph, target: Any, *states: Node) -> list[Node]:
    """Give the calls of an operator these states, as torch's partitioner does: it makes new nodes, without traced values."""
    made = []
    for call, state in zip(graph.find_nodes(op="call_function", target=target), states, strict=True):
        with graph.inserting_after(call):
            made.append(graph.call_function(wrapper, (target, *call.args), {**call.kwargs, "rng_state": state}))
        call.replace_all_uses_with(made[-1])
        graph.erase_node(call)
    return made


@pytest.mark.parametrize("dropout", (0.0, 0.1))
def test_only_attention_with_dropout_keeps_its_state(dropout: float) -> None:
    def attended(q: Tensor, state: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention.default(q, q, q, dropout, True)[0] + state

    with torch.device("meta"):
        traced = make_fx(attended)(torch.empty(1, 2, 8, 16, dtype=torch.bfloat16), torch.empty(()))
    graph = traced.graph
    wrapped(graph, aten._scaled_dot_product_flash_attention.default, graph.find_nodes(op="placeholder")[1])

    canonicalize(graph)
    targets = [n.target for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert (wrapper in targets) == (dropout > 0)
    assert (aten._scaled_dot_product_flash_attention.default in targets) == (dropout == 0)
    graph.lint()


def dropped(*states: int) -> tuple[Graph, list[Node]]:
    """Two dropouts with the states at these positions, and a third one, which draws from the device's own generator."""

    def twice(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y, mask = aten.native_dropout.default(x, 0.5, True)
        z, _ = aten.native_dropout.default(x.neg(), 0.5, True)
        return y + z + aten.bernoulli.p(x, 0.5) + mask

    given = torch.empty(8, device="meta")
    graph = make_fx(twice)(given, torch.empty(()), torch.empty(())).graph
    inputs = graph.find_nodes(op="placeholder")
    return graph, wrapped(graph, aten.native_dropout.default, *(inputs[k] for k in states))


def test_a_call_with_a_state_is_an_instruction_that_draws_from_it() -> None:
    graph, nodes = dropped(1, 2)
    canonicalize(graph)
    assert all(map(draws, nodes)) and not held_in_order(graph), "states are independent"
    plan = build.build(GraphIndex(graph, frozenset(), "forward"), (), ())
    calls = [i for i in plan.instructions if getattr(i, "generator", None) is not None]
    assert [i.generator for i in calls] == [Ref(plan.inputs[1]), Ref(plan.inputs[2])]
    assert {i.target for i in calls} == {"aten::native_dropout.default"} and all(i.packed for i in calls)
    known = [[v in plan.specs and plan.specs[v].dtype for v in i.outs] for i in calls]
    assert known == [[torch.float32, torch.bool]] * 2


def test_calls_with_one_state_keep_their_order() -> None:
    graph, (first, second) = dropped(1, 1)
    assert held_in_order(graph) == {second: first}


def test_an_unread_call_advances_its_state_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward's generators and backward's have to stay in step. Among several processes it is no collective."""
    graph, nodes = dropped(1, 2)
    (output,) = graph.find_nodes(op="output")
    output.args = (graph.find_nodes(op="placeholder")[0],)
    drop_dead_code(graph)
    assert [n for n in graph.nodes if n.op == "call_function" and n.target is wrapper] == nodes
    monkeypatch.setattr(machine, "several_processes", lambda: True)
    assert not has_collectives(graph)


def test_what_was_traced_wrong_in_one_layer_is_wrong_in_those_with_other_states() -> None:
    graph, nodes = dropped(1, 2)
    canonicalize(graph)
    assert retrace.alike(graph, nodes[0]) == nodes


def test_tracing_a_call_without_tensors_draws_nothing() -> None:
    """Otherwise the device's own generator would move on while a backward is compiled."""

    def noise(x: Tensor, state: Tensor) -> Tensor:
        return x + aten.randn.default([8], device="cpu")

    graph = make_fx(noise, tracing_mode="fake")(torch.empty(8), torch.empty(())).graph
    state = graph.find_nodes(op="placeholder")[1]
    (node,) = wrapped(graph, aten.randn.default, state)
    state.meta["val"] = torch.Generator()
    before = torch.get_rng_state()
    canonicalize(graph)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(node.meta["val"], FakeTensor) and node.meta["val"].shape == (8,)
