"""Attention that model code spells out: a product, a sum with a mask or positions, a softmax, a product."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from fusewright.interface import OpView, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.attention import RESHAPES, unrepeated
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain, many, maybe, one
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.kernels import attention_ops as kernel
from fusewright_triton.kernels import decode_ops as decode
from fusewright_triton.select.attention import decomposed_bias, sinks
from fusewright_triton.select.attention.decomposed_bias import (
    Shape,
    Sum,
    made_for_one,
    shape_of,
    through,
    view,
)
from fusewright_triton.select.attention.heads import Heads, base_of, heads_of, result_of
from fusewright_triton.select.attention.sdpa import slices_elsewhere
from fusewright_triton.select.calls import Calls

HALF = (torch.bfloat16, torch.float16)

_MOVES = RESHAPES | {"expand"}


def reason(op: OpView) -> str | None:
    """Accept only a softmax over the last dimension of scores."""
    x = spec_of(op.arg("self"))
    return None if x.rank >= 3 and op.arg("dim") in (-1, x.rank - 1) else "not over the last dimension of scores"


@dataclass
class Spelled:
    """weights = softmax(query [N, Q, D] @ key [N, D, K] * scale + terms); `product` = weights @ value [N, K, D].

    `terms` are summands with the shapes that they are broadcast to, `scores` the shape of the product of queries and keys, which is
    what `hidden` and `sink` are broadcast to. `hidden` marks scores set to -inf, `sink` is one more score of each row, which has no
    value. `ops` compute all of it; their intermediate values have no other reader.
    """

    product: OpView
    query: Value
    key: Value
    value: Value
    scale: float
    terms: list[tuple[Value, Shape]]
    scores: Shape
    hidden: Value | None
    sink: Value | None
    ops: list[OpView]


def _whole_matrices(op: OpView, m: Match, c: Calls) -> bool:
    return _same_matrices(op.out, m.out)


def _weighs(op: OpView, m: Match, c: Calls) -> bool:
    """Match a product of the softmax's result with values."""
    return bool(op.arg("self") == m.out)


def _spelled(m: Match, c: Calls) -> Spelled | None:
    """Match the whole attention around a softmax and the product behind it."""
    product, ops = m.last, list(m.ops)
    if c.graph.phase != "infer":
        return None
    scores, sink = sinks.without_sink(_uncast(m.anchor.arg("self"), c, ops), c, ops)
    scores, hidden = _unhidden(scores, c, ops)
    found = decomposed_bias.summands(scores, c, Sum())
    for k, (term, frame) in enumerate(found.terms):
        mine: list[OpView] = []
        term, after = _scaled(term, c, mine)
        term = through(term, c, mine)
        scored = made_for_one(term, c)
        if scored is None or scored.op != "bmm":
            continue
        query, before = _scaled(scored.arg("self"), c, mine)
        key, value = scored.arg("mat2"), product.arg("mat2")
        n, _, keys = shape_of(scored.out)
        dim = shape_of(query)[2]
        same = shape_of(product.arg("self")) == shape_of(scored.out) and shape_of(value) == (n, keys, dim)
        if not same or not spec_of(query).dtype == spec_of(key).dtype == spec_of(value).dtype:
            return None
        rest = [*found.terms[:k], *found.terms[k + 1 :]]
        if hidden is not None or sink is not None:  # which fit the scores as model code views them, not as they are multiplied
            frame = shape_of(scores)
        ops += [*found.ops, *mine, scored]
        return Spelled(product, query, key, value, before * after, rest, frame, hidden, sink, ops)
    return None


def _of_positions(m: Match, c: Calls) -> Match | None:
    """Match a bias decomposed into rows and columns of keys."""
    s = _spelled(m, c)
    if s is None or s.hidden or s.sink:
        return None
    heads, queries, _ = shape_of(s.query)
    bias = decomposed_bias.positions(s.terms, heads, queries, shape_of(s.value)[1])
    if bias is None or not decomposed_bias.fits(spec_of(s.query), c, bias.keys):
        return None
    key = base_of(s.key, c, s.ops)
    where = heads_of(s.query, key, s.value, s.product.out, c)
    return replace(m, ops=(*s.ops, *where.ops), at=s.product).with_ops(spelled=s, bias=bias, heads=where, key=key)


