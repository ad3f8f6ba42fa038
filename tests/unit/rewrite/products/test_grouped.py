"""Grouped products of few rows become products of single rows with gathered matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.graph import verify
from fusewright.graph.canonicalize import canonicalize
from fusewright.interface import RuleLog
from fusewright.rewrite.engine import READER
from fusewright.rewrite.grouped import ID, OPERATOR, gather

grouped_mm = torch.nn.functional.grouped_mm
ROWS, WEIGHT = torch.randn(6, 16).bfloat16(), torch.randn(4, 8, 16).bfloat16()


def _experts(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return grouped_mm(rows, weight.mT, offs=ends)


def _rewritten(*given: Tensor, gathers: bool = True) -> tuple[Graph, RuleLog, list[tuple[int, ...]]]:
    graph, log, asked = make_fx(_experts, tracing_mode="fake")(*given).graph, RuleLog(), list[tuple[int, ...]]()

    def decide(dtype: torch.dtype, *sizes: int) -> bool:
        asked.append(sizes)
        return gathers

    canonicalize(graph)
    gather(graph, decide, log)
    verify.check(graph, "grouped")
    return graph, log, asked


@pytest.mark.parametrize("ends", [(1, 3, 3, 6), (0, 0, 0, 6), (6, 6, 6, 6), (0, 2, 5, 6)], ids=str)
def test_each_row_meets_the_matrix_of_its_group(ends: tuple[int, ...]) -> None:
    given = (ROWS, WEIGHT, torch.tensor(ends, dtype=torch.int32))
    graph, log, asked = _rewritten(*given)
    ours, eager = GraphModule(torch.nn.Module(), graph)(*given), _experts(*given)
    assert (log.hits[ID], asked) == (1, [(6, 4, 16, 8)]) and ours.stride() == eager.stride()
    torch.testing.assert_close(ours, eager)


def test_rows_behind_the_last_group_read_inside_of_the_matrices() -> None:
    given = (ROWS, WEIGHT, torch.tensor([1, 2, 3, 4], dtype=torch.int32))
    graph, _, _ = _rewritten(*given)
    torch.testing.assert_close(GraphModule(torch.nn.Module(), graph)(*given)[:4], _experts(*given)[:4])


def test_a_device_whose_library_is_faster_keeps_the_call() -> None:
    graph, log, _ = _rewritten(ROWS, WEIGHT, torch.tensor([1, 3, 3, 6], dtype=torch.int32), gathers=False)
    assert not log.hits[ID] and OPERATOR in [READER.name(n) for n in graph.nodes if n.op == "call_function"]
    before = str(graph)
    gather(graph, None, log)
    gather(graph, lambda *sizes: True, RuleLog(frozenset({ID})))
    assert str(graph) == before


def test_rows_that_eager_pads_keep_the_call() -> None:
    given = (ROWS, torch.randn(4, 9, 16).bfloat16(), torch.tensor([1, 3, 3, 6], dtype=torch.int32))
    graph, log, asked = _rewritten(*given)
    assert not log.hits[ID] and not asked and _experts(*given).stride() == (16, 1)
    assert GraphModule(torch.nn.Module(), graph)(*given).stride() == (16, 1)
