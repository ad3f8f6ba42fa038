"""Products of few rows: each is one kernel with the ops around it, as accurate as eager's product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright import report
from fusewright.errors import BackendContractError
from fusewright.toolkit.region import gemv
from fusewright_triton.target import H100

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

K, N = 512, 264
OPTIONS: dict[str, Any] = {"simulate": True, "strict": True, "cache": False}


class Weights(torch.nn.Module):
    """A module of linears that share one input; `heights` are their output sizes."""

    def __init__(self, body: Callable[..., Any], *heights: int, length: int = K, biased: bool = False) -> None:
        super().__init__()
        self.body = body
        self.products = torch.nn.ModuleList(torch.nn.Linear(length, n, bias=biased) for n in heights)
        self.gain = torch.nn.Parameter(torch.rand(length) + 0.5)

    def forward(self, *args: Tensor) -> Any:
        return self.body(self, *args)


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMS norm as Llama writes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return gain * wide.to(x.dtype)


def plain(m: Weights, x: Tensor) -> Tensor:
    return m.products[0](x)


def with_residual(m: Weights, x: Tensor) -> Tensor:
    return x[..., : m.products[0].out_features] + m.products[0](x)


def gated(m: Weights, x: Tensor) -> Tensor:
    return F.silu(m.products[0](x)) * m.products[1](x)


def after_norm(m: Weights, x: Tensor) -> Tensor:
    x = norm(x, m.gain)
    return F.silu(m.products[0](x)) * m.products[1](x)


def heads(m: Weights, x: Tensor) -> list[Tensor]:
    x = norm(x, m.gain)
    return [p(x) for p in m.products]


def norm_kept(m: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    x = norm(x, m.gain)
    return x, m.products[0](x)


def layers(m: Weights, x: Tensor) -> Tensor:
    for p in m.products:
        x = x + p(norm(x, m.gain))
    return x


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "plain": (plain, (N,)), "with_residual": (with_residual, (N,)), "gated": (gated, (N, N)),
    "after_norm": (after_norm, (N, N)), "heads": (heads, (2 * N, N, N)), "norm_kept": (norm_kept, (N,)),
    "layers": (layers, (K,) * 6),
}  # fmt: skip


def tensors(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, Sequence) else [found]


def launches(model: torch.nn.Module, *args: Tensor) -> int:
    """Compare the compiled model with eager and fp64, check that no call is a product, and return the number of kernels."""
    with report.recording() as reports, torch.no_grad():
        ours = tensors(torch.compile(model, backend="nvidia_triton", options=OPTIONS)(*args))
    with torch.no_grad():
        eager = tensors(model(*args))
        exact = tensors(model.double()(*(a.double() if a.is_floating_point() else a for a in args)))
    for got, theirs, right in zip(ours, eager, exact, strict=True):
        assert (got.dtype, got.shape, got.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        floor = 4 * torch.finfo(got.dtype).eps * right.abs().mean()
        assert (got - right).abs().max() <= 2 * (theirs - right).abs().max() + floor
    (found,) = reports
    text = found.texts["plan"].partition("def run")[2]
    assert not any(name in text for name in ("linear", "addmm", "bmm"))
    return text.count("launch_")


@pytest.mark.parametrize(
    ("case", "rows", "dtype", "kernels"),
    [
        ("plain", 1, torch.bfloat16, 1), ("plain", 3, torch.float32, 1), ("plain", 4, torch.float16, 1),
        ("with_residual", 1, torch.bfloat16, 1), ("gated", 1, torch.bfloat16, 1), ("gated", 2, torch.float16, 1),
        ("after_norm", 1, torch.bfloat16, 1), ("after_norm", 3, torch.float32, 1), ("heads", 1, torch.bfloat16, 1),
        ("heads", 2, torch.bfloat16, 2), ("norm_kept", 1, torch.bfloat16, 2),
        ("layers", 1, torch.bfloat16, 6),
    ],
)  # fmt: skip
def test_one_kernel_with_what_is_around(case: str, rows: int, dtype: torch.dtype, kernels: int) -> None:
    torch.manual_seed(0)
    body, heights = CASES[case]
    model = Weights(body, *heights).to(dtype).eval()
    assert launches(model, torch.randn(1, rows, K).to(dtype)) == kernels


@pytest.mark.parametrize("shape", [(1, K), (1, 1, 1, K)])
def test_parts_of_a_joint_product_have_strides_of_their_own(shape: tuple[int, ...]) -> None:
    model = Weights(heads, 2 * N, N, N).eval()
    assert launches(model, torch.randn(shape)) == 1


def test_with_a_bias_and_weights_that_are_arguments() -> None:
    torch.manual_seed(0)
    assert launches(Weights(plain, N, biased=True).bfloat16(), torch.randn(2, K).bfloat16()) == 1
    torch.compiler.reset()
    free = Weights(lambda m, x, w, b: F.linear(x, w, b).relu(), 4)
    assert launches(free, torch.randn(K), torch.randn(N, K), torch.randn(N)) == 1


def test_a_row_longer_than_a_step_and_of_an_odd_length() -> None:
    torch.manual_seed(0)
    assert launches(Weights(after_norm, 40, 40, length=4500).bfloat16(), torch.randn(2, 4500).bfloat16()) == 1


@pytest.mark.parametrize("rows", [H100.gemv_rows + 1, 64])
def test_more_rows_stay_a_library_call(rows: int) -> None:
    model, x = Weights(plain, N), torch.randn(rows, K)
    with report.recording() as reports, torch.no_grad():
        got = torch.compile(model, backend="nvidia_triton", options=OPTIONS)(x)
        torch.testing.assert_close(got, model(x))
    assert "linear" in reports[0].texts["plan"] or reports[0].count("eager")


class Pooled(torch.nn.Module):
    """Both rows are the same row of a parameter, like the latent query of an attention pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.latent, self.query = torch.nn.Parameter(torch.rand(1, 1, K)), torch.nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.query(self.latent.expand(2, -1, -1))


