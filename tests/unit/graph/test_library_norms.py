"""Batch norms of libraries, which the direct capture of fp32 on GPUs records, and calls that write statistics unsaid."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from fusewright import ops
from fusewright.graph.canonicalize import canonicalize
from tests.compare import differences

aten = torch.ops.aten
LIBRARIES = (aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default)


def graph_of(target: Any, training: bool, statistics: bool, read: int = 0) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    with FakeTensorMode():
        x, w = torch.empty(2, 8, 5, 5), torch.empty(8)
        inputs = [graph.placeholder(n) for n in "xwbmv"]
        for node, val in zip(inputs, (x, w, w.clone(), w.clone(), w.clone()), strict=True):
            node.meta["val"] = val
        call = graph.call_function(
            target, (*inputs[:3], *(inputs[3:] if statistics else (None, None)), training, 0.1, 1e-5)
        )
        saved = w if training else w.new_empty(0)
        call.meta["val"] = (x, saved, saved, torch.empty(0, dtype=torch.uint8))[: len(target._schema.returns)]
        results = [graph.call_function(operator.getitem, (call, k)) for k in range(len(call.meta["val"]))]  # as a recorder does
        for result, val in zip(results, call.meta["val"], strict=True):
            result.meta["val"] = val
    graph.output((results[read],))
    return graph


@pytest.mark.parametrize("target", LIBRARIES)
@pytest.mark.parametrize(("training", "row"), [(False, "batch_norm"), (True, "batch_norm_no_stats")])
def test_it_becomes_the_row(target: Any, training: bool, row: str) -> None:
    graph = graph_of(target, training, statistics=not training)
    assert canonicalize(graph) == []
    assert [found.name for n in graph.nodes if n.op == "call_function" and (found := ops.find(n.target))] == [row]


def test_what_only_the_library_returns_keeps_its_call() -> None:
    graph = graph_of(aten.cudnn_batch_norm.default, training=True, statistics=False, read=3)
    canonicalize(graph)
    assert any(n.target is aten.cudnn_batch_norm.default for n in graph.nodes)


@pytest.mark.parametrize("target", LIBRARIES)
def test_one_that_writes_statistics_keeps_its_call(target: Any) -> None:
    graph = graph_of(target, training=True, statistics=True)
    canonicalize(graph)
    assert any(n.target is target for n in graph.nodes)


@pytest.mark.usefixtures("fresh_dynamo")
def test_running_statistics_are_updated_once_a_call() -> None:
    """Comparisons with eager run a call twice, and undo what it is known to write."""

    def normed(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, training=True).relu() + mean.sum()

    x = torch.randn(4, 8, 5, 5)
    ours, eager = (torch.zeros(8), torch.ones(8)), (torch.zeros(8), torch.ones(8))
    compiled = torch.compile(normed, backend="x86_onednn")
    with torch.no_grad():
        for _ in range(12):
            assert differences((normed(x, *eager), *eager), (compiled(x, *ours), *ours), exact=False) == []
