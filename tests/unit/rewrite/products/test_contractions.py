"""Sums of broadcast products become matrix products, where those are faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functionalize
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright import machine
from fusewright.accuracy import compare
from fusewright.graph import verify
from fusewright.graph.canonicalize import canonicalize
from fusewright.interface import RuleLog
from fusewright.report import recording
from fusewright.rewrite.contractions import ID, contract
from fusewright.rewrite.engine import READER

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Fn = Callable[..., Tensor]
PRODUCTS = ("mm", "bmm")


def _graph(fn: Fn, *given: Tensor, fits: bool = True) -> tuple[Graph, RuleLog]:
    graph = make_fx(functionalize(fn), tracing_mode="fake")(*given).graph
    canonicalize(graph)
    log = RuleLog()
    contract(graph, lambda *sizes: fits, log)
    verify.check(graph, "contractions")
    return graph, log


def _names(graph: Graph) -> list[str]:
    return [READER.name(n) for n in graph.nodes if n.op == "call_function"]


def _agrees(fn: Fn, *given: Tensor) -> list[str]:
    """Check the rewritten graph against eager; return its rows."""
    graph, log = _graph(fn, *given)
    ours, eager = GraphModule(torch.nn.Module(), graph)(*given), fn(*given)
    assert ours.stride() == eager.stride()
    assert compare([fn(*(x.double() for x in given))], [eager], [ours], "fp32" if eager.dtype is torch.float32 else "bf16").passed
    assert log.hits[ID] == sum(name in PRODUCTS for name in _names(graph))
    return _names(graph)


A, B = torch.randn(3, 5, 7), torch.randn(3, 4, 7)

CONTRACTIONS: dict[str, tuple[Fn, tuple[Tensor, ...], str]] = {
    "batched": (lambda a, b: (a[:, :, None] * b[:, None]).sum(-1), (A, B), "bmm"),
    "turned": (lambda a, b: (b[:, None] * a[:, :, None]).sum(-1), (A, B), "bmm"),
    "a dim that stays": (lambda a, b: (a[:, :, None] * b[:, None]).sum(-1, keepdim=True), (A, B), "bmm"),
    "no batch": (lambda a, b: (a[:, :, None] * b).sum(1), (A[0], torch.randn(7, 6)), "mm"),
    "two summed dims": (lambda a, b: (a[:, None] * b).sum((-1, -2)), (A, torch.randn(4, 5, 7)), "mm"),
    "all but one batch": (lambda a, b: (a[:, :, None] * b).sum((0, 1)), (A, torch.randn(3, 5, 4, 1)), "mm"),
    "expanded": (lambda a, b: (a[:, :, None].expand(3, 5, 4, 7) * b[:, None].expand(3, 5, 4, 7)).sum(-1), (A, B), "bmm"),
    "bfloat16": (lambda a, b: (a[:, :, None] * b[:, None]).sum(-1), (A.bfloat16(), B.bfloat16()), "bmm"),
    "a weight for each term": (lambda a, b, w: (a[:, :, None] * b[:, None] * w).sum(-1), (A, B, torch.randn(7)), "bmm"),
    "halves beside another type": (
        lambda a, b, w: (a[:, :, None] * b[:, None] * w).sum(-1), (A.bfloat16(), B, torch.randn(7).bfloat16()), "bmm",
    ),
    "a number with more digits": (
        lambda a, b, w: (a[:, :, None] * b[:, None] * w).sum(-1), (A.bfloat16(), B.bfloat16(), torch.tensor(1 / 3)), "bmm",
    ),
    "a mask of scores": (
        lambda s, m, v: (s[..., None] * m[..., None] * v[:, None]).sum(2),
        (torch.randn(2, 5, 6), torch.randn(5, 6), torch.randn(2, 6, 3)), "bmm",
    ),
    "heads between": (
        lambda c, b: (c[:, :, None] * b[:, None]).sum(-1), (torch.randn(2, 5, 3, 7), torch.randn(2, 6, 3, 7)), "bmm",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "operands", "row"), CONTRACTIONS.values(), ids=CONTRACTIONS)
def test_a_sum_of_broadcast_products_is_a_matrix_product(fn: Fn, operands: tuple[Tensor, ...], row: str) -> None:
    names = _agrees(fn, *operands)
    assert row in names and "sum" not in names


OTHERS: dict[str, tuple[Fn, tuple[Tensor, ...]]] = {
    "nothing broadcasts": (lambda a, b: (a * b).sum(-1), (A, A)),
    "a vector": (lambda a, b: (a * b).sum(-1), (A, torch.randn(7))),
    "a sum of one operand alone": (lambda a, b: (a[:, :, None] * b).sum(-1), (A, torch.randn(4, 1))),
    "a product that is read elsewhere": (lambda a, b: (p := a[:, :, None] * b[:, None]).sum(-1) + p.amax(-1), (A, B)),
    "integers": (lambda a, b: (a[:, :, None] * b[:, None]).sum(-1), (A.long(), B.long())),
    "a sum in another type": (lambda a, b: (a[:, :, None] * b[:, None]).sum(-1, dtype=torch.float64), (A, B)),
    "a dim that is expanded": (
        lambda a, b: (a[:, :, None, None].expand(3, 5, 1, 6, 7) * b[:, None, :, None]).sum(-1), (A, B),
    ),
    "a factor of all dims": (lambda a, b, c: (a[:, :, None] * b[:, None] * c).sum(-1), (A, B, torch.randn(3, 5, 4, 7))),
    "a long sum": (lambda a, b: (a[:, None] * b).sum(-1), (torch.randn(4, 2048), torch.randn(3, 2048))),
}


@pytest.mark.parametrize(("fn", "operands"), OTHERS.values(), ids=OTHERS)
def test_other_sums_stay(fn: Fn, operands: tuple[Tensor, ...]) -> None:
    graph, log = _graph(fn, *operands)
    assert not log.hits[ID] and not {*PRODUCTS} & {*_names(graph)}


def test_a_product_of_lower_precision_replaces_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "matmul_precision", lambda device: "tf32")
    fn = CONTRACTIONS["batched"][0]
    assert not _graph(fn, A, B)[1].hits[ID]
    assert _graph(fn, A.double(), B.double())[1].hits[ID]


def test_a_device_decides() -> None:
    asked: list[tuple[object, ...]] = []
    graph = make_fx(CONTRACTIONS["heads between"][0])(torch.randn(2, 5, 3, 7), torch.randn(2, 6, 3, 7)).graph
    canonicalize(graph)
    contract(graph, lambda *sizes: bool(asked.append(sizes)), RuleLog())
    assert asked == [(torch.float32, 6, 5, 7, 6)]
    assert "sum" in _names(graph)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_broadcast_product(data: st.DataObject) -> None:
    """Operands vary in any of four dims, in any order of memory; a few dims are summed."""
    sizes = [data.draw(st.integers(1, 5)) for _ in range(4)]

    def operand() -> Tensor:
        shape = [n if data.draw(st.booleans()) else 1 for n in sizes]
        order = data.draw(st.permutations(range(4)))
        return torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(4)])

    operands = [operand() for _ in range(data.draw(st.integers(2, 3)))]
    dims = data.draw(st.sets(st.integers(0, 3), min_size=1))
    keepdim = data.draw(st.booleans())

    def summed(*given: Tensor) -> Tensor:
        product = given[0]
        for x in given[1:]:
            product = product * x
        return product.sum(tuple(dims), keepdim=keepdim)

    _agrees(summed, *operands)


@pytest.mark.hardware("x86_onednn")
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_are_products_too(dynamic: bool) -> None:
    def scores(c: Tensor, b: Tensor) -> Tensor:
        return (c[:, :, None] * b[:, None]).sum(-1)

    options = {"cache": False, "never_slower": False, "strict": True}
    compiled, hits = torch.compile(scores, backend="x86_onednn", dynamic=dynamic, options=options), 0
    for length in (128, 144):
        given = [torch.randn(2, length, 4, 64, requires_grad=True) for _ in range(2)]
        wide = [x.detach().double().requires_grad_() for x in given]
        grad = torch.randn(2, length, length, 4)
        with recording() as reports:
            found = torch.autograd.grad(compiled(*given), given, grad)
        wanted = torch.autograd.grad(scores(*given), given, grad)
        assert compare(torch.autograd.grad(scores(*wide), wide, grad.double()), wanted, found, "fp32").passed
        assert [x.stride() for x in found] == [x.stride() for x in wanted]
        hits += sum(r.rules.get(ID, 0) for r in reports)
    assert hits == (3 if dynamic else 6)
