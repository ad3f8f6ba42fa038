"""Convolutions: folding, post-ops, and channels-last values between them."""

from __future__ import annotations

import pytest
import torch

from fusewright import ops
from fusewright.interface import Value
from fusewright.plan.ir import Call
from fusewright.toolkit.rules.space import layout_of
from tests.backends.onednn.common import BF16, F32, check, compiled
from tests.fragments import Sketch, targets
from tests.hosts import FLOATS, needs_bf16

CONV, CONV_ADD = "mkldnn::_convolution_pointwise", "mkldnn::_convolution_pointwise.binary"
PACK = "mkldnn::_reorder_convolution_weight"
COPY = "kernel clone"


class Net(Sketch):
    """Sketches convolutions and batch norms with random weights."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dtype = dtype

    def weight(self, *shape: int) -> object:
        return self.input(torch.randn(*shape, dtype=self.dtype) / 4, const=True)

    def conv(self, x: object, i: int, o: int, k: int = 3, groups: int = 1, bias: bool = False) -> object:
        b = self.weight(o) if bias else None
        pad = [k // 2, k // 2]
        return self.op("conv", x, self.weight(o, i // groups, k, k), b, [1, 1], pad, [1, 1], False, [0, 0], groups)

    def norm(self, x: object, c: int) -> object:
        variance = self.input(torch.rand(c, dtype=self.dtype) + 0.5, const=True)
        return self.op("batch_norm", x, self.weight(c), self.weight(c), self.weight(c), variance, 0.1, 1e-5)

    def image(self, c: int = 8) -> object:
        return self.input(torch.randn(2, c, 7, 7, dtype=self.dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [True, False])
def test_batch_norm_is_folded_into_the_weights(dtype: torch.dtype, bias: bool) -> None:
    g = Net(dtype)
    y = g.norm(g.conv(g.image(), 8, 16, bias=bias), 16)
    fragment = check(g, [y])
    assert targets(fragment) == [CONV, COPY]  # the copy gives the output eager's strides
    assert targets(fragment, prepare=True)[-1] == PACK


@pytest.mark.parametrize("channels, copies", [(1, []), (3, [COPY]), (8, [])])
def test_images_of_a_model_are_turned_in_a_kernel(channels: int, copies: list[str]) -> None:
    g = Net()
    assert targets(check(g, [g.conv(g.image(channels), channels, 16)], "packed")) == [*copies, CONV, COPY]


def test_statistics_that_are_used_keep_the_batch_norm() -> None:
    g = Net()
    y = g.norm(g.conv(g.image(), 8, 16), 16)
    mean = g.ops[-1].outs[1]
    assert "aten::_native_batch_norm_legit_no_training" in targets(check(g, [y, mean]))


@needs_bf16
@pytest.mark.parametrize("bias", [True, False])
def test_a_folded_shift_is_not_rounded(bias: bool) -> None:
    """An average over the image preserves an error that is the same at every point."""
    g = Net(BF16)
    x = g.image()
    mean = g.input(torch.linspace(50, 90, 16), const=True)
    ones = [g.input(torch.ones(16), const=True) for _ in range(3)]
    y = g.op("batch_norm", g.conv(x, 8, 16, bias=bias), ones[0], ones[1], mean, ones[2], 0.1, 0.0)
    (ours,), (eager,) = g.run(compiled(g, [y]), [y]), g.expected([y])
    wide = [None if v is None else g.tensors[v.id].double() for v in (x, *g.ops[0].args[1:3])]
    exact = torch.nn.functional.conv2d(*wide, padding=1) - g.tensors[mean.id].double().view(-1, 1, 1) + 1
    error, theirs = ((t.double() - exact).mean((2, 3)).abs().max() for t in (ours, eager))
    assert error <= 2 * theirs + 1e-3


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_residual_block(groups: int, dtype: torch.dtype) -> None:
    g = Net(dtype)
    x = g.image()
    y = g.op("hardswish", g.norm(g.conv(x, 8, 8, groups=groups), 8))
    z = g.op("silu", g.op("add", g.norm(g.conv(y, 8, 8, groups=groups), 8), y))
    first, second, rest = targets(check(g, [z], "onednn"))
    assert (first, second) == (CONV, CONV) and rest.startswith("kernel")  # addition, silu and copy in one


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_addition_rides_where_it_pays(groups: int, dtype: torch.dtype) -> None:
    """In fp32 fusing it does not pay, and torch cannot fuse it after a grouped convolution."""
    g = Net(dtype)
    x = g.image()
    y = g.op("add", g.conv(x, 8, 8, groups=groups, bias=True), x)
    fused = groups == 1 and dtype is BF16
    assert targets(check(g, [y], "onednn")) == ([CONV_ADD, COPY] if fused else [CONV, "kernel add_clone"])


@needs_bf16
def test_relu_between_convolutions_stays_channels_last() -> None:
    g = Net(BF16)
    y = g.op("relu", g.norm(g.conv(g.image(), 8, 8), 8))
    z = g.op("relu", g.op("add", g.conv(y, 8, 8), y))
    assert targets(check(g, [z])) == [CONV, "kernel relu", CONV_ADD, COPY]
    assert targets(check(g, [z], finite_math=True)) == [CONV, CONV_ADD, COPY]


@needs_bf16
@pytest.mark.parametrize("name", [row.name for row in ops.ROWS if row.activation and not row.opened])
def test_every_activation_between_convolutions_stays_channels_last(name: str) -> None:
    g = Net()
    arguments = {"softplus": (1.0, 20.0), "threshold": (0.1, 0.5)}.get(name, ())
    y = g.op(name, g.conv(g.image(), 8, 16), *arguments)
    _, second = [i for i in check(g, [g.conv(y, 16, 8)]).instructions if isinstance(i, Call) and not i.prepare]
    assert layout_of(g.temporaries[second.args[0].id]) == "channels_last"


@needs_bf16
def test_an_addition_goes_to_one_of_two_convolutions() -> None:
    g = Net(BF16)
    x = g.image()
    z = g.op("add", g.conv(x, 8, 8), g.conv(x, 8, 8, k=1))
    assert targets(check(g, [z])) == [CONV, CONV_ADD, COPY]


def test_channels_last_goes_through_pooling_to_the_classifier() -> None:
    g = Net()
    y = g.op("relu", g.conv(g.image(), 8, 16))
    y = g.op("max_pool2d", y, [3, 3], [2, 2], [1, 1])
    y = g.op("mean", g.conv(y, 16, 16), [2, 3], True)
    y = g.op("linear", g.op("view", y, [2, 16]), g.weight(4, 16))
    assert not any("clone" in t for t in targets(check(g, [y])))


def test_channels_last_goes_through_resizing_and_joining() -> None:
    """This occurs in decode heads for segmentation, where eager converts every map to contiguous and back."""
    g = Net()
    small, large = g.conv(g.image(), 8, 16), g.conv(g.input(torch.randn(2, 8, 14, 14)), 8, 16)
    maps = [g.op("upsample_bilinear2d", m, [28, 28], False) for m in (small, large)]
    y = g.conv(g.op("cat", maps, 1), 32, 8, k=1)
    resized = ["kernel upsample_bilinear2d"] * 2
    assert [t for t in targets(check(g, [y])) if t != CONV] == [*resized, "aten::cat", COPY], "one copy, of the result"


def test_a_view_that_needs_planes_reads_a_copy() -> None:
    g = Net()
    y = g.op("view", g.conv(g.image(), 8, 16), [2, 16 * 7, 7])
    assert targets(check(g, [y])) == [CONV, COPY, "aten::view"]


def test_a_permuted_value_needs_no_copy() -> None:
    g = Net()
    y = g.op("permute", g.conv(g.image(), 8, 16), [0, 2, 3, 1])
    z = g.op("layer_norm", y, [16], g.weight(16), g.weight(16), 1e-5)
    assert targets(check(g, [z])) == [CONV, "kernel layer_norm"]


def test_channels_last_input_gives_channels_last_output() -> None:
    g = Net()
    x = g.input(torch.randn(2, 8, 7, 7).to(memory_format=torch.channels_last))
    assert targets(check(g, [g.conv(x, 8, 16)])) == [CONV]


@pytest.mark.parametrize("prepack", ["never", "always", "auto"])
def test_prepack_option(prepack: str) -> None:
    g = Net()
    fragment = check(g, [g.conv(g.image(), 8, 16)], prepack=prepack)
    assert (targets(fragment)[0] == "aten::convolution") == (prepack == "never")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("groups", "stride", "dilation"), [(1, 1, 1), (1, 2, 1), (8, 1, 2)])
def test_a_sequence_runs_as_images_of_height_one(dtype: torch.dtype, groups: int, stride: int, dilation: int) -> None:
    g = Net(dtype)
    x = g.input(torch.randn(2, 8, 21, dtype=dtype))
    geometry = ([stride], [dilation], [dilation], False, [0], groups)
    y = g.op("gelu", g.norm(g.op("conv", x, g.weight(8, 8 // groups, 3), None, *geometry), 8))
    z = g.op("add", g.op("conv", y, g.weight(8, 8 // groups, 3), g.weight(8), *geometry), g.weight(1, 8, 1))
    names = targets(check(g, [z]))
    assert names.count(CONV) == 2 and not any("gelu" in n or "batch_norm" in n for n in names)


def test_a_sequence_becomes_channels_last_in_a_kernel() -> None:
    """Given planes, the operator would copy them itself, more slowly."""
    g = Net()
    x, weight = g.input(torch.randn(2, 8, 50)), g.weight(16, 8, 3)
    y = g.op("conv", x, weight, None, [1], [1], [1], False, [0], 1)
    assert targets(check(g, [y])) == [COPY, CONV, "aten::squeeze.dim", COPY]


def test_a_sequence_is_a_slice_of_one_product_of_several_linears() -> None:
    """As keys and values behind short convolutions with residuals: the copies for both are a kernel in front of both convolutions,
    and what follows these another."""
    g = Net()
    x = g.input(torch.randn(2, 50, 64))
    parts = [g.op("linear", x, g.weight(32, 64), None) for _ in range(2)]

    def short(v: Value) -> Value:
        made = g.op("conv", g.op("transpose", v, 1, 2), g.weight(32, 1, 3), None, [1], [1], [1], False, [0], 32)
        return g.op("add", g.op("transpose", made, 1, 2), v)

    check(g, [g.op("sigmoid", short(v)) for v in parts])


@needs_bf16
def test_an_addition_rides_behind_a_convolution_of_a_sequence() -> None:
    g = Net(BF16)
    x = g.input(torch.randn(2, 8, 21, dtype=BF16))
    y = g.op("add", g.op("conv", x, g.weight(8, 8, 3), None, [1], [1], [1], False, [0], 1), x)
    assert CONV_ADD in targets(check(g, [y]))


def test_a_group_norm_reads_what_eager_refuses() -> None:
    """After convolutions: a sequence, and half of the channels. Eager's group norm accepts only dense images."""
    g = Net()
    conv = g.op("conv", g.input(torch.randn(2, 8, 21)), g.weight(8, 8, 3), None, [1], [1], [1], False, [0], 1)
    half = g.op("slice", g.conv(g.input(torch.randn(1, 8, 7, 7)), 8, 16), 1, 0, 8)
    cases = ((conv, 2, 21), (half, 1, 49))
    norms = [g.op("group_norm", v, g.weight(8), g.weight(8), n, 8, points, 4, 1e-5) for v, n, points in cases]
    assert not any("group_norm" in t and "kernel" not in t for t in targets(check(g, norms)))


