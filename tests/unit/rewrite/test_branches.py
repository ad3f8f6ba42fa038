"""Convolutions of one input that are added up, as RepVGG trains them, are one convolution in inference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, functionalize
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.accuracy import compare
from fusewright.graph import verify
from fusewright.graph.canonicalize import canonicalize
from fusewright.interface import RuleLog
from fusewright.rewrite.branches import ID, merge
from fusewright.rewrite.engine import READER

C = 8
FP32 = frozenset({torch.float32})


def _conv(kernel: int | tuple[int, int], bias: bool = False, **given: Any) -> nn.Module:
    return nn.Conv2d(C, C, kernel, bias=bias, **given)


def _normed(*layers: nn.Module, dims: int = 2) -> nn.Module:
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](C)
    for p in (norm.weight, norm.running_mean, norm.bias):
        nn.init.normal_(p, 0.3, 0.5)
    nn.init.uniform_(norm.running_var, 0.3, 2)
    return nn.Sequential(*layers, norm)


class Sum(nn.Module):
    """The sum of branches of one input."""

    def __init__(self, *branches: nn.Module, add: Callable[[list[Tensor]], Tensor] = lambda made: sum(made)) -> None:  # type: ignore[assignment, return-value]
        super().__init__()
        self.branches, self.add = nn.ModuleList(branches), add

    def forward(self, x: Tensor) -> Tensor:
        return self.add([b(x) for b in self.branches])


def _traced(model: nn.Module, x: Tensor) -> tuple[Graph, dict[str, Tensor]]:
    """Return the canonical graph of a model, its weights before its input, and the weights."""
    weights = dict(model.eval().named_parameters()) | dict(model.named_buffers())
    weights = {k: v.detach() for k, v in weights.items() if v.dim()}

    def call(*given: Tensor) -> Tensor:
        return functional_call(model, dict(zip(weights, given, strict=False)), (given[-1],))

    graph = make_fx(functionalize(call), tracing_mode="fake")(*weights.values(), x).graph
    canonicalize(graph)
    return graph, weights


def _count(graph: Graph, name: str) -> int:
    return sum(READER.name(n) == name for n in graph.nodes if n.op == "call_function")


def _merged(model: nn.Module, x: Tensor, dtypes: frozenset[torch.dtype] = FP32, constant: bool = True) -> tuple[int, int, int]:
    """Merge the branches of a model and compare its results; return hits, and what is left of convolutions and batch norms."""
    graph, weights = _traced(model, x)
    expected, log = GraphModule({}, graph)(*weights.values(), x), RuleLog()
    exact, wide = _traced(copy.deepcopy(model).double(), x.double())
    reference = GraphModule({}, exact)(*wide.values(), x.double())
    inputs = graph.find_nodes(op="placeholder")
    merge(graph, frozenset(inputs[:-1] if constant else ()), dtypes, log)
    verify.check(graph, "branches")
    got = GraphModule({}, graph)(*weights.values(), x)
    dtype = "bf16" if x.dtype is torch.bfloat16 else "fp32"
    assert compare([reference], [expected], [got], dtype).passed and got.stride() == expected.stride()
    return log.hits[ID], _count(graph, "conv"), _count(graph, "batch_norm")


X = torch.randn(2, C, 9, 9)

ONE: dict[str, Sum] = {
    "RepVGG": Sum(_normed(), _normed(_conv(3, padding=1)), _normed(_conv(1))),
    "stride 2": Sum(_normed(_conv(3, padding=1, stride=2)), _normed(_conv(1, stride=2))),
    "depthwise, the input": Sum(_normed(_conv(7, padding=3, groups=C)), _conv(3, padding=1, groups=C), nn.Identity()),
    "groups and the input": Sum(_conv(3, padding=1, groups=2), nn.Identity()),
    "equal windows from 0 on": Sum(_normed(_conv(1)), _normed(_conv(1, bias=True)), add=lambda made: 0 + made[0] + made[1]),
    "a number in the bias": Sum(_conv(1, bias=True), add=lambda made: made[0] + 3),
    "biases alone": Sum(_conv(3, padding=1, bias=True), _conv(1, bias=True)),
    "dilated": Sum(_conv(3, padding=2, dilation=2), _conv(1), _conv((1, 3), padding=(0, 2), dilation=2)),
    "even windows": Sum(_conv(4, padding=1), _conv(2)),
}


@pytest.mark.parametrize("name", ONE)
def test_branches_of_one_input_become_one_convolution(name: str) -> None:
    assert _merged(ONE[name], X) == (1, 1, 0)


@pytest.mark.parametrize("dims", [1, 3])
def test_so_do_those_of_signals_and_volumes(dims: int) -> None:
    kind = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    model = Sum(_normed(kind(C, C, 3, padding=1), dims=dims), _normed(kind(C, C, 1), dims=dims), nn.Identity())
    assert _merged(model, torch.randn(2, C, *[6] * dims)) == (1, 1, 0)


def test_channels_last_images_stay_so() -> None:
    model = Sum(_normed(_conv(3, padding=1)), _normed(_conv(1)), nn.Identity()).to(memory_format=torch.channels_last)
    assert _merged(model, X.to(memory_format=torch.channels_last)) == (1, 1, 0)


def test_what_else_is_added_stays() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = _normed(_conv(3, padding=1)), _conv(1), _normed(_conv(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + x.sin() + self.b(x) + self.c(x.cos())

    assert _merged(Model(), X) == (1, 2, 1)


def test_a_branch_that_something_else_reads_stays() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = _conv(3, padding=1), _conv(1)

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            return (a + self.b(x)) * a

    assert _merged(Model(), X) == (0, 2, 0)


APART: dict[str, Sum] = {
    "no window covers the other": Sum(_conv((1, 3), padding=(0, 1)), _conv((3, 1), padding=(1, 0))),
    "taps between those of the largest": Sum(_conv(3, padding=2, dilation=2), _conv(3, padding=1)),
    "groups differ": Sum(_conv(3, padding=1), _conv(1, groups=2)),
    "a batch norm alone": Sum(_normed(), nn.Identity()),
}


@pytest.mark.parametrize("name", APART)
def test_others_stay_apart(name: str) -> None:
    hits, convs, _ = _merged(APART[name], X)
    assert (hits, convs) == (0, 0 if name == "a batch norm alone" else 2)


def test_weights_that_may_change_in_each_call_stay_apart() -> None:
    assert _merged(ONE["RepVGG"], X, constant=False) == (0, 2, 3)


def test_only_types_that_the_device_names_are_merged() -> None:
    assert _merged(ONE["RepVGG"].bfloat16(), X.bfloat16()) == (0, 2, 3)


@pytest.mark.usefixtures("fresh_dynamo")
def test_sums_with_sizes_are_no_branches() -> None:
    """A symbolic number is an operand that no tensor is."""
    f = torch.compile(lambda x: x + x.shape[0], backend="x86_onednn", dynamic=True)
    with torch.no_grad():
        for n in (3, 5):
            x = torch.randn(n, 4)
            torch.testing.assert_close(f(x), x + n)


@pytest.mark.usefixtures("fresh_dynamo")
def test_sums_with_complex_numbers_are_no_branches() -> None:
    x = torch.randn(3)
    with torch.no_grad():
        got = torch.compile(lambda x: (x + 2j, 1 - 2j + x.long()), backend="x86_onednn")(x)
        torch.testing.assert_close(got, (x + 2j, 1 - 2j + x.long()))
