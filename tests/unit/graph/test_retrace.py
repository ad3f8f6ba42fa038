"""Corrected metadata and its consequences."""

from __future__ import annotations

import torch

from fusewright.graph import retrace, verify
from fusewright.graph.canonicalize import canonicalize
from fusewright.graph.parser import parse

GRADIENTS = """
%0: bf16[2,6,12] = input('dy')
%1: bf16[2,6,12] = input('x')
%2: bf16[2,3] = input('mean')
%3: bf16[2,3] = input('rstd')
%4: bf16[6] = input('w')
%5: (bf16[2,6,12], bf16[6], bf16[6]) = group_norm_backward(%0, %1, %2, %3, %4, 2, 6, 12, 3, [True, True, True])
%6: bf16[2,6,12] = py.getitem(%5, 0)
%7: bf16[2,6,12] = exp(%6)
return [%7]
"""


def test_gradients_of_a_norm_have_the_type_of_its_input_whatever_its_statistics_are() -> None:
    """A GPU returns statistics of bf16 in fp32; FakeTensor then says fp32 for the gradients too, unlike eager."""
    graph = parse(GRADIENTS)
    assert canonicalize(graph) == []
    for name in ("mean", "rstd"):
        node = next(n for n in graph.find_nodes(op="placeholder") if n.target == name)
        retrace.mend(graph, node, torch.empty(2, 3))
    verify.check(graph, "a mend")
    assert {retrace.value_of(n).dtype for n in graph.nodes if n.target is torch.ops.aten.exp.default} == {
        torch.bfloat16
    }


RESHAPED = """
%0: f32[2,16,8] = input('x')
%1: f32[32,8] = view(%0, [32, 8])
%2: f32[32,8] = exp(%1)
return [%2]
"""


def test_what_was_traced_as_a_view_of_untrue_strides_is_a_reshape_of_the_true_ones() -> None:
    """`reshape` is traced as a view if metadata allows it: a convolution's gradient was traced as contiguous but is not."""
    graph = parse(RESHAPED)
    assert canonicalize(graph) == []
    (given,) = graph.find_nodes(op="placeholder")
    actual = torch.empty(2, 8, 16).transpose(1, 2)
    retrace.mend(graph, given, actual)
    verify.check(graph, "a mend")
    (made,) = (n for n in graph.nodes if n.target is torch.ops.aten.reshape.default)
    assert retrace.value_of(made).stride() == actual.reshape(32, 8).stride()
