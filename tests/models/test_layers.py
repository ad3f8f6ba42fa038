"""Training steps of torch's own layers without an op left to eager, against eager in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusewright.conformance.ops.judge import difference


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


class Of(nn.Module):
    """A function as a layer."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        super().__init__()
        self.fn, self.args = fn, args

    def forward(self, x: torch.Tensor) -> Any:
        args = (a.to(x.dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in self.args)
        return self.fn(x, *args)


LAYERS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "instance norm 1d": (nn.InstanceNorm1d(3), r(2, 3, 7)),
    "instance norm 2d": (nn.InstanceNorm2d(3, affine=True), r(2, 3, 5, 6)),
    "instance norm 3d": (nn.InstanceNorm3d(3, affine=True), r(2, 3, 3, 4, 5)),
    "instance norm of channels-last images": (nn.InstanceNorm2d(3, affine=True), last(r(2, 3, 5, 6))),
    "reflection pad 1d": (nn.ReflectionPad1d((2, 3)), r(2, 3, 7)),
    "reflection pad 2d": (nn.ReflectionPad2d((1, 2, 0, 3)), last(r(2, 3, 5, 6))),
    "reflection pad 3d": (nn.ReflectionPad3d((1, 2, 2, 1, 1, 1)), r(2, 3, 3, 4, 5)),
    "replication pad 1d": (nn.ReplicationPad1d((2, 3)), r(2, 3, 7)),
    "replication pad 2d": (nn.ReplicationPad2d((1, 2, 0, 3)), last(r(2, 3, 5, 6))),
    "replication pad 3d": (nn.ReplicationPad3d((1, 2, 2, 1, 1, 1)), r(2, 3, 3, 4, 5)),
    "a large replication pad": (nn.ReplicationPad2d((9, 11, 10, 12)), r(2, 3, 5, 6)),
    "circular pad 1d": (nn.CircularPad1d((2, 3)), r(2, 3, 7)),
    "circular pad 2d": (nn.CircularPad2d((1, 2, 0, 3)), r(2, 3, 5, 6)),
    "circular pad 3d": (nn.CircularPad3d((1, 2, 2, 1, 1, 1)), r(2, 3, 3, 4, 5)),
    "max pool 3d": (nn.MaxPool3d(2), r(2, 3, 4, 4, 6)),
    "overlapping max pool 3d": (nn.MaxPool3d(3, 2, 1), r(2, 3, 5, 6, 7)),
    "adaptive average pool 1d": (nn.AdaptiveAvgPool1d(4), r(2, 3, 8)),
    "adaptive average pool 2d": (nn.AdaptiveAvgPool2d((4, 2)), last(r(2, 3, 8, 6))),
    "upsample 1d": (nn.Upsample(scale_factor=2), r(2, 3, 5)),
    "upsample 2d": (nn.Upsample(scale_factor=2), r(2, 3, 5, 4)),
    "upsample 3d": (nn.Upsample(scale_factor=3), r(2, 3, 3, 4, 2)),
    "segmentation": (Of(F.cross_entropy, torch.arange(24).reshape(2, 3, 4) % 5), r(2, 5, 3, 4)),
    "weighted segmentation": (
        Of(F.cross_entropy, torch.arange(24).reshape(2, 3, 4) % 5, None, None, 3, None, "sum"), r(2, 5, 3, 4)
    ),
    "huber": (Of(F.huber_loss, torch.zeros(3, 4)), r(3, 4)),
    "soft margin": (Of(F.soft_margin_loss, torch.ones(3, 4)), r(3, 4)),
    "log sigmoid": (nn.LogSigmoid(), r(3, 4)),
    "celu": (nn.CELU(0.5), r(3, 4)),
    "pairwise distance": (Of(F.pairwise_distance, torch.ones(3, 4)), r(3, 4)),
    "prelu": (nn.PReLU(3), r(2, 3, 5)),
    "batch norm of the batch alone": (nn.BatchNorm2d(3, track_running_stats=False), r(2, 3, 5, 6)),
}

FP32 = {
    "average pool 3d": (nn.AvgPool3d(3, 2, 1), r(2, 3, 5, 6, 7)),
    "local response norm": (nn.LocalResponseNorm(3), r(2, 5, 4, 4)),
}
"""Eager has no other type on a CPU."""

CASES = [
    *((name, *of, d) for name, of in LAYERS.items() for d in (torch.float32, torch.bfloat16)),
    *((name, *of, torch.float32) for name, of in FP32.items()),
]


def step(layer: nn.Module, x: torch.Tensor, compiled: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """The result and the gradients of the input and of the parameters."""
    layer, x = copy.deepcopy(layer).to(dtype), x.detach().to(dtype).clone().requires_grad_()
    options = {"strict": True, "fallback": "error"}
    run = torch.compile(layer, backend="x86_onednn", options=options) if compiled else layer
    y = run(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=dtype).reshape(y.shape))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("layer", "x", "dtype"), [c[1:] for c in CASES], ids=[f"{c[0]} {c[3]}" for c in CASES])
def test_a_step_leaves_nothing_to_eager(layer: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> None:
    layer, x = copy.deepcopy(layer).to(dtype), x.to(dtype)
    runs = (step(layer, x, True, dtype), step(layer, x, False, dtype), step(layer, x, False, torch.float64))
    for got, eager, exact in zip(*runs, strict=True):
        assert not (why := difference(got, eager, exact)), why


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(3), nn.InstanceNorm3d(3, affine=True)], ids=str)
def test_an_instance_norm_in_inference(norm: nn.Module) -> None:
    x = r(2, 3, *[4] * (3 if isinstance(norm, nn.InstanceNorm3d) else 2))
    run = torch.compile(norm.eval(), backend="x86_onednn", options={"strict": True, "fallback": "error"})
    with torch.no_grad():
        torch.testing.assert_close(run(x), norm(x))


@pytest.mark.parametrize(
    ("run", "x"),
    [
        (lambda x: nn.functional.avg_pool3d(x, 2), torch.ones(1, 2, 4, 4, 4, dtype=torch.bfloat16)),
        (lambda x: nn.functional.interpolate(x, scale_factor=2.0), torch.ones(1, 2, 6, 6, dtype=torch.int64)),
        (lambda x: nn.functional.celu(x, 0.0), torch.ones(3)),
    ],
    ids=["half types of volumes", "integers that are resized", "celu of nothing"],
)
def test_what_eager_refuses_raises(run: Any, x: torch.Tensor) -> None:
    for f in (run, torch.compile(run, backend="fusewright")):
        with pytest.raises(RuntimeError, match=r"not implemented for|cannot be 0"):
            f(x)
