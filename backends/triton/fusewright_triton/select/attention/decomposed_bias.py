"""Find sums in a graph that are an attention bias decomposed into rows and columns of an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.attention import RESHAPES
from fusewright.toolkit.region.graph import spec_of
from fusewright_triton.kernels import attention_ops as kernel
from fusewright_triton.select.calls import Calls
from fusewright_triton.target import named

Shape = tuple[int, ...]


def shape_of(value: Value) -> Shape:
    """Return the shape of a tensor whose sizes are known."""
    return spec_of(value).shape  # type: ignore[return-value]


def made_for_one(value: Value, c: Calls) -> OpView | None:
    """Return the op that makes a value, if one op uses the value, once."""
    return c.graph.producer(value) if c.graph.only_user(value) is not None else None


def through(value: Value, c: Calls, ops: list[OpView]) -> Value:
    """Return the value that `value` is a reshaped copy of. Intermediate ops without other readers go into `ops`."""
    while (made := made_for_one(value, c)) is not None and made.op in RESHAPES:
        ops.append(made)
        value = next(made.inputs())
    return value


def view(c: Calls, target: str, *args: Any) -> Ref:
    """Return the result of a view op."""
    made = c.ctx.value(None)
    c.b.call(target, *args, out=made)
    return Ref(made.id)


def fits(q: TensorSpec, c: Calls, image: tuple[int, int] | None = None) -> bool:
    """Return whether our kernel takes these heads, in inference: training needs what torch's own attention saves."""
    target = named(c.ctx.device.arch)
    return c.graph.phase == "infer" and kernel.fits(target, q.dtype, int(q.shape[-1]), image)  # type: ignore[arg-type]


@dataclass
class Sum:
    """A value as a sum: `terms` with the shapes of the sums that they are broadcast to, and the `ops` that add them."""

    terms: list[tuple[Value, Shape]] = field(default_factory=list)
    ops: list[OpView] = field(default_factory=list)


def summands(value: Value, c: Calls, found: Sum) -> Sum:
    """Expand a value into its summands, as long as partial sums have no other reader."""
    value = through(value, c, found.ops)
    made = made_for_one(value, c)
    operands = list(made.inputs()) if made is not None else []
    if made is None or made.op != "add" or len(operands) != 2 or made.arg("alpha") != 1:
        found.terms.append((value, shape_of(value)))
        return found
    found.ops.append(made)
    for operand in operands:
        if shape_of(operand) == shape_of(value):
            summands(operand, c, found)
        else:
            found.terms.append((operand, shape_of(value)))
    return found


@dataclass(frozen=True)
class Positions:
    """The two summands of a decomposed bias [*lead, *queries, KH, KW]: `rel_h` does not depend on the column of the key,
    `rel_w` not on its row."""

    rel_h: Value
    rel_w: Value
    lead: Shape
    queries: tuple[int, int]
    keys: tuple[int, int]


def positions(terms: Sequence[tuple[Value, Shape]], heads: int, queries: int, keys: int) -> Positions | None:
    """Return two terms as a decomposed bias of `heads` matrices of queries by keys."""
    if len(terms) != 2 or terms[0][1] != terms[1][1] or len(terms[0][1]) < 4:
        return None
    frame = terms[0][1]
    rows, columns = frame[-2:]
    full = [t for t, _ in terms if len(shape_of(t)) == len(frame)]
    by_row = [t for t in full if shape_of(t)[-2:] == (rows, 1)]
    by_column = [t for t in full if shape_of(t)[-2:] == (1, columns)]
    if len(by_row) != 1 or len(by_column) != 1 or rows * columns != keys or min(rows, columns) < 2:
        return None
    for split in (len(frame) - 4, len(frame) - 3):  # queries as rows and columns, or in one dimension
        lead, inner = frame[:split], frame[split:-2]
        if math.prod(lead) == heads and math.prod(inner) == queries:
            return Positions(by_row[0], by_column[0], lead, (inner[0], math.prod(inner[1:])), (rows, columns))
    return None


def summed(p: Positions, c: Calls) -> tuple[Ref | None, Ref | None]:
    """Return rel_h [N, Qh, Qw, KH] and rel_w [N, Qh, Qw, KW]."""
    return _relative(p.rel_h, -1, p.keys[0], p, c), _relative(p.rel_w, -2, p.keys[1], p, c)


def _relative(value: Value, dim: int, size: int, p: Positions, c: Calls) -> Ref | None:
    """Return a summand as [N, Qh, Qw, size], without the dimension `dim` (of size one)."""
    made, rank = c.graph.producer(value), len(shape_of(value))
    if made is not None and made.op == "unsqueeze" and (made.arg("dim") - dim) % rank == 0:
        source = next(made.inputs())
        ref, shape = c.b.any_strides(source), shape_of(source)
    else:
        ref = view(c, "aten::squeeze.dim", c.b.any_strides(value), dim)
        shape = tuple(s for d, s in enumerate(shape_of(value)) if d != rank + dim)
    inner = p.queries if len(shape) == len(p.lead) + 3 else p.queries[:1]
    if shape != (*p.lead, *inner, size):
        ref = view(c, "aten::expand.default", ref, (*p.lead, *inner, size))
    wanted = (math.prod(p.lead), *p.queries, size)
    return ref if shape == wanted else view(c, "aten::reshape.default", ref, wanted)
