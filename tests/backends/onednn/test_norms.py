"""Group norms after convolutions: channels-last, and as accurate as eager's on contiguous images. Batch norms that no convolution
takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright.plan.ir import Launch
from tests.backends.onednn.common import BF16, F32, check, compiled
from tests.fragments import Sketch, targets
from tests.hosts import needs_bf16

CONV = "mkldnn::_convolution_pointwise"


def drawn(g: Sketch, mean: float = 0.0, groups: int = 4, batch: int = 2, affine: bool = True, dtype: Any = F32) -> Any:
    """Sketch a convolution and a group norm; the convolution's bias determines the mean."""
    torch.manual_seed(0)
    x = g.input(torch.randn(batch, 8, 9, 9, dtype=dtype))
    w = g.input(torch.randn(16, 8, 1, 1, dtype=dtype) / 3, const=True)
    bias = g.input(torch.full((16,), mean, dtype=dtype), const=True)
    y = g.op("conv", x, w, bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    scale = [g.input(torch.randn(16, dtype=dtype), const=True) if affine else None for _ in range(2)]
    return g.op("group_norm", y, *scale, batch, 16, 81, groups, 1e-5)


def test_a_residual_stream_that_eager_keeps_transposed_is_turned_once() -> None:
    """As in MobileViT: each norm would read a row's elements from as many cache lines."""
    g = Sketch()
    w = g.input(torch.randn(48, 48), const=True)
    x = g.op("transpose", g.input(torch.randn(2, 48, 40)), 1, 2)
    for _ in range(2):
        made = g.op("linear", g.op("layer_norm", x, [48], None, None, 1e-5), w, None)
        x = g.op("add", x, made)
    z = g.op("layer_norm", x, [48], None, None, 1e-5)
    check(g, [z])
    streams = [s.stride for s in g.temporaries.values() if s is not None and s.shape == (2, 40, 48)]
    assert (1920, 48, 1) in streams and x.spec.stride == (1920, 1, 40)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("groups", "batch"), [(4, 2), (1, 1), (16, 2)])
def test_group_norms_stay_channels_last(groups: int, batch: int, affine: bool) -> None:
    g = Sketch()
    z = g.op("silu", drawn(g, 1.0, groups, batch, affine))
    names = [t for t in targets(check(g, [z])) if t not in ("aten::view", "aten::expand")]
    assert names[0] == CONV and all(t.startswith("kernel") for t in names[1:])


@pytest.mark.parametrize("mean", [0.0, 3.0, 100.0])
def test_a_mean_does_not_cancel_the_variance(mean: float) -> None:
    """Eager's kernel for channels-last images loses accuracy: at least 50 times its error on contiguous ones."""
    g = Sketch()
    z = drawn(g, mean)
    (ours,) = g.run(compiled(g, [z]), [z])
    wide = [v if v is None else g.tensors[v.id].double() for v in g.ops[0].args[:3]]
    w, b = (g.tensors[v.id].double() for v in g.ops[1].args[1:3])
    exact = torch.nn.functional.group_norm(torch.nn.functional.conv2d(*wide), 4, w, b)
    error, theirs = ((t.double() - exact).square().mean().sqrt() for t in (ours, g.tensors[z.id]))
    assert error <= 2 * theirs + 1e-7


def test_statistics_that_are_read_are_eagers() -> None:
    g = Sketch()
    drawn(g)
    outs = list(g.ops[-1].outs)
    assert "aten::native_group_norm" in targets(check(g, outs))


@needs_bf16
def test_bf16_is_eagers() -> None:
    """Eager computes in fp32, where the cancellation error is far below a rounding step of bf16."""
    g = Sketch()
    assert "aten::native_group_norm" in targets(check(g, [drawn(g, 3.0, dtype=BF16)]))


@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=needs_bf16)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_depends_on_the_weights_of_a_batch_norm_is_computed_once(dtype: Any, layout: torch.memory_format) -> None:
    """As in DenseNet, where a relu and a convolution follow. In fp32 the mean is subtracted first."""
    torch.manual_seed(0)
    g = Sketch()
    x = g.input((torch.randn(2, 8, 9, 9) + 3).to(dtype).to(memory_format=layout))
    weight, bias, variance = (g.input((torch.rand(8) + 0.1).to(dtype), const=True) for _ in range(3))
    mean = g.input(torch.full((8,), 3.0, dtype=dtype), const=True)
    y = g.op("relu", g.op("batch_norm", x, weight, bias, mean, variance, 0.1, 1e-5))
    fragment = check(g, [y])
    (launch,) = [i for i in fragment.instructions if isinstance(i, Launch)]
    assert len(launch.inputs) == (4 if dtype is F32 else 3)
    assert not any(n.op == "rsqrt" for n in fragment.kernels[launch.kernel].nodes())


def test_a_batch_norm_whose_weights_are_computed_is_one_kernel() -> None:
    g = Sketch()
    x, weight, bias, mean = g.input(torch.randn(2, 8, 9, 9)), *(g.input(torch.randn(8)) for _ in range(3))
    y = g.op("batch_norm", x, weight, bias, mean, g.input(torch.rand(8) + 0.1), 0.1, 1e-5)
    assert targets(check(g, [y])) == ["kernel batch_norm"]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_group_norm_of_images_without_gradients_has_those_of_its_weights() -> None:
    """The gradient of the images, the first result, is None."""
    torch.manual_seed(0)
    net, x = torch.nn.GroupNorm(2, 8), torch.randn(2, 8, 5, 5)
    twin = torch.compile(net, backend="x86_onednn", options={"strict": True})
    made = [torch.autograd.grad(f(x).square().sum(), list(net.parameters())) for f in (net, twin)]
    torch.testing.assert_close(made[1], made[0])
