"""What the suites of programs are made of: sizes, inputs, first layers, and modules that call a function.

A program is a function of `Size` that returns a module and what it is called with. Sizes are the suite's; `Size(small=True)` caps
batches, lengths and widths for a check on a CPU and keeps channels, windows and groups, and a `share` below one cuts batches for
less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

POINTS = {1: 96, 2: 32, 3: 12}
"""Largest small lengths of images by their dimensions: windows, pools and strides of all programs leave something of them."""
LAYERS = (
    (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


@dataclass(frozen=True)
class Size:
    """The suite's sizes, or those of a small check."""

    small: bool = False
    share: float = 1.0

    def batch(self, n: int, small: int = 2) -> int:
        return min(n, small) if self.small else max(1, int(n * self.share))

    def points(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Lengths of an image, a volume or a series."""
        return tuple(min(n, POINTS[len(lengths)]) if self.small else n for n in lengths)

    def width(self, n: int, small: int = 128) -> int:
        """Features or a length of a matrix; odd ones stay odd."""
        return n if not self.small or n <= small else small - n % 2

    def groups(self, groups: int, features: int) -> int:
        """Groups of as many features as in the suite, or two."""
        return groups if self.width(features) == features else max(2, self.width(features) * groups // features)


@dataclass(frozen=True)
class Given:
    """An input: its shape, what its elements are (`KINDS`), and whether a step of training asks for its gradient."""

    shape: tuple[int, ...]
    kind: str = "uniform"
    grad: bool = True

    @property
    def floating(self) -> bool:
        return self.kind not in INTEGERS


Made: TypeAlias = tuple[nn.Module, list[Given]]
Program: TypeAlias = Callable[[Size], Made]
Part: TypeAlias = float | tuple[int, ...] | Callable[[Size], nn.Module]
"""A parameter of one number, a random one of a shape, or a module."""


class Call(nn.Module):
    """A module that is a call of a function on its inputs."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Tensor) -> Tensor:
        return self.call(*args)


class Chain(nn.Module):
    """A first layer, parameters and modules by name, and a function of the module and its inputs that uses them."""

    def __init__(self, first: nn.Module, parts: Mapping[str, nn.Module | nn.Parameter], call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.call = first, call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Tensor) -> Tensor:
        return self.call(self, *args)


def chain(first: Program, call: Callable[..., Tensor], *more: Callable[[Size], Given], **parts: Part) -> Program:
    """A first layer and the operations behind it; `more` are inputs beside that of the layer."""

    def made(size: Size) -> Made:
        layer, given = first(size)
        return Chain(layer, {name: _part(part, size) for name, part in parts.items()}, call), [*given, *(g(size) for g in more)]

    return made


def _part(part: Part, size: Size) -> nn.Module | nn.Parameter:
    if isinstance(part, float):
        return nn.Parameter(torch.tensor(part))
    return nn.Parameter(torch.randn([size.width(n) for n in part])) if isinstance(part, tuple) else part(size)


def conv(
    batch: int, inputs: int, outputs: int, points: Sequence[int], kernel: Any, transposed: bool = False, **how: Any
) -> Program:
    """A convolution of as many dimensions as `points` has lengths."""
    layer: Any = LAYERS[transposed][len(points) - 1]
    return lambda size: (
        layer(inputs, outputs, kernel, **how),
        [Given((size.batch(batch), inputs, *size.points(points)))],
    )


def linear(batch: int, inputs: int, outputs: int, **how: Any) -> Program:
    return lambda size: (
        nn.Linear(size.width(inputs), size.width(outputs), **how),
        [Given((size.batch(batch, 8), size.width(inputs)))],
    )


def group_norm(groups: int, features: int) -> Callable[[Size], nn.Module]:
    return lambda size: nn.GroupNorm(size.groups(groups, features), size.width(features))


def module(layer: Callable[..., nn.Module], *args: Any, **how: Any) -> Callable[[Size], nn.Module]:
    """A module that has no size, or one of features first."""
    return lambda size: layer(*(size.width(a) if isinstance(a, int) else a for a in args), **how)


# ---------------------------------------------------------------- inputs


def _pareto(x: Tensor) -> Tensor:
    """Heavy tails from uniform numbers: scale 0.01, exponent 1.5."""
    return 0.01 * (1 - x).clamp_min(1e-7) ** (-1 / 1.5)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda x: x,
    "pareto": _pareto,
    "scaled": lambda x: x * 0.37,
    "scaled pareto": lambda x: _pareto(x) * 0.37,
    "distribution": lambda x: x.softmax(-1),
    "scaled distribution": lambda x: (x * 0.37).softmax(-1),
    "symmetric": lambda x: (x + x.T) / 2,
    "upper": torch.triu,
    "lower": torch.tril,
    "sign": lambda x: (x < 0.5).to(x.dtype) * 2 - 1,
}
INTEGERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "mask": lambda x, _: x < 0.5,
    "class": lambda x, classes: (x * classes).long(),
}


def inputs(given: Sequence[Given], device: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Inputs made on the device, the same for the same seed. Classes are those of the input before them."""
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for k, g in enumerate(given):
        x = torch.rand(g.shape, generator=generator, device=device)
        made.append(KINDS[g.kind](x).to(dtype) if g.floating else INTEGERS[g.kind](x, given[k - 1].shape[-1]))
    return made


def size_within(program: Program, bytes_each: int, limit: float) -> Size:
    """The suite's size, with batches cut so that the largest input has at most `limit` bytes."""
    with torch.device("meta"):
        most = max(prod(g.shape) for g in program(Size())[1]) * bytes_each
    return Size(share=min(1.0, limit / most))
