"""If tracing is wrong about an op's result, the first call corrects the plan and gives eager's result."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = [pytest.mark.hardware("x86_onednn"), pytest.mark.usefixtures("fresh_dynamo")]


def normed(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
    return [t.exp() for t in torch.ops.aten._batch_norm_with_update(x, w, b, mean, var, 0.5, 0.6)[:3]]


def test_one_of_several_results_has_another_dtype_than_traced() -> None:
    """FakeTensor says fp32 for running statistics that a CPU returns in bf16. They are also written in place, once."""
    torch.manual_seed(0)
    given = [torch.randn(5, 5, 5, dtype=torch.bfloat16), *(torch.rand(5, dtype=torch.bfloat16) for _ in range(4))]
    eager, ours = [t.clone() for t in given], [t.clone() for t in given]
    want = normed(*eager)
    got = torch.compile(normed, backend="x86_onednn", dynamic=False)(*ours)
    for g, w in zip([*got, *ours], [*want, *eager], strict=True):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w)


@torch.library.custom_op("fusewright_tests::halves", mutates_args=())
def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x[: x.shape[0] // 2].clone()


@halves.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)  # the second is really half as long


@pytest.mark.parametrize("used", [True, False])
def test_a_result_has_another_shape_than_traced(used: bool) -> None:
    """This cannot be corrected: eager runs the readers, and kernels the rest. An unread result is harmless."""

    def f(x: Tensor) -> list[Tensor]:
        for _ in range(3):
            x, half = halves(x.sin() + 1)
        return [x.exp() * 2, half.exp() * 2 if used else x]

    x = torch.randn(6, 4)
    compiled = torch.compile(f, backend="x86_onednn", dynamic=False, options={"fallback": "allow"})
    for _ in range(2):
        for g, w in zip(compiled(x), f(x), strict=True):
            torch.testing.assert_close(g, w)


def test_a_quantized_result_is_traced_as_floats() -> None:
    """No FakeTensor can have its scale, so eager runs what reads it, and kernels the rest."""

    def f(x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.quantize_per_tensor(x.exp().tanh(), 0.1, 0, torch.qint8).dequantize() + 1
        return x

    x = torch.randn(6, 4)
    compiled = torch.compile(f, backend="x86_onednn", options={"fallback": "allow"})
    for _ in range(2):
        torch.testing.assert_close(compiled(x), f(x))


@torch.library.custom_op("fusewright_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape)  # really it has the strides of `x`


def test_a_result_of_symbolic_sizes_has_other_strides_than_traced() -> None:
    """Its strides are formulas of sizes known at run time. In torch itself, the gradient of reflection padding is such a case."""

    def f(x: Tensor) -> Tensor:
        return doubled(x + 1).exp() + 1

    compiled = torch.compile(f, backend="x86_onednn", dynamic=True, options={"fallback": "allow"})
    for n in (2, 3):
        x = torch.randn(n, 3, 4, 5).to(memory_format=torch.channels_last)
        torch.testing.assert_close(compiled(x), f(x))


def test_a_gradient_of_symbolic_sizes_lies_otherwise_than_traced() -> None:
    def f(x: Tensor) -> Tensor:
        return F.pad(x * 2, (1, 1, 1, 1), mode="reflect")

    compiled = torch.compile(f, backend="x86_onednn", dynamic=True, options={"fallback": "allow"})
    for n in (2, 3):
        x = torch.randn(n, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
        got, want = (torch.autograd.grad(g(x).square().sum(), x)[0] for g in (compiled, f))
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


def test_a_result_without_elements_does_not_show_its_strides() -> None:
    """How many there are depends on data: the first call has none, and the second one is compared too."""

    def f(x: Tensor, k: Tensor) -> Tensor:
        return doubled(x[k].transpose(1, 3) + 1).exp() + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(f, backend="x86_onednn", options={"fallback": "allow"})
        x = torch.randn(3, 3, 4, 5)
        for k in ([False, False, False], [True, False, True]):
            torch.testing.assert_close(compiled(x, torch.tensor(k)), f(x, torch.tensor(k)))


@torch.library.custom_op("fusewright_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return x.conj_physical().conj()  # as an SVD on a GPU returns its right vectors


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


torch.library.register_autograd(
    "fusewright_tests::turned",
    lambda ctx, g: ctx.saved_tensors[0].abs() * g * 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def test_a_complex_result_is_a_lazy_conjugate_in_memory_when_traced() -> None:
    """Also where it is saved for a gradient."""

    def f(x: Tensor) -> Tensor:
        y = turned(x * 2)
        return y.abs() + y.t()[1:].exp().imag.sum()

    x = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    compiled = torch.compile(f, backend="x86_onednn", options={"fallback": "allow"})
    for _ in range(2):
        got, want = (torch.autograd.grad(g(x).square().sum(), x)[0] for g in (compiled, f))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(compiled(x), f(x))
