"""Convolutions of three spatial dims, and transposed ones: channels-last, in inference and in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.interface import Fragment, Value
from fusewright.plan.ir import Call, Launch
from fusewright_triton.select import more_channels
from tests.backends.triton.select.test_calls import BF16, Net, check, lowered, text
from tests.fragments import targets
from tests.hosts import needs_bf16

CUBE, SQUARE = (2, 8, 4, 5, 6), (2, 8, 5, 6)
LAYOUTS = pytest.mark.parametrize("shape", [CUBE, SQUARE], ids=["3-d", "2-d"])


def copies(fragment: Fragment) -> int:
    return sum(t.startswith("kernel clone") for t in targets(fragment))


@needs_bf16
@pytest.mark.parametrize(("shape", "transposed"), [(CUBE, False), (CUBE, True), (SQUARE, True)])
@pytest.mark.parametrize("bias", [True, False])
def test_images_stay_channels_last_between_convolutions(shape: tuple[int, ...], transposed: bool, bias: bool) -> None:
    """Only the first is given another layout, and the last gives the result eager's strides; norms and sums are kernels."""
    g = Net()
    x = g.relu(g.conv(g.tensor(*shape), 8, 8, bias=bias, transposed=transposed))
    y = g.relu(g.op("add", g.norm(g.conv(x, 8, 8, bias=bias, transposed=transposed), 8), x))
    found = check(g, [y])
    assert targets(found).count("aten::convolution") == 2 and copies(found) <= 2
    assert any("channels-last" in note for note in found.notes.values())
    laid = [s for s in g.temporaries.values() if s is not None and len(s.shape) == len(shape) and min(s.shape[2:]) > 1]
    assert sum(s.stride[1] == 1 for s in laid) > len(laid) / 2


def test_no_fused_call_of_the_library_is_asked_for_volumes() -> None:
    g = Net()
    y = g.relu(g.norm(g.conv(g.tensor(*CUBE), 8, 8), 8))
    calls = [t for t in targets(lowered(g, [y])) if "convolution" in t]
    assert calls == ["aten::convolution"]


def test_groups_of_volumes_keep_all_of_a_region_in_planes() -> None:
    g = Net()
    y = g.conv(g.relu(g.conv(g.tensor(*CUBE), 8, 8)), 8, 8, groups=8)
    fragment = check(g, [y])
    assert not copies(fragment) and not any("channels-last" in n for n in fragment.notes.values())


@needs_bf16
@pytest.mark.parametrize("shape", [(2, 1, 4, 5, 6), (1, 1, 5, 6)], ids=["3-d", "2-d"])
@pytest.mark.parametrize("norm", [True, False])
def test_single_pixels_of_one_channel_stay_channels_last(shape: tuple[int, ...], norm: bool) -> None:
    """Neither the image nor the weight tells a layout, so that torch would choose planes, and a kernel read the wrong elements."""
    g = Net()
    y = g.conv(g.tensor(*shape), 1, 8, 1, bias=True)
    fragment = check(g, [g.relu(g.norm(y, 8) if norm else y)])
    assert "aten::convolution" in targets(fragment)


@pytest.mark.parametrize("last", [True, False])
def test_patches_of_volumes_are_products(last: bool) -> None:
    """As in transformers of videos: in inference, in training, and for the gradient of the weight."""
    g, how = Net(), {"stride": (2, 2, 2), "padding": (0, 0, 0)}
    x = (g.images if last else g.tensor)(2, 3, 4, 6, 4)
    fragment = check(g, [g.conv(x, 3, 8, 2, bias=True, **how)])
    assert "aten::linear" in targets(fragment) and "aten::convolution" not in targets(fragment)
    g = Net()
    g.phase = "backward"
    grad, x = g.tensor(2, 8, 2, 3, 2), (g.images if last else g.tensor)(2, 3, 4, 6, 4)
    ones, zeros = (1, 1, 1), (0, 0, 0)
    g.op("conv_backward", grad, x, g.tensor(8, 3, 2, 2, 2), (8,), (2, 2, 2), zeros, ones, False, zeros, 1, (False, True, True))
    fragment = check(g, list(g.ops[-1].outs[1:]))
    assert "aten::mm" in targets(fragment) and not [t for t in targets(fragment) if "conv" in t]


def test_single_pixels_of_volumes_with_an_activation_are_products(thresholds: Callable[..., None]) -> None:
    thresholds(product_results=1)
    g = Net()
    x = g.images(2, 64, 2, 4, 8)
    fragment = check(g, [g.op("silu", g.norm(g.conv(x, 64, 64, 1), 64))])
    assert [t for t in targets(fragment) if "linear" in t] and "aten::convolution" not in targets(fragment)


