"""Log softmaxes of which a gather reads a few classes are computed for these alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.graph import verify
from fusewright.graph.canonicalize import canonicalize
from fusewright.interface import RuleLog
from fusewright.rewrite.engine import READER
from fusewright.rewrite.picked import ID, pick

X, LABELS = torch.randn(3, 5, 128), torch.randint(0, 128, (3, 5, 1))


def rewritten(f: Callable[..., Tensor], *given: Tensor) -> tuple[Graph, RuleLog]:
    graph, log = make_fx(f, tracing_mode="fake")(*given).graph, RuleLog()
    canonicalize(graph)
    pick(graph, log)
    verify.check(graph, "picked")
    return graph, log


def names(graph: Graph) -> list[str]:
    return [READER.name(n) for n in graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(("dim", "labels"), [(-1, LABELS), (2, torch.randint(0, 128, (3, 5, 2))), (1, LABELS)])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_it_is_what_the_whole_says(dim: int, labels: Tensor, scale: float) -> None:
    def picked(x: Tensor, labels: Tensor) -> Tensor:
        return x.log_softmax(dim).gather(dim, labels)

    x, labels = X * scale, labels.transpose(1, 2) if dim == 1 else labels
    x = x.transpose(1, 2).contiguous() if dim == 1 else x
    graph, log = rewritten(picked, x, labels)
    assert log.hits[ID] == 1 and "log_softmax" not in names(graph)
    ours, eager, exact = GraphModule(torch.nn.Module(), graph)(x, labels), picked(x, labels), picked(x.double(), labels)
    assert ours.stride() == eager.stride()
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + 4 * torch.finfo(x.dtype).eps * exact.abs().max()


def test_classes_without_a_chance_and_rows_that_are_nan() -> None:
    x = X.clone()
    x[0, 0, :64], x[1], x[2, 1, 5] = -torch.inf, -torch.inf, torch.inf

    def picked(x: Tensor, labels: Tensor) -> Tensor:
        return x.log_softmax(-1).gather(-1, labels)

    graph, _ = rewritten(picked, x, LABELS)
    torch.testing.assert_close(GraphModule(torch.nn.Module(), graph)(x, LABELS), picked(x, LABELS), equal_nan=True)


def whole(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    y = x.log_softmax(-1)
    return y.gather(-1, labels), y


def fewer_rows(x: Tensor, labels: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, labels[:2])


def another_dim(x: Tensor, labels: Tensor) -> Tensor:
    return x.log_softmax(1).gather(-1, labels)


def rounded(x: Tensor, labels: Tensor) -> Tensor:
    return x.bfloat16().log_softmax(-1).gather(-1, labels)


def most(x: Tensor, labels: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, labels.expand(3, 5, 9))


@pytest.mark.parametrize("f", [whole, fewer_rows, another_dim, rounded, most])
def test_others_keep_the_call(f: Callable[..., Tensor]) -> None:
    graph, log = rewritten(f, X, LABELS)
    assert not log.hits[ID] and "log_softmax" in names(graph)
