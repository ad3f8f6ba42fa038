"""The operator behind the row `linear_scan`, which torch lacks: eager's loop over the steps of a linear recurrence."""

from __future__ import annotations

from typing import Any

import torch


def carried(dtype: torch.dtype) -> torch.dtype:
    """The type in which states of a type are carried."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def linear_scan(a: Any, b: Any, initial: Any, dim: int) -> Any:
    """All states h[t] = a[t] * h[t - 1] + b[t] along `dim`, contiguous, of the shape and type of `b`.

    `a` broadcasts to `b`, and `initial`, the state before the first step, to `b` without `dim`. Without it the first state is b[0],
    and a[0] is not used. States of half types are carried in fp32 and rounded once each, as results. Raises what `expand` raises
    where shapes do not fit.
    """
    out = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    kept = carried(b.dtype)
    factors, h = a.expand(b.shape), None if initial is None else initial.expand(_without(b, dim)).to(kept)
    for t in range(b.shape[dim]):
        step = b.select(dim, t).to(kept)
        h = step if h is None else factors.select(dim, t).to(kept) * h + step
        out.select(dim, t).copy_(h)
    return out


def in_steps(a: Any, b: Any, initial: Any, dim: int) -> Any:
    """`linear_scan` in primitives."""
    kept = carried(b.dtype)
    if not b.shape[dim]:
        return torch.empty(b.shape, dtype=b.dtype, device=b.device)
    h, states = None if initial is None else initial.expand(_without(b, dim)).to(kept), []
    for x, y in zip(a.expand(b.shape).to(kept).unbind(dim), b.to(kept).unbind(dim), strict=True):
        h = y if h is None else x * h + y
        states.append(h)
    return torch.stack(states, dim).to(b.dtype)


def _without(b: Any, dim: int) -> list[Any]:
    """The shape of one step of `b`."""
    return [n for d, n in enumerate(b.shape) if d != dim % b.dim()]


def _traced(a: Any, b: Any, initial: Any, dim: int) -> Any:
    a.expand(b.shape)
    if initial is not None:
        initial.expand(_without(b, dim))
    return torch.empty(b.shape, dtype=b.dtype, device=b.device)


_library = torch.library.Library("fusewright", "FRAGMENT")
_library.define("linear_scan(Tensor a, Tensor b, Tensor? initial, int dim) -> Tensor")
_library.impl("linear_scan", linear_scan, "CompositeExplicitAutograd")
torch.library.register_fake("fusewright::linear_scan", _traced, lib=_library)
