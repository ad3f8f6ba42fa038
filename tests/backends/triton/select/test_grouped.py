"""Convolutions of small groups, and their gradients, are products by kernels of our own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright_triton.kernels import grouped_ops as kernels
from fusewright_triton.select import grouped as select
from tests.backends.triton.select.test_calls import BF16, Net, check, lowered, text

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "ELEMENTS", 1)


def calls(fragment: Any) -> list[str]:
    names = [t.partition("(")[0] for t in text(fragment)]
    return [n.removeprefix("fusewright_triton::") for n in names if "grouped" in n or "conv" in n]


SHAPES = [
    (4, 4, 8, 3, 1, 1, 1),
    (16, 16, 6, 1, 1, 0, 1),
    (24, 24, 3, 3, 2, 1, 1),
    (8, 4, 12, 3, 2, 1, 2),
    (2, 4, 16, 5, 1, 2, 1),
    (12, 12, 4, 2, 1, 0, 3),
    (40, 40, 2, 3, 1, 0, 1),
    (8, 8, 4, 3, 1, 2, 2),
]  # fmt: skip
"""Channels of a group, in and out, groups, window, stride, padding, dilation."""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("ins", "outs", "groups", "k", "stride", "padding", "dilation"), SHAPES)
def test_inference(ins: int, outs: int, groups: int, k: int, stride: int, padding: int, dilation: int, bias: bool) -> None:
    g = Net()
    how = {"stride": (stride, stride), "padding": (padding, padding), "dilation": (dilation, dilation), "groups": groups}
    y = g.conv(g.tensor(2, ins * groups, 7, 9), ins * groups, outs * groups, k, bias, **how)
    fragment = check(g, [g.relu(g.norm(y, outs * groups))])
    assert calls(fragment) == ["grouped_blocks", "grouped"]
    assert text(fragment, prepare=True)[0].startswith("fusewright_triton::grouped_blocks")


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True), (False, True, False)])
@pytest.mark.parametrize(("ins", "outs", "groups", "k", "stride", "padding", "dilation"), SHAPES)
def test_gradients(
    ins: int, outs: int, groups: int, k: int, stride: int, padding: int, dilation: int, mask: tuple[bool, bool, bool]
) -> None:
    g = Net()
    g.phase = "backward"
    x, w = g.images(2, ins * groups, 7, 9), g.images(outs * groups, ins, k, k)
    sizes = [(n + 2 * padding - (k - 1) * dilation - 1) // stride + 1 for n in (7, 9)]
    grad, both = g.images(2, outs * groups, *sizes), ((stride, stride), (padding, padding))
    bias = (outs * groups,) if mask[2] else None
    g.op("conv_backward", grad, x, w, bias, *both, (dilation, dilation), False, (0, 0), groups, mask)
    outputs = [v for v, wanted in zip(g.ops[-1].outs, mask, strict=True) if wanted]
    expected = ["grouped_blocks", "grouped_image_gradient"] * mask[0] + ["grouped_weight_gradient"] * mask[1]
    assert calls(check(g, outputs, exact=True)) == expected


@pytest.mark.parametrize("how", [
    {"groups": 1},
    {"groups": 48},
    {"groups": 3},
    {"groups": 2, "channels": 36},
    {"k": 7},
    {"stride": (1, 2)},
    {"images": False},
])  # fmt: skip
def test_others_stay(how: dict[str, Any]) -> None:
    """Dense, depthwise, of channels that make no tile, of large windows, of other strides, and planes in training."""
    g = Net()
    g.phase = "forward"
    given = {"groups": 8, "k": 3, "images": True, "channels": 48, "stride": (1, 1), **how}
    groups, k, images, channels = (given[n] for n in ("groups", "k", "images", "channels"))
    x = (g.images if images else g.tensor)(2, channels, 8, 8)
    w = g.tensor(channels, channels // groups, k, k)
    y = g.op("conv", x, w, None, given["stride"], (k // 2, k // 2), (1, 1), False, (0, 0), groups)
    assert calls(lowered(g, [y])) == ["aten::convolution"]


def test_small_images_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "ELEMENTS", 1 << 12)
    g = Net()
    assert calls(lowered(g, [g.conv(g.images(1, 32, 8, 8), 32, 32, groups=8)])) == ["aten::convolution"]


def test_infinities_stay_in_their_groups() -> None:
    """Though a tile of several groups is one product with zeros between them."""
    torch.manual_seed(0)
    x = torch.randn(2, 32, 6, 6).to(BF16).contiguous(memory_format=LAST)
    x[0, 5, 2, 2], x[1, 9, 1, 1] = torch.inf, torch.nan
    w = torch.randn(32, 4, 3, 3).to(BF16)
    ours = kernels.grouped(x, kernels.blocks(w, 8), w.shape, (1,) * 6, 8, "sm_90")
    eager = torch.nn.functional.conv2d(x, w, None, 1, 1, groups=8)
    assert torch.equal(ours.isnan(), eager.isnan()) and torch.equal(ours.isinf(), eager.isinf())
    finite = eager.isfinite()
    torch.testing.assert_close(ours[finite], eager[finite], atol=2e-1, rtol=2e-2)


def test_torch_computes_the_same() -> None:
    """Where Triton cannot build the kernels."""
    torch.manual_seed(0)
    x, grad = (torch.randn(s).to(BF16) for s in ((2, 16, 7, 6), (2, 24, 4, 3)))
    w, shape, how = torch.randn(24, 4, 3, 3).to(BF16), (24, 4, 3, 3), ((2, 2, 1, 1, 1, 1), 4, "sm_90")
    matrices = kernels.blocks(w, 4)
    for run, other, given in (
        (kernels.grouped, kernels._by_torch, (x, matrices, shape, *how)),
        (kernels.image_gradient, kernels._image_by_torch, (grad, matrices, (7, 6), shape, *how)),
        (kernels.weight_gradient, kernels._weight_by_torch, (grad, x, shape, *how)),
    ):
        ours, torchs = run(*given), other(*given)
        assert ours.stride() == torchs.stride()
        if run is kernels.weight_gradient:
            ours, torchs = ours.sum(0), torchs.sum(0)
        torch.testing.assert_close(ours, torchs, atol=2e-1, rtol=2e-2)


def test_no_images() -> None:
    w = torch.randn(16, 2, 3, 3).to(BF16)
    made = kernels.grouped(torch.randn(0, 16, 5, 5).to(BF16), kernels.blocks(w, 8), w.shape, (1,) * 6, 8, "sm_90")
    assert made.shape == (0, 16, 5, 5)
