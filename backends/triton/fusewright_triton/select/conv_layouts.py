"""Layouts of convolutions of inference where that is no matter of course: each is tried once in planes and in channels-last.

fp32: torch lets cuDNN round the operands of convolutions to TF32 by default. Whether a call does depends on the layout, the sizes
and cuDNN's choice among its kernels, which nothing tells: few channels in planes often stay fp32 where the same in channels-last is
rounded (80 times eager's error on ViT). Where both round, cuDNN's kernels are channels-last, and planes are copied on both sides of
them. So it is channels-last where that is faster and rounds no more than torch's own call (docs/studies/gpu-kernels.md).

Half types are channels-last, unless images in planes would be copied in front of a convolution or behind it: between loop kernels
none are, and nothing is tried. Torch has kernels of its own for groups in planes, and single pixels are a product in either layout;
nothing else is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.ops.strides import CHANNELS_LAST
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.region.builder import channels_last_strides, same_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.rules.space import layout_of
from fusewright_triton.run.graphs import REPEATS, several
from fusewright_triton.select import convolutions, more_channels
from fusewright_triton.select.calls import Calls

FINE = 1 + 2.0**-12
"""A number that TF32, with ten bits behind the point, rounds to one."""

LARGE = 1 << 22
"""Elements of an image from which one call takes long enough to be timed."""

OTHERS = frozenset(f"triton.conv.{name}" for name in ("few_channels", "grouped", "depthwise", "planes"))
"""Rows that have chosen a kernel and its layout."""

Steps = tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...]
"""The shape of the weight and the geometry of each convolution."""


@dataclass(frozen=True)
class Trial:
    """Convolutions, each of which is the only reader of the one before, to be tried: whether images have to be copied in front of
    them and behind if they are channels-last; channels of zeros that the first then has, in and out; and whether an activation, a
    part of the call then, is a pass of its own in planes, and a bias, which the copy behind adds then, one of torch's call."""

    image: tuple[int, ...]
    steps: Steps
    copied: tuple[bool, bool]
    device: str
    dtype: torch.dtype = torch.float32
    more: tuple[int, int] = (0, 0)
    activated: bool = False
    biased: bool = False

    @property
    def key(self) -> str:
        dtype, steps = str(self.dtype).removeprefix("torch."), " ".join(f"{w} {how}" for w, how in self.steps)
        words = f"{f' more {self.more}' if any(self.more) else ''}{' activated' * self.activated}{' bias' * self.biased}"
        return f"convolution {dtype} layout {self.image} {steps} copied {self.copied}{words}"

    def tensors(self, last: bool, random: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return an image, random or ones, and the weights."""
        (behind, outs), form = self.more if last else (0, 0), CHANNELS_LAST[len(self.image)] if last else torch.contiguous_format
        n, c, *sizes = self.image
        image = (torch.randn if random else torch.ones)((n, c + behind, *sizes), device=self.device)
        shapes = [w for w, _ in self.steps]
        shapes[0] = (shapes[0][0] + outs, shapes[0][1] + behind, *shapes[0][2:])
        weights = [torch.ones(s, device=self.device) for s in shapes]
        image, *weights = (t.to(self.dtype).contiguous(memory_format=form) for t in (image, *weights))
        return image, weights

    def call(self, x: torch.Tensor, w: torch.Tensor, how: tuple[Any, ...], bias: torch.Tensor | None = None) -> torch.Tensor:
        """Run what eager would run."""
        return torch.convolution(x, w, bias, *how)

    def run(self, x: torch.Tensor, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
        for k, (w, (_, how)) in enumerate(zip(weights, self.steps, strict=True), 1):
            x = self.call(x, w, how, bias if k == len(weights) else None)
        return x

    def rounds(self, last: bool) -> list[bool]:
        """Return whether the library rounds the operands of each convolution to TF32."""
        found = []
        x, weights = self.tensors(last, random=False)
        for w, (_, how) in zip(weights, self.steps, strict=True):
            made = self.call(x, w, how)
            found.append(bool((self.call(x * FINE, w, how).amax() / made.amax() < (1 + FINE) / 2).item()))
            x = torch.ones_like(made)
        return found

    def planes(self) -> Thunk:
        x, weights = self.tensors(last=False, random=True)
        bias = self._bias() if self.biased else None

        def run() -> None:
            out = self.run(x, weights, bias)
            if self.activated:
                out.clone()

        return self._several(run)

    def last(self) -> Thunk:
        """Raises RuntimeError where only channels-last rounds."""
        if self.dtype is torch.float32 and any(a and not b for a, b in zip(self.rounds(True), self.rounds(False), strict=True)):
            raise RuntimeError("channels-last is rounded to TF32, planes are not")
        x, weights = self.tensors(last=True, random=True)

        def run() -> None:
            before, behind = self.copied
            out = self.run(x, weights)
            if before:
                x.clone()  # takes as long as a kernel that moves channels
            if behind:
                out.clone()

        return self._several(run)

    def _bias(self) -> torch.Tensor:
        shape, (*_, transposed, _, groups) = self.steps[-1]
        return torch.ones(shape[1] * groups if transposed else shape[0], dtype=self.dtype, device=self.device)

    def _several(self, run: Callable[[], Any]) -> Thunk:
        return several(run, self.device, 1 if math.prod(self.image) >= LARGE else REPEATS)


def _trial(ops: Sequence[OpView], copied: tuple[bool, bool], c: Calls) -> Trial:
    x, first = spec_of(ops[0].arg("input")), ops[0]
    steps = tuple((tuple(spec_of(op.arg("weight")).shape), convolutions.geometry(op)) for op in ops)
    alone = len(ops) == 1 and x.dtype is not torch.float32
    more = more_channels.added(first, c) if alone else (0, 0)
    biased = copied[1] and ops[-1].arg("bias") is not None
    activated = alone and _activates(first, c)
    return Trial(tuple(x.shape), steps, copied, x.device, x.dtype, more, activated, biased)  # type: ignore[arg-type]


def _in_any_layout(op: OpView) -> bool:
    """Return whether an op is a convolution, or a loop kernel, which reads and writes any layout."""
    return op.op == "conv" or convolutions.in_kernels(op)


def _made_by_kernel(value: Value, c: Calls) -> bool:
    made = c.graph.producer(value)
    while made is not None and convolutions.is_view(made) and (given := next(made.inputs(), None)) is not None:
        made = c.graph.producer(given)
    return made is not None and _in_any_layout(made)


def _stays_here(value: Value, c: Calls) -> bool:
    """Return whether neither a value nor a view of it leaves the region."""
    views = (v for u in c.graph.users(value) if convolutions.is_view(u) for v in u.outs)
    return not c.graph.escapes(value) and all(_stays_here(v, c) for v in views)


def _read_by_kernels(value: Value, c: Calls) -> bool:
    """Return whether loop kernels and convolutions alone read a value. Views of channels-last images are often what a product
    reads without a copy."""
    users = c.graph.users(value)
    return bool(users) and _stays_here(value, c) and all(convolutions.is_view(u) or _in_any_layout(u) for u in users)


def _activates(op: OpView, c: Calls) -> bool:
    """Return whether a relu, perhaps behind a norm, is part of the library's call if images are channels-last, and only
    convolutions, for which no kernel could apply it, read its result."""
    user = c.graph.only_user(op.out)
    if user is not None and user.op == "batch_norm":
        user = c.graph.only_user(user.outs[0])
    if user is None or user.op != "relu" or op.arg("groups") != 1 or c.graph.escapes(user.out):
        return False
    return all(reader.op == "conv" for reader in c.graph.users(user.out))


def _linked(op: OpView, c: Calls) -> tuple[OpView, ...]:
    """Return the convolutions around one, each the only reader of the one before: they have one layout."""
    found = [op]
    while (made := c.graph.producer(found[0].arg("input"))) is not None and _follows(made, found[0], c):
        found.insert(0, made)
    while (user := c.graph.only_user(found[-1].out)) is not None and _follows(found[-1], user, c):
        found.append(user)
    return tuple(found)


def _follows(made: OpView, user: OpView, c: Calls) -> bool:
    alone = made.op == user.op == "conv" and c.graph.only_user(made.out) is user and user.arg("input") == made.out
    return alone and _tried(made, c) and _tried(user, c)


def _tried(op: OpView, c: Calls) -> bool:
    """Return whether a convolution of a constant weight may have either layout."""
    claim = c.graph.claim_of(op)
    if claim is not None and not OTHERS.isdisjoint(claim.rules):
        return False
    return convolutions.reason(op) is None and convolutions.constant(Match(op, (op,)), c) and not convolutions.patches(op)


def _copied(ops: Sequence[OpView], c: Calls) -> tuple[bool, bool]:
    """Return whether images in planes are copied in front of convolutions, and behind."""
    x, out = ops[0].arg("input"), ops[-1].out
    before = _planes_alone(spec_of(x)) and not _made_by_kernel(x, c)
    return before, _planes_alone(spec_of(out)) and not _read_by_kernels(out, c)


def _planes_alone(s: TensorSpec) -> bool:
    """Return whether images are in planes, and not in both layouts, as single pixels are."""
    return layout_of(s) == "contiguous" and not same_strides(s, channels_last_strides(s.shape))  # type: ignore[arg-type]


def _faster(m: Match, c: Calls) -> bool:
    """Return whether a convolution of a constant weight is channels-last; in simulation always, so that this is tried there."""
    if not _tried(m.anchor, c):
        return False
    if c.ctx.device.simulated or layout_of(spec_of(m.anchor.arg("input"))) == "channels_last":
        return True
    linked = _linked(m.anchor, c)
    return _choice(_trial(linked, _copied(linked, c), c), c) == "last"


def _stays(m: Match, c: Calls) -> bool:
    """Return whether a convolution of a half type is faster in planes, where eager's is: copies count."""
    op = m.anchor
    if c.ctx.device.simulated or not convolutions.laid(m, c) or not _tried(op, c):
        return False
    if any(layout_of(spec_of(v)) != "contiguous" for v in (op.arg("input"), op.arg("weight"), op.out)):
        return False
    linked = _linked(op, c)
    copied = _copied(linked, c)
    return any(copied) and any(map(_suits_planes, linked)) and _choice(_trial(linked, copied, c), c) == "planes"


def _suits_planes(op: OpView) -> bool:
    """Return whether some library computes planes as they lie: groups, and single pixels as a product. For windows over all
    channels cuDNN copies planes itself, which took 1.2 to 2.2 times as long as channels-last with copies."""
    return op.arg("groups") > 1 or all(size == 1 for size in spec_of(op.arg("weight")).shape[2:])


def _choice(trial: Trial, c: Calls) -> str:
    return c.ctx.choose(trial.key, Lazy({"planes": trial.planes, "last": trial.last}))


def _in_planes(m: Match, c: Calls) -> None:
    """Emit torch's own call, whose bias a kernel adds if one reads the result."""
    op = m.anchor
    if convolutions.bias_apart(m, c):
        convolutions.alone(m, c)
    else:
        given = (c.exact(op.arg(name)) for name in ("input", "weight", "bias"))
        c.b.call("aten::convolution.default", *given, *convolutions.geometry(op), out=op.out, op=op)


ROWS = (
    Row("triton.conv.layout", chain("conv"), when=_faster, write=convolutions.write, note="convolution, channels-last"),
    convolutions.BIAS,
)
"""Rows for fp32."""

PLANES = Row("triton.conv.in_planes", chain("conv"), when=_stays, write=_in_planes, note="convolution, in planes")
"""For half types, before all that is channels-last."""
