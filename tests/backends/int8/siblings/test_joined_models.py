"""Joined int8 products in whole models: one for query, key and value in the plan, and results that change by no bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchao", reason="torchao is an optional dependency of fusewright-int8 (extra `quantize`)")

import fusewright
from fusewright.bench import suite
from fusewright.cache.tune import Tuner
from fusewright_int8.siblings import ROWS
from tests.backends.int8.common import needs_core

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), needs_core]

CALLS = {"static": "linear", "dynamic": "dynamic_linear", "weight_only": "weight_linear"}


@pytest.fixture(autouse=True)
def choices_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two measurements may choose differently (attention of bf16), and the bits of the results depend on it."""
    monkeypatch.setattr(Tuner, "choose", lambda self, key, candidates: next(iter(candidates)))


def run(model: nn.Module, given: Mapping[str, Tensor], **options: Any) -> Any:
    torch.compiler.reset()
    with torch.no_grad():
        return torch.compile(model, backend="x86_int8", options={"strict": True, "engine": "core", **options})(**given)


def both(model: nn.Module, given: Mapping[str, Tensor], plans: Any) -> tuple[list[str], list[str]]:
    """Compile with joined and with separate products, check that the results are equal, and return the int8 calls of each."""
    joined = run(model, given)
    with_siblings = plans.calls()
    apart = run(model, given, disable_rules=[row.id for row in ROWS])
    for ours, other in zip(torch.utils._pytree.tree_leaves(joined), torch.utils._pytree.tree_leaves(apart), strict=True):
        assert torch.equal(ours, other)
    return with_siblings, plans.calls()


def quantized(name: str, recipe: str, dtype: str = "fp32", keep: tuple[str, ...] = ()) -> tuple[nn.Module, dict[str, Tensor]]:
    built = suite.build(name, "small", dtype)  # type: ignore[arg-type]
    assert built.module is not None and not built.args
    given = dict(built.kwargs)
    return fusewright.quantize(built.module.eval(), [given], recipe, keep=keep, dynamic_batch=False), given


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", CALLS)
def test_a_layer_of_bert_has_four_products_in_place_of_six(recipe: str, dtype: str, plans: Any) -> None:
    pytest.importorskip("transformers", reason="the suite's models are Hugging Face's")
    joined, apart = both(*quantized("bert", recipe, dtype), plans)
    pooler = 1
    assert joined == [CALLS[recipe]] * (2 * 4 + pooler) and apart == [CALLS[recipe]] * (2 * 6 + pooler)


@pytest.mark.parametrize("recipe", CALLS)
def test_grouped_queries_keys_and_values_are_one_product_and_gate_and_up_another(recipe: str, plans: Any) -> None:
    """Llama's have unequal widths, and only the gate has an activation."""
    pytest.importorskip("transformers", reason="the suite's models are Hugging Face's")
    joined, apart = both(*quantized("llama", recipe), plans)
    head = 1
    assert joined == [CALLS[recipe]] * (2 * 4 + head) and apart == [CALLS[recipe]] * (2 * 7 + head)


class Attention(nn.Module):
    """Only the key has a bias, as in no model."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=bias) for bias in (False, True, False))
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("recipe", CALLS)
def test_one_layer_that_stays_in_floats_leaves_two_that_are_joined(recipe: str, plans: Any) -> None:
    x = torch.randn(2, 8, 64)
    model = fusewright.quantize(Attention().eval(), [{"x": x}], recipe, keep=["v"], dynamic_batch=False)
    joined, apart = both(model, {"x": x}, plans)
    assert joined == [CALLS[recipe]] * 2 and apart == [CALLS[recipe]] * 3


@pytest.mark.parametrize("recipe", CALLS)
def test_a_batch_of_symbolic_size_is_not_joined_since_each_result_would_be_copied(recipe: str, plans: Any) -> None:
    """As in floats (`onednn.product.siblings`)."""
    model = fusewright.quantize(Attention().eval(), [{"x": torch.randn(2, 8, 64)}], recipe)
    compiled = torch.compile(model, backend="x86_int8", options={"strict": True, "engine": "core"})
    with torch.no_grad():
        for batch in (2, 5):
            x = torch.randn(batch, 8, 64)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x=x), model(x=x), rtol=1e-4, atol=1e-4)
    assert plans.calls() == [CALLS[recipe]] * 4


def test_new_weights_are_joined_again(plans: Any) -> None:
    """What is joined is prepared once for each set of weights."""
    x = torch.randn(2, 8, 64)
    model = fusewright.quantize(Attention().eval(), [{"x": x}], "dynamic", dynamic_batch=False)
    compiled = torch.compile(model, backend="x86_int8", options={"strict": True, "engine": "core"})
    with torch.no_grad():
        first = compiled(x=x)
        for held in model.buffers():
            if held.dtype is torch.int8:
                held.neg_().clamp_(-127, 127)
        second = compiled(x=x)
        torch.testing.assert_close(second, model(x=x), rtol=1e-4, atol=1e-4)
    assert not torch.equal(first, second) and plans.calls() == ["dynamic_linear"] * 2
