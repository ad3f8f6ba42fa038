"""fp32 convolutions are channels-last where that is faster and rounds no more than torch's own call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from torch import Tensor

from fusewright.toolkit.rules.space import layout_of
from fusewright_triton.select import conv_layouts as select
from tests.backends.triton.select.test_calls import Net, check, lowered, text

GEOMETRY = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)


def net(channels: int = 4, **more: Any) -> tuple[Net, list[Any]]:
    """Draw a convolution between two loop kernels."""
    g = Net(torch.float32)
    x = g.relu(g.tensor(2, channels, 9, 7))
    return g, [g.relu(g.conv(x, channels, 8, **more))]


def moves_weights(fragment: Any) -> bool:
    return any(t.startswith("aten::clone") for t in text(fragment, prepare=True))


@pytest.mark.parametrize("more", [{}, {"bias": True}, {"k": 1}, {"stride": (2, 1)}, {"transposed": True}, {"groups": 2}])
def test_results_are_eagers_in_either_layout(more: dict[str, Any]) -> None:
    assert moves_weights(check(*net(**more)))


def test_results_that_are_returned_lie_as_eagers_do() -> None:
    g = Net(torch.float32)
    y = g.conv(g.tensor(2, 4, 9, 7), 4, 8)
    fragment = check(g, [y])
    assert moves_weights(fragment)
    assert layout_of(y.spec) == "contiguous"  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", [True, False])
def test_volumes_with_group_norms_stay_in_planes(norm: bool) -> None:
    g = Net(torch.float32)
    y = g.conv(g.relu(g.tensor(2, 4, 5, 6, 7)), 4, 8)
    z = g.op("group_norm", y, None, None, 2, 8, 210, 4, 1e-5) if norm else g.relu(y)
    assert moves_weights(check(g, [z])) != norm


@pytest.mark.parametrize(("prefer", "last"), [("last", True), ("planes", False)])
def test_a_device_is_asked(prefer: str, last: bool) -> None:
    assert moves_weights(lowered(*net(), prefer)) == last


@pytest.mark.parametrize(("planes", "last", "tried"), [
    ("fine", "fine", True), ("coarse", "coarse", True), ("coarse", "fine", True), ("fine", "coarse", False),
])  # fmt: skip
def test_a_layout_that_alone_rounds_is_none(planes: str, last: str, tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands in TF32 have ten bits behind the point."""

    def convolution(self: select.Trial, x: Tensor, w: Tensor) -> Tensor:
        kind = last if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous() else planes
        return torch.convolution((x * 1024).round() / 1024 if kind == "coarse" else x, w, None, *self.geometry)

    monkeypatch.setattr(select.Trial, "call", convolution)
    monkeypatch.setattr(select, "several", _once)
    trial = select.Trial((2, 600, 5, 5), (3, 600, 3, 3), GEOMETRY, (True, True), "cpu")
    trial.planes()()
    if tried:
        trial.last()()
    else:
        with pytest.raises(RuntimeError, match="rounded to TF32"):
            trial.last()


def _once(run: Callable[[], Any], device: str, calls: int) -> Callable[[], Any]:
    return run


def test_what_kernels_make_and_read_needs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []
    monkeypatch.setattr(select.Trial, "key", property(lambda self: asked.append(self.copied) or "key"))
    lowered(*net(), "planes")
    g = Net(torch.float32)
    lowered(g, [g.conv(g.tensor(2, 4, 9, 7), 4, 8)], "planes")
    assert list(dict.fromkeys(asked)) == [(False, False), (True, True)]
