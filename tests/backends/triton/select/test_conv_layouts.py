"""Convolutions are channels-last where that is faster and, in fp32, rounds no more than torch's own call; in half types without a
trial if no image is copied for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from torch import Tensor

from fusewright.toolkit.rules.space import layout_of
from fusewright_triton.backend import NvidiaTriton
from fusewright_triton.select import conv_layouts as select
from fusewright_triton.select import norms
from tests.backends.triton.select.test_calls import REAL, Net, check, lowered, text
from tests.fragments import Context, by_preference, targets
from tests.hosts import FLOATS

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


def test_volumes_with_group_norms_are_channels_last_too() -> None:
    """Such norms are computed by channels."""
    g = Net(torch.float32)
    y = g.conv(g.relu(g.tensor(2, 4, 5, 6, 7)), 4, 8)
    assert moves_weights(check(g, [g.op("group_norm", y, None, None, 2, 8, 210, 4, 1e-5)]))


class Volumes(torch.nn.Module):
    """A block of a network of volumes: group norms between convolutions, a shortcut of single pixels, a step down."""

    def __init__(self) -> None:
        super().__init__()
        conv, norm = torch.nn.Conv3d, torch.nn.GroupNorm
        self.first, self.a, self.b, self.side = conv(4, 8, 3, padding=1), conv(8, 16, 3, padding=1), norm(2, 8), conv(8, 16, 1)
        self.up = torch.nn.ConvTranspose3d(16, 8, 2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.up(self.a(torch.relu(self.b(x))) + self.side(x))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_block_of_volumes(batch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "LEAST", 1)
    torch.manual_seed(0)
    net, x = Volumes().to(dtype).eval(), torch.randn(batch, 4, 4, 5, 6).to(dtype)
    compiled = torch.compile(net, backend="nvidia_triton", options={"simulate": True, "cache": False, "strict": True})
    with torch.no_grad():
        ours, eager, exact = compiled(x), net(x), copy.deepcopy(net).double()(x.double())
    assert ours.stride() == eager.stride()
    assert (ours - exact).norm() <= 2 * (eager - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize(("prefer", "last"), [("last", True), ("planes", False)])
def test_a_device_is_asked(prefer: str, last: bool) -> None:
    assert moves_weights(lowered(*net(), prefer)) == last


@pytest.mark.parametrize(("planes", "last", "tried"), [
    ("fine", "fine", True), ("coarse", "coarse", True), ("coarse", "fine", True), ("fine", "coarse", False),
])  # fmt: skip
@pytest.mark.parametrize("number", [1, 2])
def test_a_layout_that_alone_rounds_is_none(
    planes: str, last: str, tried: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands in TF32 have ten bits behind the point."""

    def convolution(self: select.Trial, x: Tensor, w: Tensor, how: Any, bias: Tensor | None = None) -> Tensor:
        kind = last if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous() else planes
        return torch.convolution((x * 1024).round() / 1024 if kind == "coarse" else x, w, None, *how)

    monkeypatch.setattr(select.Trial, "call", convolution)
    monkeypatch.setattr(select, "several", _once)
    steps = (((3, 600, 3, 3), GEOMETRY), ((5, 3, 3, 3), GEOMETRY))[:number]
    trial = select.Trial((2, 600, 5, 5), steps, (True, True), "cpu")
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


# ---------------------------------------------------------------- half types

LONE: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "pixels": ((2, 8, 6, 5), {"k": 1}),
    "window": ((2, 8, 6, 5), {"bias": True}),
    "strided": ((2, 8, 6, 5), {"stride": (2, 1)}),
    "transposed": ((2, 8, 6, 5), {"transposed": True}),
    "depthwise": ((2, 8, 9, 9), {"groups": 8, "k": 7}),
    "grouped": ((2, 16, 6, 5), {"groups": 2}),
    "volume": ((2, 8, 3, 4, 5), {}),
    "transposed volume": ((2, 8, 3, 4, 5), {"transposed": True, "bias": True}),
}
"""Shapes of images and what is special about a convolution."""


