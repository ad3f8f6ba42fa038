"""The operator behind the row `coupled_scan`: eager's loop over the steps of several states that depend on each other.

A step is text: assignments of expressions (`steps`) over the states `h0`, `h1`, ... before it, operands `x0`, ..., and what was
assigned before, "t0=add(h1, x0);n0=tanh(t0);n1=mul(h0, t0)". `n0`, `n1`, ... are its results: first the states after it, then
other values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count, takewhile
from typing import Any

import torch

from fusewright.ops.semantics.recurrence import carried, summed, without_dim
from fusewright.ops.semantics.steps import FUNCTIONS, Expr, evaluated, names, needs_gradient, parsed

MOST_RESULTS = 8
"""Results of a step that kernels have."""


@cache
def assignments(step: str) -> tuple[tuple[str, Expr], ...]:
    """The names that a step assigns, and their expressions. ValueError if it is none."""
    parts = [part.partition("=") for part in step.split(";")]
    found = tuple((name, parsed(text)) for name, _, text in parts)
    if not results(step):
        raise ValueError(f"{step!r} has no result")
    return found


@cache
def results(step: str) -> int:
    """How many results a step has."""
    assigned = {part.partition("=")[0] for part in step.split(";")}
    return sum(1 for _ in takewhile(assigned.__contains__, (f"n{k}" for k in count())))


def ran(step: str, given: Mapping[str, Any], call: Callable[..., Any]) -> list[Any]:
    """The results of a step. `call` takes a function's name and its arguments."""
    known = dict(given)
    for name, expr in assignments(step):
        known[name] = evaluated(expr, known, call)
    return [known[f"n{k}"] for k in range(results(step))]


def given(states: Sequence[Any], operands: Sequence[Any]) -> dict[str, Any]:
    """What a step may read, by name."""
    return {**{f"h{k}": h for k, h in enumerate(states)}, **dict(zip(names(operands), operands, strict=True))}


