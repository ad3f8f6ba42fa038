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
    factors, h = a.expand(b.shape), None if initial is None else initial.expand(without_dim(b, dim)).to(kept)
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
    h, states = None if initial is None else initial.expand(without_dim(b, dim)).to(kept), []
    for x, y in zip(a.expand(b.shape).to(kept).unbind(dim), b.to(kept).unbind(dim), strict=True):
        h = y if h is None else x * h + y
        states.append(h)
    return torch.stack(states, dim).to(b.dtype)


def without_dim(b: Any, dim: int) -> list[Any]:
    """The shape of one step of `b`."""
    return [n for d, n in enumerate(b.shape) if d != dim % b.dim()]


def _traced(a: Any, b: Any, initial: Any, dim: int) -> Any:
    a.expand(b.shape)
    if initial is not None:
        initial.expand(without_dim(b, dim))
    return torch.empty(b.shape, dtype=b.dtype, device=b.device)


def _gradients(ctx: Any, grad: Any) -> tuple[Any, ...]:
    """The gradients of a scan: that of the states is a scan in the opposite order, d[t] = a[t + 1] * d[t + 1] + grad[t]."""
    a, initial, states = ctx.saved_tensors
    dim, steps = ctx.dim, states.shape[ctx.dim]
    of_a, _, of_initial, _ = ctx.needs_input_grad
    one_before = [0, 0] * (states.dim() - 1 - dim) + [1, 0]
    factors, pad = a.expand(states.shape), torch.nn.functional.pad
    later = pad(factors.narrow(dim, 1, steps - 1).flip([dim]), one_before)  # the first is not used
    d = linear_scan_op(later, grad.flip([dim]), None, dim).flip([dim])
    first = d.select(dim, 0)
    da = None
    if of_a and initial is None:
        da = pad(d.narrow(dim, 1, steps - 1) * states.narrow(dim, 0, steps - 1), one_before)
    elif of_a:
        begun = initial.expand(first.shape).to(states.dtype).unsqueeze(dim)
        da = d * torch.cat([begun, states.narrow(dim, 0, steps - 1)], dim)
    dh = factors.select(dim, 0) * first if of_initial else None
    return summed(da, a), d, summed(dh, initial), None


def summed(grad: Any, like: Any) -> Any:
    """The gradient of a tensor that was broadcast."""
    return None if grad is None else grad.sum_to_size(like.shape).to(like.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, initial, dim = inputs
    ctx.dim = dim % b.dim()
    ctx.save_for_backward(a, initial, output)


_library = torch.library.Library("fusewright", "FRAGMENT")
_library.define("linear_scan(Tensor a, Tensor b, Tensor? initial, int dim) -> Tensor")
_library.impl("linear_scan", linear_scan, "CompositeExplicitAutograd")
torch.library.register_fake("fusewright::linear_scan", _traced, lib=_library)
linear_scan_op = torch.ops.fusewright.linear_scan.default
torch.library.register_autograd("fusewright::linear_scan", _gradients, setup_context=_keep, lib=_library)
