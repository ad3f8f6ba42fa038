"""Extremes of sources that meet in one element, as emitted for a GPU, against eager: every type, NaN, infinities, ties."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusewright import report
from fusewright.toolkit.ir import Builder
from fusewright.toolkit.ir.types import DType, to_torch
from fusewright_triton.emit.emitter import emit
from fusewright_triton.emit.operators import Unsupported
from fusewright_triton.emit.schedule import Config, Tile
from tests.backends.triton.emit.test_rules import simulated
from tests.backends.triton.kernels import reference, scatter_extreme, simulate
from tests.fragments import Sketch
from tests.unit.fuse.running import run_sketch
from tests.zoo.handmade import GraphAttention

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NEGATIVE_NAN = torch.tensor([-1], dtype=torch.int32).view(torch.float32)


def special(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Few distinct values, so that most meet an equal one; NaN, infinities and zeros of both signs, and the
    least and the largest integer."""
    g = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        few = torch.tensor([info.min, info.max, 0, 1, 2, 3, max(info.min, -3)], dtype=dtype)
    else:
        numbers = torch.tensor([0.0, -0.0, 1.5, -2.0, 1e-3, -1e-3, math.inf, -math.inf, math.nan])
        few = torch.cat([numbers, NEGATIVE_NAN]).to(dtype)
    return few[torch.randint(len(few), (count,), generator=g)]


def assert_same(got: Tensor, wanted: Tensor) -> None:
    """Equal but for the signs of zeros and NaNs."""
    assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("how", ["max", "min"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "i32", "i64"])
def test_extremes_that_meet(how: str, dtype: DType) -> None:
    """Memory may hold NaN of either sign before the first store."""
    kernel = scatter_extreme(how, 300, 3, 70, dtype)
    for seed in range(3):
        torch.manual_seed(seed)
        ids = torch.randint(0, 70, (300,))
        data = [ids, special(900, to_torch(dtype), seed).view(300, 3), special(210, to_torch(dtype), seed + 9).view(70, 3)]
        wanted = reference(kernel, data)[2]
        simulate(kernel, data)
        assert_same(data[2], wanted)


@pytest.mark.parametrize(("how", "negative"), [("max", False), ("min", True)])
@pytest.mark.parametrize("first", [0.0, -0.0])
@pytest.mark.parametrize("before", [0.0, -0.0, None])
def test_the_order_of_equal_zeros_does_not_show(how: str, negative: bool, first: float, before: float | None) -> None:
    kernel = scatter_extreme(how, 2, 1, 1)
    start = before if before is not None else -math.inf if how == "max" else math.inf
    data = [torch.zeros(2, dtype=torch.int64), torch.tensor([[first], [-first]]), torch.tensor([[start]])]
    simulate(kernel, data)
    assert data[2].item() == 0 and data[2].signbit().item() is negative


def test_threads_without_a_point_store_nothing() -> None:
    b = Builder("scatter", p=[5])
    ids, out = b.input("ids", "i64"), b.inout("out", "f32")
    b.store(out, b.indirect(b.bound(b.load(ids, b.axes[0]), 3)), b.const(2.0, "f32"), how="max")
    data = [torch.tensor([1, 2, 2, 1, 2]), torch.zeros(3)]
    simulate(b.build(), data)
    assert data[1].tolist() == [0, 2, 2]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "i8", "u8", "i16"])
def test_extremes_without_an_atomic_are_refused(dtype: DType) -> None:
    with pytest.raises(Unsupported, match=f"accumulating {dtype} with max where points meet"):
        emit(scatter_extreme("max", 8, 4, 5, dtype), Config((Tile((0,), 8),), 0, False, 1, 1))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    sources=st.integers(0, 9),
    dim=st.integers(0, 2),
    dtype=st.sampled_from(FLOATS + INTEGERS),
    reduce=st.sampled_from(["amax", "amin"]),
    include_self=st.booleans(),
    layout=st.sampled_from(["contiguous", "transposed", "gapped", "expanded"]),
    seed=st.integers(0, 99),
)
def test_folding_follows_eager(
    shape: list[int], sources: int, dim: int, dtype: torch.dtype, reduce: str, include_self: bool, layout: str, seed: int
) -> None:
    dim %= len(shape)
    sources = sources if shape[dim] else 0
    read = [*shape[:dim], sources, *shape[dim + 1 :]]
    x, src = (laid_out(special(math.prod(s), dtype, seed + k).view(s), layout) for k, s in enumerate((shape, read)))
    g = torch.Generator().manual_seed(seed)
    each, slices = (torch.randint(0, max(shape[dim], 1), s, generator=g) for s in (read, [sources]))
    follows("scatter_reduce", (x, dim - len(shape), each, src, reduce), include_self)
    follows("index_reduce", (x, dim, slices, src, reduce), include_self)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in other memory; "expanded" repeats the first of the last dim."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "gapped":
        return torch.stack([x, x], -1)[..., 0]
    return x[..., :1].expand(x.shape) if layout == "expanded" and x.shape[-1] else x