@needs_bf16
@pytest.mark.parametrize("shape", [CUBE, SQUARE], ids=["3-d", "2-d"])
def test_what_reads_an_instance_norm_reads_it_as_the_images_lie(shape: tuple[int, ...]) -> None:
    """Two readers: one copy would be made for a convolution alone."""
    g = Net()
    x = g.conv(g.tensor(*shape), 8, 8)
    y = g.op("view", x, (1, 16, *shape[2:]))
    y = g.op("batch_norm_no_stats", y, None, None, True, 0.1, 1e-5)
    y = g.op("leaky_relu", g.op("view", y, shape), 0.01)
    z = g.op("add", g.conv(y, 8, 8), y)
    fragment = check(g, [z])
    launches = [i for i in fragment.instructions if isinstance(i, Launch)]
    assert len(launches) == 3, "the images laid, the norm with its activation, the sum in planes"
    assert all(g.temporaries[o].stride[1] == 1 for i in launches[:2] for o in i.outs)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(more_channels, "LARGE", 1)


def shapes(g: Net, fragment: Fragment, target: str) -> list[tuple[Any, ...]]:
    """The shapes of what a call makes."""
    made = {i.outs for i in fragment.instructions if isinstance(i, Call) and i.target.startswith(target)}
    return [tuple(g.temporaries[o].shape) for outs in made for o in outs if g.temporaries.get(o) is not None]


@needs_bf16
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("channels", "outs"), [(3, 8), (1, 8), (12, 18)])
@pytest.mark.usefixtures("large")
def test_channels_that_libraries_pad(channels: int, outs: int, bias: bool) -> None:
    g = Net()
    y = g.relu(g.norm(g.conv(g.tensor(2, channels, 3, 4, 5), channels, outs, bias=bias), outs))
    fragment = check(g, [y])
    assert [c for c in text(fragment, prepare=True) if "constant_pad_nd" in c]
    assert any("channels of zeros" in n for n in fragment.notes.values())


def volume(g: Net, *shape: int) -> Value:
    """Draw images as a training step lays them: channels-last, also where one channel says nothing about it."""
    x = torch.randn(shape[0], *shape[2:], shape[1]).to(BF16).movedim(-1, 1)
    return g.input(x)


@needs_bf16
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("large")
def test_few_channels_of_a_training_step(channels: int, bias: bool) -> None:
    """Forward, and the gradients of weight and bias."""
    ones, zeros = (1, 1, 1), (0, 0, 0)
    g = Net()
    g.phase = "forward"
    x, w = volume(g, 2, channels, 3, 4, 5), volume(g, 8, channels, 3, 3, 3)
    y = g.op("conv", x, w, g.tensor(8) if bias else None, ones, ones, ones, False, zeros, 1)
    fragment = check(g, [g.relu(y)])
    assert any("channels of zeros" in n for n in fragment.notes.values())
    g = Net()
    g.phase = "backward"
    grad, x, w = volume(g, 2, 8, 3, 4, 5), volume(g, 2, channels, 3, 4, 5), volume(g, 8, channels, 3, 3, 3)
    mask, sizes = (False, True, bias), (8,) if bias else None
    g.op("conv_backward", grad, x, w, sizes, ones, ones, ones, False, zeros, 1, mask)
    fragment = check(g, list(g.ops[-1].outs[1 : 2 + bias]))
    assert any("channels of zeros" in n for n in fragment.notes.values())
    (call,) = [c for c in text(fragment) if "convolution_backward" in c]
    assert "(False, True, False)" in call


@pytest.mark.parametrize("mask", [(True, True, False), (False, True, True), (False, True, False)])
def test_other_gradients_of_volumes_stay(mask: tuple[bool, bool, bool]) -> None:
    """Small ones, and those of images: the library's call, without the bias's."""
    ones, zeros = (1, 1, 1), (0, 0, 0)
    g = Net()
    g.phase = "backward"
    grad, x, w = volume(g, 2, 8, 3, 4, 5), volume(g, 2, 3, 3, 4, 5), volume(g, 8, 3, 3, 3, 3)
    g.op("conv_backward", grad, x, w, (8,) if mask[2] else None, ones, ones, ones, False, zeros, 1, mask)
    fragment = check(g, [o for o, wanted in zip(g.ops[-1].outs, mask, strict=True) if wanted])
    assert not any("channels of zeros" in n for n in fragment.notes.values())
