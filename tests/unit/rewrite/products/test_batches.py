"""Matrices of batched products that lie between each other in memory are copied for the library's one call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.graph import verify
from fusewright.graph.canonicalize import canonicalize
from fusewright.interface import RuleLog
from fusewright.report import recording
from fusewright.rewrite.batches import ID, lay_out
from fusewright.rewrite.engine import READER

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _between(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A batch whose index is the last dim in memory."""
    return torch.randn(*shape[1:], shape[0], dtype=dtype).permute(2, 0, 1)


def _graph(*given: Tensor, fn: object = torch.bmm, wanted: bool = True) -> tuple[Graph, RuleLog]:
    graph = make_fx(functionalize(fn), tracing_mode="fake")(*given).graph  # type: ignore[arg-type]
    canonicalize(graph)
    log = RuleLog()
    lay_out(graph, wanted, log)
    verify.check(graph, "batches")
    return graph, log


def _copies(graph: Graph) -> int:
    return sum(READER.name(n) in ("clone", "stack") for n in graph.nodes)


X, W = _between(9, 4, 16), _between(9, 16, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_both_operands_are_copied(dtype: torch.dtype) -> None:
    x, w = _between(9, 4, 16, dtype=dtype), _between(9, 16, 8, dtype=dtype)
    graph, log = _graph(x, w)
    assert _copies(graph) == 2
    assert log.hits[ID] == 1
    torch.testing.assert_close(GraphModule(torch.nn.Module(), graph)(x, w), torch.bmm(x, w))


def test_a_conjugate_is_resolved_by_its_copy() -> None:
    x, w = _between(9, 4, 16, dtype=torch.complex64), _between(9, 8, 16, dtype=torch.complex64)
    fn = lambda x, w: torch.bmm(x, w.transpose(1, 2).conj())  # noqa: E731
    graph, _ = _graph(x, w, fn=fn)
    (product,) = (n for n in graph.nodes if READER.name(n) == "bmm")
    assert not any(n.meta["val"].is_conj() for n in product.all_input_nodes)
    torch.testing.assert_close(GraphModule(torch.nn.Module(), graph)(x, w), fn(x, w))


def test_copies_lie_as_the_matrices_do() -> None:
    """A copy along memory is cheaper than one across it."""
    graph, _ = _graph(_between(9, 16, 4).transpose(1, 2), W)
    (product,) = (n for n in graph.nodes if READER.name(n) == "bmm")
    assert [n.meta["val"].stride() for n in product.all_input_nodes] == [(64, 1, 4), (128, 8, 1)]


def test_an_operand_of_two_products_is_copied_once() -> None:
    graph, _ = _graph(X, W, fn=lambda x, w: torch.bmm(x, w) + torch.bmm(x, w * 2))
    assert _copies(graph) == 3


def test_an_operand_that_is_written_is_copied_anew() -> None:
    graph = make_fx(lambda x, w: (torch.bmm(x, w), x.add_(1), torch.bmm(x, w)), tracing_mode="fake")(X.clone(), W).graph
    canonicalize(graph)
    lay_out(graph, True, RuleLog())
    assert _copies(graph) == 4


@pytest.mark.parametrize(
    "given",
    [
        (torch.randn(9, 4, 16), torch.randn(9, 8, 16).transpose(1, 2)),  # a library takes them
        (torch.randn(4, 9, 16).transpose(0, 1), torch.randn(9, 16, 8)),  # rows of all matrices one after the other
        (_between(7, 4, 16), _between(7, 16, 8)),  # few
        (_between(9, 3, 16), _between(9, 16, 8)),  # small
        (_between(1, 4, 16).expand(9, 4, 16)[:, :, ::2], _between(9, 8, 16)),  # a copy would hold more
        (_between(9, 4, 16, dtype=torch.bfloat16), _between(9, 16, 8, dtype=torch.bfloat16)),  # oneDNN's
    ],
    ids=["dense", "rows", "few", "small", "one", "bf16"],
)
def test_others_stay(given: tuple[Tensor, Tensor]) -> None:
    assert not _copies(_graph(*given)[0])


def test_nobody_asked() -> None:
    assert not _copies(_graph(X, W, wanted=False)[0])


@pytest.mark.hardware("x86_onednn")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_backend_for_cpus_asks(dynamic: bool) -> None:
    options = {"cache": False, "never_slower": False, "strict": True}
    fn = lambda x, w: torch.einsum("bixy,ioxy->boxy", x, w)  # noqa: E731
    x, w = torch.randn(4, 16, 6, 6), torch.randn(16, 8, 6, 6)
    with torch.no_grad(), recording() as reports:
        made = torch.compile(fn, backend="x86_onednn", dynamic=dynamic, options=options)(x, w)
    torch.testing.assert_close(made, fn(x, w))
    assert made.stride() == fn(x, w).stride()
    assert dynamic or any(r.rules.get(ID) for r in reports)
