"""Convolutions of few channels, and of single pixels in groups, are products by a kernel of our own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.plan.ir import Launch
from fusewright_triton.kernels import convolution_ops as kernel
from fusewright_triton.select import few_channels as select
from tests.backends.triton.select.test_calls import BF16, Net, check, lowered, text


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "PIXELS", 1)


def convolutions(fragment: Any) -> list[str]:
    return [t.partition("(")[0] for t in text(fragment) if "conv" in t.partition("(")[0]]


OURS = ["fusewright_triton::convolution"]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("channels", "window", "more"), [
    (3, 3, {"stride": (2, 2)}),
    (1, 5, {"padding": (2, 0)}),
    (4, 7, {"stride": (4, 4), "padding": (3, 3)}),
    (6, 3, {"padding": (0, 0)}),
    (16, 2, {"stride": (1, 2), "padding": (1, 1)}),
])  # fmt: skip
@pytest.mark.parametrize("planes", [True, False])
def test_first_convolutions(planes: bool, channels: int, window: int, more: dict[str, Any], norm: bool) -> None:
    g = Net()
    x = (g.tensor if planes else g.images)(2, channels, 13, 11)
    y = g.conv(x, channels, 20, window, bias=not norm, **more)
    assert convolutions(check(g, [g.relu(g.norm(y, 20)) if norm else y])) == OURS


@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_first_convolutions_of_training(bias: bool, planes: bool) -> None:
    """Their weights change, so they are laid out at each call; images in planes stay the library's."""
    g = Net()
    g.phase = "forward"
    x = (g.tensor if planes else g.images)(2, 3, 9, 11)
    w, b = g.tensor(20, 3, 3, 3), g.tensor(20) if bias else None
    y = g.op("conv", x, w, b, (2, 2), (1, 1), (1, 1), False, (0, 0), 1)
    fragment = check(g, [y, g.relu(y)])
    assert convolutions(fragment) == (["aten::convolution"] if planes else OURS) and not text(fragment, prepare=True)


@pytest.mark.parametrize("activation", ["relu", "silu", "sigmoid", "gelu"])
def test_the_activation_is_an_epilogue(activation: str) -> None:
    g = Net()
    fragment = check(g, [g.op(activation, g.norm(g.conv(g.tensor(2, 3, 9, 9), 3, 8), 8))])
    assert [t for t in text(fragment) if "fusewright_triton::convolution" in t and f"'{activation}'" in t]


def test_pixels_in_groups() -> None:
    g = Net()
    y = g.conv(g.images(2, 48, 6, 5), 48, 96, 1, bias=True, groups=3, stride=(2, 1))
    assert convolutions(check(g, [g.op("silu", y)])) == OURS


@pytest.mark.parametrize(("channels", "window", "more"), [
    (17, 3, {}),
    (12, 3, {"outs": 160}),
    (3, 1, {}),
    (32, 1, {"groups": 2}),
    (24, 1, {"groups": 3}),
    (48, 3, {"groups": 3}),
    (48, 1, {"groups": 3, "padding": (1, 1)}),
])  # fmt: skip
def test_others_stay(channels: int, window: int, more: dict[str, Any]) -> None:
    g = Net()
    how = {"outs": 48, **more}
    outs = how.pop("outs")
    assert not set(OURS) & set(convolutions(lowered(g, [g.conv(g.images(2, channels, 6, 6), channels, outs, window, **how)])))


def test_small_images_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "PIXELS", 99)
    g = Net()
    assert convolutions(lowered(g, [g.conv(g.images(2, 3, 7, 7), 3, 8)])) == ["aten::convolution"]


def test_padding_takes_one_kernel() -> None:
    g = Net()
    fragment = check(g, [g.conv(g.images(2, 3, 8, 8), 3, 8)])
    assert sum(isinstance(i, Launch) for i in fragment.instructions) == 1
    g = Net()
    fragment = check(g, [g.conv(g.images(2, 4, 8, 8), 4, 8, padding=(0, 0))])
    assert not [i for i in fragment.instructions if isinstance(i, Launch)]


def test_infinities_stay_in_their_windows() -> None:
    """Zeros behind the channels meet zeros of the weight only."""
    x = torch.randn(1, 3, 8, 8).to(BF16)
    x[0, 1, 2, 2] = torch.inf
    w = torch.randn(8, 3, 3, 3).to(BF16)
    pad = torch.nn.functional.pad
    ours = kernel.convolution(pad(x, (1, 1, 1, 1, 0, 1)), kernel.packed(pad(w, (0, 0, 0, 0, 0, 1))), None, "", (1, 1), 1, "sm_90")
    eager = torch.nn.functional.conv2d(x, w, None, 1, 1)
    assert torch.equal(ours.isfinite(), eager.isfinite())


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_torch_computes_the_same(dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(s).to(dtype) for s in ((2, 36, 5, 7), (24, 6, 1, 1), (24,)))
    given = (x, kernel.packed(w), b, "silu", (1, 2), 6, "sm_90")
    ours, torchs = kernel.convolution(*given), kernel.by_torch(*given)
    assert ours.stride() == torchs.stride()
    torch.testing.assert_close(ours, torchs, atol=2e-2, rtol=2e-2)


def test_no_pixels() -> None:
    x, w = torch.randn(0, 4, 5, 5).to(BF16), torch.randn(8, 4, 3, 3).to(BF16)
    assert kernel.convolution(x, w, None, "", (1, 1), 1, "sm_90").shape == (0, 8, 3, 3)
