"""Compiled calls raise eager's errors, with the same type and message, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright import registry
from fusewright.graph import canonicalize
from fusewright.report import recording
from tests.ops.bad_calls import CALLS, LOST, BadCall

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BACKENDS: dict[str, dict[str, Any]] = {
    "x86_onednn": {},
    "nvidia_triton": {"simulate": True},
    "rocm_triton": {"simulate": True},
    "fusewright_null": {},
    "fusewright_interp": {},
}
PAIRS = [(b, c) for b in BACKENDS for c in CALLS]
SAMPLE = [(b, c) for k, b in enumerate(BACKENDS) for c in list(CALLS)[k :: len(BACKENDS)]]


def said(fn: Any, args: tuple[Any, ...]) -> tuple[str, str]:
    """The type and first line of the error that a call raises."""
    with torch.no_grad(), pytest.raises((RuntimeError, IndexError, NotImplementedError)) as e:
        fn(*args)
    return e.type.__name__, str(e.value).partition("\n")[0].strip()


def compiled(fn: Any, backend: str, dynamic: bool = False) -> Any:
    torch.compiler.reset()
    options = {**BACKENDS[backend], "cache": False, "fallback": "allow", "strict": True} if backend in BACKENDS else None
    return torch.compile(fn, backend=backend, dynamic=dynamic, options=options)


def needs(backend: str) -> None:
    if "triton" in backend:
        pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")
    elif not (info := registry.info(backend)).available:
        pytest.skip(f"{backend}: {info.device.reason}; runs where: {info.device.fix}")


def check(backend: str, call: BadCall, name: str, dynamic: bool = False) -> None:
    needs(backend)
    eager = said(call.fn, call.args)
    assert call.text in eager[1]
    wanted = said(compiled(call.fn, "aot_eager", dynamic), call.args) if name in LOST else eager
    assert said(compiled(call.fn, backend, dynamic), call.args) == wanted


@pytest.mark.parametrize(("backend", "name"), SAMPLE)
def test_a_compiled_call_says_what_eager_says(backend: str, name: str) -> None:
    check(backend, CALLS[name], name)


@pytest.mark.parametrize("backend", ["x86_onednn", "nvidia_triton"])
def test_what_a_join_or_a_pad_leaves_out_is_not_divided(backend: str) -> None:
    def fn(a: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [op(a * 3, d[k : k + 4]) for k, op in enumerate((torch.remainder, torch.fmod, torch.floor_divide))]
        return torch.cat(parts, -1), torch.nn.functional.pad(a // d[:4], (1, 2))

    needs(backend)
    args = torch.arange(-8, 8).view(2, 8, 1), torch.tensor([2, -3, 1, 4, 5, -6])
    for got, want in zip(compiled(fn, backend)(*args), fn(*args), strict=True):
        assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_call_on_every_backend(backend: str) -> None:
    for name in (n for n in CALLS if (backend, n) not in SAMPLE):
        check(backend, CALLS[name], name)


@pytest.mark.slow
def test_every_index_with_symbolic_sizes() -> None:
    for name in (n for n in CALLS if n.startswith("index.") and n not in LOST):
        check("x86_onednn", CALLS[name], name, dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in CALLS if not n.startswith("size.")])  # there aot_eager gives empty tensors
def test_what_aot_eager_says_otherwise_is_listed(name: str) -> None:
    same = said(compiled(CALLS[name].fn, "aot_eager"), CALLS[name].args) == said(CALLS[name].fn, CALLS[name].args)
    assert same == (name not in LOST)


@pytest.mark.parametrize("name", ["index.one_embedding", "index.gather", "index.scatter_add", "index.nll_loss"])
def test_kernels_find_what_is_wrong(name: str) -> None:
    """A kernel reports the error, not an op that eager ran."""
    needs("x86_onednn")
    call = CALLS[name]
    with recording() as reports:
        assert said(compiled(call.fn, "x86_onednn"), call.args) == said(call.fn, call.args)
    assert reports[0].count("lowered") and not reports[0].count("eager")


@torch.no_grad()
@pytest.mark.parametrize("backend", ["x86_onednn", "nvidia_triton"])
def test_an_ignored_label_is_no_index(backend: str) -> None:
    """`ignore_index` and `padding_idx` may be out of bounds; gradients of other indices are left out."""
    needs(backend)
    loss = torch.nn.functional.nll_loss
    x, labels = torch.randn(3, 1).log_softmax(0), torch.tensor([0, 7, -100])
    for ignored in (7, -100):
        valid = torch.where(labels == (-100 if ignored == 7 else 7), 0, labels)
        fn = compiled(lambda x, i, ignored=ignored: loss(x, i, ignore_index=ignored), backend)
        torch.testing.assert_close(fn(x, valid), loss(x, valid, ignore_index=ignored))
    grads, rows = torch.randn(3, 4), torch.tensor([0, 9, 2])
    backward = torch.ops.aten.embedding_dense_backward
    out = compiled(lambda g, i: backward(g, i, 3, 2, False) + 0, backend)(grads, rows)
    torch.testing.assert_close(out, backward(grads, rows, 3, 2, False))


@pytest.mark.parametrize("fn", [lambda x: torch.floor_divide(x, 0.3) + x, lambda x: torch.heaviside(x, x) * x])
def test_a_call_without_a_gradient_raises_where_eager_does(fn: Any) -> None:
    """In the backward pass, not while the graph is traced."""
    needs("x86_onednn")
    x = torch.rand(4, requires_grad=True)
    out = torch.compile(fn, backend="x86_onednn", options={"cache": False})(x)
    torch.testing.assert_close(out, fn(x))
    with pytest.raises(RuntimeError, match="derivative for aten::"):
        out.sum().backward()
    with pytest.raises(Exception, match="derivative for aten::"):
        torch.compile(fn, backend="x86_onednn", options={"cache": False, "fallback": "error"})(x)


@pytest.mark.parametrize("backend", ["x86_onednn", "nvidia_triton"])
def test_a_limit_beyond_the_range_of_integers(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no limit where torch takes it, as from 2.15 on; kernels do not wrap it."""
    needs(backend)
    monkeypatch.setattr(canonicalize, "refusal", lambda *_: None)

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.clamp_min(-1000) + 1, x.clamp_max(1000) - 1, y.clamp(-1, 300) + 1, x.clamp(-200, 3) + 1

    x, y = torch.tensor([-128, -5, 0, 127], dtype=torch.int8), torch.tensor([0, 1, 200, 255], dtype=torch.uint8)
    for got, want in zip(compiled(fn, backend)(x, y), (x + 1, x - 1, y + 1, x.clamp(-128, 3) + 1), strict=True):
        assert torch.equal(got, want)
