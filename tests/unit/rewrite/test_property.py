"""Rules and CSE preserve every bit: random small graphs, run before and after, on values that expose wrong algebra."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.graph import verify
from fusewright.graph.canonicalize import canonicalize
from fusewright.graph.cse import merge_common
from fusewright.rewrite.engine import Rewriter
from fusewright.rewrite.rules import RULES

N = 4
Step = Callable[[Tensor, Tensor], Tensor]


def _flip(x: Tensor) -> Tensor:
    return x.permute(*reversed(range(x.dim())))


STEPS: dict[str, Step] = {
    "x * 1": lambda x, y: x * 1,
    "x * True": lambda x, y: x * True,
    "x * 1.0": lambda x, y: x * 1.0,
    "x / 1": lambda x, y: x / 1,
    "x * -0.0": lambda x, y: x * -0.0,
    "x * 0.0": lambda x, y: x * 0.0,
    "x + 0": lambda x, y: x + 0,
    "x + y": lambda x, y: x + y,
    "x - y": lambda x, y: x - y,
    "x @ y.T": lambda x, y: x @ y.t(),
    "x @ y": lambda x, y: x @ y,
    "flat x @ y.T": lambda x, y: (x.reshape(2, 2, N).view(N, N) @ y.t()).view(2, 2, N).reshape(N, N),
    "addmm": lambda x, y: torch.addmm(y[0].contiguous(), x, y.t()),
    "t": lambda x, y: x.t(),
    "t t": lambda x, y: x.t().t(),
    "flip flip": lambda x, y: _flip(_flip(x)),
    "view same": lambda x, y: x.view(N, N),
    "view view": lambda x, y: x.reshape(-1).view(2, 2 * N).view(N, N),
    "expand same": lambda x, y: x.expand(N, N),
    "clone": lambda x, y: x.clone(),
    "copy to": lambda x, y: x.to(x.dtype, copy=True),
    "to f64 and back": lambda x, y: x.to(torch.float64).to(x.dtype),
    "contiguous": lambda x, y: x.t().contiguous(),
    "relu": lambda x, y: x.relu(),
    "neg": lambda x, y: -x,
}

VALUES = torch.tensor(
    [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 3e38, 1e-42, 0.1, -2.0, 7.0, 0.5, -0.25, 2.0, -1.0]
)

programs = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])


def _program(steps: list[tuple[str, int, int]], outputs: list[int]) -> Callable[..., Any]:
    def fn(a: Tensor, b: Tensor) -> Any:
        pool = [a, b]
        for name, i, j in steps:
            x, y = pool[i % len(pool)], pool[j % len(pool)]
            if x.dtype == y.dtype or "y" not in name:
                pool.append(STEPS[name](x, y))
        return [pool[k % len(pool)] for k in outputs]

    return fn


def _inputs(dtype: torch.dtype) -> list[Tensor]:
    values = VALUES.nan_to_num(0, 9, -9).clamp(-99, 99) if dtype == torch.int64 else VALUES
    return [values.view(N, N).to(dtype), values.flip(0).view(N, N).to(dtype)]


def _bits(t: Tensor) -> Any:
    views = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}
    nan = t.isnan()  # the NaN that an op returns is not defined
    return torch.where(nan, torch.zeros_like(t), t).contiguous().view(
        views.get(t.dtype, t.dtype)
    ).tolist(), nan.tolist()


def _run(graph: Graph, inputs: list[Tensor]) -> tuple[list[Any], list[Any]]:
    outputs = GraphModule({}, graph)(*inputs)
    storages = [t.untyped_storage().data_ptr() for t in (*inputs, *outputs)]
    seen = [(t.dtype, tuple(t.shape), t.stride(), _bits(t)) for t in outputs]
    return seen, [storages.index(s) for s in storages]


@given(programs, st.lists(st.integers(0, 20), min_size=1, max_size=3), dtypes)
def test_rules_and_cse_keep_every_bit(
    steps: list[tuple[str, int, int]], outputs: list[int], dtype: torch.dtype
) -> None:
    graph = make_fx(_program(steps, outputs), tracing_mode="fake")(*_inputs(dtype)).graph
    canonicalize(graph)
    before = _run(graph, _inputs(dtype))
    Rewriter(graph).run(RULES)
    merge_common(graph)
    verify.check(graph, "simplify")
    assert _run(graph, _inputs(dtype)) == before
