"""`_foreach_` calls become one call per tensor, with the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

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