def asked(g: Net, outputs: list[Any], *prefer: str) -> tuple[Any, list[str]]:
    """Lower for a device, and return which layouts were tried."""
    pick = by_preference(*prefer, "last", "kernel", "library", "separate", "aten", "torch")
    g.temporaries.clear()
    ctx = Context({}, REAL, pick, specs=g.temporaries)
    fragment = NvidiaTriton(REAL).compile(g.region(outputs), ctx)
    return fragment, [key for key in ctx.asked if " layout " in key]


def lone(name: str) -> tuple[Net, Any]:
    shape, more = LONE[name]
    g = Net()
    return g, g.conv(g.tensor(*shape), shape[1], shape[1], **more)


WINDOWS = frozenset({"window", "strided", "transposed", "volume", "transposed volume"})
"""Convolutions of all channels, for which cuDNN copies planes itself."""


@pytest.mark.parametrize("name", sorted(WINDOWS))
def test_windows_over_all_channels_are_not_tried(name: str) -> None:
    g, y = lone(name)
    assert not asked(g, [y], "planes")[1]


@pytest.mark.parametrize("name", sorted(LONE.keys() - WINDOWS))
def test_a_lone_convolution_stays_in_planes_if_that_is_faster(name: str) -> None:
    g, y = lone(name)
    fragment, keys = asked(g, [y], "planes")
    assert [t.removesuffix(".default") for t in targets(fragment)] == ["aten::convolution"] and len(set(keys)) == 1
    (ours,), (eager,) = g.run(fragment, [y]), g.expected([y])
    assert torch.equal(ours, eager) and ours.stride() == eager.stride()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("transposed", [True, False])
