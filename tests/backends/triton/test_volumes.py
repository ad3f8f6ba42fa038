"""Nets of 3-d convolutions, simulated: images lie channels-last between convolutions, in training and in inference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from torch import Tensor, nn

from fusewright import report
from fusewright.interface import TensorSpec
from fusewright.plan.build import Plan
from fusewright.plan.ir import Call, Launch, Ref
from fusewright.toolkit.rules.space import layout_of
from tests.hosts import needs_bf16
from tests.zoo.written.images import Segmenter, _VideoBlock

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Video(nn.Module):
    """The ends and a block of the video net."""

    def __init__(self, factored: bool) -> None:
        super().__init__()
        stem = nn.Conv3d(3, 8, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False)
        self.blocks = nn.Sequential(
            stem, nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)),
            _VideoBlock(8, 16, 2, factored),
        )  # fmt: skip
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(x).mean((2, 3, 4)))  # type: ignore[no-any-return]


NETS = {
    "video": (lambda: Video(False), (2, 3, 4, 16, 12)),
    "factored video": (lambda: Video(True), (1, 3, 4, 16, 12)),
    "U-Net of instance norms": (lambda: Segmenter(3, (8, 16), 1, 4), (2, 1, 4, 4, 6)),
    "U-Net of two dims": (lambda: Segmenter(2, (8, 16), 3, 4), (2, 3, 8, 12)),
}


def operands(plan: Plan) -> Iterator[tuple[str, TensorSpec]]:
    """What convolutions and their gradients read and make: images, where the layout of their memory can be told."""
    for i in plan.instructions:
        if isinstance(i, Call) and "convolution" in i.target and not i.prepare:
            ids = [a.id for a in i.args if isinstance(a, Ref)] + list(i.outs)
            for spec in (plan.specs.get(n) for n in ids):
                if spec is not None and len(spec.shape) > 3 and spec.shape[1] > 1 and min(spec.shape[2:]) > 1:  # type: ignore[operator, type-var]
                    yield i.target, spec


def step(module: Any, run: Any, shape: tuple[int, ...], train: bool, wide: bool = False) -> list[Tensor]:
    """The result of a step in bf16 autocast, or in fp64, and the gradients of all weights."""
    torch.manual_seed(1)
    x = torch.randn(shape)
    x = x.double() if wide else x
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not wide), torch.set_grad_enabled(train):
        y = run(x)
    if not train:
        return [y]
    (y if wide else y.float()).square().mean().backward()
    return [y.detach(), *(p.grad for p in module.parameters())]


def seen(x: Tensor) -> list[int]:
    """Strides, but for those of dims of size 1."""
    return [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]


@needs_bf16
@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("net", NETS)
def test_no_layout_is_copied_around_convolutions(net: str, train: bool) -> None:
    make, shape = NETS[net]
    torch.manual_seed(0)
    modules = [make().train(train) for _ in range(3)]
    for m in modules[1:]:
        m.load_state_dict(modules[0].state_dict())
    wide = step(modules[0].double(), modules[0], shape, train, wide=True)
    eager = step(modules[1], modules[1], shape, train)
    how = {"simulate": True, "strict": True, "fallback": "allow", "cache": False}
    with report.recording(keep=True) as reports:
        ours = step(modules[2], torch.compile(modules[2], backend="nvidia_triton", options=how), shape, train)
    for w, e, o in zip(wide, eager, ours, strict=True):
        assert o.dtype == e.dtype and seen(o) == seen(e)
        # with AVX512-BF16 and no AMX, gradients of bf16 weights of tiny volumes read what nothing wrote, in eager too
        if (e - w).norm() < w.norm() / 2:
            assert (o - w).norm() <= 2 * (e - w).norm() + 1e-2 * w.norm() + 1e-4
    plans = [r.kept.plan for r in reports if not r.superseded and r.kept is not None]
    assert len(plans) == 1 + train
    laid = [layout_of(s) for plan in plans for _, s in operands(plan)]
    ends = 2 if net.startswith("U-Net") else 0  # the result in planes, and its gradient
    assert len(laid) >= 8 and len(laid) - laid.count("channels_last") <= ends
    copies = [i for plan in plans for i in plan.instructions if isinstance(i, Call) and i.target.startswith("aten::clone")]
    assert not [i for i in copies if not i.prepare]


@needs_bf16
@pytest.mark.parametrize("norm", [nn.InstanceNorm3d(8), nn.InstanceNorm3d(8, affine=True)], ids=["plain", "affine"])
def test_an_instance_norm_of_a_training_step_is_one_kernel_that_reads_images_as_they_lie(norm: nn.Module) -> None:
    module = nn.Sequential(nn.Conv3d(4, 8, 3), norm, nn.LeakyReLU(0.01), nn.Conv3d(8, 4, 1))
    run = torch.compile(module, backend="nvidia_triton", options={"simulate": True, "strict": True, "cache": False})
    with report.recording(keep=True) as reports:
        step(module, run, (2, 4, 5, 4, 6), True)
    for plan in (r.kept.plan for r in reports if not r.superseded and r.kept is not None):
        launches = [i for i in plan.instructions if isinstance(i, Launch)]
        images = [[s for n in i.outs if (s := plan.specs[n]) is not None and len(s.shape) == 5] for i in launches]
        norms = [specs for specs in images if specs and specs[0].shape == (2, 8, 3, 2, 4)]
        assert len(norms) == 1 and all(s.stride[1] == 1 for s in norms[0])
        assert not any(isinstance(i, Call) and "batch_norm" in i.target for i in plan.instructions)