def follows(name: str, args: tuple[object, ...], include_self: bool) -> None:
    """Check one call against eager, with the blocks of a target. Eager's own call takes no elements."""
    g = Sketch()
    values = [g.input(a) if isinstance(a, Tensor) else a for a in args]
    out = g.op(name, *values, include_self=include_self)
    fragment, (got,) = run_sketch(g, [out], lambda kernels: next(simulated(kernels))(kernels))
    assert fragment.kernels or any(not a.numel() for a in args if isinstance(a, Tensor))
    assert_same(got, g.tensors[out.id])


class Pooled(torch.nn.Module):
    """Features of the nodes of each graph, pooled to their largest and least, as torch_geometric writes it."""

    def forward(self, x: Tensor, graph: Tensor, count: int) -> Tensor:
        index = graph[:, None].expand_as(x)
        most, least = (
            x.new_zeros(count, x.shape[1]).scatter_reduce_(0, index, x, how, include_self=False) for how in ("amax", "amin")
        )
        return torch.cat([most, least], -1).relu()


def compiled(model: torch.nn.Module, dynamic: bool = False) -> torch.nn.Module:
    options = {"simulate": True, "strict": True, "fallback": "allow"}
    return torch.compile(model, backend="nvidia_triton", dynamic=dynamic, options=options)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
def test_graph_attention_has_its_softmax_in_kernels(dtype: torch.dtype, tolerance: float, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = GraphAttention().eval().to(dtype)
    ours = compiled(model, dynamic)
    with torch.no_grad(), report.recording() as reports:
        for nodes, count in ((20, 90), (31, 77)):
            x, edges = torch.randn(nodes, 16, dtype=dtype), torch.randint(0, nodes, (2, count))
            torch.testing.assert_close(ours(x, edges), model(x, edges), rtol=tolerance, atol=tolerance, equal_nan=True)
    assert len(reports) == (1 if dynamic else 2)
    assert all([op.op for op in r.by_eager] == ["linear"] for r in reports)


@pytest.mark.usefixtures("fresh_dynamo")
def test_graph_attention_in_training() -> None:
    torch.manual_seed(0)
    model, edges = GraphAttention(), torch.randint(0, 12, (2, 40))
    x = torch.randn(12, 16, requires_grad=True)
    read = [x, *model.parameters()]
    wanted = torch.autograd.grad(model(x, edges).square().sum(), read)
    with report.recording() as reports:
        got = torch.autograd.grad(compiled(model)(x, edges).square().sum(), read)
    assert [sorted(op.op for op in r.by_eager) for r in reports] == [["linear"], ["mm", "mm"]]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fresh_dynamo")
def test_pooled_graphs_and_gradients_that_ties_share() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (30, 5), generator=g).float().requires_grad_()
    graph = torch.randint(0, 4, (30,), generator=g)
    weight = torch.randn(6, 10, generator=g)
    model = Pooled()
    with report.recording() as reports:
        out = compiled(model)(x, graph, 6)  # two of the six have no nodes
        (got,) = torch.autograd.grad((out * weight).sum(), [x])
    (wanted,) = torch.autograd.grad((model(x, graph, 6) * weight).sum(), [x])
    assert len(reports) == 2 and not any(r.by_eager for r in reports)
    assert torch.equal(out, model(x, graph, 6))
    largest = x.detach() == out.detach()[graph, :5]
    assert int(largest.sum()) > 4 * 5, "no ties"
    torch.testing.assert_close(got, wanted)
