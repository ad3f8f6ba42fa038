"""`full_like` and its kin become fills of a size, and scalars of the host become numbers, where the result is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.graph.fills import host_scalars, number_fills, size_fills

X = torch.randn(3, 4)


@pytest.mark.parametrize(
    "fn",
    [
        torch.zeros_like, torch.ones_like, lambda x: torch.full_like(x, 2, dtype=torch.int64), lambda x: x.new_ones(2),
        lambda x: torch.fill(x, 0.3), torch.ops.aten.zero.default, lambda x: torch.fill(x > 0, 2),
    ],
)  # fmt: skip
def test_nothing_waits_for_the_tensor(fn: object) -> None:
    gm = make_fx(lambda x: x.sum() + fn(x), tracing_mode="fake")(X)  # type: ignore[operator]
    size_fills(gm.graph)
    gm.recompile()
    gm.graph.eliminate_dead_code()
    (x,) = gm.graph.find_nodes(op="placeholder")
    assert [n.target for n in x.users] == [torch.ops.aten.sum.default]
    wanted, got = X.sum() + fn(X), gm(X)  # type: ignore[operator]
    assert torch.equal(got, wanted) and got.dtype == wanted.dtype


def test_strides_that_a_size_does_not_say_stay() -> None:
    gm = make_fx(torch.zeros_like, tracing_mode="fake")(X.t())
    size_fills(gm.graph)
    assert gm.graph.find_nodes(op="call_function", target=torch.ops.aten.zeros_like.default)


def rewritten(fn: Callable[..., Any], *args: torch.Tensor) -> GraphModule:
    gm = make_fx(fn, tracing_mode="fake")(*args)
    host_scalars(gm.graph)
    gm.recompile()
    return gm


def calls(gm: GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def root(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.sqrt(torch.tensor(value, dtype=torch.float64) * 3).to(dtype)


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("of", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_scalar_of_the_host_is_a_number_with_its_own_rounding(name: str, of: torch.dtype, dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> Any:
        return getattr(torch, name)(x, root(64, dtype))

    x = torch.randn(7, 5).to(of)
    gm = rewritten(fn, x)
    assert calls(gm) == [f"aten.{name}.Tensor"]
    (call,) = gm.graph.find_nodes(op="call_function", target=getattr(torch.ops.aten, name).Tensor)
    assert call.args[1] == root(64, dtype).item()
    assert gm(x).dtype == fn(x).dtype and torch.equal(gm(x), fn(x))


@pytest.mark.parametrize(
    ("x", "fn"),
    [
        (torch.arange(6), lambda x: x * root(2, torch.float64)),  # float64; with a number float32
        (torch.arange(6), lambda x: x / root(2, torch.bfloat16)),  # bfloat16; with a number float32
        (torch.arange(6, dtype=torch.int32), lambda x: x + torch.tensor(1 << 40)),  # wraps around
        (torch.tensor(True), lambda x: x + torch.tensor(3, dtype=torch.int32)),
        (torch.tensor(2.0).half(), lambda x: x * root(64, torch.float32)),  # both are 0-dim: float32
        (torch.randn(6), lambda x: root(64, torch.float32) / x),
        (torch.randn(6), lambda x: x * torch.tensor(float("nan"))),
        (torch.rand(6), lambda x: x ** root(4, torch.float32)),
        (torch.arange(1, 7), lambda x: x // torch.tensor(4)),
    ],
)
def test_where_a_number_is_not_the_same_the_scalar_stays_a_tensor(x: torch.Tensor, fn: Callable[..., Any]) -> None:
    gm = rewritten(fn, x)
    last = next(n for n in reversed(gm.graph.nodes) if n.op == "call_function")
    assert len(last.all_input_nodes) == 2
    assert gm(x).dtype == fn(x).dtype and torch.equal(gm(x).nan_to_num(9), fn(x).nan_to_num(9))


def test_scalars_of_the_other_side_are_swapped_only_where_that_is_the_same() -> None:
    x = torch.randn(6).bfloat16()
    for fn in (lambda x: root(64, torch.float32) * x, lambda x: torch.tensor(0.1) + x):
        gm = rewritten(fn, x)
        assert len(calls(gm)) == 1 and torch.equal(gm(x), fn(x))
    gm = rewritten(lambda x: torch.add(torch.tensor(0.1), x, alpha=2), x)
    assert len(calls(gm)) == 2


def test_no_tensor_of_the_host_is_left_in_a_graph_of_another_device() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.where(x > 0, torch.tensor(2).type_as(x), x / root(64, torch.float32).to(x.dtype))
        y = y.masked_fill(x < 0, torch.tensor(-1e4)) + torch.scalar_tensor(0.1) * x
        return torch.where(x > 1, torch.maximum(y, torch.tensor(0.3)), torch.full([], 7.0))

    gm = rewritten(fn, torch.empty(3, 4, dtype=torch.bfloat16, device="meta"))
    assert {n.meta["val"].device.type for n in gm.graph.nodes if n.op != "output"} == {"meta"}
    gm = rewritten(fn, x := torch.randn(3, 4).bfloat16())
    assert torch.equal(gm(x), fn(x))


def test_scalars_that_the_caller_gets_or_the_graph_writes_stay() -> None:
    def fn(x: torch.Tensor) -> Any:
        count = torch.tensor(1.0) + 1
        count.add_(1)
        returned = torch.tensor(5.0) * 2
        return x * count, x * returned, returned

    x = torch.randn(3)
    gm = rewritten(fn, x)
    assert calls(gm).count("aten.mul.Tensor") == 3
    for _ in range(2):
        for got, wanted in zip(gm(x), fn(x), strict=True):
            assert torch.equal(got, wanted)
        gm(x)[2].zero_()


@pytest.mark.parametrize(("numbers", "dtype"), [((2, 0.5), torch.float32), ((2, 1j), torch.complex64), ((2, 3), torch.int64)])
def test_operands_that_all_are_numbers_promote_to_the_default_float(numbers: tuple[Any, Any], dtype: torch.dtype) -> None:
    graph = torch.fx.Graph()
    product = graph.call_function(torch.ops.aten.mul.Tensor, numbers)
    with FakeTensorMode():
        product.meta["val"] = torch.ops.aten.mul.Tensor(*numbers)
    graph.output(product)
    number_fills(graph)
    got = GraphModule({}, graph)()
    assert got.dtype == dtype and got.item() == numbers[0] * numbers[1]
