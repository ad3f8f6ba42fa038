"""fp32 convolutions of inference, channels-last where that is faster and rounds no more than torch's own call.

Torch lets cuDNN round the operands of convolutions to TF32 by default. Whether a call does depends on the layout, the sizes and
cuDNN's choice among its kernels, which nothing tells: few channels in planes often stay fp32 where the same in channels-last is
rounded (80 times eager's error on ViT). Where both round, cuDNN's kernels are channels-last, and planes are copied on both sides of
them. So each convolution is tried once (docs/studies/gpu-kernels.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusewright.interface import OpView, Value
from fusewright.ops.strides import CHANNELS_LAST
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.run.graphs import REPEATS, several
from fusewright_triton.select import convolutions
from fusewright_triton.select.calls import Calls

FINE = 1 + 2.0**-12
"""A number that TF32, with ten bits behind the point, rounds to one."""

LARGE = 1 << 22
"""Elements of an image from which one call takes long enough to be timed."""


@dataclass(frozen=True)
class Trial:
    """A convolution to be tried: shapes, and whether images have to be copied in front of it and behind."""

    image: tuple[int, ...]
    weight: tuple[int, ...]
    geometry: tuple[Any, ...]
    copied: tuple[bool, bool]
    device: str

    @property
    def key(self) -> str:
        return f"convolution float32 layout {self.image} {self.weight} {self.geometry} copied {self.copied}"

    def tensors(self, last: bool, random: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an image and a weight, random or ones."""
        form = CHANNELS_LAST[len(self.image)] if last else torch.contiguous_format
        made = (torch.randn if random else torch.ones)(self.image, device=self.device), torch.ones(self.weight, device=self.device)
        return made[0].contiguous(memory_format=form), made[1].contiguous(memory_format=form)

    def call(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.convolution(x, w, None, *self.geometry)

    def rounds(self, last: bool) -> bool:
        """Return whether the library rounds operands to TF32."""
        x, w = self.tensors(last, random=False)
        exact = self.call(x, w).amax()
        return bool((self.call(x * FINE, w).amax() / exact < (1 + FINE) / 2).item())

    def planes(self) -> Thunk:
        x, w = self.tensors(last=False, random=True)
        return self._several(lambda: self.call(x, w))

    def last(self) -> Thunk:
        """Raises RuntimeError where only channels-last rounds."""
        if self.rounds(last=True) and not self.rounds(last=False):
            raise RuntimeError("channels-last is rounded to TF32, planes are not")
        x, w = self.tensors(last=True, random=True)

        def run() -> None:
            before, behind = self.copied
            out = self.call(x, w)
            if before:
                x.clone()  # takes as long as a kernel that moves channels
            if behind:
                out.clone()

        return self._several(run)

    def _several(self, run: Callable[[], Any]) -> Thunk:
        return several(run, self.device, 1 if math.prod(self.image) >= LARGE else REPEATS)


def _trial(op: OpView, c: Calls) -> Trial:
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    copied = not _made_by_kernel(op.arg("input"), c), not _read_by_kernels(op.out, c)
    return Trial(tuple(x.shape), tuple(w.shape), convolutions.geometry(op), copied, x.device)  # type: ignore[arg-type]


def _in_any_layout(op: OpView) -> bool:
    """Return whether an op is a convolution, or a loop kernel, which reads and writes any layout."""
    return op.op == "conv" or convolutions.in_kernels(op)


def _made_by_kernel(value: Value, c: Calls) -> bool:
    made = c.graph.producer(value)
    return made is not None and _in_any_layout(made)


def _read_by_kernels(value: Value, c: Calls) -> bool:
    users = c.graph.users(value)
    return not c.graph.escapes(value) and bool(users) and all(map(_in_any_layout, users))


def _faster(m: Match, c: Calls) -> bool:
    """Return whether a convolution of a constant weight is channels-last; in simulation always, so that this is tried there."""
    if not convolutions.constant(m, c) or (spec_of(m.out).rank == 5 and any(op.op == "group_norm" for op in c.graph)):
        return False  # groups of channels of volumes lie across memory for kernels
    if c.ctx.device.simulated:
        return True
    trial = _trial(m.anchor, c)
    return c.ctx.choose(trial.key, Lazy({"planes": trial.planes, "last": trial.last})) == "last"


ROWS = (
    Row("triton.conv.layout", chain("conv"), when=_faster, write=convolutions.write, note="convolution, channels-last"),
    convolutions.BIAS,
)
"""Rows for fp32."""
