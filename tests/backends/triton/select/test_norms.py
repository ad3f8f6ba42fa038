"""Group norms of channels-last images, volumes and sequences by sums over the pixels of each channel."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.interface import Fragment, Value
from fusewright.plan.ir import Launch
from fusewright_triton.emit import schedule
from fusewright_triton.select import norms
from tests.backends.triton.select.test_calls import BF16, F32, H100, Net, check, lowered
from tests.hosts import needs_bf16


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "LEAST", 1)


SIZES = pytest.mark.parametrize("sizes", [(5, 7), (35,), (5, 2, 7)], ids=["2-d", "1-d", "3-d"])


def laid(g: Net, c: int, sizes: tuple[int, ...]) -> Value:
    """Draw images whose channels are innermost."""
    return g.input(torch.randn(2, *sizes, c).to(g.dtype).movedim(-1, 1))


def drawn(g: Net, groups: int, c: int, affine: bool, sizes: tuple[int, ...] = (5, 7)) -> list[Value]:
    """A norm as traced on a GPU, where images are copied to planes, behind an op and in front of one."""
    x = g.op("relu", laid(g, c, sizes))
    planes = g.op("clone", x, memory_format=torch.contiguous_format)
    weights = (g.weight(c), g.weight(c)) if affine else (None, None)
    y = g.op("group_norm", planes, *weights, 2, c, math.prod(sizes), groups, 1e-5)
    statistics = g.ops[-1].outs[1:]
    return [g.op("add", x, g.op("silu", y)), *statistics]


def gradient(
    g: Net, groups: int, c: int, affine: bool, mask: tuple[bool, bool, bool], sizes: tuple[int, ...] = (5, 7)
) -> list[Value]:
    g.phase = "backward"
    x, grad = (g.op("clone", laid(g, c, sizes), memory_format=torch.contiguous_format) for _ in range(2))
    mean, rstd = g.input(torch.randn(2, groups)), g.input(torch.rand(2, groups))
    g.op("group_norm_backward", grad, x, mean, rstd, g.weight(c) if affine else None, 2, c, math.prod(sizes), groups, mask)
    dx, *others = g.ops[-1].outs
    images = [g.op("permute", dx, (0, *range(2, 2 + len(sizes)), 1))] if mask[0] else []
    return [*images, *(v for v, wanted in zip(others, mask[1:], strict=True) if wanted)]


def by_channels(fragment: Fragment) -> bool:
    """Whether no kernel computes a norm, or its gradient, row by row."""
    return not any("group_norm" in k.name for k in loops(fragment))  # type: ignore[attr-defined]


def loops(fragment: Fragment) -> list[object]:
    return [fragment.kernels[i.kernel] for i in fragment.instructions if isinstance(i, Launch)]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("groups", "c"), [(2, 8), (4, 8), (3, 12), (2, 64)])
def test_results_are_eagers(groups: int, c: int, affine: bool, dtype: torch.dtype) -> None:
    g = Net(dtype)
    assert by_channels(check(g, drawn(g, groups, c, affine)))


@SIZES
def test_volumes_and_sequences_are_read_by_channels(sizes: tuple[int, ...]) -> None:
    g = Net(BF16)
    assert by_channels(check(g, drawn(g, 4, 8, True, sizes)))


@needs_bf16
@pytest.mark.parametrize("transposed", [True, False])
def test_a_norm_of_what_a_library_makes_channels_last(transposed: bool) -> None:
    """As in a network of volumes: nobody copies the images, neither in front of the norm nor behind it."""
    g = Net(BF16)
    x = g.op("relu", g.conv(g.op("relu", g.images(2, 8, 4, 5, 3)), 8, 8, transposed=transposed))
    y = g.op("group_norm", x, g.weight(8), g.weight(8), 2, 8, 60, 2, 1e-5)
    fragment = check(g, [g.op("relu", g.conv(y, 8, 8, transposed=transposed))])
    assert by_channels(fragment) and not any("clone" in k.name for k in loops(fragment))  # type: ignore[attr-defined]


@SIZES
def test_gradients_of_volumes_and_sequences(sizes: tuple[int, ...]) -> None:
    g = Net(F32)
    assert by_channels(check(g, gradient(g, 2, 8, True, (True, True, True), sizes)))


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True), (True, False, True), None])
@pytest.mark.parametrize(("groups", "c"), [(2, 8), (3, 12)])
def test_gradients_are_eagers(groups: int, c: int, mask: tuple[bool, bool, bool] | None) -> None:
    """All of them and some, and that of the image of a norm without weights."""
    g = Net(F32)
    check(g, gradient(g, groups, c, mask is not None, mask or (True, False, False)))


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, True), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("pixels", [20480, 512])
def test_gradients_in_planes(pixels: int, mask: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that no program holds would be read for the image and again for the weights."""
    monkeypatch.setattr(norms, "LEAST_IN_PLANES", 1)
    g = Net(F32)
    g.phase = "backward"
    grad, x = g.tensor(2, 4, pixels // 32, 32), g.tensor(2, 4, pixels // 32, 32)
    g.op("group_norm_backward", grad, x, g.input(torch.randn(2, 2)), g.input(torch.rand(2, 2)), g.weight(4), 2, 4, pixels, 2, mask)
    fragment = check(g, [v for v, wanted in zip(g.ops[-1].outs, mask, strict=True) if wanted], exact=True)
    assert by_channels(fragment) == (pixels == 20480 and mask[0] and any(mask[1:]))


def test_a_few_pixels_are_rows() -> None:
    """A number of each channel would be as much memory as the images."""
    g = Net(F32)
    assert not by_channels(check(g, drawn(g, 4, 8, True, (3, 2))))


def test_digits_far_from_zero_are_kept() -> None:
    """Where the mean is many times the spread, squares of the numbers themselves would cancel."""
    g = Net(F32)
    x = g.op("add", g.images(2, 8, 5, 7), 50.0)
    planes = g.op("clone", x, memory_format=torch.contiguous_format)
    y = g.op("group_norm", planes, None, None, 2, 8, 35, 2, 1e-5)
    check(g, [g.op("clone", y, memory_format=torch.channels_last)])


def test_images_in_planes_and_single_groups_stay_rows() -> None:
    for sizes in ((5, 7), (35,), (5, 1, 7)):
        g = Net(F32)
        y = g.op("group_norm", g.tensor(2, 8, *sizes), None, None, 2, 8, 35, 2, 1e-5)
        assert len(loops(lowered(g, [y]))) == 1
    g = Net(F32)
    assert len(loops(lowered(g, drawn(g, 1, 8, True)))) == 1


def test_programs_take_the_channels_of_several_groups() -> None:
    """Two channels a group are eight bytes; a program reads 32 numbers next to each other."""
    g = Net(F32)
    outs = gradient(g, 32, 64, True, (True, True, True))
    sums = next(k for k in loops(lowered(g, outs)) if k.r and "mul" in k.name)  # type: ignore[attr-defined]
    (tile,) = schedule.choose(sums, H100).tiles  # type: ignore[arg-type]
    assert tile.block >= 32
