"""Small models of the suite on aarch64: right by the fp64 rule, with no heavy work in oneDNN's reference kernels.

On other machines a few of them run on the simulated device; ci/aarch64.sh runs all of them under emulation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from fusewright.bench import suite
from fusewright.bench.accuracy import compare, reference, train_reference
from fusewright.bench.suite import flatten_outputs
from tests.backends.acl import common
from tests.backends.acl.common import HERE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS: dict[str, Any] = {"strict": True} if HERE else {"strict": True, "simulate": True}
MODELS = ("bert", "resnet50", "gpt2", "llama", "mobilenet_v2", "convnext_tiny", "vit", "t5_small")
on_arm = pytest.mark.hardware("graviton_acl")


@cache
def built(model: str, dtype: suite.DType) -> suite.Built:
    return suite.build(model, "small", dtype)


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="graviton_acl", options={**OPTIONS, **options})


def without_references(run: Callable[[], Any]) -> Any:
    """Return the result of `run`; on aarch64, fail if a reference kernel did heavy work."""
    found, seen = common.without_references(run)
    assert not HERE or any(e.heavy for e in seen), seen
    return found


def right(model: str, dtype: suite.DType, **options: Any) -> None:
    call = built(model, dtype)
    with torch.no_grad():
        ours = compiled(call.fn, **options)
        first = without_references(lambda: flatten_outputs(call.run(ours)))
        again = flatten_outputs(call.run(ours))
        eager = flatten_outputs(call.run())
    for got in (first, again):
        verdict = compare(reference(call), eager, got, dtype)
        assert verdict.passed, verdict


EVERYWHERE = {("bert", "fp32"), ("resnet50", "bf16")}
QUICK = EVERYWHERE | {("gpt2", "amp"), ("llama", "bf16"), ("mobilenet_v2", "bf16"), ("convnext_tiny", "bf16")}


def _case(model: str, dtype: str) -> Any:
    marks = ([] if (model, dtype) in EVERYWHERE else [on_arm]) + ([] if (model, dtype) in QUICK else [pytest.mark.slow])
    return pytest.param(model, dtype, marks=marks)


@pytest.mark.parametrize(("model", "dtype"), [_case(m, d) for m in MODELS for d in ("fp32", "bf16", "amp")])
def test_inference(model: str, dtype: suite.DType) -> None:
    right(model, dtype, prepack="always")


@on_arm
def test_fp32_multiplied_in_bf16_is_as_right_as_autocast() -> None:
    call, half = built("bert", "fp32"), built("bert", "amp")
    with torch.no_grad():
        ours = compiled(call.fn, fpmath="bf16")
        got = without_references(lambda: flatten_outputs(call.run(ours)))
        eager = [t.float() for t in flatten_outputs(half.run())]
    verdict = compare(reference(call), eager, got, "amp")
    assert verdict.passed and verdict.err_rms > 1e-5, verdict


@on_arm
@pytest.mark.parametrize("model", ["bert", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_inference_in_forms_that_were_measured(model: str) -> None:
    right(model, "fp32")


TRAINED = [("resnet18", "fp32"), ("bert_small", "amp"), ("gpt2_small", "fp32"), ("resnet18", "amp"), ("bert_small", "fp32"),
           ("gpt2_small", "amp")]  # fmt: skip
STEPS = [pytest.param(*t, marks=[*([on_arm] if k else []), *([pytest.mark.slow] if k > 2 else [])]) for k, t in enumerate(TRAINED)]


@pytest.mark.parametrize(("model", "dtype"), STEPS)
def test_training(model: str, dtype: suite.DType) -> None:
    eager = suite.train_step(model, "small", dtype)
    ours = copy.deepcopy(eager)
    ours.compiled = compiled(ours.module)
    torch.manual_seed(3)
    wanted = eager.loss_and_grads()
    torch.manual_seed(3)
    got = without_references(ours.loss_and_grads)
    exact = train_reference(eager)
    scale = max(float(e.abs().max()) for e in exact[1:])
    real = [k for k, e in enumerate(exact) if k == 0 or float(e.abs().max()) > 1e-6 * scale]  # not a key's bias
    verdict = compare(*([t[k] for k in real] for t in (exact, wanted, got)), dtype)
    assert verdict.passed, verdict
