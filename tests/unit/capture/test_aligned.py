"""Products of a training step whose rows are of odd length read operands with zeros behind their rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from fusewright.capture.capture import through_aot
from fusewright.graph.spec import value_of
from fusewright.interface import DevicePolicy

aten = torch.ops.aten


def traced(multiple: int = 8) -> tuple[dict[str, GraphModule], Callable[[GraphModule, Any], Any]]:
    """A backend that runs graphs as they are, and the graphs that it was given, by phase."""
    found: dict[str, GraphModule] = {}

    def keep(aten: GraphModule, phase: str, constants: Any, mode: str) -> Any:
        found[phase] = aten
        return lambda args: aten(*args)

    return found, lambda gm, inputs: through_aot(gm, inputs, keep, "test", DevicePolicy(multiple=lambda dtype, m, k, n: multiple))


def products(found: dict[str, GraphModule]) -> list[Node]:
    graphs = [found[phase].graph for phase in ("forward", "backward") if phase in found]
    return [n for g in graphs for t in (aten.mm.default, aten.addmm.default) for n in g.find_nodes(op="call_function", target=t)]


def aligned(node: Node) -> bool:
    """Whether the rows of a product's operands and result, or their columns where these are contiguous, are whole vectors."""
    matrices = [value_of(x) for x in (*node.args[-2:], node)]
    return all(max(t.stride()) % 8 == 0 and t.shape[t.stride().index(1)] % 8 == 0 for t in matrices)


def called(aten: GraphModule) -> list[str]:
    return [str(n.target) for n in aten.graph.nodes if n.op == "call_function"]


class Net(nn.Module):
    """Widths of 5, 9, 16 and 3, a result in between, and a view of the last."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 9), nn.Linear(9, 16, bias=False), nn.Linear(16, 3)
        self.act = act

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.act(self.a(x))
        y = self.c(self.b(h).tanh())
        return h, y, y.transpose(-1, -2)


def step(model: nn.Module, x: torch.Tensor, run: Callable[..., Any]) -> list[torch.Tensor]:
    """Results and gradients."""
    x = x.clone().requires_grad_()
    made = run(x)
    sum((t.double() * torch.arange(t.numel()).view(t.shape).sin()).sum() for t in made).backward()  # type: ignore[attr-defined]
    return [*made, *(p.grad for p in model.parameters()), x.grad]  # type: ignore[misc]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5)])
@pytest.mark.parametrize("act", [torch.relu, torch.sigmoid, torch.nn.functional.gelu])
def test_a_step_of_odd_widths(shape: tuple[int, ...], act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """All products are of aligned rows; results and gradients have eager's values and strides, and views share memory."""
    torch.manual_seed(0)
    found, backend = traced()
    ours, x = Net(act), torch.randn(shape)
    theirs = copy.deepcopy(ours)
    got, eager = step(ours, x, torch.compile(ours, backend=backend)), step(theirs, x, theirs)
    for a, b in zip(got, eager, strict=True):
        assert a.stride() == b.stride() and a.dtype == b.dtype
        torch.testing.assert_close(a, b)
    assert got[1].data_ptr() == got[2].data_ptr()
    assert len(products(found)) == 9 and all(map(aligned, products(found)))


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_gradients_read_is_saved_with_its_zeros() -> None:
    """The hidden rows are saved once, padded, and the gradients of relu, weight and bias read those."""
    found, backend = traced()
    net = nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 16))
    torch.compile(net, backend=backend)(torch.randn(7, 8)).sum().backward()
    saved = [tuple(value_of(n).shape) for n in found["backward"].graph.find_nodes(op="placeholder")]
    assert (7, 16) in saved and (7, 9) not in saved
    assert called(found["backward"]).count("aten.constant_pad_nd.default") == 1, "of the gradient"
    (total,) = (
        n for n in found["backward"].graph.find_nodes(op="call_function", target=aten.sum.dim_IntList) if value_of(n).numel() == 9
    )
    assert value_of(total.args[0]).stride() == (16, 1)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_matrix_is_padded_once_for_all_of_its_products() -> None:
    found, backend = traced()
    x = torch.randn(16, 9, requires_grad=True)
    a, b = (torch.randn(9, 8, requires_grad=True) for _ in range(2))
    torch.compile(lambda x: (x @ a, x @ b), backend=backend)(x)
    pads = found["forward"].graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    assert sorted(tuple(value_of(n).shape) for n in pads) == [(16, 8), (16, 8), (16, 16)]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_transposed_operands(turned: tuple[bool, bool]) -> None:
    found, backend = traced()
    torch.manual_seed(0)
    tensors = [torch.randn(*(s[::-1] if t else s)) for s, t in zip(((11, 9), (9, 7)), turned, strict=True)]

    def product(*given: torch.Tensor) -> tuple[torch.Tensor]:
        a, b = (x.t() if t else x for x, t in zip(given, turned, strict=True))
        return (torch.addmm(torch.ones(7), a, b, beta=2, alpha=0.5),)

    results = []
    for run in (torch.compile(product, backend=backend), product):
        leaves = [t.clone().requires_grad_() for t in tensors]
        (out,) = run(*leaves)
        out.square().sum().backward()
        results.append([out, *(t.grad for t in leaves)])
    for ours, eager in zip(*results, strict=True):
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager)
    assert all(map(aligned, products(found)))


@pytest.mark.usefixtures("fresh_dynamo")
def test_symbolic_numbers_of_rows() -> None:
    torch.manual_seed(0)
    found, backend = traced()
    ours = Net()
    theirs, compiled = copy.deepcopy(ours), torch.compile(ours, backend=backend, dynamic=True)
    for rows in (7, 13):
        x = torch.randn(2, rows, 5)
        for model in (ours, theirs):
            model.zero_grad()
        for a, b in zip(step(ours, x, compiled), step(theirs, x, theirs), strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b)
    pads = sum(called(g).count("aten.constant_pad_nd.default") for g in found.values())
    assert pads and any(isinstance(n, torch.SymInt) for n in value_of(products(found)[0]).shape)


@pytest.mark.usefixtures("fresh_dynamo")
def test_infinities_stay_in_their_rows() -> None:
    found, backend = traced()
    net, x = nn.Linear(5, 3), torch.randn(4, 5)
    x[1, 2], x[2, 0] = torch.inf, torch.nan
    ours, eager = torch.compile(net, backend=backend)(x), net(x)
    torch.testing.assert_close(ours, eager, equal_nan=True)
    assert all(map(aligned, products(found)))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("what", ["wide bias", "any length", "symbolic"])
def test_what_stays_as_it_is(what: str) -> None:
    """A bias that is a matrix, devices that ask for no multiple, rows of unknown length."""
    found, backend = traced(1 if what == "any length" else 8)
    net = nn.Linear(5, 3)
    bias = torch.randn(4, 3, requires_grad=True)
    fn = (lambda x: torch.addmm(bias, x, net.weight.t())) if what == "wide bias" else net
    if what == "symbolic":
        fn = lambda x: x.relu() @ x.t() * bias.sum()  # noqa: E731
    compiled = torch.compile(fn, backend=backend, dynamic=what == "symbolic")
    x = torch.randn(4, 5)
    torch.testing.assert_close(compiled(x), fn(x))
    assert "aten.constant_pad_nd.default" not in called(found["forward"])
