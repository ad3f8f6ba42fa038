"""Linears with int8 weights: which call each graph becomes, and its results, on CPU tensors in Triton's interpreter.

The graphs are those that torchao's tensors produce (these are tested where torchao is installed): with int8 weights alone, or with
activations quantized row by row as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
import triton
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass as from_dense
from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass as to_dense
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusewright import report
from fusewright.bench.accuracy import compare
from fusewright_triton.kernels import int8 as int8_kernels
from fusewright_triton.kernels.int8_ops import int8_linear, int8_mm, tiles
from fusewright_triton.target import AMD, NVIDIA

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SHAPES = [(1, 5, 700), (5, 33, 5000), (17, 64, 128), (70, 40, 65)]
"""M, N, K: one row and several, with and without a remainder in every dimension, K whole and in parts."""

WIDE, DEEP = 1100, 1024
"""N and K of weights that are too large to be kept in bf16 beside their int8 form."""


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def simulated(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend="nvidia_triton", options={"simulate": True, "strict": True, **options})


def plan(reports: list[report.GraphReport]) -> str:
    (only,) = reports
    assert not only.fallbacks
    return only.texts["plan"]


# ---------------------------------------------------------------- the operators


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear_rounds_once(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w, scale, bias = torch.randn(m, k).to(dtype), int8(n, k), torch.rand(n).to(dtype) / 64, torch.randn(n).to(dtype)
    wide = (x.double() @ w.double().t()) * scale.double() + bias.double()
    got = int8_linear(x, w, scale, bias, "sm_90")
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wide, rtol=torch.finfo(dtype).eps, atol=1e-4)
    bare = int8_linear(x.double().div(64).to(dtype), w, None, None, "gfx942").double()
    torch.testing.assert_close(
        bare, x.double().div(64).to(dtype).double() @ w.double().t(), rtol=torch.finfo(dtype).eps, atol=2e-3
    )


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_integer_products_are_exact(m: int, n: int, k: int) -> None:
    x, w = int8(m, k), int8(n, k)
    assert torch.equal(int8_mm(x, w, "sm_90"), (x.long() @ w.long().t()).int())


def test_operands_need_not_be_dense() -> None:
    x, w = int8(6, 80)[:, ::2], int8(40, 8).t()
    assert torch.equal(int8_mm(x, w, "sm_90"), (x.long() @ w.long().t()).int())


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "gfx942", "gfx1100"])
def test_tiles_fit(target: str) -> None:
    """Blocks suit the matrix units and shared memory; with few rows no multiprocessor is idle."""
    t = (NVIDIA | AMD)[target]
    for m in (1, 16, 64, 128, 512):
        for itemsize in (1, 2, 4):
            how = tiles(m, 4096, 14336, itemsize, target)
            assert min(how.bm, how.bn, how.bk) >= 16
            assert how.stages * how.bk * (how.bm * itemsize + how.bn) <= t.shared
    assert tiles(16, 2048, 8192, 2, target).split > 1 and tiles(512, 2048, 8192, 2, target).split == 1


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942", "gfx1100"])
@pytest.mark.parametrize("integer", [False, True])
def test_kernels_build_without_a_gpu(target: str, integer: bool) -> None:
    t = (NVIDIA | AMD)[target]
    how = tiles(16, 4096, 4096, 1 if integer else 2, target)
    x, sums = ("*i8", "*i32") if integer else ("*bf16", "*fp32")
    types = [x, "*i8", "*bf16", "*bf16", sums, "i32", "i32", "i32", "i32", "i32", "i32"]
    fixed = {
        "SCALED": True, "BIASED": True, "INTEGER": integer, "EVEN": True, "SPLIT": how.split, "BM": how.bm, "BN": how.bn,
        "BK": how.bk, "PRECISION": "ieee",
    }  # fmt: skip
    signature = dict(zip(int8_kernels.blocks.arg_names, [*types, *["constexpr"] * len(fixed)], strict=True))
    arch: Any = int(target.removeprefix("sm_")) if t.triton == "cuda" else target
    built = triton.compile(
        ASTSource(int8_kernels.blocks, signature, fixed),
        target=GPUTarget(t.triton, arch, t.lanes),
        options={"num_warps": how.warps, "num_stages": how.stages},
    )
    assert built.metadata.shared <= t.shared


# ---------------------------------------------------------------- weights alone


class WeightOnly(nn.Module):
    """A linear as torchao's Int8Tensor computes it."""

    def __init__(self, bias: bool = True, rows: bool = True) -> None:
        super().__init__()
        w = int8(WIDE, DEEP) if rows else int8(DEEP, WIDE).t()
        self.register_buffer("weight", w)
        self.register_buffer("scale", torch.rand(WIDE, 1) / 64)
        self.bias = nn.Parameter(torch.randn(WIDE).bfloat16()) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.mm(x.reshape(-1, x.shape[-1]), self.weight.t().to(x.dtype))
        y = (flat * self.scale.to(x.dtype).flatten()).reshape(*x.shape[:-1], WIDE)
        return y if self.bias is None else y + self.bias

    def wide(self, x: Tensor) -> Tensor:
        y = x.double() @ self.weight.double().t() * self.scale.to(x.dtype).double().flatten()
        return y if self.bias is None else y + self.bias.double()


