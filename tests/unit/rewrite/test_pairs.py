"""Complex numbers as pairs: values, strides, conjugates and types of calls are eager's, and kernels compute them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fusewright import registry
from fusewright.graph.canonicalize import canonicalize
from fusewright.interface import RuleLog
from fusewright.report import recording
from fusewright.rewrite.pairs import split

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

C64, C128 = torch.complex64, torch.complex128


def rotary(x: Tensor, freqs: Tensor) -> Tensor:
    """As Llama's own code."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs[:, None]).flatten(3).type_as(x)


def _c(*shape: int, dtype: torch.dtype = C64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))


FREQS = torch.polar(torch.ones(5, 4), torch.linspace(0, 3, 20).view(5, 4))
ODD = torch.complex(torch.tensor([math.inf, math.nan, 0.0, -0.0]), torch.tensor([1.0, 0.0, -0.0, math.inf]))
FINITE = torch.complex(torch.arange(4.0), torch.tensor([0.0, -0.0, 1.0, -2.0]))

CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "rotary": (rotary, (torch.randn(2, 5, 3, 8), FREQS)),
    "rotary_bf16": (rotary, (torch.randn(2, 5, 3, 8).bfloat16(), FREQS)),
    "wide": (lambda x, f: torch.view_as_real(torch.view_as_complex(x.double()) * f), (torch.randn(5, 4, 2), FREQS.to(C128))),
    "promoted": (lambda x, y: (x * y, x + y.abs()), (_c(3, 4), _c(3, 4, dtype=C128))),
    "transposed": (lambda x, y: x.t() * y.t() + 1, (_c(3, 4), _c(3, 4))),
    "permuted_one": (lambda x: torch.view_as_real(x.permute(2, 0, 1) * 2).exp(), (_c(3, 4, 2),)),
    "broadcast": (lambda x, y: (x * y, x[:, :1] - y), (_c(3, 4), _c(4))),
    "with_real": (lambda x, y: (x * y, y - x, x + 2, 1.5 - x, x * 1j), (_c(3, 4), torch.randn(3, 4))),
    "sum_of_a_column": (lambda x, y: x + y, (_c(3, 1), torch.randn(3, 4))),
    "conjugate": (lambda x, y: (x.conj() * y, x.conj(), (x * y).conj().resolve_conj()), (_c(3, 4), _c(3, 4))),
    "parts": (lambda x, y: (torch.complex(x, y) * torch.complex(y, x)).real, (torch.randn(6), torch.randn(6))),
    "sizes": (lambda x: (x.abs(), x.angle(), torch.sgn(x), -x, torch.exp(x)), (_c(3, 4),)),
    "polar": (lambda x, y: torch.polar(x, y) + 1, (torch.rand(6), torch.randn(6))),
    "odd": (lambda x: (x * x, x * 2, torch.sgn(x), x.abs()), (ODD,)),
    "odd_sums": (lambda x, y: (x + x, x - y, y - x, x + x.real, x + 1, 2j - x, x * 1 + y), (ODD, FINITE)),
    "odd_powers": (lambda x, y: torch.complex(x.real, y.imag * 0).exp(), (ODD, FINITE)),
    "filtered": (lambda x, w: torch.fft.irfft2(torch.fft.rfft2(x.relu()) * w).tanh(), (torch.randn(2, 8, 8), _c(8, 5))),
    "windows": (lambda x: torch.view_as_real(x.unfold(-1, 2, 1) * 2), (_c(5, 6),)),
    "twice": (lambda x: (y := x * x, y[0].abs(), torch.view_as_real(y)), (_c(3, 4),)),
}


def modes(x: Tensor, w: Tensor) -> Tensor:
    """As a Fourier neural operator: the lowest and highest frequencies are mixed, all others are zeros."""
    f = torch.fft.rfft2(x)
    out = torch.zeros(*f.shape[:1], w.shape[1], *f.shape[2:], dtype=f.dtype)
    for rows in (slice(2), slice(-2, None)):
        out[:, :, rows, :3] = torch.einsum("bixy,ioxy->boxy", f[:, :, rows, :3], w)
    return torch.fft.irfft2(out)


