"""Convolutions and their gradients: the form for each kind, type and core."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright.interface import Value
from tests.backends.acl.common import BF16, F32, channels_last, check, compiled
from tests.fragments import Sketch, targets
from tests.hosts import FLOATS, needs_bf16

CONV, PACK = "mkldnn::_convolution_pointwise", "mkldnn::_reorder_convolution_weight"


def _conv(
    dtype: torch.dtype = F32, *, groups: int = 1, channels: int = 16, bias: bool = True, const: bool = True, planes: bool = False,
    size: tuple[int, ...] = (9, 7), kernel: int = 3, phase: Any = "infer", transposed: bool = False, stride: int = 1,
) -> tuple[Sketch, Value]:  # fmt: skip
    torch.manual_seed(0)
    g, rank = Sketch(phase), len(size)
    data = torch.randn(2, channels, *size, dtype=dtype)
    x = g.input(data if planes or rank != 2 else channels_last(data))
    w = g.input(torch.randn(32, channels // groups, *[kernel] * rank, dtype=dtype) / 8, const=const)
    if groups == channels:
        w = g.input(torch.randn(channels, 1, *[kernel] * rank, dtype=dtype) / 3, const=const)
    if transposed:
        w = g.input(torch.randn(channels, 8, *[kernel] * rank, dtype=dtype) / 8, const=const)
    out = 8 if transposed else channels if groups == channels else 32
    b = g.input(torch.randn(out, dtype=dtype), const=const) if bias else None
    ones, pad = [1] * rank, [kernel // 2] * rank
    return g, g.op("conv", x, w, b, [stride] * rank, pad, ones, transposed, [0] * rank, groups)


@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kernel", [1, 3])
def test_one_group_is_acls_and_packed(dtype: torch.dtype, kernel: int, planes: bool) -> None:
    g, y = _conv(dtype, kernel=kernel, planes=planes)
    assert CONV in targets(check(g, [y]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_dimension(dtype: torch.dtype) -> None:
    g, y = _conv(dtype, size=(11,))
    assert CONV in targets(check(g, [y]))


def _normed(g: Sketch, y: Value, dtype: torch.dtype) -> Value:
    channels = y.spec.shape[1] if y.spec else 0
    stats = [g.input(torch.rand(channels, dtype=dtype) + 0.5, const=True) for _ in range(4)]
    return g.op("batch_norm", y, *stats, 0.1, 1e-5)


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_fp32_takes_a_batch_norm_and_a_relu_in(groups: int) -> None:
    g, y = _conv(groups=groups, planes=False)
    found = targets(check(g, [g.op("relu", _normed(g, y, F32))]))
    assert set(found) <= {CONV, "aten::slice.Tensor", "aten::cat"} and found.count(CONV) == (4 if groups == 4 else 1)


@pytest.mark.parametrize("groups", [pytest.param(1, marks=needs_bf16), pytest.param(4, marks=needs_bf16), 16])
def test_bf16_leaves_them_to_a_kernel(groups: int) -> None:
    g, y = _conv(BF16, groups=groups)
    found = targets(check(g, [g.op("relu", _normed(g, y, BF16))]))
    assert found[-1].startswith("kernel") and not any("norm" in t for t in found[:-1])
    assert found.count(CONV) == (4 if groups == 4 else 1)


def test_clamp_rides_and_what_acl_lacks_does_not() -> None:
    g, y = _conv()
    assert targets(check(g, [g.op("clamp", y, 0.0, 6.0)]))[0] == CONV
    g, y = _conv()
    assert targets(check(g, [g.op("silu", y)]))[-1] == "kernel silu"


@pytest.mark.parametrize(
    "how",
    [
        {"groups": 16}, {"transposed": True}, {"size": (4, 5, 6)}, {"groups": 2, "const": False}, {"groups": 16, "const": False},
    ],
    ids=lambda h: "-".join(h),
)  # fmt: skip
def test_bf16_that_has_only_a_reference_kernel_is_computed_in_fp32(how: dict[str, Any]) -> None:
    g, y = _conv(BF16, planes=True, **how)
    fragment = check(g, [y])
    found = targets(fragment)
    heavy = [k for k, t in enumerate(found) if "conv" in t and not t.startswith("kernel")]
    assert heavy and found[0].startswith("kernel cast") and found[-1].startswith("kernel cast")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("planes", [True, False])
def test_each_group_is_a_convolution_of_its_own(dtype: torch.dtype, planes: bool) -> None:
    g, y = _conv(dtype, groups=4, planes=planes)
    found = targets(check(g, [y]))
    assert found.count(CONV) == 4 and "aten::cat" in found


@pytest.mark.parametrize("size", [(9, 7), (11,), (1, 1)])
@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_groups_of_few_channels_that_train_are_apart(dtype: torch.dtype, planes: bool, size: tuple[int, ...]) -> None:
    g, y = _conv(dtype, groups=8, const=False, planes=planes, size=size)
    found = targets(check(g, [y]))
    assert found.count("aten::convolution") == 8 and "aten::cat" in found


def test_a_depthwise_one_without_sve_is_eagers() -> None:
    g, y = _conv(groups=16)
    assert targets(check(g, [y])) == [CONV]
    assert targets(check(g, [y], on="neoverse-n1")) == ["aten::convolution"]


def _backward(dtype: torch.dtype, mask: list[bool], planes: bool, **how: Any) -> tuple[Sketch, list[Value]]:
    torch.manual_seed(0)
    g, groups, stride, dilation = Sketch("backward"), how.get("groups", 1), how.get("stride", 1), how.get("dilation", 1)
    x, w = torch.randn(2, 8, 9, 7, dtype=dtype), torch.randn(16, 8 // groups, 3, 3, dtype=dtype) / 8
    y = torch.convolution(x, w, None, [stride] * 2, [1, 1], [dilation] * 2, False, [0, 0], groups)
    layout = (lambda t: t) if planes else channels_last
    given = [g.input(layout(t)) for t in (torch.randn_like(y), x, w)]
    first = g.op("conv_backward", *given, [16], [stride] * 2, [1, 1], [dilation] * 2, False, [0, 0], groups, mask)
    return g, [v for v, wanted in zip(next(o for o in g.ops if o.outs[0] is first).outs, mask, strict=True) if wanted]


@pytest.mark.parametrize("on", ["neoverse-v1", "neoverse-n1"])
@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False], [True, False, False], [False, False, True]])
@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradients_are_computed_in_fp32_and_in_planes(dtype: torch.dtype, planes: bool, mask: list[bool], on: str) -> None:
    g, outs = _backward(dtype, mask, planes)
    if dtype is BF16 and on == "neoverse-n1":
        return  # the core lacks bf16, so the host never asks
    found = targets(check(g, outs, on=on))
    assert ("aten::_slow_conv2d_backward.output_mask" in found) == (on == "neoverse-n1" and mask[:2] != [False, False])


@pytest.mark.parametrize("how", [{"stride": 2}, {"dilation": 2}, {"groups": 2}, {"groups": 8}], ids=lambda h: "-".join(h))
@pytest.mark.parametrize("on", ["neoverse-v1", "neoverse-n1"])
def test_gradients_of_other_convolutions(how: dict[str, Any], on: str) -> None:
    g, outs = _backward(F32, [True, True, True], planes=False, **how)
    found, groups = targets(check(g, outs, on=on)), how.get("groups", 1)
    made = [t for t in found if "conv" in t and "backward" in t]
    columns = on == "neoverse-n1" and "dilation" not in how
    assert made == ["aten::_slow_conv2d_backward.output_mask" if columns else "aten::convolution_backward"] * groups


def test_an_empty_image_stays_eagers() -> None:
    g, y = _conv()
    assert targets(compiled(g, [y]))
    empty = Sketch()
    x, w = empty.input(torch.randn(0, 8, 5, 5)), empty.input(torch.randn(4, 8, 3, 3), const=True)
    out = empty.op("conv", x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert targets(compiled(empty, [out])) == ["aten::convolution"]
