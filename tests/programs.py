"""Random programs over a few tensors, for hypothesis: views, bits, writes, assertions, data-dependent sizes, modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Step = Callable[[list[Tensor], Tensor, Tensor], Tensor]
"""(all values so far, two of them) -> a new one."""


def _fit(x: Tensor, y: Tensor) -> Tensor:
    """Make `y` broadcast with `x`."""
    return y if y.shape == x.shape else y.sum()


def _write(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    z.add_(_fit(z, y))
    return z


def _write_view(x: Tensor, y: Tensor) -> Tensor:
    z = x + 1
    z[..., 0:1].mul_(3)
    return z


def _write_mask(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[z > 0.5] = 0.25
    return z


def _asserted(x: Tensor, y: Tensor) -> Tensor:
    torch._assert_async((x * 0 == 0).all(), "finite")
    return x + 1


def _checked(x: Tensor, y: Tensor) -> Tensor:
    kept = x[x > -100]
    torch._check(kept.shape[0] <= 10000)
    return x + kept.sum()


def _autocast(x: Tensor, y: Tensor) -> Tensor:
    m = x.reshape(-1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = m @ m.t()
    return p.float().sum() + x


def _conj(x: Tensor, y: Tensor) -> Tensor:
    return torch.complex(x, x + 1).conj().imag + x


def _lazy_conj(x: Tensor, y: Tensor) -> Tensor:
    return torch.view_as_real(torch.complex(x, x + 1).conj().resolve_conj()).sum(-1)


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + _fit(x, y),
    "mul": lambda x, y: x * _fit(x, y),
    "sin": lambda x, y: x.sin(),
    "t": lambda x, y: x.transpose(0, -1),
    "flat": lambda x, y: x.reshape(-1),
    "slice": lambda x, y: x[..., 1:] if x.shape[-1] > 2 else x[..., :1],
    "step": lambda x, y: x[::2],
    "expand": lambda x, y: x.unsqueeze(0).expand(2, *x.shape).sum(0),
    "one piece": lambda x, y: x.chunk(1, 0)[0],
    "pieces": lambda x, y: torch.cat(x.chunk(2, 0)[::-1]),
    "flip": lambda x, y: x.flip(0),
    "sum": lambda x, y: x + x.sum(0, keepdim=True),
    "softmax": lambda x, y: x.softmax(-1),
    "conj": _conj,
    "resolved conj": _lazy_conj,
    "write": _write,
    "write a view": _write_view,
    "write at a mask": _write_mask,
    "assert": _asserted,
    "check": _checked,
    "mask": lambda x, y: x + x[x > 0].sum(),
    "nonzero": lambda x, y: x * (x > 0).nonzero().float().sum(),
    "item": lambda x, y: x * (x.abs().sum() + 1).item(),
    "autocast": _autocast,
    "random": lambda x, y: x + torch.rand_like(x),
    "dropout": lambda x, y: torch.nn.functional.dropout(x, 0.5),
    "detach": lambda x, y: x.detach(),
    "vmap": lambda x, y: torch.vmap(lambda a: a.sin() * 2)(x),
    "cast": lambda x, y: x.double().float(),
    "where": lambda x, y: torch.where(x > 0, x, -x),
    "index": lambda x, y: x[torch.arange(x.shape[0], device=x.device) // 2],
}
"""Each takes two tensors of rank one or more and returns one with at least one element."""


@dataclass(frozen=True)
class Program:
    """`steps` are (name, first operand, second operand), counted back from the newest value; `results` likewise."""

    shape: tuple[int, ...]
    transposed: bool
    steps: tuple[tuple[str, int, int], ...]
    results: tuple[int, ...]
    writes: bool

    def __call__(self, x: Tensor, y: Tensor) -> Any:
        values = [x, y]
        for name, a, b in self.steps:
            values.append(STEPS[name](values[-1 - a % len(values)], values[-1 - b % len(values)]))
        if self.writes:
            x.add_(1)
        return [values[-1 - k % len(values)] for k in self.results]

    def inputs(self) -> list[Tensor]:
        """The same numbers every time."""
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(self.shape, generator=generator) for _ in range(2))
        return [x.transpose(0, -1), y] if self.transposed else [x, y]


@st.composite
def programs(draw: st.DrawFn, steps: int = 6) -> Program:
    """A program of up to this many steps."""
    step = st.tuples(st.sampled_from(list(STEPS)), st.integers(0, 3), st.integers(0, 3))
    return Program(
        shape=tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))),
        transposed=draw(st.booleans()),
        steps=tuple(draw(st.lists(step, min_size=1, max_size=steps))),
        results=tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))),
        writes=draw(st.integers(0, 4)) == 0,
    )
