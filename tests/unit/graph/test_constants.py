"""Which values count as depending only on weights."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node

from fusewright.graph.constants import Constants, find
from fusewright.graph.parser import parse
from fusewright.graph.printer import to_text
from fusewright.interface import Phase
from fusewright.plan.build import build

INPUTS = "%0: f32[4,4] = input('x')\n%1: f32[4,4] = input('w')\n"


def made_of_weights(text: str, phase: Phase = "infer") -> list[str]:
    """Return the names of the constant ops, in order."""
    graph = parse(INPUTS + text)
    const = frozenset(n for n in graph.find_nodes(op="placeholder") if n.target == "w")
    found = find(graph, const, phase).values
    return [str(n.target.overloadpacket.__name__) for n in graph.nodes if n in found and n.op == "call_function"]


CAST = "%2: bf16[4,4] = cast(%1, dtype=torch.bfloat16)\n%3: bf16[4,4] = neg(%2)\n%4: f32[4,4] = mul(%0, %3)\nreturn [%4]\n"


def test_chains_of_ops_on_weights() -> None:
    assert made_of_weights(CAST) == ["_to_copy", "neg"]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_nothing_where_weights_change(phase: Phase) -> None:
    assert made_of_weights(CAST, phase) == []


@pytest.mark.parametrize(
    "text",
    [
        "%2: f32[4,4] = exp(%1)\nreturn [%2]\n",
        "%2: f32[4,4] = exp(%1)\n%3: f32[4,4] = t(%2)\nreturn [%3]\n",
        "%2: f32[4,4] = aten.mul_.Tensor(%1, 2)\nreturn [%0]\n",
        "%2: f32[4,4] = aten.rand_like.default(%1)\n%3: f32[4,4] = mul(%0, %2)\nreturn [%3]\n",
        "%2: f32[1024,1024,4,4] = expand(%1, [1024, 1024, 4, 4])\n%3: f32[1024,1024,4,4] = exp(%2)\n"
        "%4: f32[1024,1024,4,4] = mul(%3, %0)\nreturn [%4]\n",
    ],
    ids=["returned", "a view of it is returned", "written", "random", "large"],
)
def test_not_what_the_caller_sees_nor_what_differs_nor_what_is_large(text: str) -> None:
    assert not {"exp", "mul_", "rand_like"} & set(made_of_weights(text))


MASK = (
    "%2: i64[4] = arange(0, 4, 1)\n%3: i64[4] = add(%2, 1)\n%4: f32[4,4] = add(%0, %3)\n"
    "%5: i64[4] = arange(0, 4, 1)\n%6: f32[4,4] = add(%4, %5)\nreturn [%6]\n"
)


def test_what_is_made_of_creations_alone_is_constant_but_not_a_creation_that_only_others_read() -> None:
    graph = parse(INPUTS + MASK)
    found = find(graph, frozenset(), "infer")
    assert [n.name for n in graph.nodes if n in found.values] == ["arange_start_step", "add_tensor"]
    assert [n.name for n in graph.nodes if n in found.creations] == ["arange_start_step_1"]
    assert find(graph, frozenset(), "forward").creations == frozenset()


def test_the_plan_prepares_what_is_marked_and_nothing_else() -> None:
    graph = parse(INPUTS + CAST)
    weights = frozenset(n for n in graph.find_nodes(op="placeholder") if n.target == "w")
    unmarked = build(Constants(weights).index(graph, "infer"), (), ())
    marked = build(find(graph, weights, "infer").index(graph, "infer"), (), ())
    assert not unmarked.prepare and len(marked.prepare) == 2
    assert len(unmarked.instructions) == 3 and len(marked.instructions) == 1


def test_the_dump_of_the_stage_says_which_values_are_constant() -> None:
    graph = parse(INPUTS + CAST)
    weights = frozenset(n for n in graph.find_nodes(op="placeholder") if n.target == "w")
    lines = to_text(graph, const=find(graph, weights, "infer").values).splitlines()
    assert [line.endswith("# const") for line in lines] == [False, True, True, True, False, False]
    assert to_text(parse("\n".join(lines)), sources=False) == to_text(graph)


def test_a_literal_of_the_program_is_a_constant() -> None:
    """Index tensors filled with literals of the program are computed once (BEiT's index, DeBERTa's buckets)."""
    graph = Graph()
    x, literal, held = graph.placeholder("x"), graph.get_attr("_tensor_constant0"), graph.get_attr("constant0")

    def called(op: object, *args: Node) -> Node:
        return graph.call_function(op, args)  # type: ignore[arg-type]

    made, other = (called(torch.ops.aten.neg.default, n) for n in (literal, held))
    graph.output(tuple(called(torch.ops.aten.add.Tensor, x, n) for n in (made, other)))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(3, device="meta")
    found = find(graph, frozenset(), "infer").values
    assert {literal, made} <= found and not {held, other} & found
