"""Depthwise convolutions: what joins their kernel, what does not, and when oneDNN computes them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fusewright.interface import Value
from tests.backends.onednn.common import BF16, F32, check, close, compiled
from tests.backends.onednn.test_conv import CONV, COPY, Net
from tests.fragments import targets
from tests.hosts import FLOATS

KERNEL = "kernel depthwise_"


def depthwise(
    g: Net, x: Value, c: int, k: int = 3, stride: int = 1, padding: int = 0, dilation: int = 1, bias: bool = False
) -> Value:
    shift = g.weight(c) if bias else None
    geometry = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], c)
    return g.op("conv", x, g.weight(c, 1, k, k), shift, *geometry)


def calls(found: list[str]) -> list[str]:
    """What runs, without the name of a depthwise kernel after its type."""
    return [KERNEL if t.startswith(KERNEL) else t for t in found]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("special", [None, math.nan, math.inf, -math.inf])
def test_an_inverted_residual_is_three_calls(dtype: torch.dtype, stride: int, special: float | None) -> None:
    """As in MobileNetV2 with TensorFlow's padding: both clamps, the padding and the batch norm are in the kernel."""
    g = Net(dtype)
    x = g.image()
    if special is not None:
        g.tensors[x.id][1, 3, 2, 4] = special
    y = g.op("clamp", g.norm(g.conv(x, 8, 24, k=1), 24), 0, 6)
    y = g.op("constant_pad_nd", y, [0, 1, 0, 1] if stride == 2 else [1, 1, 1, 1], 0.0)
    y = g.op("clamp", g.norm(depthwise(g, y, 24, stride=stride), 24), 0, 6)
    assert calls(targets(check(g, [g.conv(y, 24, 8, k=1)]))) == [CONV, KERNEL, CONV, COPY]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("after", ["silu", "hardswish", "relu", ""])
