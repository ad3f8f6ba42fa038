"""Max pooling as a kernel: values and indices equal eager's, including NaN and windows without a number."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fusewright.interface import DevicePolicy
from fusewright.toolkit.lower.tables import verdict
from tests.fragments import Sketch
from tests.unit.fuse.running import LOADERS, kernel_count, run_sketch


def some_nan(shape: tuple[int, ...]) -> torch.Tensor:
    x = torch.randn(shape)
    return torch.where(torch.rand(shape) < 0.2, math.nan, torch.where(torch.rand(shape) < 0.3, -math.inf, x))


def nothing(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.full(shape, -math.inf)


@pytest.mark.parametrize("values", [torch.randn, some_nan, nothing])
@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((2, 3, 7, 9), ([3, 3], [2, 2], [1, 1])),
        ((2, 3, 8, 34), ([2, 2], [2, 2], [0, 0])),
        ((1, 2, 13, 15), ([5, 3], [3, 2], [2, 1])),
    ],
)
def test_max_pool(values: Callable[..., torch.Tensor], shape: tuple[int, ...], window: tuple[list[int], ...]) -> None:
    g = Sketch()
    g.op("max_pool2d", g.input(values(shape)), *window)
    outputs = list(g.ops[0].outs)
    for loader in LOADERS.values():
        fragment, got = run_sketch(g, outputs, loader)
        for ours, eager in zip(got, g.expected(outputs), strict=True):
            torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)
    assert kernel_count(fragment) == 1


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("values", [torch.randn, some_nan, nothing])
@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((2, 3, 7, 9), ([3, 3], [2, 2], [1, 1])),
        ((2, 3, 8, 10), ([3, 3], [2, 2], [1, 1])),
        ((2, 3, 9, 34), ([2, 2], [2, 2], [0, 0])),
        ((1, 2, 13, 15), ([5, 3], [3, 2], [2, 1])),
        ((1, 2, 9, 11), ([2, 1], [3, 2], [0, 0])),
    ],
)
def test_the_gradient_of_max_pool_is_gathered(
    values: Callable[..., torch.Tensor], shape: tuple[int, ...], window: tuple[list[int], ...], layout: torch.memory_format
) -> None:
    x = values(shape).to(memory_format=layout)
    out, indices = torch.nn.functional.max_pool2d(x, *window, return_indices=True)
    g = Sketch()
    grad = g.input(torch.randn(out.shape).to(memory_format=layout))
    g.op("max_pool2d_backward", grad, g.input(x), *window, [1, 1], False, g.input(indices))
    for loader in LOADERS.values():
        fragment, (ours,) = run_sketch(g, [g.ops[0].out], loader, DevicePolicy())
        torch.testing.assert_close(ours, g.expected([g.ops[0].out])[0])
    assert kernel_count(fragment) == 1


def test_eager_scatters_large_gradients_on_a_cpu() -> None:
    g = Sketch()
    x = torch.randn(1, 8, 64, 64)
    out, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    g.op("max_pool2d_backward", g.input(out), g.input(x), [2, 2], [2, 2], [0, 0], [1, 1], False, g.input(indices))
    fragment, _ = run_sketch(g, [g.ops[0].out])
    assert kernel_count(fragment) == 0 and "gradients of max pooling" in next(iter(fragment.notes.values()))


def test_gradients_of_elements_in_many_windows_are_left_to_eager() -> None:
    g = Sketch()
    window = [3, 3], [1, 1], [1, 1]
    x = torch.randn(1, 1, 6, 6)
    out, indices = torch.nn.functional.max_pool2d(x, *window, return_indices=True)
    g.op("max_pool2d_backward", g.input(out), g.input(x), *window, [1, 1], False, g.input(indices))
    assert "many windows" in verdict(g.ops[0]).detail


def test_a_window_that_ends_outside_is_left_to_eager() -> None:
    g = Sketch()
    g.op("max_pool2d", g.input(torch.randn(1, 1, 6, 6)), [3, 3], [2, 2], [0, 0], [1, 1], True)
    assert "ends outside" in verdict(g.ops[0]).detail
