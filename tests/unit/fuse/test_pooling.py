"""Windows of images as kernels: pooling, im2col and gradients. Maxima and their indices equal eager's, including NaN and windows
without a number."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewright import ops
from fusewright.interface import DevicePolicy
from fusewright.toolkit.lower.tables import verdict
from tests.fragments import Sketch
from tests.ops.test_kernels_vs_eager import check
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
        ((2, 3, 4, 6, 18), ([2, 2, 2], [2, 2, 2], [0, 0, 0])),
        ((1, 2, 5, 6, 7), ([3, 3, 3], [2, 1, 2], [1, 1, 0])),
    ],
)
def test_max_pool(values: Callable[..., torch.Tensor], shape: tuple[int, ...], window: tuple[list[int], ...]) -> None:
    g = Sketch()
    g.op(f"max_pool{len(shape) - 2}d", g.input(values(shape)), *window)
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


aten = torch.ops.aten
PAIR = st.tuples(st.integers(1, 3), st.integers(1, 3)).map(list)
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
LAYOUTS = st.sampled_from([torch.contiguous_format, torch.channels_last])


Window = tuple[torch.Tensor, list[int], list[int], list[int], list[int]]
"""An image, and the size, stride, padding (up to half of the size) and dilation of a window that fits in it."""


@st.composite
def windows(draw: st.DrawFn, dilated: bool) -> Window:
    size, stride, dilation = draw(PAIR), draw(PAIR), draw(PAIR) if dilated else [1, 1]
    padding = [draw(st.integers(0, n // 2)) for n in size]
    height, width = (d * (n - 1) + 1 + draw(st.integers(0, 5)) for d, n in zip(dilation, size, strict=True))
    image = torch.randn(2, 3, height, width).to(draw(TYPES), memory_format=draw(LAYOUTS))
    return image, size, stride, padding, dilation


@settings(max_examples=12, deadline=None)
@given(windows(dilated=True), st.booleans())
def test_columns_of_an_image_and_their_sum(window: Window, alone: bool) -> None:
    image, size, stride, padding, dilation = window
    image = image[0] if alone else image
    assert check(ops.OPS["im2col"], [image, size, dilation, padding, stride], {})
    columns = torch.randn_like(aten.im2col(image, size, dilation, padding, stride))
    assert check(ops.OPS["col2im"], [columns, list(image.shape[-2:]), size, dilation, padding, stride], {})


@settings(max_examples=12, deadline=None)
@given(windows(dilated=False), st.booleans(), st.booleans(), st.sampled_from([None, 3]))
def test_means_of_windows_and_their_gradient(
    window: Window, ceil: bool, padded: bool, divisor: int | None
) -> None:
    image, size, stride, padding, _ = window
    how = [size, stride, padding, ceil, padded, divisor]
    assert check(ops.OPS["avg_pool2d"], [image, *how], {})
    assert check(ops.OPS["avg_pool2d_backward"], [torch.randn_like(aten.avg_pool2d(image, *how)), image, *how], {})


@settings(max_examples=12, deadline=None)
@given(windows(dilated=True), st.booleans())
def test_maxima_of_dilated_windows_and_of_windows_that_end_outside(
    window: Window, ceil: bool
) -> None:
    image, size, stride, padding, dilation = window
    how = [size, stride, padding, dilation, ceil]
    assert check(ops.OPS["max_pool2d"], [image, *how], {})
    maxima, places = aten.max_pool2d_with_indices(image, *how)
    check(ops.OPS["max_pool2d_backward"], [torch.randn_like(maxima), image, *how, places], {})  # if few windows overlap


def test_a_dilated_window_without_a_number_has_its_first_place_inside() -> None:
    """As in eager, which steps over the padding by the dilation."""
    assert check(ops.OPS["max_pool2d"], [nothing((1, 1, 9, 8)), [3, 3], [2, 1], [1, 1], [3, 2], True], {})


def test_columns_of_booleans() -> None:
    assert check(ops.OPS["im2col"], [torch.rand(1, 2, 5, 6) > 0.5, [3, 2], [1, 2], [1, 1], [2, 1]], {})


def test_pixels_in_many_windows_are_added_up_by_eager() -> None:
    g = Sketch()
    g.op("col2im", g.input(torch.randn(1, 49, 36)), [6, 6], [7, 7], [1, 1], [3, 3], [1, 1])
    assert "many windows" in verdict(g.ops[0]).detail


def test_columns_are_added_up_where_a_product_left_them() -> None:
    """As in VOLO's outlook attention: an element of a window is one dimension there, and two for the sum."""
    g = Sketch()
    heads = g.op("permute", g.input(torch.randn(2, 3, 9, 9, 4)), [0, 1, 4, 3, 2])
    out = g.op("col2im", g.op("reshape", heads, [2, 108, 9]), [6, 6], [3, 3], [1, 1], [1, 1], [2, 2])
    fragment, (ours,) = run_sketch(g, [out], LOADERS["llvm"])
    torch.testing.assert_close(ours, g.expected([out])[0])
    assert kernel_count(fragment) == 1 and not fragment.notes.keys() - {g.ops[2].id}