def _taken(step: str, states: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    return ran(step, given(states, operands), lambda name, *args: FUNCTIONS[name](*args))


def coupled_scan(x: Any, others: Sequence[Any], initial: Sequence[Any], dim: int, step: str) -> list[Any]:
    """All results n0[t], n1[t], ... = step(h0[t], h1[t], ..., x0[t], x1[t], ...) along `dim`, where the states h[t] are the first
    results of t - 1, or `initial`. Each is contiguous, of the shape of `x`, which is x0, and the type of the first state.

    `initial` broadcast to `x` without `dim`, `others` to `x`. States of half types are carried in fp32 and rounded once each, as
    results. Raises what `expand` raises where shapes do not fit.
    """
    out = _empty(x, initial, step)
    states, columns = _begun(x, others, initial, dim)
    for t in range(x.shape[dim]):
        found = _taken(step, states, [c.select(dim, t) for c in columns])
        for whole, n in zip(out, found, strict=True):
            whole.select(dim, t).copy_(n)
        states = found[: len(states)]
    return out


def in_steps(x: Any, others: Sequence[Any], initial: Sequence[Any], dim: int, step: str) -> list[Any]:
    """`coupled_scan` in primitives."""
    if not x.shape[dim]:
        return _empty(x, initial, step)
    states, columns = _begun(x, others, initial, dim)
    taken: list[list[Any]] = []
    for operands in zip(*(c.unbind(dim) for c in columns), strict=True):
        taken.append(_taken(step, states, operands))
        states = taken[-1][: len(states)]
    shape = without_dim(x, dim)
    return [torch.stack([n.expand(shape) for n in of], dim).to(initial[0].dtype) for of in zip(*taken, strict=True)]


def _empty(x: Any, initial: Sequence[Any], step: str) -> list[Any]:
    return [torch.empty(x.shape, dtype=initial[0].dtype, device=x.device) for _ in range(results(step))]


def _begun(x: Any, others: Sequence[Any], initial: Sequence[Any], dim: int) -> tuple[list[Any], list[Any]]:
    """The states before the first step, and all operands, in the type that is carried."""
    kept, shape = carried(initial[0].dtype), without_dim(x, dim)
    return [h.expand(shape).to(kept) for h in initial], [c.expand(x.shape).to(kept) for c in (x, *others)]


def _traced(x: Any, others: Sequence[Any], initial: Sequence[Any], dim: int, step: str) -> list[Any]:
    for h in initial:
        h.expand(without_dim(x, dim))
    for other in others:
        other.expand(x.shape)
    return _empty(x, initial, step)


def _gradients(ctx: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients of a scan: with J, how much each result follows each state before it, those of the states are a linear coupled
    scan in the opposite order, d[t] = J[t + 1]^T d[t + 1] + grad[t]. All else is one step of eager's, for all at once."""
    saved = list(ctx.saved_tensors)
    columns, initial, out = saved[: ctx.columns], saved[ctx.columns : ctx.columns + ctx.states], saved[ctx.columns + ctx.states :]
    dim, steps, size = ctx.dim, out[0].shape[ctx.dim], ctx.states
    begun, wide = _begun(columns[0], columns[1:], initial, dim)
    before = [torch.cat([h.unsqueeze(dim), n.narrow(dim, 0, steps - 1).to(h.dtype)], dim) for h, n in zip(begun, out, strict=False)]
    grads = [(torch.zeros_like(n) if g is None else g).to(begun[0].dtype) for g, n in zip(grads, out, strict=True)]
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (*before, *wide)]
        after = [n.expand(out[0].shape) for n in _taken(ctx.step, leaves[:size], leaves[size:])]
        # a value that is no state has its gradient at once: that of its step
        own = _wrt(after[size:], leaves[:size], grads[size:]) if len(after) > size else [None] * size
        follows = [_wrt([n], leaves[:size], [torch.ones_like(n)]) for n in after[:size]]
        d = _adjoint(follows, own, grads[:size], dim)
        found = _wrt(after, leaves, [*d, *grads[size:]])
    of = [None if g is None or not t.is_floating_point() else summed(g, t) for g, t in zip(found[size:], columns, strict=True)]
    of_initial = [None if g is None else summed(g.select(dim, 0), h) for g, h in zip(found[:size], initial, strict=True)]
    return of[0], of[1:], of_initial, None, None


def _adjoint(follows: Sequence[Sequence[Any]], own: Sequence[Any], grads: Sequence[Any], dim: int) -> list[Any]:
    """The gradients of the states after each step, all readers counted. `follows[i][j]` is how much state i follows j, `own` the
    gradients that the step itself adds to the states before it."""
    operands, terms = [], list[str]()

    def operand(t: Any) -> str:
        operands.append(t.flip([dim]))
        return f"x{len(operands) - 1}"

    for j, grad in enumerate(grads):
        text = operand(grad if own[j] is None else grad + _one_later(own[j], dim))
        for i, row in enumerate(follows):
            if row[j] is not None:
                text = f"add(mul(h{i}, {operand(_one_later(row[j], dim))}), {text})"
        terms.append(f"n{j}={text}")
    zeros = [torch.zeros_like(g.select(dim, 0)) for g in grads]
    return [t.flip([dim]) for t in coupled_scan_op(operands[0], operands[1:], zeros, dim, ";".join(terms))]


def _one_later(t: Any, dim: int) -> Any:
    """What the next step has; zero at the last."""
    return torch.cat([t.narrow(dim, 1, t.shape[dim] - 1), torch.zeros_like(t.narrow(dim, 0, 1))], dim)


def _wrt(after: Sequence[Any], given: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """Gradients; None where there is no dependence."""
    pairs = [(n, g) for n, g in zip(after, grads, strict=True) if n.requires_grad]
    if not pairs:
        return [None] * len(given)
    outs, of = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outs, given, of, retain_graph=True, allow_unused=True))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, others, initial, dim, ctx.step = inputs
    ctx.dim, ctx.columns, ctx.states = dim % x.dim(), 1 + len(others), len(initial)
    ctx.save_for_backward(x, *others, *initial, *output)
    wanted = _need_gradients(ctx.step, *([t.requires_grad for t in of] for of in (initial, (x, *others))))
    ctx.mark_non_differentiable(*(t for t, w in zip(output, wanted, strict=True) if not w))


def _need_gradients(step: str, states: list[bool], operands: list[bool]) -> list[bool]:
    """Which results need gradients after any step, where these states do before the first, and these operands."""
    known = given(states, operands)
    for _ in range(len(states) + 1):  # it may take as many steps until one state has reached all others
        for name, expr in assignments(step):
            known[name] = known.get(name, False) or needs_gradient(expr, known)
        known |= {f"h{k}": known[f"h{k}"] or known[f"n{k}"] for k in range(len(states))}
    return [known[f"n{k}"] for k in range(results(step))]


_library = torch.library.Library("fusewright", "FRAGMENT")
_library.define("coupled_scan(Tensor x, Tensor[] others, Tensor[] initial, int dim, str step) -> Tensor[]")
_library.impl("coupled_scan", coupled_scan, "CompositeExplicitAutograd")
torch.library.register_fake("fusewright::coupled_scan", _traced, lib=_library)
coupled_scan_op = torch.ops.fusewright.coupled_scan.default
torch.library.register_autograd("fusewright::coupled_scan", _gradients, setup_context=_keep, lib=_library)