def _filled(x: Tensor) -> tuple[Tensor, ...]:
    out = torch.full((4, 3), 1 + 2j)
    out[1] = x[0] * 2
    out[:, -1:] = 1
    return out, out.t()[0] * x[:, 0]


CALLS |= {
    "modes": (modes, (torch.randn(2, 3, 8, 8), _c(3, 4, 2, 3))),
    "filled": (_filled, (_c(4, 3),)),
    "joined": (lambda x, y: (torch.cat([x * 2, y], -1), torch.stack([x, y], -1), torch.cat([x, x.real])), (_c(3, 4), _c(3, 4))),
    "moved": (lambda x: (x.flip(-1), x.roll(1, -1), x.roll(2), F.pad(x, (1, 2)), F.pad(x, (1, 2), value=1.0)), (_c(3, 4),)),
    "copied": (lambda x: (x.t().contiguous(), x.t().clone(), x[:, :1].clone()), (_c(3, 4),)),
    "added_up": (lambda x: (x.sum(-1) * 2, x.sum(), (x * x).sum((0, -1), True), x.mean(1), x.sum(0, dtype=C128)), (_c(3, 4, 5),)),
    "views": (lambda x: (y := x * 2, y.t()[None, 1:].expand(2, -1, -1).conj() * x.t()[1:], y.flatten() + 1)[1:], (_c(3, 4),)),
}
BACKENDS: dict[str, dict[str, Any]] = {"x86_onednn": {}, "nvidia_triton": {"simulate": True}}


def _options(backend: str) -> dict[str, Any]:
    if "triton" in backend:
        pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")
    elif not registry.info(backend).available:
        pytest.skip(f"{backend}: {registry.info(backend).device}")
    return {**BACKENDS[backend], "cache": False, "never_slower": False, "strict": True}