@torch.no_grad()
@pytest.mark.parametrize(
    ("shape", "bias", "call"),
    [
        ((1, DEEP), True, ""),
        ((1, 3, DEEP), False, ""),
        ((5, DEEP), False, "int8_linear"),
        ((2, 3, DEEP), True, "int8_linear"),
    ],
)
def test_few_rows_read_the_weight_as_it_is(shape: tuple[int, ...], bias: bool, call: str) -> None:
    """Few rows are one loop kernel with scale and bias; more rows use the blocked kernel."""
    model, x = WeightOnly(bias).eval(), torch.randn(shape).bfloat16()
    with report.recording() as reports:
        got = simulated(model)(x)
    verdict = compare([model.wide(x)], [model(x)], [got], "bf16")
    assert verdict.passed, verdict.reason
    text = plan(reports)
    assert call in text and "aten_mm" not in text and "bfloat16[1024, 1100]" not in text
    assert ("int8_linear" in text) == bool(call)


@torch.no_grad()
def test_many_rows_are_the_librarys(thresholds: Callable[..., None]) -> None:
    thresholds(int8_rows=4)
    model, x = WeightOnly().eval(), torch.randn(5, DEEP).bfloat16()
    with report.recording() as reports:
        got = simulated(model)(x)
    verdict = compare([model.wide(x)], [model(x)], [got], "bf16")
    assert verdict.passed, verdict.reason
    assert "int8_linear" not in plan(reports) and "aten_mm" in plan(reports)


@torch.no_grad()
def test_a_weight_that_is_no_transpose_is_the_librarys() -> None:
    model, x = WeightOnly(rows=False).eval(), torch.randn(3, DEEP).bfloat16()
    with report.recording() as reports:
        got = simulated(model)(x)
    torch.testing.assert_close(got, model(x), rtol=2e-2, atol=0.2)
    assert "int8_linear" not in plan(reports)


@torch.no_grad()
def test_what_else_reads_the_product_still_does() -> None:
    """The scale cannot be fused when the product itself is a result too."""
    model = WeightOnly()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.mm(x, model.weight.t().to(x.dtype))
        return y, y * model.scale.to(x.dtype).flatten()

    x = torch.randn(3, DEEP).bfloat16()
    for got, expected in zip(simulated(both)(x), both(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=0.5)


@torch.no_grad()
def test_a_new_weight_is_seen() -> None:
    model, x = WeightOnly().eval(), torch.randn(2, DEEP).bfloat16()
    compiled = simulated(model)
    compiled(x)
    model.weight.neg_()
    torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=0.2)


# ---------------------------------------------------------------- activations too


class Dynamic(nn.Module):
    """A linear with quantized rows, as torchao computes it on a GPU."""

    def __init__(self, wide: int = 96, deep: int = 64) -> None:
        super().__init__()
        self.register_buffer("weight", int8(wide, deep))
        self.register_buffer("scale", torch.rand(wide) / 64)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.out_dtype import out_dtype

        step = (x.float().abs().amax(-1, keepdim=True) / 127.5).clamp(1e-7)
        q = torch.clamp(torch.round(x.float() * step.reciprocal()), -128, 127).to(torch.int8)
        sums = out_dtype(torch.ops.aten.mm.default, torch.int32, q, self.weight.t())
        return ((sums * step).to(x.dtype) * self.scale).to(x.dtype)


