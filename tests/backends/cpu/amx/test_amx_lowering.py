"""Products and 1x1 convolutions that run as our kernel for AMX: what is in its call, and strides. Tiles are simulated."""

from __future__ import annotations

import math

import pytest
import torch

from fusewright_cpu.target import host_target
from tests.backends.cpu.amx.simulated import simulate_linears
from tests.backends.onednn.common import BF16, F32, check
from tests.backends.onednn.test_conv import Net
from tests.fragments import Sketch, targets
from tests.hosts import needs_bf16

pytestmark = pytest.mark.skipif(not host_target().masks, reason="this CPU has no masked stores")


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_linears(monkeypatch)


def kernels(g: Sketch, *outputs: object, **options: object) -> list[str]:
    return targets(check(g, list(outputs), "own", "kernel", **options))


def linear(g: Sketch, x: object, n: int, bias: bool = True, dtype: torch.dtype = BF16) -> object:
    w = g.input(torch.randn(n, x.spec.shape[-1], dtype=dtype) / 8, const=True)
    return g.op("linear", x, w, g.input(torch.randn(n, dtype=dtype), const=True) if bias else None)


@pytest.mark.parametrize("shape", [(40, 64), (2, 33, 32), (3, 1, 40, 96)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    g = Sketch()
    assert kernels(g, linear(g, g.input(torch.randn(*shape, dtype=BF16)), 45, bias)) == [f"kernel amx_linear{'_bias' * bias}"]


@pytest.mark.parametrize("after", ["relu", "gelu", "silu", "tanh", "sigmoid", "hardswish", "hardsigmoid"])
def test_activations_are_in_the_call_and_keep_nan(after: str) -> None:
    g = Sketch()
    x = torch.randn(33, 32, dtype=BF16)
    x[3, 4] = math.nan
    if after != "gelu":  # eager's of infinity depends on the place in a vector
        x[5, 6] = math.inf
    y = g.op(after, linear(g, g.input(x), 32))
    assert kernels(g, y) == [f"kernel amx_linear_bias_{after}"]


def test_scalars_of_activations() -> None:
    g = Sketch()
    x = g.input(torch.randn(33, 32, dtype=BF16))
    low, leaky = g.op("clamp", linear(g, x, 32), -0.25, 0.5), g.op("leaky_relu", linear(g, x, 40), 0.125)
    tanh = g.op("gelu", linear(g, x, 48), "tanh")
    names = kernels(g, low, leaky, tanh, disable_rules=("onednn.product.siblings",))
    assert names == ["kernel amx_linear_bias_clamp", "kernel amx_linear_bias_leaky_relu", "kernel amx_linear_bias_gelu_tanh"]


def test_rows_that_are_apart_are_read_in_place_and_others_copied() -> None:
    g = Sketch()
    wide = g.input(torch.randn(2, 40, 96, dtype=BF16))
    inside, turned = g.op("slice", wide, 2, 32, 96), g.op("transpose", wide, 1, 2)
    assert kernels(g, linear(g, inside, 32)) == ["aten::slice.Tensor", "kernel amx_linear_bias"]
    g = Sketch()
    turned = g.op("transpose", g.input(torch.randn(2, 64, 40, dtype=BF16)), 1, 2)
    assert "kernel amx_linear_bias" in kernels(g, linear(g, turned, 32))


@pytest.mark.parametrize("shape", [(2, 20, 64), (2, 20, 2, 32)])
def test_flattened_rows_are_read_in_place(shape: tuple[int, ...]) -> None:
    g = Sketch()
    flat = g.op("view", g.input(torch.randn(*shape, dtype=BF16)), [40, 64])
    w, bias = (g.input(torch.randn(*s, dtype=BF16) / 8, const=True) for s in ((64, 32), (32,)))
    y = g.op("relu", g.op("view", g.op("addmm", bias, flat, w), [2, 20, 32]))
    assert kernels(g, y)[-1] == "kernel amx_linear_bias_relu"


def test_siblings_become_one_launch() -> None:
    g = Sketch()
    x = g.input(torch.randn(2, 32, 32, dtype=BF16))
    outs = [g.op("mul", linear(g, x, n), 2.0) for n in (32, 16, 16)]
    assert kernels(g, *outs)[:4] == ["kernel amx_linear_bias"] + ["aten::slice.Tensor"] * 3


@pytest.mark.parametrize(
    ("rows", "k", "dtype", "prepack"),
    [
        pytest.param(31, 32, BF16, "auto", marks=needs_bf16), pytest.param(40, 40, BF16, "auto", marks=needs_bf16),
        (40, 32, F32, "auto"), pytest.param(40, 32, BF16, "never", marks=needs_bf16),
    ],
)
def test_other_products_are_left_to_onednn(rows: int, k: int, dtype: torch.dtype, prepack: str) -> None:
    g = Sketch()
    y = linear(g, g.input(torch.randn(rows, k, dtype=dtype)), 32, dtype=dtype)
    assert not any("amx" in t for t in kernels(g, y, prepack=prepack))


@needs_bf16
def test_relu_stays_apart_where_onednn_multiplies() -> None:
    g = Sketch()
    y = g.op("relu", linear(g, g.input(torch.randn(40, 32, dtype=BF16)), 32))
    assert targets(check(g, [y], "packed")) == ["mkldnn::_linear_pointwise", "kernel relu"]


@needs_bf16
def test_a_bottleneck_is_three_calls() -> None:
    g = Net(BF16)
    x = g.op("relu", g.norm(g.conv(g.image(32), 32, 32, 1), 32))
    y = g.op("relu", g.norm(g.conv(x, 32, 32, 3), 32))
    y = g.op("relu", g.op("add", g.norm(g.conv(y, 32, 32, 1), 32), x, 1))
    found = [t for t in kernels(g, y) if "clone" not in t]
    assert found == [
        "kernel amx_linear_bias_relu", "mkldnn::_convolution_pointwise", "kernel relu", "kernel amx_linear_bias_add_relu",
    ]  # fmt: skip


def test_an_image_that_is_added_may_have_other_strides() -> None:
    g = Net(BF16)
    other = g.input(torch.randn(2, 32, 7, 7, dtype=BF16))
    y = g.op("add", other, g.conv(g.image(64), 64, 32, 1, bias=True), 1)
    assert "kernel amx_linear_bias_add" in kernels(g, y)


@needs_bf16
@pytest.mark.parametrize(("k", "c", "stride"), [(3, 32, 1), (1, 24, 1), (1, 32, 2)])
def test_other_convolutions_are_left_to_onednn(k: int, c: int, stride: int) -> None:
    g = Net(BF16)
    w = g.weight(32, c, k, k)
    y = g.op("conv", g.image(c), w, None, [stride, stride], [k // 2, k // 2], [1, 1], False, [0, 0], 1)
    assert not any("amx" in t for t in kernels(g, y))