def test_what_cannot_be_computed_at_the_place_of_a_window_is_stored_first() -> None:
    g = Sketch()
    out = g.op("col2im", g.op("repeat", g.input(torch.randn(2, 3, 16)), [1, 9, 1]), [10, 10], [3, 3], [1, 1], [0, 0], [2, 2])
    fragment, (ours,) = run_sketch(g, [out], LOADERS["llvm"])
    torch.testing.assert_close(ours, g.expected([out])[0])
    assert kernel_count(fragment) == len(fragment.instructions) == 2


def test_a_sum_of_columns_in_another_order_is_computed_in_that_of_its_reader() -> None:
    """A product follows in VOLO, and channels lie innermost on both sides."""
    g = Sketch()
    heads = g.op("permute", g.input(torch.randn(2, 3, 9, 9, 4)), [0, 1, 4, 3, 2])
    image = g.op("col2im", g.op("reshape", heads, [2, 108, 9]), [6, 6], [3, 3], [1, 1], [1, 1], [2, 2])
    out = g.op("clone", g.op("permute", image, [0, 2, 3, 1]), memory_format=torch.contiguous_format)
    for loader in LOADERS.values():
        fragment, (ours,) = run_sketch(g, [out], loader)
        torch.testing.assert_close(ours, g.expected([out])[0])
    assert kernel_count(fragment) == len(fragment.instructions) == 1


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize(
    "window", [([2, 2, 2], [2, 2, 2], [0, 0, 0]), ([1, 3, 3], [1, 2, 2], [0, 1, 1]), ([3, 2, 1], [2, 1, 2], [1, 1, 0])], ids=str
)
def test_the_gradient_of_max_pool_of_volumes_is_gathered(window: tuple[list[int], ...], layout: torch.memory_format) -> None:
    x = torch.randn(2, 3, 5, 6, 7).round().to(memory_format=layout)  # maxima that are equal
    out, indices = torch.nn.functional.max_pool3d(x, *window, return_indices=True)
    g = Sketch()
    grad = g.input(torch.randn(out.shape).to(memory_format=layout))
    g.op("max_pool3d_backward", grad, g.input(x), *window, [1, 1, 1], False, g.input(indices))
    for loader in LOADERS.values():
        fragment, (ours,) = run_sketch(g, [g.ops[0].out], loader, DevicePolicy())
        torch.testing.assert_close(ours, g.expected([g.ops[0].out])[0])
    assert kernel_count(fragment) == 1


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_max_pool_of_any_volume(data: st.DataObject) -> None:
    three = st.tuples(*[st.integers(1, 3)] * 3).map(list)
    size, stride, dilation = (data.draw(three) for _ in range(3))
    padding = [data.draw(st.integers(0, n // 2)) for n in size]
    lengths = [d * (n - 1) + 1 + data.draw(st.integers(0, 4)) for d, n in zip(dilation, size, strict=True)]
    x = torch.randn(2, 3, *lengths).to(data.draw(TYPES))
    x = x.to(memory_format=data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last_3d])))
    assert check(ops.OPS["max_pool3d"], [x, size, stride, padding, dilation, data.draw(st.booleans())], {})
