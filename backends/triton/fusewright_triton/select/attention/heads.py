"""Read and write attention heads in place: without the copies by which model code reorders queries, keys, values and results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusewright.interface import OpView, Value
from fusewright.plan.ir import Call, Ref
from fusewright.toolkit.region.attention import RESHAPES
from fusewright.toolkit.region.graph import Claim, spec_of
from fusewright_triton.select.attention.decomposed_bias import made_for_one, shape_of, through, view
from fusewright_triton.select.calls import Calls

_VIEWS = frozenset({"view", "reshape", "permute", "transpose", "alias"})


@dataclass(frozen=True)
class Stack:
    """Queries, keys and values as slices of one tensor [parts, B, H, L, D]: `at` gives the index of each.

    `ops` copy it to a dense tensor and unbind that; the attention no longer needs them.
    """

    whole: Value
    at: tuple[int, int, int]
    unbind: OpView
    ops: tuple[OpView, ...]

    def slices(self, c: Calls) -> list[Ref]:
        """Return query, key and value [B, H, L, D] as views."""
        return [view(c, "aten::select.int", c.b.any_strides(self.whole), 0, k) for k in self.at]


def stack_of(query: Value, key: Value, value: Value, c: Calls, taken: list[OpView]) -> Stack | None:
    """Return the tensor that query, key and value [N, L, D] (or [B, H, L, D]) are slices of. Views in between go into `taken`."""
    between: list[OpView] = []
    found = [_unbound(x, c, between) for x in (query, key, value)]
    if any(f is None or f[0] is not found[0][0] for f in found):  # type: ignore[index]
        return None
    unbind = found[0][0]  # type: ignore[index]
    copies: list[OpView] = []
    whole = through(next(unbind.inputs()), c, copies)
    n, length, dim = shape_of(unbind.out)
    shape = shape_of(whole)
    if not c.graph.free(unbind) or unbind.arg("dim") != 0 or not any(op.op == "clone" for op in copies):
        return None
    if len(shape) != 5 or shape[3:] != (length, dim) or shape[1] * shape[2] != n or spec_of(whole).stride[-1] != 1:
        return None
    taken += between
    return Stack(whole, tuple(f[1] for f in found), unbind, (*copies, unbind))  # type: ignore[index, arg-type]


def _unbound(value: Value, c: Calls, between: list[OpView]) -> tuple[OpView, int] | None:
    """Return the unbind op that makes a value, and the value's index in it."""
    while (made := c.graph.producer(value)) is not None and made.op != "unbind":
        if made.op not in RESHAPES or c.graph.only_user(value) is None:
            return None
        between.append(made)
        value = next(made.inputs())
    return None if made is None or len(shape_of(value)) != 3 else (made, made.outs.index(value))


def taken_apart(s: Stack | None, taken: Sequence[OpView], c: Calls) -> tuple[Claim, ...]:
    """Copy only those slices that have readers besides the attention (`taken`)."""
    if s is None:
        return ()
    inside = {op.id for op in taken}
    wanted = [c.graph.escapes(v) or any(user.id not in inside for user in c.graph.users(v)) for v in s.unbind.outs]
    return (Claim(s.ops, s.unbind, partial(_copies, s, wanted), "slices that are read elsewhere"),)


def _copies(s: Stack, wanted: Sequence[bool], c: Calls) -> None:
    dense: Any = (("memory_format", torch.contiguous_format),)
    for k, out in enumerate(s.unbind.outs):
        if wanted[k]:
            part, copy = view(c, "aten::select.int", c.b.any_strides(s.whole), 0, k), c.ctx.value(None)
            c.b.append(Call("aten::clone.default", (part,), (copy.id,), dense))
            c.b.call("aten::view.default", Ref(copy.id), shape_of(out), out=out, op=s.unbind)


@dataclass(frozen=True)
class Result:
    """A result [B, H, L, D] that is wanted as a dense [B, L, H * D], to which `end` copies it after `ops`."""

    lead: tuple[int, int]
    end: OpView
    ops: tuple[OpView, ...]

    def stride(self, length: int, dim: int) -> tuple[int, int, int, int]:
        """Return the strides that make [B, H, L, D] that dense tensor."""
        heads = self.lead[1]
        return (length * heads * dim, dim, heads * dim, 1)

    def write(self, made: Ref, c: Calls) -> None:
        """Emit the end of the copy as a view of the result."""
        rows = view(c, "aten::permute.default", made, (0, 2, 1, 3))
        c.b.call("aten::view.default", rows, shape_of(self.end.out), out=self.end.out, op=self.end)


