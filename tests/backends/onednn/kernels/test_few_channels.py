"""Convolutions of images of few channels in a kernel of our own, with what follows."""

from __future__ import annotations

import pytest
import torch

from fusewright_cpu.target import host_target
from tests.backends.onednn.common import BF16, F32, check
from tests.backends.onednn.test_conv import CONV, Net
from tests.fragments import targets

if host_target().arm or not (host_target().masks and host_target().fma):
    pytest.skip("the kernel needs AVX2 with FMA, or AVX-512; runs where: a CPU has one of them", allow_module_level=True)


def kernels(fragment: object) -> list[str]:
    """Return the names of launched kernels, first convolutions without their tiles."""
    names = [t.removeprefix("kernel ") for t in targets(fragment)]
    return ["_".join(n.split("_")[i] for i in (0, 1, 2, *range(8, n.count("_") + 1))) if "first" in n else n for n in names]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_are_read_where_they_lie(memory_format: torch.memory_format, dtype: torch.dtype) -> None:
    g = Net(dtype)
    x = g.input(torch.randn(2, 3, 20, 20, dtype=dtype).contiguous(memory_format=memory_format))
    y = g.op("relu", g.norm(g.conv(x, 3, 16), 16))
    kind = "f32" if dtype is F32 else "bf16"
    copies = ["clone"] if memory_format is torch.contiguous_format else []
    assert kernels(check(g, [y], "own")) == [f"first_conv_{kind}_bias_relu", *copies]


def test_an_addition_is_in_the_kernel() -> None:
    g = Net()
    x, other = g.input(torch.randn(2, 3, 20, 20)), g.input(torch.randn(2, 16, 20, 20))
    y = g.op("silu", g.op("add", g.conv(x, 3, 16, bias=True), other), *[])
    assert kernels(check(g, [y], "own")) == ["clone", "first_conv_f32_bias_add_silu", "clone"]


def test_a_library_stays_where_it_is_faster() -> None:
    g = Net()
    assert CONV in targets(check(g, [g.conv(g.input(torch.randn(2, 3, 20, 20)), 3, 16)], "packed"))


@pytest.mark.parametrize(
    ("channels", "window", "dilation", "groups"), [(8, 3, 1, 1), (3, 1, 1, 1), (3, 3, 2, 1), (4, 3, 1, 2), (7, 8, 1, 1)]
)
def test_other_convolutions_have_other_kernels(channels: int, window: int, dilation: int, groups: int) -> None:
    g = Net()
    w = g.weight(16, channels // groups, window, window)
    y = g.op("conv", g.input(torch.randn(1, channels, 40, 40)), w, None, [1, 1], [0, 0], [dilation] * 2, False, [0, 0], groups)
    assert not any(k.startswith("first") for k in kernels(check(g, [y], "own")))


def test_lines_shorter_than_a_block_stay() -> None:
    g = Net()
    assert not any(k.startswith("first") for k in kernels(check(g, [g.conv(g.input(torch.randn(2, 3, 3, 3)), 3, 16)], "own")))