@pytest.mark.parametrize("k, stride", [(3, 1), (3, 2), (5, 1), (5, 2)])
def test_the_faster_one_computes_it(dtype: torch.dtype, after: str, k: int, stride: int) -> None:
    """Where oneDNN's call needs no pass over memory more, a measurement decides."""
    g = Net(dtype)
    y = depthwise(g, g.conv(g.image(), 8, 20, k=1), 20, k, stride, k // 2, bias=True)
    y = g.op(after, y) if after else y
    assert calls(targets(check(g, [y], "kernel"))) == [CONV, KERNEL, COPY]
    exact = after not in ("relu",)
    assert calls(targets(check(g, [y], "onednn"))) == [CONV, CONV if exact else KERNEL, COPY]
    assert calls(targets(check(g, [y], "onednn", finite_math=True))) == [CONV, CONV, COPY]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("first", ["silu", "hardswish"])
@pytest.mark.parametrize("special", [None, math.nan, math.inf, -math.inf])
def test_an_activation_is_in_the_kernel_that_reads_it(dtype: torch.dtype, first: str, special: float | None) -> None:
    """oneDNN's convolution in front, which could compute it too, takes longer for it."""
    g = Net(dtype)
    x = g.image()
    if special is not None:
        g.tensors[x.id][1, 3, 2, 4] = special
    y = g.op(first, g.norm(g.conv(x, 8, 24, k=1), 24))
    y = g.op("silu", g.norm(depthwise(g, y, 24, padding=1), 24))
    found = targets(check(g, [y], "kernel"))
    assert calls(found) == [CONV, KERNEL, COPY] and f"of_{first}_silu" in found[1]
    assert targets(check(g, [y], "onednn")) == [CONV, CONV, COPY]


def test_one_number_counts_for_height_and_width() -> None:
    """padding="valid" is traced as [0]."""
    g = Net()
    y = g.op("constant_pad_nd", g.conv(g.image(), 8, 16, k=1), [0, 1, 0, 1], 0.0)
    y = g.op("conv", y, g.weight(16, 1, 3, 3), None, [2], [0], [1], False, [0], 16)
    assert calls(targets(check(g, [y]))) == [CONV, KERNEL, COPY]


def test_its_input_may_be_in_planes_and_have_other_readers() -> None:
    """The copy to channels-last and the addition read the same image: a kernel of both would wait for itself."""
    g = Net()
    x = g.image()
    y = g.op("add", depthwise(g, x, 8, padding=1), x)
    assert calls(targets(check(g, [y], "kernel"))) == ["kernel clone", KERNEL, "kernel add_clone"]


def test_an_activation_with_another_reader_stays_outside() -> None:
    g = Net()
    y = g.op("relu", g.conv(g.image(), 8, 16))
    z = g.op("add", g.op("relu", depthwise(g, y, 16, padding=1)), y)
    assert calls(targets(check(g, [z]))) == [CONV, "kernel relu", KERNEL, "kernel add_clone"]


@pytest.mark.parametrize("pad, value", [([1, 1, 1, 1], 0.5), ([-1, 2, 1, 1], 0.0), ([1, 1, 1, 1, 1, 1], 0.0)])
def test_only_zeros_around_the_image_join(pad: list[int], value: float) -> None:
    g = Net()
    c = 8 if len(pad) == 4 else 10
    y = g.op("constant_pad_nd", g.conv(g.image(), 8, 8, k=1), pad, value)
    assert calls(targets(check(g, [depthwise(g, y, c)], "kernel"))) == [CONV, "kernel constant_pad_nd", KERNEL, COPY]


def test_limits_that_are_not_numbers_stay_outside() -> None:
    g = Net()
    y = g.op("clamp", g.conv(g.image(), 8, 8, k=1), None, 3.0)
    y = g.op("clamp", depthwise(g, y, 8, padding=1), 0.0, None)
    assert calls(targets(check(g, [y], "kernel"))) == [CONV, "kernel clamp", KERNEL, COPY]


@pytest.mark.parametrize("form", ["kernel", "onednn"])
def test_a_large_window_is_measured_though_it_saves_a_pass(form: str) -> None:
    g = Net()
    y = g.op("relu", depthwise(g, g.conv(g.image(), 8, 16, k=1), 16, 7, padding=3))
    assert calls(targets(check(g, [y], form)))[:2] == [CONV, KERNEL if form == "kernel" else CONV]


@pytest.mark.parametrize("case", ["dilated", "fifteen", "grouped", "wide", "trained"])
def test_others_stay_oneDNNs(case: str) -> None:
    g = Net()
    x = g.op("relu", g.conv(g.image(), 8, 16, k=1))
    options: dict[str, Any] = {"prepack": "never"} if case == "trained" else {}
    match case:
        case "dilated":
            y = depthwise(g, x, 16, padding=2, dilation=2)
        case "fifteen":
            y = depthwise(g, x, 16, 15, padding=7)
        case "grouped":
            y = g.conv(x, 16, 16, groups=8)
        case "wide":
            y = g.conv(x, 16, 32, groups=16)
        case _:
            y = depthwise(g, x, 16, padding=1)
    assert not any(t.startswith(KERNEL) for t in targets(check(g, [y], "kernel", **options)))


class Inverted(torch.nn.Module):
    """Expand, depthwise, project and add, twice."""

    def __init__(self, act: type[torch.nn.Module], k: int) -> None:
        super().__init__()

        def conv(i: int, o: int, k: int, groups: int = 1) -> list[torch.nn.Module]:
            return [torch.nn.Conv2d(i, o, k, padding=k // 2, groups=groups, bias=False), torch.nn.BatchNorm2d(o)]

        def block() -> torch.nn.Module:
            return torch.nn.Sequential(*conv(12, 40, 1), act(), *conv(40, 40, k, 40), act(), *conv(40, 12, 1))

        self.blocks = torch.nn.ModuleList([block(), block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for b in self.blocks:
            x = x + b(x)
        return x


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("act, k", [(torch.nn.ReLU6, 3), (torch.nn.SiLU, 5), (torch.nn.Hardswish, 5), (torch.nn.ReLU, 3)])
def test_models_are_as_exact_as_in_eager(dtype: torch.dtype, act: type[torch.nn.Module], k: int) -> None:
    torch.manual_seed(0)
    m = Inverted(act, k).eval().to(dtype)
    x = torch.randn(2, 12, 15, 13, dtype=dtype)
    with torch.no_grad():
        ours, eager = torch.compile(m, backend="x86_onednn")(x), m(x)
        exact = m.double()(x.double())
    close(ours, eager)
    error, theirs = (float((t.double() - exact).norm()) for t in (ours, eager))
    assert error <= 2 * theirs


def test_a_fold_in_bf16_rounds_no_weight() -> None:
    """The kernel takes fp32 weights."""
    g = Net(BF16)
    y = g.norm(depthwise(g, g.conv(g.image(), 8, 16, k=1), 16, padding=1), 16)
    prepared = targets(compiled(g, [y], "kernel"), prepare=True)
    assert prepared[-3:] == ["aten::t", "aten::constant_pad_nd", "aten::clone"]