TRANSPOSED = "mkldnn::_convolution_transpose_pointwise"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("taps", "step", "groups", "end"), [(2, 2, 1, 0), (4, 2, 1, 0), (3, 2, 1, 1), (3, 1, 1, 0), (4, 2, 2, 0)])
def test_transposed_convolutions_are_packed(dtype: torch.dtype, bias: bool, taps: int, step: int, groups: int, end: int) -> None:
    g = Net(dtype)
    weights = g.weight(8, 16 // groups, taps, taps), g.weight(16) if bias else None
    pad = [int(taps > 2)] * 2
    y = g.op("conv", g.image(), *weights, [step, step], pad, [1, 1], True, [end, end], groups)
    assert targets(check(g, [g.op("hardswish", y)])) == [COPY, TRANSPOSED, COPY]


def test_images_stay_channels_last_through_a_transposed_convolution() -> None:
    g = Net()
    y = g.op("conv", g.conv(g.image(), 8, 8), g.weight(8, 8, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    assert targets(check(g, [g.conv(y, 8, 8)])) == [CONV, TRANSPOSED, CONV, COPY]


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_batch_norm_behind_a_transposed_convolution_is_folded(dtype: torch.dtype) -> None:
    g = Net(dtype)
    y = g.op("conv", g.image(), g.weight(8, 16, 2, 2), g.weight(16), [2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    assert targets(check(g, [g.norm(y, 16)])) == ["kernel clone", TRANSPOSED, COPY]


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_transposed_convolution_of_signals_is_one_of_images(dtype: torch.dtype) -> None:
    g = Net(dtype)
    x = g.input(torch.randn(2, 8, 20, dtype=dtype))
    y = g.op("conv", x, g.weight(8, 16, 4), g.weight(16), [2], [1], [1], True, [0], 1)
    assert TRANSPOSED in targets(check(g, [y]))


@pytest.mark.parametrize("how", [{"groups": 8}, {"end": 2, "dilation": 3}, {"channels": 128, "step": 1}])
def test_some_transposed_convolutions_stay_eagers(how: dict[str, int]) -> None:
    """With one channel a group or a long end torch does not call oneDNN; at stride 1 long sums would be less exact."""
    g = Net()
    c, groups, step, end, dilation = (how.get(k, d) for k, d in dict(channels=8, groups=1, step=2, end=0, dilation=1).items())
    pair = [step, step], [1, 1], [dilation, dilation], True, [end, end]
    y = g.op("conv", g.image(c), g.weight(c, 16 // groups, 3, 3), None, *pair, groups)
    assert TRANSPOSED not in targets(check(g, [y]))


def volume(g: Net, channels: int = 8) -> object:
    return g.input(torch.randn(1, channels, 5, 6, 7, dtype=g.dtype))


def conv3d(g: Net, x: object, i: int, o: int, step: int = 1, groups: int = 1, bias: bool = True) -> object:
    weights = g.weight(o, i // groups, 3, 3, 3), g.weight(o) if bias else None
    return g.op("conv", x, *weights, [1, step, step], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], groups)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("step", "groups", "bias"), [(1, 1, True), (2, 1, False), (1, 8, True), (1, 2, True)])
def test_convolutions_of_volumes_are_packed_with_their_batch_norm(dtype: torch.dtype, step: int, groups: int, bias: bool) -> None:
    g = Net(dtype)
    y = g.op("silu", g.norm(conv3d(g, volume(g), 8, 16, step, groups, bias), 16))
    assert targets(check(g, [y])) == [CONV, COPY]


def test_volumes_stay_channels_last_between_convolutions() -> None:
    g = Net()
    y = g.op("relu", conv3d(g, volume(g), 8, 8))
    z = g.op("add", conv3d(g, y, 8, 8), y)
    assert targets(check(g, [conv3d(g, z, 8, 8)])) == [CONV, "kernel relu", CONV, "kernel add", CONV, COPY]


def test_long_sums_over_volumes_are_split() -> None:
    g = Net()
    assert targets(check(g, [conv3d(g, volume(g, 64), 64, 8)])) == [CONV, "kernel add_clone"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_convolutions_of_volumes_without_constant_weights_stay_eagers(dtype: torch.dtype) -> None:
    g = Net(dtype)
    y = g.norm(conv3d(g, volume(g), 8, 8), 8)
    w = g.input(torch.randn(8, 8, 1, 1, 1, dtype=dtype))
    z = g.op("conv", g.op("silu", y), w, None, [1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1)
    assert "aten::convolution" in targets(check(g, [z]))


@needs_bf16
def test_an_addition_rides_on_a_convolution_of_volumes() -> None:
    g = Net(BF16)
    x = volume(g)
    assert targets(check(g, [g.op("add", conv3d(g, x, 8, 8), x)], "onednn")) == [CONV_ADD, COPY]


def test_patches_of_volumes_stay_eagers_product() -> None:
    g = Net()
    how = [1, 2, 2], [0] * 3, [1] * 3, False, [0] * 3, 1
    y = g.op("conv", volume(g, 3), g.weight(8, 3, 1, 2, 2), None, *how)
    assert targets(check(g, [y])) == ["aten::convolution"]
