"""Random graphs of pointwise ops, views, reductions, joins and norms: fused kernels against eager."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from fusewright.interface import DevicePolicy, Splits, Value
from tests.fragments import Sketch
from tests.unit.fuse.running import LOADERS, run_sketch

Step = Callable[[Sketch, random.Random, Value], Value]


def _dim(r: random.Random, v: Value) -> int:
    assert v.spec is not None
    return r.randrange(v.spec.rank)


def _partner(g: Sketch, r: random.Random, v: Value) -> Value:
    """Pick or make a value of the same shape, or one that broadcasts to it."""
    assert v.spec is not None
    same = [o.out for o in g.ops if o.out.spec is not None and o.out.spec.shape == v.spec.shape]
    if same and r.random() < 0.7:
        return r.choice(same)
    shape = [int(s) if r.random() < 0.6 else 1 for s in v.spec.shape]  # type: ignore[arg-type]
    return g.input(torch.randn(shape[r.randrange(len(shape) + 1) :]))


def _reshaped(g: Sketch, r: random.Random, v: Value) -> Value:
    assert v.spec is not None
    shape = [int(s) for s in v.spec.shape]  # type: ignore[arg-type]
    if len(shape) > 1 and r.random() < 0.6:
        d = r.randrange(len(shape) - 1)
        shape[d : d + 2] = [shape[d] * shape[d + 1]]
    else:
        d = r.randrange(len(shape))
        factor = next((f for f in (3, 2) if shape[d] % f == 0), 1)
        shape[d : d + 1] = [shape[d] // factor, factor]
    return g.op("reshape", v, shape)


STEPS: tuple[Step, ...] = (
    lambda g, r, v: g.op(r.choice(("tanh", "sigmoid", "gelu", "neg", "abs", "relu")), v),
    lambda g, r, v: g.op(r.choice(("add", "mul", "div", "maximum")), v, _partner(g, r, v)),
    lambda g, r, v: g.op("add", v, _partner(g, r, v)),
    lambda g, r, v: g.op("transpose", v, _dim(r, v), _dim(r, v)),
    _reshaped,
    lambda g, r, v: g.op("softmax", v, _dim(r, v), False),
    lambda g, r, v: g.op(r.choice(("sum", "mean", "amax")), v, [_dim(r, v)], True),
    lambda g, r, v: g.op("mul", v, g.op("mean", v, [_dim(r, v)], True)),
    lambda g, r, v: g.op("layer_norm", v, [v.spec.shape[-1]], None, None, 1e-3),  # type: ignore[union-attr]
    lambda g, r, v: g.op("cat", [v, _same(g, r, v)], _dim(r, v)),
    lambda g, r, v: g.op("flip", v, [_dim(r, v)]),
    lambda g, r, v: g.op("where", g.op("gt_scalar", v, 0.0), v, _partner(g, r, v)),
    lambda g, r, v: g.op("clone", v),
    lambda g, r, v: g.op("cumsum", v, _dim(r, v)),
    lambda g, r, v: g.op("constant_pad_nd", v, [1, 0], 0.5),
)


SHORT = DevicePolicy(splits=Splits(parts=2, long_row=8, few_points=4, held_row=4, column_rows=4, column_elements=16, few_columns=4))
"""Rows of a few elements are reduced in parts, and not held for another pass."""


def _same(g: Sketch, r: random.Random, v: Value) -> Value:
    assert v.spec is not None
    return r.choice([o.out for o in g.ops if o.out.spec is not None and o.out.spec.shape == v.spec.shape] or [v])


def draw(seed: int) -> tuple[Sketch, list[Value]]:
    """Draw a graph of about ten ops, some of them read twice, with two to four outputs."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    g = Sketch("forward")
    shape = [r.choice((1, 2, 3, 4, 6)) for _ in range(r.randint(1, 3))]
    values = [g.input(torch.randn(shape)) for _ in range(2)]
    for _ in range(r.randint(4, 14)):
        v = r.choice(values[-4:])
        if v.spec is not None and v.spec.rank and v.spec.numel_hint() < 2000:
            values.append(r.choice(STEPS)(g, r, v))
    made = [v for v in values if v not in g.inputs] or [g.op("neg", values[0])]
    return g, list({v.id: v for v in [made[-1], *r.sample(made, min(len(made), 3))]}.values())


@pytest.mark.parametrize("loader", list(LOADERS))
@pytest.mark.parametrize("seed", [*range(40), 710, 1090, 1146])
def test_random_graph_follows_eager(seed: int, loader: str) -> None:
    g, outputs = draw(seed)
    _, got = run_sketch(g, outputs, LOADERS[loader])
    for ours, eager in zip(got, g.expected(outputs), strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (eager.shape, eager.stride(), eager.dtype)
        torch.testing.assert_close(ours, eager, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("seed", range(40))
def test_sums_that_share_kernels_with_what_they_add_up(seed: int) -> None:
    """Total sums of results, and what needs such a sum, where even short rows take more than one kernel."""
    g, outputs = draw(seed)
    sums = [g.op("sum", v, list(range(v.spec.rank)), True) for v in outputs if v.spec is not None and v.spec.rank]
    outputs += [*sums, *(g.op("add", v, s) for v, s in zip(outputs, sums, strict=False) if v.spec is not None and v.spec.rank)]
    _, got = run_sketch(g, outputs, LOADERS["interpreter"], SHORT)
    for ours, eager in zip(got, g.expected(outputs), strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (eager.shape, eager.stride(), eager.dtype)
        torch.testing.assert_close(ours, eager, rtol=2e-5, atol=5e-5, equal_nan=True)
