"""Steps of recurrences as text, and the operator behind the row `pointwise_scan`, which torch lacks: eager's loop over them.

A step is an expression of rows over the state `h` before it, operands `x0`, `x1`, ... and numbers: "maximum(add(h, x0), x1)".
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch

from fusewright.ops.semantics.recurrence import carried, linear_scan_op, summed, without_dim

COMPARISONS: Mapping[str, Callable[..., Any]] = {
    f"{name}{s}": getattr(torch, name) for name in ("lt", "le", "gt", "ge", "eq", "ne") for s in ("", "_scalar")
}
"""What has no gradient."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
    "minimum": torch.minimum, "logaddexp": torch.logaddexp, "neg": torch.neg, "abs": torch.abs, "relu": torch.relu,
    "exp": torch.exp, "expm1": torch.expm1, "log": torch.log, "log1p": torch.log1p, "sqrt": torch.sqrt,
    "reciprocal": torch.reciprocal, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "where": torch.where,
    "rsub": torch.rsub, "clamp": torch.clamp, "lerp": torch.lerp, "lerp_scalar": torch.lerp, "pow_scalar": torch.pow,
    **COMPARISONS,
}  # fmt: skip
"""What a step may call, by row."""

Expr: TypeAlias = "str | float | tuple[Any, ...]"
"""A name, a number, or a call: the function's name and its arguments."""


@cache
def parsed(step: str) -> Expr:
    """The expression that a text stands for. ValueError if it is none."""

    def read(node: ast.AST) -> Expr:
        match node:
            case ast.Name(id=name):
                return name
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str() as number)], keywords=[]):
                return float(number)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
                return (name, *map(read, args))
        raise ValueError(f"{step!r} is no step")

    return read(ast.parse(step, mode="eval").body)


def written(expr: Expr) -> str:
    """An expression as text, which `parsed` reads."""
    if isinstance(expr, tuple):
        return f"{expr[0]}({', '.join(map(written, expr[1:]))})"
    finite = isinstance(expr, str) or expr - expr == 0
    return str(expr) if finite else f"float('{expr}')"


def evaluated(expr: Expr, given: Mapping[str, Any], call: Callable[..., Any]) -> Any:
    """The value of an expression. `call` takes a function's name and its arguments."""
    if isinstance(expr, str):
        return given[expr]
    return call(expr[0], *(evaluated(e, given, call) for e in expr[1:])) if isinstance(expr, tuple) else expr


def needs_gradient(expr: Expr, known: Mapping[str, bool]) -> bool:
    """Whether the value of an expression needs a gradient, as eager would decide, where these names do."""
    return evaluated(expr, known, lambda name, *args: name not in COMPARISONS and any(a is True for a in args)) is True


def names(operands: Sequence[Any]) -> list[str]:
    """The names of the operands in a step."""
    return [f"x{k}" for k in range(len(operands))]


def taken(step: str, h: Any, operands: Sequence[Any]) -> Any:
    """The state after one step, or after many side by side."""
    given = dict(zip(names(operands), operands, strict=True), h=h)
    return evaluated(parsed(step), given, lambda name, *args: FUNCTIONS[name](*args))


def pointwise_scan(x: Any, others: Sequence[Any], initial: Any, dim: int, step: str) -> Any:
    """All states h[t] = step(h[t - 1], x0[t], x1[t], ...) along `dim`, contiguous, of the shape of `x`, which is x0, and the type
    of `initial`, the state before the first step, which broadcasts to `x` without `dim`. `others` broadcast to `x`.

    States of half types are carried in fp32 and rounded once each, as results. Raises what `expand` raises where shapes do not fit.
    """
    out = torch.empty(x.shape, dtype=initial.dtype, device=x.device)
    h, columns = _begun(x, others, initial, dim)
    for t in range(x.shape[dim]):
        h = taken(step, h, [c.select(dim, t) for c in columns])
        out.select(dim, t).copy_(h)
    return out


