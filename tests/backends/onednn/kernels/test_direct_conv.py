"""Convolutions of fp32 in kernels of our own, with what follows."""

from __future__ import annotations

import math

import pytest
import torch

from fusewright.interface import Fragment
from fusewright_cpu.target import host_target
from tests.backends.onednn.common import BF16, check, compiled
from tests.backends.onednn.test_conv import CONV, COPY, Net
from tests.fragments import targets

if host_target().arm or not (host_target().masks and host_target().fma):
    pytest.skip("the kernel needs AVX2 with FMA, or AVX-512; runs where: a CPU has one of them", allow_module_level=True)

AVX512 = host_target().vector_bytes == 64
POINTWISE = "vector_linear_16_16" if AVX512 else "direct pointwise"
"""The kernel of a 1x1 convolution of one group."""


def kernels(fragment: Fragment) -> list[str]:
    """Return the names of launched kernels without their tiles."""
    names = [t.removeprefix("kernel ") for t in targets(fragment)]
    return [n if not n.startswith("direct_conv") else "direct" + "".join(f" {p}" for p in n.split("_")[4:]) for n in names]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("act", ["relu", "silu", "gelu", "hardswish", "sigmoid"])
def test_all_that_follows_is_in_the_kernel(act: str, groups: int) -> None:
    g = Net()
    x = g.input(torch.randn(2, 16, 7, 7))
    y = g.op("add", g.norm(g.conv(x, 16, 16, groups=groups), 16), x)
    z = g.op(act, y, *(["none"] if act == "gelu" else []))
    assert kernels(check(g, [z], "own")) == ["clone", f"direct bias add {act}", "clone"]


def test_relu_keeps_nan() -> None:
    g = Net()
    x = torch.randn(1, 8, 6, 6)
    x[0, 3, 2, 2], x[0, 1, 5, 5] = math.nan, -math.inf
    y = g.op("relu", g.conv(g.input(x), 8, 8, bias=True))
    assert kernels(check(g, [y], "own")) == ["clone", "direct bias relu", "clone"]


@pytest.mark.parametrize("stride", [[1, 1], [2, 2], [2, 1]])
@pytest.mark.parametrize("dilation", [[1, 1], [2, 3]])
@pytest.mark.parametrize(("window", "padding"), [((3, 3), [1, 1]), ((1, 3), [0, 3]), ((1, 1), [0, 0]), ((1, 1), [1, 1])])
def test_geometries(window: tuple[int, int], padding: list[int], stride: list[int], dilation: list[int]) -> None:
    g = Net()
    x, w = g.input(torch.randn(2, 16, 9, 8)), g.weight(24, 8, *window)
    y = g.op("conv", x, w, None, stride, padding, dilation, False, [0, 0], 2)
    found = kernels(check(g, [y], "own"))
    assert found[1].startswith("direct") and CONV not in found


@pytest.mark.parametrize(("k", "dilation"), [(7, 3), (1, 1)])
def test_signals_are_images_of_one_line(k: int, dilation: int) -> None:
    g = Net()
    x, pad = g.input(torch.randn(2, 16, 40)), [dilation * (k // 2)]
    y = g.op("conv", x, g.weight(16, 16, k), g.weight(16), [1], pad, [dilation], False, [0], 1)
    form = "pointwise " if k == 1 else ""
    assert f"direct {form}bias add relu" in kernels(check(g, [g.op("relu", g.op("add", y, x))], "own"))


def test_a_slice_of_channels_is_read_where_it_lies() -> None:
    g = Net()
    x = g.input(torch.randn(2, 24, 6, 6).to(memory_format=torch.channels_last))
    y = g.conv(g.op("slice", x, 1, 8, 24, 1), 16, 16, k=1)
    assert kernels(check(g, [y], "own")) == ["aten::slice.Tensor", POINTWISE]


def test_rows_that_are_apart_are_no_product() -> None:
    g = Net()
    x = g.input(torch.randn(2, 16, 12, 12).to(memory_format=torch.channels_last))
    y = g.conv(g.op("slice", x, 3, 2, 9, 1), 16, 16, k=1)
    copied = ["clone", POINTWISE]  # a linear's rows are equally far apart
    assert kernels(check(g, [y], "own")) == (copied if AVX512 else ["aten::slice.Tensor", "direct"])


def test_one_pixel_reads_the_weight_once() -> None:
    """As in squeeze-and-excite."""
    g = Net()
    x = g.input(torch.randn(2, 64, 1, 1))
    y = g.op("relu", g.norm(g.conv(x, 64, 8, k=1), 8))
    z = g.op("sigmoid", g.conv(y, 8, 64, k=1, bias=True))
    few = "gemv_2_f32_f32_bias"
    assert [n for n in kernels(check(g, [z], "own")) if n != "clone"] == [few, "relu", few, "sigmoid"]


def test_a_batch_norm_between_a_weight_and_its_other_reader() -> None:
    g = Net()
    x = g.image()
    y = g.conv(x, 8, 8)
    assert kernels(check(g, [g.norm(y, 8), y], "own"))[1] == "direct"


@pytest.mark.parametrize("options", [{"prepack": "never"}, {"prepack": "always"}])
def test_without_a_packed_weight_oneDNN_stays(options: dict[str, str]) -> None:
    g = Net()
    assert "direct" not in " ".join(kernels(check(g, [g.conv(g.image(), 8, 16)], "own", **options)))


def test_few_channels_of_a_group_stay_with_onednn() -> None:
    g = Net()
    copy = COPY.removeprefix("kernel ")
    assert kernels(check(g, [g.conv(g.image(8), 8, 16, groups=2)], "own")) == [CONV, copy]


def test_other_types_stay() -> None:
    g = Net(BF16)
    assert not any(k.startswith("direct") for k in kernels(compiled(g, [g.conv(g.image(), 8, 16)], "own")))