def result_of(out: Value, c: Calls) -> Result | None:
    """Match a result [N, L, D] or [B, H, L, D] that is only copied to rows of all heads."""
    chain: list[OpView] = []
    user = c.graph.only_user(out)
    while user is not None and user.op in _VIEWS:
        chain.append(user)
        user = c.graph.only_user(user.out)
    if user is None or user.op != "clone" or user.arg("memory_format") != torch.contiguous_format:
        return None
    *_, length, dim = shape_of(out)
    start, lead = 0, shape_of(out)[:-2]
    if len(lead) == 1:  # the views tell batches and heads apart
        splits = [k for k, op in enumerate(chain) if len(shape_of(op.out)) > 3 and op.op in ("view", "reshape")]
        if not splits or math.prod(shape_of(chain[splits[0]].out)[:2]) != lead[0]:
            return None
        start, lead = splits[0], shape_of(chain[splits[0]].out)[:2]
        if any(op.op not in RESHAPES for op in chain[:start]):
            return None
    found = Result((lead[0], lead[1]), user, (*chain, user))
    laid = torch.empty_strided((*lead, length, dim), found.stride(length, dim), device="meta")
    try:
        for op in chain[start:]:
            laid = _applied(op, laid)
    except RuntimeError:  # a view that such strides do not allow
        return None
    return found if laid.is_contiguous() and tuple(laid.shape) == shape_of(user.out) else None


def _applied(op: OpView, x: torch.Tensor) -> torch.Tensor:
    if op.op == "permute":
        return x.permute(op.arg("dims"))
    if op.op == "transpose":
        return x.transpose(op.arg("dim0"), op.arg("dim1"))
    return x.view(shape_of(op.out))


def base_of(transposed: Value, c: Calls, taken: list[OpView]) -> Value | None:
    """Return [N, L, D] of which a value is the transpose [N, D, L]; a transpose without other readers goes into `taken`."""
    made = c.graph.producer(transposed)
    if made is None or made.op not in ("transpose", "permute"):
        return None
    if made.op == "transpose":
        swapped = {made.arg("dim0") % 3, made.arg("dim1") % 3} == {1, 2}
    else:
        swapped = [d % 3 for d in made.arg("dims")] == [0, 2, 1]
    if not swapped:
        return None
    if made_for_one(transposed, c) is not None:
        taken.append(made)
    return next(made.inputs())


@dataclass(frozen=True)
class Heads:
    """Where the operands and the result of an attention lie; it claims `ops` for that. `lead` is (batch, heads), or None where
    [N, L, D] suffices."""

    stack: Stack | None
    result: Result | None
    lead: tuple[int, int] | None
    ops: tuple[OpView, ...]

    def operands(self, values: Sequence[Value | Ref | None], c: Calls) -> list[Ref | None]:
        """Return query, key and value, as [B, H, L, D] where batch and heads are known separately."""
        if self.stack is not None:
            return list(self.stack.slices(c))
        refs = [c.b.any_strides(x) if isinstance(x, Value) else x for x in values]
        if self.lead is None:
            return refs
        return [view(c, "aten::unflatten.int", r, 0, self.lead) for r in refs]

    def write(self, op: OpView, target: str, args: Sequence[Any], c: Calls) -> None:
        """Emit `op.out`, or what it is copied to, by a call of `args`, the strides of its result and the target's name."""
        out, arch = spec_of(op.out), c.ctx.device.arch
        if self.result is not None:
            length, dim = shape_of(op.out)[-2:]
            made = view(c, target, *args, self.result.stride(length, dim), arch)
            self.result.write(made, c)
        elif self.lead is not None:
            step, *inner = out.stride
            made = view(c, target, *args, (step * self.lead[1], step, *inner), arch)  # type: ignore[operator]
            c.b.call("aten::view.default", made, out.shape, out=op.out, op=op)
        else:
            c.b.call(target, *args, out.stride, arch, out=op.out, op=op)


def heads_of(query: Value, key: Value | None, value: Value, out: Value, c: Calls) -> Heads:
    """Find the heads of query, key, value and result, each [N, L, D] or [B, H, L, D]; `key` is None if it has another layout."""
    ops: list[OpView] = []
    stack = None if key is None else stack_of(query, key, value, c, ops)
    result = result_of(out, c)
    split = None if stack is None else shape_of(stack.whole)[1:3]
    if result is not None and split not in (None, result.lead):
        result = None
    if result is not None:
        ops += result.ops
    lead = result.lead if result is not None else split
    return Heads(stack, result, lead if len(shape_of(out)) == 3 else None, tuple(ops))  # type: ignore[arg-type]
