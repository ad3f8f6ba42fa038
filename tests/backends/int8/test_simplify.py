"""Padding and clamps around quantized products are rewritten: the same levels, and no floating point in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("torchao", reason="torchao is an optional dependency of fusewright-int8 (extra `quantize`)")

import fusewright
from fusewright import report
from fusewright_int8.flow import convert
from tests.backends.int8.common import needs_core

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Padded(nn.Module):
    """Pads as TensorFlow's models do: before each convolution, asymmetrically if it is strided."""

    def __init__(self, pads: tuple[list[int], ...], limit: Callable[[Tensor], Tensor] = F.relu6) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 16, 3, stride=2), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 8, 1)])
        self.pads, self.limit = pads, limit

    def forward(self, x: Tensor) -> Tensor:
        for conv, pads in zip(self.convs, self.pads, strict=True):
            x = self.limit(conv(F.pad(x, pads)))
        return x


SAME = [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]
UNEVEN = [0, 1, 0, 1], [0, 1, 2, 1], [1, 0, 0, 0]


@needs_core
@pytest.mark.parametrize("pads", [SAME, UNEVEN])
def test_no_float_image_lies_between_padded_convolutions(pads: Any) -> None:
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        quantized = fusewright.quantize(model := Padded(pads).eval(), [x])
        with report.recording() as reports:
            ours = torch.compile(quantized, backend="x86_int8", options={"engine": "core"})(x)
    plan = reports[-1].texts["plan"].partition("def run(")[2]
    made = [line for line in plan.splitlines() if "= fusewright_int8_" in line and "float32[" in line]
    assert len(made) == 1, made  # the last one
    torch.testing.assert_close(ours, quantized(x), rtol=0, atol=1.1 * float(ours[ours > 0].min()))
    assert float((ours - model(x)).abs().max()) < 0.1


@pytest.mark.parametrize("pads", [SAME, UNEVEN])
@pytest.mark.parametrize("limit", [F.relu6, lambda x: torch.clamp(x, 0, 0.5), F.hardtanh, lambda x: torch.clamp(x, max=1)])
def test_quantized_graphs_give_the_same_bits_as_before(
    pads: Any, limit: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 3, 16, 16)
    model = Padded(pads, limit).eval()
    ours = fusewright.quantize(copy.deepcopy(model), [x])
    monkeypatch.setattr(convert, "after_converting", lambda graph: graph)
    assert torch.equal(ours(x), fusewright.quantize(model, [x])(x))


@pytest.mark.parametrize("pads", [SAME, UNEVEN])
def test_zeros_become_the_padding_of_the_convolution(pads: Any) -> None:
    x, model = torch.randn(2, 3, 16, 16), Padded(pads).eval()
    with torch.no_grad():
        exported = convert.export(model, ((x,), {}), dynamic_batch=False)
        assert torch.equal(exported(x), model(x))
    left = [n for n in exported.graph.nodes if "pad" in str(n.target)]
    assert len(left) == sum(p[0] != p[1] or p[2] != p[3] for p in pads)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "ones"])
def test_padding_with_something_else_than_zeros_stays(mode: str) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            kind = {"mode": "constant", "value": 1.0} if mode == "ones" else {"mode": mode}
            return self.conv(F.pad(torch.relu(x), [1, 1, 1, 1], **kind))

    x = torch.randn(2, 3, 8, 8)
    quantized = fusewright.quantize(model := Other().eval(), [x])
    torch.testing.assert_close(quantized(x), model(x), rtol=0, atol=0.05)
