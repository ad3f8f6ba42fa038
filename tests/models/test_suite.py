"""Every model of the suite at small size: `null` equals aot_eager bit for bit, the other backends pass the fp64 rule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import registry
from fusewright.bench import suite
from fusewright.bench.accuracy import Accuracy, compare, reference, train_reference
from fusewright.bench.suite import Built, flatten_outputs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Options = dict[str, Any] | None


def compiled(fn: Callable[..., Any], backend: str, options: Options = None) -> Callable[..., Any]:
    return torch.compile(fn, backend=backend, options=options)


@cache
def built(model: str, dtype: suite.DType) -> Built:
    return suite.build(model, "small", dtype)


@cache
def wide(model: str, dtype: suite.DType) -> Sequence[Tensor]:
    return reference(built(model, dtype))


def outputs(model: str, dtype: suite.DType, backend: str | None, options: Options = None) -> list[Tensor]:
    """The flat outputs of one seeded call, without gradients."""
    call = built(model, dtype)
    torch.manual_seed(3)
    with torch.no_grad():
        return flatten_outputs(call.run(None if backend is None else compiled(call.fn, backend, options)))


def needs(backend: str) -> None:
    if not registry.info(backend).available:
        pytest.skip(f"{backend}: {registry.info(backend).device}")


def same_bits(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    return len(a) == len(b) and all(
        (x is None and y is None)
        or (x is not None and y is not None and torch.equal(x, y) and x.stride() == y.stride())
        for x, y in zip(a, b, strict=True)
    )


# What is captured of the others is compared in test_differential.py.
@pytest.mark.parametrize("model", ["gpt2", "resnet50", "swin_tiny"])
def test_null_is_aot_eager(model: str) -> None:
    ours = outputs(model, "fp32", "fusewright_null")
    torch.compiler.reset()
    assert same_bits(ours, outputs(model, "fp32", "aot_eager"))


@pytest.mark.parametrize("model", suite.TRAINABLE)
def test_null_is_aot_eager_in_training(model: str) -> None:
    def step(backend: str) -> list[Tensor]:
        torch.compiler.reset()
        made = suite.train_step(model, "small")
        made.compiled = compiled(made.module, backend)
        torch.manual_seed(3)
        return made.loss_and_grads()

    assert same_bits(step("fusewright_null"), step("aot_eager"))


@pytest.mark.parametrize("model", suite.SUITE)
def test_interp_is_close(model: str) -> None:
    """`interp` computes each op in fp64 and rounds to fp32 in between, so it is at least as accurate as eager."""
    verdict = compare(
        wide(model, "fp32"), outputs(model, "fp32", None), outputs(model, "fp32", "fusewright_interp"), "fp32"
    )
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "amp"])
@pytest.mark.parametrize("model", suite.SUITE)
def test_x86_onednn_passes_the_fp64_rule(model: str, dtype: suite.DType) -> None:
    needs("x86_onednn")
    verdict = compare(wide(model, dtype), outputs(model, dtype, None), outputs(model, dtype, "x86_onednn"), dtype)
    assert verdict.passed, verdict.reason


def gradient_verdict(model: str, dtype: suite.DType, backend: str, options: Options = None) -> Accuracy:
    """Judge loss and gradients of one step by the fp64 rule."""
    eager = suite.train_step(model, "small", dtype)
    ours = copy.deepcopy(eager)
    ours.compiled = compiled(ours.module, backend, options)
    torch.manual_seed(3)
    wanted = eager.loss_and_grads()
    torch.manual_seed(3)
    exact, got = train_reference(eager), ours.loss_and_grads()
    scale = max(float(e.abs().max()) for e in exact[1:])
    # the gradient of a key's bias is zero: every library returns its own rounding noise
    real = [k for k, e in enumerate(exact) if k == 0 or float(e.abs().max()) > 1e-6 * scale]
    assert len(real) > len(exact) // 2
    for k in set(range(len(exact))) - set(real):
        assert float(got[k].abs().max()) <= 1e-5 * scale
    return compare([exact[k] for k in real], [wanted[k] for k in real], [got[k] for k in real], dtype)


@pytest.mark.parametrize("dtype", ["fp32", "amp"])
@pytest.mark.parametrize("model", suite.TRAINABLE)
def test_gradients_pass_the_fp64_rule(model: str, dtype: suite.DType) -> None:
    needs("x86_onednn")
    verdict = gradient_verdict(model, dtype, "x86_onednn")
    assert verdict.passed, verdict.reason
