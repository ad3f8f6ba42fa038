"""Group norms of channels-last images by sums over the pixels of each channel."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.interface import Fragment, Value
from fusewright.plan.ir import Launch
from fusewright_triton.emit import schedule
from fusewright_triton.select import norms
from tests.backends.triton.select.test_calls import BF16, F32, H100, Net, check, lowered


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "LEAST", 1)


def drawn(g: Net, groups: int, c: int, affine: bool, copied: bool = True) -> list[Value]:
    """A norm as traced on a GPU, where images are copied to planes, behind an op and in front of one."""
    x = g.op("relu", g.images(2, c, 5, 7))
    planes = g.op("clone", x, memory_format=torch.contiguous_format) if copied else x
    weights = (g.weight(c), g.weight(c)) if affine else (None, None)
    y = g.op("group_norm", planes, *weights, 2, c, 35, groups, 1e-5)
    statistics = g.ops[-1].outs[1:]
    return [g.op("add", x, g.op("silu", y)), *statistics]


def gradient(g: Net, groups: int, c: int, affine: bool, mask: tuple[bool, bool, bool]) -> list[Value]:
    g.phase = "backward"
    x, grad = (g.op("clone", g.images(2, c, 5, 7), memory_format=torch.contiguous_format) for _ in range(2))
    mean, rstd = g.input(torch.randn(2, groups)), g.input(torch.rand(2, groups))
    g.op("group_norm_backward", grad, x, mean, rstd, g.weight(c) if affine else None, 2, c, 35, groups, mask)
    dx, *others = g.ops[-1].outs
    images = [g.op("clone", dx, memory_format=torch.channels_last)] if mask[0] else []
    return [*images, *(v for v, wanted in zip(others, mask[1:], strict=True) if wanted)]


def by_channels(fragment: Fragment) -> bool:
    return any("channels" in note for note in fragment.notes.values()) or len(loops(fragment)) > 2


def loops(fragment: Fragment) -> list[object]:
    return [fragment.kernels[i.kernel] for i in fragment.instructions if isinstance(i, Launch)]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("groups", "c"), [(2, 8), (4, 8), (3, 12), (2, 64)])
def test_results_are_eagers(groups: int, c: int, affine: bool, dtype: torch.dtype) -> None:
    g = Net(dtype)
    assert by_channels(check(g, drawn(g, groups, c, affine)))


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True), (True, False, True), None])
@pytest.mark.parametrize(("groups", "c"), [(2, 8), (3, 12)])
def test_gradients_are_eagers(groups: int, c: int, mask: tuple[bool, bool, bool] | None) -> None:
    """All of them and some, and that of the image of a norm without weights."""
    g = Net(F32)
    check(g, gradient(g, groups, c, mask is not None, mask or (True, False, False)))


def test_digits_far_from_zero_are_kept() -> None:
    """Where the mean is many times the spread, squares of the numbers themselves would cancel."""
    g = Net(F32)
    x = g.op("add", g.images(2, 8, 5, 7), 50.0)
    planes = g.op("clone", x, memory_format=torch.contiguous_format)
    y = g.op("group_norm", planes, None, None, 2, 8, 35, 2, 1e-5)
    check(g, [g.op("clone", y, memory_format=torch.channels_last)])


def test_images_in_planes_and_single_groups_stay_rows() -> None:
    g = Net(F32)
    y = g.op("group_norm", g.tensor(2, 8, 5, 7), None, None, 2, 8, 35, 2, 1e-5)
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