def test_rows_that_share_their_memory() -> None:
    model, x = Pooled().eval(), torch.rand(2, 1, N)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="nvidia_triton", options=OPTIONS)(x), model(x))


@pytest.mark.faulty
def test_strides_that_a_kernel_believes_of_a_constant_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expanded row with strides as if each row had its own memory: a kernel would read past the first row."""
    monkeypatch.setattr(gemv, "metadata", lambda op, given, spec: torch.empty(given["size"] if "size" in given else given["shape"]))
    model, x = Pooled().eval(), torch.rand(2, 1, N)
    with torch.no_grad(), pytest.raises(BackendContractError, match=r"has strides \(0, 512, 1\), expected \(512, 512, 1\)"):
        torch.compile(model, backend="nvidia_triton", options=OPTIONS)(x)


class Experts(torch.nn.Module):
    """Each token's products with the matrices of its experts, which `bmm` multiplies once they are gathered."""

    def __init__(self, shape: tuple[int, int], vector_first: bool) -> None:
        super().__init__()
        self.weight, self.vector_first = torch.nn.Parameter(torch.randn(6, *shape) / shape[-1] ** 0.5), vector_first

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        weight = self.weight[experts]
        if self.vector_first:
            return torch.bmm(x.unsqueeze(1), weight).squeeze(1).relu()
        return torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1).relu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "vector_first"), [((N, K), False), ((K, N), True)])
def test_gathered_matrices_are_read_in_their_place(
    shape: tuple[int, int], vector_first: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    experts = torch.tensor([3, -1, 3, 0, 5, 2])
    assert launches(Experts(shape, vector_first).to(dtype), torch.randn(6, K).to(dtype), experts) == 1


def test_gathered_matrices_that_others_read_too_stay_a_librarys_product() -> None:
    torch.manual_seed(0)
    model, x = Experts((N, K), False), torch.randn(2, K)

    def both(x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        weight = model.weight[experts]
        return torch.bmm(weight, x.unsqueeze(-1)), weight.amax(-1)

    with report.recording() as reports, torch.no_grad():
        got = torch.compile(both, backend="nvidia_triton", options=OPTIONS)(x, torch.tensor([1, 4]))
        torch.testing.assert_close(got, both(x, torch.tensor([1, 4])))
    assert "aten_bmm" in reports[0].texts["plan"]


def test_grouped_products_of_decoded_tokens_read_each_matrix_in_its_place() -> None:
    torch.manual_seed(0)
    experts = Experts((N, K), False)
    ends = torch.tensor([0, 1, 1, 1, 2, 2], dtype=torch.int32)

    def forward(x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, experts.weight.mT.to(x.dtype), offs=ends).relu()

    experts.forward = forward  # type: ignore[method-assign]
    with report.recording() as reports, torch.no_grad():
        x = torch.randn(2, K).bfloat16()
        got = torch.compile(experts.bfloat16(), backend="nvidia_triton", options=OPTIONS)(x, ends)
        exact = torch.einsum("sk,snk->sn", x.double(), experts.weight[[1, 4]].double()).relu()
    torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2)
    assert "grouped" not in reports[0].texts["plan"].partition("def run")[2] and reports[0].rules["product.gathered"] == 1