def _of_mask(m: Match, c: Calls) -> Match | None:
    """Match an added mask, or none."""
    s = _spelled(m, c)
    if s is None or len(s.terms) + (s.hidden is not None) > 1:
        return None
    q = spec_of(s.query)
    heads, queries, _ = shape_of(s.query)
    lead = _lead(s, heads, queries, shape_of(s.value)[1])
    if lead is None or q.dtype not in HALF or not decomposed_bias.fits(q, c):
        return None
    if s.sink is not None and (len(lead) != 2 or shape_of(s.sink) != (*lead, queries, 1)):
        return None
    moves = [_split(x, lead, c) for x in (s.query, s.key, s.value)]
    operands = [value for value, _ in moves]
    shared, between = _unrepeated(operands[1], operands[2], c)
    result = result_of(s.product.out, c)
    where = Heads(None, result if result is not None and result.lead == lead else None, lead, ())
    ops = (*s.ops, *(op for _, ops in moves for op in ops), *between, *(where.result.ops if where.result else ()))
    return replace(m, ops=ops, at=s.product).with_ops(spelled=s, heads=where, operands=operands, shared=shared)


def _unrepeated(key: Value, value: Value, c: Calls) -> tuple[tuple[Value, Value] | None, list[OpView]]:
    """Return keys and values [B, Hk, K, D] of which [B, H, D, K] and [B, H, K, D] are copies with every head repeated, and the ops
    in between that nobody else needs. (Values of `repeat_interleave` may be viewed as [B * H, K, D] at once.)"""
    ops: list[OpView] = []
    made = made_for_one(through(key, c, ops), c)
    if made is None or made.op != "transpose" or len(shape_of(key)) != 4 or shape_of(made.out) != shape_of(key):
        return None, []
    if {made.arg("dim0") % 4, made.arg("dim1") % 4} != {2, 3}:
        return None, []
    ops.append(made)
    repeated = next(made.inputs())
    found = unrepeated(repeated, c.graph, ops), unrepeated(value, c.graph, ops, shape_of(repeated))
    if found == (repeated, value) or shape_of(found[0]) != shape_of(found[1]):
        return None, []
    return found, ops


def _same_matrices(a: Value, b: Value) -> bool:
    """Return whether two tensors hold equally many matrices of one size."""
    return shape_of(a)[-2:] == shape_of(b)[-2:] and math.prod(shape_of(a)) == math.prod(shape_of(b))


def _uncast(value: Value, c: Calls, ops: list[OpView]) -> Value:
    """Return the value that `value` is a wider copy of."""
    made = made_for_one(value, c)
    if made is None or made.op != "cast":
        return value
    ops.append(made)
    return next(made.inputs())


def _unhidden(value: Value, c: Calls, ops: list[OpView]) -> tuple[Value, Value | None]:
    """Return a value before some of its scores were hidden, and the mask of the hidden ones."""
    made = made_for_one(value, c)
    if made is None or made.op != "masked_fill" or made.arg("value") != -math.inf:
        return value, None
    ops.append(made)
    return made.arg("self"), made.arg("mask")


def _scaled(value: Value, c: Calls, ops: list[OpView]) -> tuple[Value, float]:
    """Return the value that `value` is a multiple of, and the factor."""
    made = made_for_one(value, c)
    if made is None or made.op not in ("mul", "div"):
        return value, 1.0
    factor, source = made.arg("other"), made.arg("self")
    if not isinstance(factor, int | float) or not isinstance(source, Value) or (made.op == "div" and factor == 0):
        return value, 1.0
    if spec_of(source).dtype != spec_of(value).dtype:
        return value, 1.0
    ops.append(made)
    return source, float(factor) if made.op == "mul" else 1.0 / factor


def _with_positions(m: Match, c: Calls) -> None:
    s, where, key = m["spelled"], m["heads"], m["key"]
    k = key if key is not None or where.stack is not None else view(c, "aten::transpose.int", c.b.any_strides(s.key), 1, 2)
    operands = where.operands([s.query, k, s.value], c)
    where.write(s.product, kernel.DECOMPOSED, [*operands, *decomposed_bias.summed(m["bias"], c), s.scale], c)


