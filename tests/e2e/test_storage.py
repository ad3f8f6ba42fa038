"""Tensors whose memory does not hold their value (lazy conjugate, negation, zero tensors): kernels read eager's values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from fusewright.errors import FreedStorageError
from fusewright.storage import NO_MEMORY, lazy, materialized, why_not

pytestmark = [pytest.mark.hardware("x86_onednn"), pytest.mark.usefixtures("fresh_dynamo")]

BACKENDS = [("x86_onednn", {}), ("nvidia_triton", {"simulate": True}), ("fusewright_interp", {})]


def complexes(n: int = 4) -> Tensor:
    return torch.randn(n, dtype=torch.complex64)


def negated(*shape: int) -> Tensor:
    return torch._neg_view(torch.randn(*shape))


def zeros(*shape: int) -> Tensor:
    """Zero tensors as autograd's formulas return them where a derivative is zero everywhere."""
    return torch._efficientzerotensor(shape)


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "imaginary part of a conjugate": (lambda x: x.conj().imag + 1, lambda: (complexes(),)),
    "of a Fourier transform's": (lambda x: torch.fft.rfft(x).conj().imag * 2, lambda: (torch.randn(8),)),
    "resolved": (lambda x: x.conj().resolve_conj().imag.exp(), lambda: (complexes(),)),
    "negated view inside": (lambda x: torch._neg_view(x).exp() + 1, lambda: (torch.randn(4),)),
    "negated input": (lambda x: x.exp() + 1, lambda: (negated(4),)),
    "negated input of a product": (lambda x, y: (x @ y).relu() + 1, lambda: (negated(4, 4), torch.randn(4, 4))),
    "part of a negated input": (lambda x: x[1:].t().clone() * 2, lambda: (negated(4, 4),)),
    "conjugated input": (lambda x: x.imag * 2 + 1, lambda: (complexes().conj(),)),
    "zeros": (lambda x: x.sin() + 1, lambda: (zeros(4),)),
    "zeros and others": (lambda x, y: (x * y + y).relu(), lambda: (zeros(4), torch.randn(4))),
    "no elements": (lambda x: (x.exp() + 1).sum(1), lambda: (torch.randn(0, 4),)),
    "sparse": (lambda x: x.to_dense() * 2 + 1, lambda: (torch.eye(4).to_sparse(),)),
    "mkldnn": (lambda x: x.relu(), lambda: (torch.eye(4).to_mkldnn(),)),
}


def compiled(f: Callable[..., Any], backend: str, options: dict[str, Any]) -> Callable[..., Any]:
    return torch.compile(f, backend=backend, dynamic=False, options={**options, "fallback": "allow"})


def plain(t: Tensor) -> Tensor:
    return (t if t.layout is torch.strided else t.to_dense()).resolve_neg().resolve_conj()


