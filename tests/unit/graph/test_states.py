"""States of random numbers that torch's checkpoints give to operators: they go where nothing is drawn."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.graph.canonicalize import canonicalize

aten = torch.ops.aten


@pytest.mark.parametrize("dropout", (0.0, 0.1))
def test_only_attention_with_dropout_keeps_its_state(dropout: float) -> None:
    def attended(q: Tensor, state: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention.default(q, q, q, dropout, True)[0] + state

    with torch.device("meta"):
        traced = make_fx(attended)(torch.empty(1, 2, 8, 16, dtype=torch.bfloat16), torch.empty(()))
    graph = traced.graph
    (call,) = graph.find_nodes(op="call_function", target=aten._scaled_dot_product_flash_attention.default)
    state = graph.find_nodes(op="placeholder")[1]
    wrapper = torch._prims.rng_prims.graphsafe_run_with_rng_state
    call.target, call.args, call.kwargs = wrapper, (call.target, *call.args), {"rng_state": state}

    canonicalize(graph)
    targets = [n.target for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert (wrapper in targets) == (dropout > 0)
    assert (aten._scaled_dot_product_flash_attention.default in targets) == (dropout == 0)
    graph.lint()