# ---------------------------------------------------------------- with an added mask, or none


def _lead(s: Spelled, n: int, queries: int, keys: int) -> tuple[int, int] | None:
    """Return batch and heads as in the sum of scores and mask; None when these are no matrices of queries by keys."""
    frame = s.terms[0][1] if s.terms else s.scores
    if frame[-2:] != (queries, keys) or len(frame) not in (3, 4) or math.prod(frame[:-2]) != n:
        return None
    return (frame[0], frame[1]) if len(frame) == 4 else (n, 1)


def _split(value: Value, lead: Shape, c: Calls) -> tuple[Value, list[OpView]]:
    """Return a stack of matrices as [B, H, ...] if it was made of that, and the copies and views in between; else itself."""
    between: list[OpView] = []
    at = value
    while (made := made_for_one(at, c)) is not None and made.op in _MOVES:
        at = next(made.inputs())
        if not _same_matrices(at, value):
            break
        between.append(made)
        if shape_of(at)[:-2] == lead:
            return at, between
    return value, []


def _with_mask(m: Match, c: Calls) -> None:
    s, where = m["spelled"], m["heads"]
    q, k, v = _operands(m, c)
    mask, given = _mask(s, c)
    if given is not None and len(s.terms[0][1] if s.terms else s.scores) == len(shape_of(given)) == 3:
        mask = view(c, "aten::unsqueeze.default", mask, 1)
    sink = None if s.sink is None else c.b.any_strides(s.sink)
    if s.sink is not None and m["shared"] is not None and _few(m["shared"][0], s.query, where, c):
        where.write(s.product, decode.OPERATOR, [q, k, v, mask, sink, None, None, s.scale], c)
    else:
        where.write(s.product, kernel.ATTENTION, [q, k, v, mask, sink, False, s.scale, False], c)


def _operands(m: Match, c: Calls) -> tuple[Ref | None, Ref | None, Ref | None]:
    """Return query, key and value with dims for batch, heads, rows and elements."""
    lead = m["heads"].lead
    q, k, v = m["operands"]
    if m["shared"] is not None:
        key, value = m["shared"]
        return _four(q, lead, c), c.b.any_strides(key), c.b.any_strides(value)
    return _four(q, lead, c), view(c, "aten::transpose.int", _four(k, lead, c), -2, -1), _four(v, lead, c)


def _few(key: Value, query: Value, where: Heads, c: Calls) -> bool:
    """Return whether there are few queries for each head of many keys, as in decoding."""
    assert where.lead is not None
    rows = where.lead[1] // shape_of(key)[1] * shape_of(query)[-2]
    return rows <= decode.MOST_ROWS and shape_of(key)[2] >= c.target.bounds.decode_keys


def _mask(s: Spelled, c: Calls) -> tuple[Ref | None, Value | None]:
    """Return the mask that the kernel reads, and its source value. A mask of weights is made once."""
    if s.hidden is None:
        return (c.b.any_strides(s.terms[0][0]), s.terms[0][0]) if s.terms else (None, None)
    make = c.b.prepare if c.is_const(s.hidden) else partial(view, c)
    return make("aten::logical_not.default", c.b.exact(s.hidden)), s.hidden


def _four(value: Value, lead: Shape, c: Calls) -> Ref | None:
    ref = c.b.any_strides(value)
    if shape_of(value)[:-2] == lead:
        return ref
    return view(c, "aten::view.default", ref, (*lead, *shape_of(value)[-2:]))


_SOFTMAX = chain("softmax", maybe("slice", sinks.drops_last), many(_MOVES | {"cast"}, _whole_matrices), one("bmm", _weighs))

ROWS = (
    Row(
        "triton.attention.unfused_positions", _SOFTMAX, extend=_of_positions, also=slices_elsewhere,
        write=_with_positions, note="attention with decomposed positions",
    ),
    Row(
        "triton.attention.unfused", _SOFTMAX, extend=_of_mask, write=_with_mask, note="attention, by our kernel"
    ),
)  # fmt: skip
"""Rows of attention around a softmax."""