@pytest.mark.parametrize(("backend", "options"), BACKENDS, ids=[b for b, _ in BACKENDS])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_eagers(name: str, backend: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    f, make = PROGRAMS[name]
    given = make()
    run = compiled(f, backend, options)
    for _ in range(2):
        torch.testing.assert_close(plain(run(*given)), plain(f(*given)))


def test_a_plan_of_plain_inputs_is_not_used_for_lazy_ones() -> None:
    """Neither a plan in the process, where Dynamo guards on laziness, nor one from disk."""

    def f(x: Tensor) -> Tensor:
        return x.t().exp() + 1

    for given in (torch.ones(3, 3), torch._neg_view(torch.ones(3, 3)), zeros(3, 3), torch.ones(3, 3)):
        torch.compiler.reset()
        run = compiled(f, "x86_onednn", {})
        torch.testing.assert_close(run(given), f(given))
        torch.testing.assert_close(run(given), f(given))


def test_a_write_into_zeros_without_memory_is_eagers_error() -> None:
    def f(x: Tensor) -> Tensor:
        return x.add_(1).exp()

    for run in (f, compiled(f, "x86_onednn", {})):
        with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
            run(zeros(4))


@pytest.mark.parametrize("make", [zeros, negated, torch.randn], ids=["zeros", "negated", "plain"])
def test_gradients_from_autograd_may_be_lazy(make: Callable[[int], Tensor]) -> None:
    """No guard checks what autograd passes to a compiled backward graph."""
    x = torch.randn(4, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return x.sin() * 2 + x.exp()

    run, handed = compiled(f, "x86_onednn", {}), make(4)
    for gradient in (torch.ones(4), handed, torch.ones(4)):
        (got,) = torch.autograd.grad(run(x), x, gradient)
        (want,) = torch.autograd.grad(f(x), x, gradient)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("backend", "options"), BACKENDS, ids=[b for b, _ in BACKENDS])
@pytest.mark.parametrize("first", ["plain", "batched"])
def test_gradients_from_autograd_may_be_batched(first: str, backend: str, options: dict[str, Any]) -> None:
    """A vectorized Jacobian calls a backward graph with tensors that only wrap others."""
    layer = nn.Linear(4, 3)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x).tanh() * 2, x.sin()

    g, ones = compiled(f, backend, options), torch.eye(6).view(6, 2, 3)
    for batched in (first == "batched", True, False):
        x = torch.randn(2, 4, requires_grad=True)
        weights = ones if batched else ones[0]
        (made,) = torch.autograd.grad(g(x)[0], x, weights, is_grads_batched=batched)
        (expected,) = torch.autograd.grad(f(x)[0], x, weights, is_grads_batched=batched)
        torch.testing.assert_close(made, expected)


@pytest.mark.parametrize(("backend", "options"), BACKENDS, ids=[b for b, _ in BACKENDS])
@pytest.mark.parametrize("before", [False, True], ids=["traced so", "traced before"])
def test_a_plan_does_not_lose_forward_mode_tangents(before: bool, backend: str, options: dict[str, Any]) -> None:
    def f(x: Tensor) -> Tensor:
        return (x.sin() ** 2 + x).sum(-1)

    g, x, t = compiled(f, backend, options), torch.randn(2, 5), torch.randn(2, 5)
    if before:
        torch.testing.assert_close(g(x), f(x))
    made = torch.autograd.functional.jacobian(g, x, vectorize=True, strategy="forward-mode")
    torch.testing.assert_close(made, torch.autograd.functional.jacobian(f, x))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(g(forward_ad.make_dual(x, t))).tangent
    torch.testing.assert_close(tangent, ((2 * x).sin() + 1).mul(t).sum(-1))
    torch.testing.assert_close(g(x), f(x))


def test_a_gradient_that_is_zero_everywhere_reaches_a_compiled_backward() -> None:
    x = torch.randn(4, requires_grad=True)
    run = compiled(lambda x: x.sin() * 2, "x86_onednn", {})
    assert torch.autograd.grad(torch.sgn(run(x)).sum(), x)[0].tolist() == [0, 0, 0, 0]


class Shifted(nn.Module):
    """Holds its tensor as a parameter, a buffer or a plain attribute."""

    def __init__(self, held: Tensor, how: str) -> None:
        super().__init__()
        if how == "parameter":
            self.w = nn.Parameter(held, requires_grad=False)
        elif how == "buffer":
            self.register_buffer("w", held)
        else:
            self.w = held

    def forward(self, x: Tensor) -> Tensor:
        return x.exp() @ self.w + self.w.sum()


@pytest.mark.parametrize("make", [zeros, negated], ids=["zeros", "negated"])
@pytest.mark.parametrize("how", ["parameter", "buffer", "attribute"])
def test_what_a_model_holds_may_be_lazy(how: str, make: Callable[..., Tensor]) -> None:
    model, x = Shifted(make(4, 4), how).eval(), torch.randn(4, 4)
    run = compiled(model, "x86_onednn", {})
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x))


