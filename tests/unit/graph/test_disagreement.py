"""If the opset table and torch's metadata disagree, eager runs the op and the report lists it as a bug."""

from __future__ import annotations

import pytest

from fusewright.graph import verify
from fusewright.graph.canonicalize import canonicalize
from fusewright.graph.parser import parse
from fusewright.graph.view import GraphIndex
from fusewright.partition.partition import partition
from fusewright.reference import Interp

WRONG = "%0: f32[2,3] = input('x')\n%1: f32[2,3] = exp(%0)\n%2: f32[7] = relu(%1)\n%3: f32[2] = sin(%2)\nreturn [%3]\n"


def test_the_op_is_left_to_eager() -> None:
    graph = parse(WRONG)
    assert canonicalize(graph) == [
        "relu_default: relu result 0 has shape (7,); the table says (2, 3)",
        "sin_default: sin result 0 has shape (2,); the table says (7,)",
    ]
    verify.check(graph, "canonicalize")
    found = partition(Interp(), GraphIndex(graph, frozenset(), "infer"), {})
    assert [[op.op for op in r.ops] for r in found.regions] == [["exp"]]
    assert sum("the opset does not describe it" in str(v) for v in found.verdicts.values()) == 2


def test_a_later_stage_that_breaks_a_graph_is_an_error() -> None:
    with pytest.raises(verify.VerifyError, match=r"after simplify:\n  relu_default: relu result 0 has shape \(7,\)"):
        verify.check(parse(WRONG), "simplify")


def test_a_use_before_its_definition_is_found() -> None:
    graph = parse("%0: f32[2] = input('x')\n%1: f32[2] = exp(%0)\n%2: f32[2] = relu(%1)\nreturn [%2]\n")
    _, exp, relu, _ = graph.nodes
    relu.append(exp)
    assert list(verify.find_problems(graph)) == ["relu_default uses exp_default before it is defined"]