def _flat(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def _wide(x: Tensor) -> Tensor:
    return x.to(C128 if x.is_complex() else torch.float64)


def _parts(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _error(got: Tensor, exact: Tensor) -> float:
    return (got.to(exact.dtype) - exact).abs().max().item()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_eagers(backend: str, name: str, dynamic: bool) -> None:
    fn, args = CALLS[name]
    with torch.no_grad():
        made = _flat(torch.compile(fn, backend=backend, dynamic=dynamic, options=_options(backend))(*args))
        eager, exact = _flat(fn(*args)), _flat(fn(*map(_wide, args)))
    for got, want, true in zip(made, eager, exact, strict=True):
        assert (got.dtype, got.shape, got.stride(), got.is_conj()) == (want.dtype, want.shape, want.stride(), want.is_conj())
        if name == "odd":
            torch.testing.assert_close(got, want, equal_nan=True)
        elif name.startswith("odd"):
            torch.testing.assert_close(*map(_parts, (got, want)), equal_nan=True)
        else:
            assert _error(got, true) <= 2 * _error(want, true) + 1e-6 * true.abs().max().item()


def test_what_was_conjugated_twice_is_a_view() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * x
        return y, y.conj(), y.conj().imag, y.conj().conj() * 2

    with torch.no_grad():
        y, conjugate, imag, _ = torch.compile(fn, backend="x86_onednn", options=_options("x86_onednn"))(_c(3, 4))
    assert y.data_ptr() == conjugate.data_ptr() == imag.data_ptr() - 4
    y.zero_()
    assert not imag.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_eagers(backend: str) -> None:
    def step(fn: Any, *args: Tensor) -> tuple[Tensor, ...]:
        given = [a.detach().clone().requires_grad_() for a in args]
        fn(*given).sum().backward()
        return tuple(a.grad for a in given)  # type: ignore[misc]

    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = torch.view_as_complex(x) * y
        return (z.conj() * y).abs() + torch.view_as_real(z).sum(-1).sin()

    args = torch.randn(5, 4, 2), _c(5, 4)
    made = step(torch.compile(fn, backend=backend, options=_options(backend)), *args)
    for got, want, true in zip(made, step(fn, *args), step(fn, *map(_wide, args)), strict=True):
        assert _error(got, true) <= 2 * _error(want, true) + 1e-6 * true.abs().max().item()


def test_gradients_keep_the_digits_of_numbers() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 0.8j

    x = _c(3, 4, dtype=C128).requires_grad_()
    compiled = torch.compile(fn, backend="x86_onednn", options=_options("x86_onednn"))
    made, want = (torch.autograd.grad(f(x).abs().sum(), x)[0] for f in (compiled, fn))
    torch.testing.assert_close(made, want, rtol=1e-14, atol=1e-14)


def test_steps_that_are_traced_as_one_keep_conjugates_lazy() -> None:
    """Their gradients read what the forward graph saved as lazy views."""

    def fn(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        h, g, out = z * 1, x[0] * 1, []
        for t in range(12):
            turned = h * torch.exp(1j * x[t]) + x[t] * (-0.3 + 0.1j)
            g = g * 0.5 + h.abs()
            h = turned
            out.append(h.imag * x[t])
        return torch.stack(out), h

    given = torch.randn(12, 4, dtype=torch.float64).requires_grad_(), _c(4, dtype=C128).requires_grad_()
    compiled = torch.compile(fn, backend="x86_onednn", options=_options("x86_onednn"))
    made, want = (torch.autograd.grad(torch.view_as_real(f(*given)[1]).sum(), given) for f in (compiled, fn))
    torch.testing.assert_close(made, want)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("of", ["product", "parts"])
def test_gradients_of_conjugates_are_in_memory_or_not(of: str, lazy: bool) -> None:
    """They were traced as conjugated, as the results are."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2 if of == "product" else torch.view_as_complex(torch.view_as_real(x) * 2)
        return y.conj(), (x * 3).conj().imag

    x, grads = _c(3, 4).requires_grad_(), (_c(4, 3).t(), torch.randn(3, 4))
    given = (grads[0].conj(), grads[1]) if lazy else grads
    (made,) = torch.autograd.grad(torch.compile(fn, backend="x86_onednn", options=_options("x86_onednn"))(x), x, given)
    (want,) = torch.autograd.grad(fn(x), x, given)
    torch.testing.assert_close(made, want)


def test_only_transforms_and_products_of_complex_numbers_are_eagers() -> None:
    with torch.no_grad(), recording(keep=True) as reports:
        torch.compile(modes, backend="x86_onednn", options=_options("x86_onednn"))(*CALLS["modes"][1])
    (report,) = reports
    not_lowered = {o.op for o in report.ops if o.where in ("eager", "carried")}
    assert not_lowered == {"aten._fft_r2c.default", "aten._fft_c2r.default", "bmm"}


@pytest.mark.parametrize("off", [False, True])
def test_a_rotary_embedding_of_complex_numbers_is_one_kernel(off: bool) -> None:
    options = {**_options("x86_onednn"), "disable_rules": ("complex.pairs",) if off else ()}
    with torch.no_grad(), recording(keep=True) as reports:
        torch.compile(rotary, backend="x86_onednn", options=options)(*CALLS["rotary_bf16"][1])
    (report,) = reports
    assert report.count("eager") == off
    assert report.kept is not None
    assert len(report.kept.kernels) == 1 + off


def test_a_graph_without_inputs_makes_complex_numbers() -> None:
    def fn() -> Tensor:
        return torch.full((4,), 1 + 2j, dtype=torch.complex128).conj().abs() + torch.zeros(4, dtype=torch.complex128).abs()

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fn, backend="x86_onednn", options=_options("x86_onednn"))(), fn())


def test_an_input_that_is_called_as_a_view_is_none() -> None:
    """Those of a step that is traced once have the names of what they were."""

    class Named(torch.nn.Module):
        def forward(self, select: Tensor, view_as_complex: Tensor) -> Tensor:
            return select * view_as_complex

    given = (_c(3, 4), _c(3, 4))
    traced = make_fx(Named(), tracing_mode="fake")(*given)
    for node, name in zip(traced.graph.find_nodes(op="placeholder"), ("select", "view_as_complex"), strict=True):
        node.target = name
    canonicalize(traced.graph)
    split(traced.graph, RuleLog())
    traced.recompile()
    torch.testing.assert_close(traced(*given), given[0] * given[1])