def test_freed_memory_is_an_error_and_never_a_crash() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * y + 1).exp().tanh()

    run = compiled(f, "x86_onednn", {})
    x, y = torch.randn(32, 32), torch.randn(32, 32)
    run(x, y)
    run(x, y)
    y.untyped_storage().resize_(0)
    with pytest.raises(FreedStorageError, match=r"shape \(32, 32\).* no memory; was its storage freed"):
        run(x, y)
    torch.compiler.reset()
    with pytest.raises(FreedStorageError, match="no memory"):
        compiled(f, "x86_onednn", {"cache": False})(x, y)
    y.untyped_storage().resize_(32 * 32 * 4)
    torch.testing.assert_close(run(x, y.fill_(2)), f(x, y))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_fake_tensors_stay_fake(trained: bool, within: bool) -> None:
    """Nothing is computed for a caller's FakeTensors; tensors with memory are computed before and after."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1)).requires_grad_(trained), torch.randn(2, 4)
    run = compiled(model, "x86_onednn", {})
    torch.testing.assert_close(run(x), model(x))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(x).requires_grad_(trained)
    with mode if within else contextlib.nullcontext():
        y = run(fake)
        assert isinstance(y, FakeTensor) and y.shape == (2, 8) and y.requires_grad == trained
        if trained:
            assert isinstance(torch.autograd.grad(y.sum(), fake)[0], FakeTensor)
    torch.testing.assert_close(run(x), model(x))


def test_the_place_that_decides() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    reasons = {
        "plain": torch.ones(3), "empty": torch.ones(0), "neg": negated(3), "conj": complexes().conj(), "zero": zeros(3),
        "freed": freed, "sparse": torch.eye(3).to_sparse(), "mkldnn": torch.eye(3).to_mkldnn(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "meta": torch.ones(3, device="meta"),
    }  # fmt: skip
    assert {k for k, t in reasons.items() if not why_not(t)} == {"plain", "empty"}
    assert {k for k, t in reasons.items() if lazy(t)} == {"neg", "conj", "zero"}
    assert why_not(freed) is NO_MEMORY
    assert not any(why_not(materialized(reasons[k])) for k in ("plain", "neg", "conj", "zero"))


def test_a_parameter_made_in_the_graph_keeps_its_memory() -> None:
    def made(x: Tensor) -> tuple[Tensor, Tensor]:
        half = x * 2 + 1
        weight = nn.Parameter(half * 3, requires_grad=False)
        return weight, ((half.exp() + 1) @ half).sum(1)

    compiled = torch.compile(made, backend="x86_onednn", options={"strict": True})
    inputs = [torch.rand(16, 16) for _ in range(3)]
    with torch.no_grad(), torch._dynamo.config.patch(graph_break_on_nn_param_ctor=False):
        kept = [compiled(x)[0] for x in inputs]
        for x, weight in zip(inputs, kept, strict=True):
            torch.testing.assert_close(weight, made(x)[0])


def test_what_code_of_others_keeps_is_not_overwritten() -> None:
    kept: list[Tensor] = []

    @torch.library.custom_op("others::noted", mutates_args=())
    def noted(x: Tensor) -> Tensor:
        result = x * 2
        kept.extend((x, result))
        return result

    noted.register_fake(torch.empty_like)

    def made(x: Tensor) -> Tensor:
        half = noted(x * 2 + 1) * 3 - 1
        return ((half.exp() + 1) @ half).sum(1)

    compiled = torch.compile(made, backend="x86_onednn", options={"never_slower": False})
    inputs = [torch.rand(16, 16) for _ in range(3)]
    for x in inputs:
        compiled(x)
    for x, given, result in zip(inputs, kept[::2], kept[1::2], strict=True):
        torch.testing.assert_close(given, x * 2 + 1)
        torch.testing.assert_close(result, (x * 2 + 1) * 2)


def test_code_of_others_runs_as_often_as_in_eager() -> None:
    calls: list[int] = []

    @torch.library.custom_op("others::counted", mutates_args=())
    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return x + len(calls)

    counted.register_fake(torch.empty_like)
    weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)

    def made(x: Tensor) -> Tensor:
        return (counted(x) + counted(x).relu()) @ counted(weight)

    def results(fn: Callable[[Tensor], Tensor]) -> list[Tensor]:
        calls.clear()
        return [fn(torch.ones(4, 4)) for _ in range(3)]

    compiled = torch.compile(made, backend="x86_onednn", options={"never_slower": False})
    torch.testing.assert_close(results(compiled), results(made))