@torch.no_grad()
@pytest.mark.parametrize(("m", "call"), [(1, "int8_mm"), (16, "int8_mm"), (17, "_int_mm"), (40, "_int_mm")])
def test_rows_that_cublas_refuses_have_a_kernel(m: int, call: str) -> None:
    model, x = Dynamic(), torch.randn(m, 64).bfloat16()
    with report.recording() as reports:
        got = simulated(model)(x)
    torch.testing.assert_close(got, model(x))
    assert call in plan(reports)


@torch.no_grad()
def test_widths_that_cublas_refuses_have_a_kernel() -> None:
    model, x = Dynamic(wide=97, deep=60), torch.randn(40, 60).bfloat16()
    with report.recording() as reports:
        torch.testing.assert_close(simulated(model)(x), model(x))
    assert "int8_mm" in plan(reports)


@torch.no_grad()
def test_quantization_and_what_undoes_it_are_a_kernel_each() -> None:
    with report.recording() as reports:
        simulated(Dynamic())(torch.randn(40, 64).bfloat16())
    (only,) = reports
    assert only.count("eager") == 0
    assert len({o.note for o in only.ops if o.note.startswith("kernel")}) == 2


# ---------------------------------------------------------------- torchao


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DEEP, WIDE), nn.GELU(), nn.Linear(WIDE, 64, bias=False)).bfloat16().eval()


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao(config: str, rows: int) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, x = mlp(), torch.randn(rows, DEEP).bfloat16()
    quantization.quantize_(model, getattr(quantization, config)())
    with report.recording() as reports:
        got = simulated(model)(x)
    torch.testing.assert_close(got, model(x), rtol=2e-2, atol=2e-2)
    assert [r.count("eager") for r in reports] == [0]
    if config == "Int8WeightOnlyConfig":
        assert ("int8_linear" in plan(reports)) == (rows > 4) and "aten_mm" not in plan(reports)[:400]


# ---------------------------------------------------------------- 2:4 sparse weights


@pytest.fixture
def sparse_products() -> Iterator[None]:
    """Register torch's sparse products on the CPU, which has none, during a test; they unpack the weight."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_sparse_semi_structured_mm", lambda a, meta, b, **_: to_dense(a, meta) @ b, "CPU")
    library.impl(
        "_sparse_semi_structured_addmm", lambda bias, a, meta, b, **_: bias[:, None] + to_dense(a, meta) @ b, "CPU"
    )
    yield
    library._destroy()


def two_of_four(weight: Tensor) -> nn.Parameter:
    """Return the weight with every other pair of numbers removed, packed for CUTLASS."""
    SparseSemiStructuredTensorCUTLASS._load_dispatch_table()
    pruned = weight.detach() * torch.tensor([0, 0, 1, 1]).bool().tile((weight.shape[0], weight.shape[1] // 4))
    packed, meta = from_dense(pruned)
    sparse = SparseSemiStructuredTensorCUTLASS(weight.shape, packed, meta, None, None, None)
    return nn.Parameter(sparse, requires_grad=False)


@torch.no_grad()
@pytest.mark.usefixtures("sparse_products")
def test_sparse_weights_stay_torchs_products_with_kernels_around() -> None:
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False)).bfloat16().eval()
    )
    for k in (1, 3):
        model[k].weight = two_of_four(model[k].weight)  # type: ignore[union-attr,arg-type]
    x = torch.randn(5, 64).bfloat16()
    with report.recording() as reports:
        got = simulated(model)(x)
    torch.testing.assert_close(got, model(x))
    (only,) = reports
    where = {o.op: o.where for o in only.ops}
    assert where["layer_norm"] == where["gelu"] == "lowered"
    theirs = [op for op, runs in where.items() if runs == "eager"]
    assert theirs and all("mm" in op for op in theirs)
