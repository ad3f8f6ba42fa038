"""Depthwise convolutions for which cuDNN has no kernel of its own are sums in loop kernels."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.interface import Fragment
from fusewright.plan.ir import Call, Launch
from fusewright_triton.select import depthwise as select
from tests.backends.triton.select.test_calls import BF16, Net, check, lowered, text


def kernels(fragment: Fragment) -> int:
    """The number of kernels of a fragment that has no convolution."""
    assert not [t for t in text(fragment) if "conv" in t]
    return sum(isinstance(i, Launch) for i in fragment.instructions)


def depthwise(g: Net, x: Any, window: tuple[int, ...], bias: bool = True, **more: Any) -> Any:
    channels, ones = 6, (1,) * len(window)
    how = {"stride": ones, "padding": tuple(k // 2 for k in window), "dilation": ones, "results": channels, **more}
    b = g.weight(how["results"]) if bias else None
    zero = (0,) * len(window)
    geometry = how["stride"], how["padding"], how["dilation"]
    return g.op("conv", x, g.weight(how["results"], 1, *window), b, *geometry, False, zero, channels)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("window", "more"), [
    ((1, 11), {}),
    ((11, 1), {"stride": (2, 2), "padding": (1, 0)}),
    ((3, 3), {"dilation": (2, 2), "padding": (2, 2)}),
    ((2, 4), {"stride": (1, 3), "dilation": (2, 1), "padding": (0, 3)}),
])  # fmt: skip
def test_windows(window: tuple[int, ...], more: dict[str, Any], dtype: torch.dtype) -> None:
    for bias in (True, False):
        g = Net(dtype)
        x = g.images(2, 6, 13, 12)
        assert kernels(lowered(g, [g.relu(depthwise(g, x, window, bias, **more))])) <= 2  # one may pad
    if dtype is BF16:
        g = Net(dtype)
        x = g.images(2, 6, 13, 12)
        check(g, [g.relu(depthwise(g, x, window, **more))])


def test_sequences_and_planes() -> None:
    g = Net()
    assert kernels(check(g, [g.op("silu", depthwise(g, g.tensor(2, 6, 20), (4,), padding=(3,)))])) == 2
    g = Net()
    assert kernels(check(g, [depthwise(g, g.tensor(2, 6, 9, 8), (1, 5))])) >= 2


@pytest.mark.parametrize("padding", [0, 3])
def test_sequences_between_linears_stay_as_they_lie(padding: int) -> None:
    """Their channels are innermost; transposed for the convolution, and back behind it."""
    g = Net()
    y = depthwise(g, g.op("transpose", g.tensor(2, 20, 6), 1, 2), (4,), padding=(padding,))
    back = g.op("transpose", g.op("silu", y), 1, 2)
    fragment = check(g, [back])
    assert kernels(fragment) == 2  # of the weights, and of the sum
    g = Net()
    y = depthwise(g, g.op("transpose", g.tensor(2, 20, 6), 1, 2), (4,), padding=(padding,))
    check(g, [y])  # a result has eager's strides


@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
def test_several_results_for_each_channel(stride: tuple[int, int]) -> None:
    g = Net()
    fragment = check(g, [g.relu(depthwise(g, g.images(2, 6, 9, 8), (3, 3), stride=stride, results=18))])
    assert kernels(fragment) <= 2
    g = Net()
    assert kernels(check(g, [depthwise(g, g.tensor(2, 6, 20), (5,), results=12)])) <= 3


def test_norms_and_activations_on_both_sides() -> None:
    """Padding is a part of the kernel before, and the norm behind one of the sum."""
    g = Net()
    before = g.relu(g.norm(g.images(2, 6, 9, 8), 6))
    after = g.relu(g.norm(depthwise(g, before, (1, 7), bias=False), 6))
    assert kernels(check(g, [after])) == 2


def test_an_expensive_activation_is_computed_once() -> None:
    """Each element of a window reads all that is computed with it."""

    def of(activation: str) -> int:
        g = Net()
        return kernels(check(g, [depthwise(g, g.op(activation, g.tensor(2, 6, 20)), (9,))]))

    assert of("silu") == of("relu") + 1


@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
@pytest.mark.parametrize("window", [(3, 3), (5, 5), (7, 7), (6, 6)])
def test_windows_of_the_library(window: tuple[int, ...], stride: tuple[int, int]) -> None:
    g = Net()
    made = depthwise(g, g.images(2, 6, 9, 8), window, padding=(2, 2), stride=stride)
    assert [t for t in text(lowered(g, [made])) if "conv" in t]


def test_a_square_of_three_with_a_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "ALIGNED", 6)
    g = Net()
    assert kernels(check(g, [depthwise(g, g.images(2, 6, 9, 8), (3, 3), stride=(2, 2))])) <= 2


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("window", "stride"), [(3, 2), (5, 1), (5, 2), (7, 1)])
def test_images_of_two_by_two(window: int, stride: int, trains: bool) -> None:
    """The library computes one channel at a time there, unless images are in planes."""
    g = Net()
    x = g.images(3, 6, 2, 2)
    y = g.relu(depthwise(g, g.relu(x), (window, window), stride=(stride, stride), bias=False))
    g.phase = "forward" if trains else "infer"
    fragment = check(g, [y])
    read = [i.args[0].id for i in fragment.instructions if isinstance(i, Call) and "conv" in i.target]
    assert [g.temporaries[v].stride for v in read] == [(24, 4, 2, 1)] * (trains or window == 7)


def test_several_results_for_each_channel_in_training() -> None:
    g = Net()
    y = g.relu(depthwise(g, g.relu(g.images(2, 6, 9, 8)), (7, 7), stride=(2, 2), results=12))
    g.phase = "forward"
    (read,) = (i.args[0].id for i in check(g, [y]).instructions if isinstance(i, Call) and "conv" in i.target)
    assert g.temporaries[read].stride == (432, 72, 8, 1)


def test_convolutions_that_are_not_depthwise() -> None:
    g = Net()
    assert [t for t in text(lowered(g, [g.conv(g.images(2, 6, 9, 8), 6, 6, 4, groups=3)])) if "conv" in t]