def in_steps(x: Any, others: Sequence[Any], initial: Any, dim: int, step: str) -> Any:
    """`pointwise_scan` in primitives."""
    if not x.shape[dim]:
        return torch.empty(x.shape, dtype=initial.dtype, device=x.device)
    h, columns = _begun(x, others, initial, dim)
    states = [h := taken(step, h, operands) for operands in zip(*(c.unbind(dim) for c in columns), strict=True)]
    return torch.stack([h.expand(without_dim(x, dim)) for h in states], dim).to(initial.dtype)


def _begun(x: Any, others: Sequence[Any], initial: Any, dim: int) -> tuple[Any, list[Any]]:
    """The state before the first step, and all operands, in the type that is carried."""
    kept = carried(initial.dtype)
    return initial.expand(without_dim(x, dim)).to(kept), [c.expand(x.shape).to(kept) for c in (x, *others)]


def _traced(x: Any, others: Sequence[Any], initial: Any, dim: int, step: str) -> Any:
    initial.expand(without_dim(x, dim))
    for other in others:
        other.expand(x.shape)
    return torch.empty(x.shape, dtype=initial.dtype, device=x.device)


def _gradients(ctx: Any, grad: Any) -> tuple[Any, ...]:
    """The gradients of a scan: with c, how much each state follows the one before, those of the states are a linear recurrence in
    the opposite order, d[t] = c[t + 1] * d[t + 1] + grad[t]. All else is one step of eager's, for all states at once."""
    x, *others, initial, states = ctx.saved_tensors
    dim, steps = ctx.dim, states.shape[ctx.dim]
    begun, columns = _begun(x, others, initial, dim)
    before = torch.cat([begun.unsqueeze(dim), states.narrow(dim, 0, steps - 1).to(begun.dtype)], dim)
    with torch.enable_grad():
        given = [t.detach().requires_grad_() for t in (before, *columns)]
        after = taken(ctx.step, given[0], given[1:]).expand(states.shape)
        c = torch.zeros_like(after) if (found := _wrt(after, given[:1], torch.ones_like(after))[0]) is None else found
        later = torch.cat([c.narrow(dim, 1, steps - 1), torch.zeros_like(c.narrow(dim, 0, 1))], dim)
        d = linear_scan_op(later.flip([dim]), grad.flip([dim]).to(c.dtype), None, dim).flip([dim])
        first, *of_columns = _wrt(after, given, d)
    pairs = zip(of_columns, (x, *others), strict=True)
    wanted = [None if g is None or not t.is_floating_point() else summed(g, t) for g, t in pairs]
    return wanted[0], wanted[1:], None if first is None else summed(first.select(dim, 0), initial), None, None


def _wrt(after: Any, given: Sequence[Any], grad: Any) -> list[Any]:
    """Gradients; None where there is no dependence, as in eager."""
    return list(torch.autograd.grad(after, given, grad, retain_graph=True, allow_unused=True))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, others, initial, dim, ctx.step = inputs
    ctx.dim = dim % x.dim()
    ctx.save_for_backward(x, *others, initial, output)
    known = {name: t.requires_grad for name, t in zip(names([x, *others]), (x, *others), strict=True)}
    after_first = needs_gradient(parsed(ctx.step), known | {"h": initial.requires_grad})
    if not (after_first or needs_gradient(parsed(ctx.step), known | {"h": after_first})):
        ctx.mark_non_differentiable(output)


_library = torch.library.Library("fusewright", "FRAGMENT")
_library.define("pointwise_scan(Tensor x, Tensor[] others, Tensor initial, int dim, str step) -> Tensor")
_library.impl("pointwise_scan", pointwise_scan, "CompositeExplicitAutograd")
torch.library.register_fake("fusewright::pointwise_scan", _traced, lib=_library)
pointwise_scan_op = torch.ops.fusewright.pointwise_scan.default
torch.library.register_autograd("fusewright::pointwise_scan", _gradients, setup_context=_keep, lib=_library)
