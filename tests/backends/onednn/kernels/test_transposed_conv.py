"""Transposed convolutions of fp32 in kernels of our own, with what follows."""

from __future__ import annotations

import pytest
import torch

from fusewright_cpu.target import host_target
from tests.backends.onednn.common import BF16, check
from tests.backends.onednn.kernels.test_direct_conv import kernels
from tests.backends.onednn.test_conv import TRANSPOSED, Net, needs_bf16
from tests.fragments import targets

if host_target().arm or not (host_target().masks and host_target().fma):
    pytest.skip("the kernel needs AVX2 with FMA, or AVX-512; runs where: a CPU has one of them", allow_module_level=True)


@pytest.mark.parametrize("act", ["relu", "silu", "clamp"])
def test_all_that_follows_is_in_the_kernel(act: str) -> None:
    g = Net()
    other = g.input(torch.randn(2, 16, 12, 12))
    y = g.op("conv", g.input(torch.randn(2, 8, 6, 6)), g.weight(8, 16, 4, 4), g.weight(16), [2, 2], [1, 1], [1, 1], True, [0, 0], 1)
    z = g.op(act, g.op("add", g.norm(y, 16), other), *([0.0, 1.0] if act == "clamp" else []))
    assert kernels(check(g, [z], "own")) == ["clone", "clone", f"direct transposed bias add {act}", "clone"]


GEOMETRIES = [((4, 4), [2, 2], [1, 1], [0, 0], 1), ((2, 2), [2, 2], [0, 0], [0, 0], 2), ((3, 3), [2, 2], [1, 1], [1, 1], 1),
              ((3, 5), [1, 1], [1, 2], [0, 0], 1), ((5, 3), [3, 2], [1, 1], [0, 1], 1)]  # fmt: skip


@pytest.mark.parametrize(("window", "stride", "padding", "end", "groups"), GEOMETRIES)
def test_geometries(window: tuple[int, int], stride: list[int], padding: list[int], end: list[int], groups: int) -> None:
    g = Net()
    x, w = g.input(torch.randn(2, 16, 9, 8)), g.weight(16, 24 // groups, *window)
    y = g.op("conv", x, w, None, stride, padding, [1, 1], True, end, groups)
    assert kernels(check(g, [y], "own")) == ["clone", "direct transposed", "clone"]


def test_signals_are_images_of_one_line() -> None:
    g = Net()
    x, other = g.input(torch.randn(2, 8, 20)), g.input(torch.randn(2, 16, 80))
    y = g.op("conv", x, g.weight(8, 16, 8), g.weight(16), [4], [2], [1], True, [0], 1)
    found = kernels(check(g, [g.op("relu", g.op("add", y, other))], "own"))
    assert "direct transposed bias add relu" in found


def test_a_result_that_strides_do_not_divide_stays_onednns() -> None:
    g = Net()
    y = g.op("conv", g.image(), g.weight(8, 16, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [0, 0], 1)
    assert TRANSPOSED in targets(check(g, [y], "own"))


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 1), pytest.param(BF16, 4, marks=needs_bf16)])
def test_a_window_with_gaps_and_half_types_stay_onednns(dtype: torch.dtype, window: int) -> None:
    g = Net(dtype)
    weight, end = g.weight(8, 16, window, window), [window % 2] * 2
    y = g.op("conv", g.image(), weight, None, [2, 2], [0, 0], [1, 1], True, end, 1)
    assert TRANSPOSED in targets(check(g, [y], "own"))


def test_long_sums_at_stride_1_are_as_exact_as_eagers() -> None:
    g = Net()
    x, w = torch.rand(1, 256, 6, 6), g.weight(256, 8, 3, 3)
    y = g.op("conv", g.input(x), w, None, [1, 1], [1, 1], [1, 1], True, [0, 0], 1)
    assert kernels(check(g, [y], "own")) == ["clone", "direct transposed", "clone"]
