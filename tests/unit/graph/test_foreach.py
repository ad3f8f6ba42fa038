"""Calls of optimizers: `_foreach_` calls become one call per tensor, products that are added two calls, with the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright import report
from fusewright.graph import foreach

List = list[Tensor]

CALLS: dict[str, Callable[[List, List, List], List]] = {
    "scalar": lambda x, y, z: torch._foreach_add(x, 2.5),
    "list with alpha": lambda x, y, z: torch._foreach_sub(x, y, alpha=3),
    "scalars": lambda x, y, z: torch._foreach_mul(x, [2.0, 3.0]),
    "tensor": lambda x, y, z: torch._foreach_div(x, torch.tensor(4.0)),
    "unary": lambda x, y, z: torch._foreach_sqrt(y),
    "addcmul": lambda x, y, z: torch._foreach_addcmul(x, y, z, 0.5),
    "addcdiv of scalars": lambda x, y, z: torch._foreach_addcdiv(x, y, z, [0.5, 2.0]),
    "power of a number": lambda x, y, z: torch._foreach_pow(0.9, y),
    "power": lambda x, y, z: torch._foreach_pow(y, 3),
    "lerp": lambda x, y, z: torch._foreach_lerp(x, y, 0.25),
    "maximum": lambda x, y, z: torch._foreach_maximum(x, y),
}


def given() -> tuple[List, List, List]:
    g = torch.Generator().manual_seed(0)
    x, y, z = ([torch.rand(s, generator=g) + 0.5 for s in ((3, 4), (5,))] for _ in range(3))
    return x, y, z


def foreach_calls(graph: torch.fx.Graph) -> list[Any]:
    return [n.target for n in graph.nodes if "_foreach_" in str(n.target)]


@pytest.mark.parametrize("name", CALLS)
def test_each_tensor_has_its_own_call(name: str) -> None:
    traced = make_fx(CALLS[name])(*given())
    assert len(foreach_calls(traced.graph)) == 1
    foreach.single(traced.graph)
    traced.recompile()
    assert not foreach_calls(traced.graph)
    for got, expected in zip(traced(*given()), CALLS[name](*given()), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_other_calls_stay() -> None:
    """Norms are not calls on single tensors, and a list returned as a list has no elements to replace."""
    traced = make_fx(lambda x, y, z: torch._foreach_norm(x))(*given())
    foreach.single(traced.graph)
    assert len(foreach_calls(traced.graph)) == 1
    graph = torch.fx.Graph()
    whole = graph.call_function(torch.ops.aten._foreach_neg.default, ([graph.placeholder("x")],))
    graph.output(whole)
    foreach.single(graph)
    assert len(foreach_calls(graph)) == 1


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "addcmul": lambda x, y, z: x.addcmul_(y, z, value=0.3),
    "addcdiv": lambda x, y, z: x.addcdiv_(y, z, value=-0.3),
    "addcmul by a number that is a tensor": lambda x, y, z: x.add_(y, alpha=z[0, 0]),
    "of two types": lambda x, y, z: x.addcmul_(y.bfloat16(), z, value=2),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_are_added_are_two_calls(name: str, dtype: torch.dtype, fresh_dynamo: None) -> None:
    def given() -> list[torch.Tensor]:
        return [torch.linspace(0.5, 2, 12).view(3, 4).mul(k).to(dtype) for k in (1, 2, 3)]

    x, y = given(), given()
    with report.recording() as reports:
        torch.compile(WRITES[name], backend="fusewright_null")(*x)
    torch.compile(WRITES[name], backend="aot_eager")(*y)
    assert reports and not [r.op for r in reports[0].ops if r.op.startswith("prims")]
    assert torch.equal(x[0], y[0])
