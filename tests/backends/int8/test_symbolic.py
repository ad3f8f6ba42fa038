"""Quantized models of symbolic sizes run in int8, bit for bit as with fixed sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchao", reason="torchao is optional; runs with it: pip install fusewright-int8[quantize]")

import fusewright
from fusewright import report
from tests.backends.int8.common import needs_core

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), needs_core]

CALLS = {"static": "linear", "dynamic": "dynamic_linear", "weight_only": "weight_linear", "torchao": "dynamic_linear"}


class Rows(nn.Module):
    """A model of [rows, width] on [batch, length, width]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.reshape(-1, x.shape[-1]))
        return out.reshape(x.shape)


def quantized(recipe: str, *sizes: int) -> nn.Module:
    """The MLP of a transformer, for inputs of these sizes."""
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).eval()
    if recipe != "torchao":
        return fusewright.quantize(model, [torch.randn(*sizes, 64)], recipe)
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def compiled(model: nn.Module, dynamic: bool) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend="x86_int8", dynamic=dynamic, options={"strict": True, "engine": "core", "cache": False})


@pytest.mark.parametrize("recipe", CALLS)
def test_a_symbolic_length_gives_the_bits_of_a_fixed_one(recipe: str, plans: Any) -> None:
    model = quantized(recipe, 2, 9)
    lengths = (7, 5, 19, 1, 0) if recipe != "torchao" else (7, 5, 19, 1)  # its tensors refuse no rows in eager too
    given = {n: torch.randn(2, n, 64) for n in lengths}
    with torch.no_grad():
        fixed = {n: compiled(model, False)(x) for n, x in given.items()}
        plans._reports.clear()
        f = compiled(model, True)
        for n in lengths:
            assert torch.equal(f(given[n]), fixed[n])
    assert plans.calls(0) == [CALLS[recipe]] * 2
    assert len(plans._reports) <= 3, "one plan for all lengths, and those of no and of one row"


@pytest.mark.parametrize("recipe", ["static", "dynamic", "weight_only"])
def test_one_plan_for_any_number_of_rows(recipe: str, plans: Any) -> None:
    model = quantized(recipe, 9)
    f = compiled(model, True)
    with torch.no_grad():
        for n in (4, 0, 1, 30):
            x = torch.randn(n, 64)
            torch._dynamo.decorators.mark_unbacked(x, 0)
            ours, eager = f(x), model(x)
            assert ours.shape == eager.shape
            torch.testing.assert_close(ours, eager, rtol=0, atol=0.05)
    assert len(plans._reports) == 1 and plans.calls() == [CALLS[recipe]] * 2


def test_what_stays_in_floats_says_why() -> None:
    """The product's rows are one symbolic size in its input and two in its result."""
    with torch.no_grad(), report.recording() as reports:
        compiled(Rows(quantized("static", 9)), True)(torch.randn(2, 7, 64))
    one, other = (r.note for r in reports[-1].ops if r.op == "linear")
    assert one.startswith("int8 linear, core") and other.startswith("not int8: of symbolic size, with a result in another layout")