def test_the_copy_behind_adds_the_bias(transposed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch adds it in a pass of its own, which is part of its call in planes."""
    g = Net(dtype)
    y = g.conv(g.tensor(2, 32, 6, 5), 32, 16, bias=True, transposed=transposed)
    fragment, keys = asked(g, [y])
    assert [t for t in targets(fragment) if t.startswith("kernel")] == ["kernel clone"] * 2
    assert all(key.endswith("bias") for key in keys) and bool(keys) == (dtype is torch.float32)
    assert [t for t in text(fragment, prepare=False) if t.startswith("aten::convolution('_', '_', None")]
    check(g, [y])
    monkeypatch.setattr(select, "several", _once)
    step = ((32, 16, 3, 3) if transposed else (16, 32, 3, 3)), (*GEOMETRY[:3], transposed, (0, 0), 1)
    select.Trial((2, 32, 6, 5), (step,), (True, True), "cpu", dtype, biased=True).planes()()


@pytest.mark.parametrize("name", LONE)
def test_a_lone_convolution_is_channels_last_if_that_is_faster(name: str) -> None:
    g, y = lone(name)
    fragment, _ = asked(g, [y])
    assert [t for t in targets(fragment) if t.startswith("kernel")] == ["kernel clone"] * 2


def test_a_sequence_and_groups_of_volumes_are_not_tried() -> None:
    """They are in planes anyway."""
    for shape, more in (((2, 8, 9), {}), ((2, 8, 3, 4, 5), {"groups": 2}), ((2, 8, 6, 5), {"groups": 2, "transposed": True})):
        g = Net()
        assert not asked(g, [g.conv(g.tensor(*shape), 8, 8, **more)])[1]


def stem(g: Net, *shape: int) -> Any:
    return g.relu(g.norm(g.conv(g.tensor(*shape), shape[1], 16), 16))


@pytest.mark.parametrize("dims", [2, 3])
def test_between_loop_kernels_nothing_is_tried(dims: int) -> None:
    """Not the first either, whose image is the graph's, if its windows are over all channels."""
    g = Net()
    sizes = (6, 5, 4)[:dims]
    x = stem(g, 2, 24, *sizes)
    for _ in range(6):
        y = g.relu(g.norm(g.conv(x, 16, 32, 1), 32))
        y = g.relu(g.norm(g.conv(y, 32, 32, groups=4 if dims == 2 else 1), 32))
        normed = g.op("group_norm", g.conv(y, 32, 32, bias=True), None, None, 2, 32, y.spec.numel_hint() // 64, 4, 1e-5)
        z = g.op("silu", g.conv(normed, 32, 16))
        x = g.relu(g.op("add", z, x))
        x = g.op("add", x, g.conv(g.op("cat", [x, z], 1), 32, 16))
    pooled = g.op("mean", x, tuple(range(2, dims + 2)), False)
    fragment, keys = asked(g, [g.op("linear", pooled, g.weight(8, 16), None)])
    assert not keys
    assert any("channels-last" in note for note in fragment.notes.values())
    g = Net()
    last = g.conv(g.relu(g.tensor(2, 32, *sizes)), 32, 32)
    assert not asked(g, [g.relu(last)])[1]


@pytest.mark.parametrize("dims", [2, 3])
def test_images_that_are_channels_last_or_of_one_pixel_are_not_tried(dims: int) -> None:
    g = Net()
    x = g.images(2, 32, *(6, 5, 4)[:dims])
    assert not asked(g, [g.conv(x, 32, 32)], "planes")[1]
    g = Net()
    assert not asked(g, [g.conv(g.tensor(2, 32, *(1,) * dims), 32, 32, 1)], "planes")[1]


def test_what_a_product_reads_as_rows_is_not_tried() -> None:
    g = Net()
    y = g.conv(g.relu(g.tensor(2, 32, 6, 5)), 32, 32)
    rows = g.op("transpose", g.op("view", y, (2, 32, 30)), 1, 2)
    assert not asked(g, [g.op("linear", rows, g.weight(16, 32), None)])[1]


@pytest.mark.parametrize("prefer", ["planes", "last"])
def test_convolutions_of_convolutions_have_one_layout(prefer: str) -> None:
    """A depthwise convolution and one of single pixels: copies are in front of both and behind both, if at all."""
    g = Net()
    y = g.conv(g.conv(g.tensor(2, 32, 6, 5), 32, 32, groups=32), 32, 64, 1)
    fragment, keys = asked(g, [y], prefer)
    assert len(set(keys)) == 1 and len(keys) == 2
    assert sum(t == "kernel clone" for t in targets(fragment)) == (0 if prefer == "planes" else 2)


def test_a_kernel_behind_adds_the_bias_in_planes() -> None:
    g = Net()
    y = g.relu(g.conv(g.tensor(2, 32, 6, 5), 32, 32, bias=True, groups=2))
    fragment, _ = asked(g, [y], "planes")
    assert [t.removesuffix(".default") for t in targets(fragment) if "view" not in t] == ["aten::convolution", "kernel relu"]
    assert "'_', '_', None" in text(fragment)[0]


def test_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels-last with its copies and channels of zeros, planes with an activation that would be part of the call."""
    copies: list[tuple[int, ...]] = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda t: copies.append(tuple(t.shape)) or clone(t))
    monkeypatch.setattr(select, "several", _once)
    steps = (((6, 3, 3, 3), GEOMETRY),)
    for activated, copied, planes, last in (
        (False, (True, True), [], [(2, 8, 5, 5), (2, 8, 5, 5)]), (True, (True, False), [(2, 6, 5, 5)], [(2, 8, 5, 5)]),
    ):  # fmt: skip
        trial = select.Trial((2, 3, 5, 5), steps, copied, "cpu", torch.bfloat16, (5, 2), activated)
        for thunk, expected in ((trial.planes(), planes), (trial.last(), last)):
            copies.clear()
            thunk()
            assert copies == expected
