"""Attention: which kernel computes it, and what model code spells out in products, sums and a softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Call, Ref
from fusewright.toolkit.builder import contiguous_strides
from fusewright_triton.calls import Calls, Found, spec_of
from fusewright_triton.kernels import attention_ops as kernel

RESHAPES = frozenset({"view", "reshape", "clone", "alias"})
"""Ops that keep the elements and their order."""

Shape = tuple[int, ...]


def sdpa_reason(op: OpView) -> str | None:
    """Why torch's own choice among its kernels is left alone."""
    if op.arg("attn_mask") is None:
        return "torch's own choice among its kernels is the fastest one"
    return None


def lower_sdpa(op: OpView, c: Calls) -> Found | None:
    """Attention with a mask: decomposed positions by our kernel, a mask that torch's kernels refuse as a dense copy."""
    return _decomposed_mask(op, c) or _broadcast_mask(op, c)


# ---------------------------------------------------------------- masks that are refused


def _broadcast_mask(op: OpView, c: Calls) -> Found | None:
    """Only masks whose last dimension is not dense: flash, memory-efficient and cuDNN attention all refuse those, and torch
    would compute in fp32 products and a softmax. A mask made of constants is copied once, when the plan is first run."""
    if spec_of(op.arg("attn_mask")).stride[-1:] == (1,):
        return None
    return Found((op,), op, partial(_with_dense_mask, op), "attention with a dense mask")


def _with_dense_mask(op: OpView, c: Calls) -> None:
    mask: Value = op.arg("attn_mask")
    spec = spec_of(mask)
    dense = c.ctx.value(replace(spec, stride=contiguous_strides(spec.shape), const=False))  # type: ignore[arg-type]
    clone = Call("aten::clone.default", (c.exact(mask),), (dense.id,), (("memory_format", torch.contiguous_format),))
    c.b.append(clone)
    given = c.b.at_hand(op)
    place = op.argnames.index("attn_mask")
    c.b.append(c.ctx.aten(replace(given, args=(*given.args[:place], dense, *given.args[place + 1 :]))))


# ---------------------------------------------------------------- sums that are a bias by rows and columns of an image


@dataclass(frozen=True)
class Positions:
    """The two summands of a decomposed bias [*lead, *queries, KH, KW]: `rel_h` does not depend on the column of the key,
    `rel_w` not on its row."""

    rel_h: Value
    rel_w: Value
    lead: Shape
    queries: tuple[int, int]
    keys: tuple[int, int]


@dataclass
class Sum:
    """A value as a sum: `terms` with the shapes of the sums that they are broadcast to, and the `ops` that add up."""

    terms: list[tuple[Value, Shape]] = field(default_factory=list)
    ops: list[OpView] = field(default_factory=list)


def _shape(value: Value) -> Shape:
    return spec_of(value).shape  # type: ignore[return-value]


def _alone(value: Value, c: Calls) -> OpView | None:
    """The op that makes a value which one op uses, once."""
    return c.producer(value) if c.b.links.only_user(value) is not None else None


def _through(value: Value, c: Calls, ops: list[OpView]) -> Value:
    """What a value is a reshaped copy of. The ops in between, used by nobody else, are noted."""
    while (made := _alone(value, c)) is not None and made.op in RESHAPES:
        ops.append(made)
        value = next(made.inputs())
    return value


def _summands(value: Value, c: Calls, found: Sum) -> Sum:
    """Opens the sums that a value is, as far as nobody else reads them."""
    value = _through(value, c, found.ops)
    made = _alone(value, c)
    operands = list(made.inputs()) if made is not None else []
    if made is None or made.op != "add" or len(operands) != 2 or made.arg("alpha") != 1:
        found.terms.append((value, _shape(value)))
        return found
    found.ops.append(made)
    for operand in operands:
        if _shape(operand) == _shape(value):
            _summands(operand, c, found)
        else:
            found.terms.append((operand, _shape(value)))
    return found


def _positions(terms: Sequence[tuple[Value, Shape]], heads: int, queries: int, keys: int) -> Positions | None:
    """Two terms as a decomposed bias of `heads` matrices of queries by keys."""
    if len(terms) != 2 or terms[0][1] != terms[1][1] or len(terms[0][1]) < 4:
        return None
    frame = terms[0][1]
    rows, columns = frame[-2:]
    by_row = [t for t, _ in terms if len(_shape(t)) == len(frame) and _shape(t)[-2:] == (rows, 1)]
    by_column = [t for t, _ in terms if len(_shape(t)) == len(frame) and _shape(t)[-2:] == (1, columns)]
    if len(by_row) != 1 or len(by_column) != 1 or rows * columns != keys or min(rows, columns) < 2:
        return None
    for split in (len(frame) - 4, len(frame) - 3):  # queries as rows and columns, or in one dimension
        lead, inner = frame[:split], frame[split:-2]
        if math.prod(lead) == heads and math.prod(inner) == queries:
            return Positions(by_row[0], by_column[0], lead, (inner[0], math.prod(inner[1:])), (rows, columns))
    return None


def _taken(op: OpView, q: TensorSpec, image: tuple[int, int], c: Calls) -> bool:
    """Whether our kernel is built for these heads."""
    target = kernel.target_of(c.ctx.device.arch)
    return c.region.phase == "infer" and kernel.fits(target, q.dtype, int(q.shape[-1]), image)  # type: ignore[arg-type]


def _decomposed_mask(op: OpView, c: Calls) -> Found | None:
    """A mask of decomposed positions that nobody else reads never becomes a matrix."""
    q, k, v = (spec_of(op.arg(n)) for n in ("query", "key", "value"))
    plain = q.rank == 4 and q.shape[:2] == k.shape[:2] and q.shape[-1] == v.shape[-1]
    if not plain or op.arg("dropout_p") or op.arg("is_causal"):
        return None
    found = _summands(op.arg("attn_mask"), c, Sum())
    batch, heads, queries, _ = q.shape
    positions = _positions(found.terms, batch * heads, queries, k.shape[2])  # type: ignore[arg-type, operator]
    if positions is None or not _taken(op, q, positions.keys, c):
        return None
    operands = op.arg("query"), op.arg("key"), op.arg("value")
    write = partial(_decomposed, op, positions, operands, op.arg("scale"))
    return Found(_ordered([*found.ops, op], c), op, write, "attention with decomposed positions")


def _ordered(ops: Sequence[OpView], c: Calls) -> tuple[OpView, ...]:
    chosen = {op.id for op in ops}
    return tuple(op for op in c.region.ops if op.id in chosen)


def _decomposed(op: OpView, p: Positions, operands: Sequence[Value | Ref], scale: float | None, c: Calls) -> None:
    """The call that makes `op.out` of query, key and value [B, H, L, D] or [N, L, D]."""
    q, k, v = (c.b.any_strides(x) if isinstance(x, Value) else x for x in operands)
    rel_h, rel_w = _relative(p.rel_h, -1, p.keys[0], p, c), _relative(p.rel_w, -2, p.keys[1], p, c)
    stride = spec_of(op.out).stride
    c.b.call(kernel.DECOMPOSED, q, k, v, rel_h, rel_w, scale, stride, c.ctx.device.arch, out=op.out, op=op)


def _relative(value: Value, dim: int, size: int, p: Positions, c: Calls) -> Ref | None:
    """A summand as [N, Qh, Qw, size], without the dimension `dim` (of size one)."""
    made, rank = c.producer(value), len(_shape(value))
    if made is not None and made.op == "unsqueeze" and (made.arg("dim") - dim) % rank == 0:
        source = next(made.inputs())
        ref, shape = c.b.any_strides(source), _shape(source)
    else:
        ref = _view(c, "aten::squeeze.dim", c.b.any_strides(value), dim)
        shape = tuple(s for d, s in enumerate(_shape(value)) if d != rank + dim)
    inner = p.queries if len(shape) == len(p.lead) + 3 else p.queries[:1]
    if shape != (*p.lead, *inner, size):
        ref = _view(c, "aten::expand.default", ref, (*p.lead, *inner, size))
    wanted = (math.prod(p.lead), *p.queries, size)
    return ref if shape == wanted else _view(c, "aten::reshape.default", ref, wanted)


def _view(c: Calls, target: str, *args: Any) -> Ref:
    made = c.ctx.value(None)
    c.b.call(target, *args, out=made)
    return Ref(made.id)


# ---------------------------------------------------------------- attention that is spelled out


def softmax_reason(op: OpView) -> str | None:
    """Only over the last dimension of scores."""
    x = spec_of(op.arg("self"))
    return None if x.rank >= 3 and op.arg("dim") in (-1, x.rank - 1) else "not over the last dimension of scores"


def lower_softmax(op: OpView, c: Calls) -> Found | None:
    """softmax(q k^T scale + decomposed positions) v, where nobody else reads what lies between."""
    last = _weighted(op, c)
    if c.region.phase != "infer" or last is None:
        return None
    product, ops = last[0], [op, *last]
    found = _summands(_uncast(op.arg("self"), c, ops), c, Sum())
    scores = [(s, t) for t in found.terms if (s := _scores(t[0], c)) is not None]
    if len(scores) != 1:
        return None
    scored, term = scores[0]
    v = product.arg("mat2")
    n, queries, _ = _shape(product.arg("self"))
    positions = _positions([t for t in found.terms if t is not term], n, queries, _shape(v)[1])
    q = spec_of(scored.query)
    same = _shape(v) == (*_shape(scored.key)[:1], _shape(scored.key)[2], q.shape[-1]) and q.shape[:2] == (n, queries)
    if positions is None or not same or spec_of(v).dtype != q.dtype or not _taken(op, q, positions.keys, c):
        return None
    write = partial(_spelled_out, product, positions, scored, v)
    ops += [*found.ops, *scored.ops]
    return Found(_ordered(ops, c), product, write, "attention with decomposed positions")


@dataclass
class Scores:
    """query [N, Q, D] times key [N, D, K] and `scale`, by `ops`."""

    query: Value
    key: Value
    scale: float
    ops: list[OpView]


def _weighted(op: OpView, c: Calls) -> list[OpView] | None:
    """The product of a softmax's result with values, then the ops in between."""
    ops: list[OpView] = []
    value, user = op.out, c.b.links.only_user(op.out)
    while user is not None and user.op in RESHAPES | {"cast", "expand"} and _shape(user.out)[-2:] == _shape(value)[-2:]:
        if math.prod(_shape(user.out)) != math.prod(_shape(value)):
            return None
        ops.append(user)
        value, user = user.out, c.b.links.only_user(user.out)
    if user is None or user.op != "bmm" or user.arg("self") != value or spec_of(user.out).dtype != spec_of(value).dtype:
        return None
    return [user, *ops]


def _uncast(value: Value, c: Calls, ops: list[OpView]) -> Value:
    """What a value is a wider copy of."""
    made = _alone(value, c)
    if made is None or made.op != "cast":
        return value
    ops.append(made)
    return next(made.inputs())


def _scaled(value: Value, c: Calls, ops: list[OpView]) -> tuple[Value, float]:
    """What a value is the multiple of, and how much of it."""
    made = _alone(value, c)
    if made is None or made.op not in ("mul", "div"):
        return value, 1.0
    factor, source = made.arg("other"), made.arg("self")
    if not isinstance(factor, int | float) or not isinstance(source, Value) or (made.op == "div" and factor == 0):
        return value, 1.0
    if spec_of(source).dtype != spec_of(value).dtype:
        return value, 1.0
    ops.append(made)
    return source, float(factor) if made.op == "mul" else 1.0 / factor


def _scores(value: Value, c: Calls) -> Scores | None:
    """A product of queries and keys, scaled before or after."""
    ops: list[OpView] = []
    value, after = _scaled(value, c, ops)
    value = _through(value, c, ops)
    product = _alone(value, c)
    if product is None or product.op != "bmm":
        return None
    ops.append(product)
    query, before = _scaled(product.arg("self"), c, ops)
    return Scores(query, product.arg("mat2"), before * after, ops)


def _spelled_out(product: OpView, p: Positions, s: Scores, v: Value, c: Calls) -> None:
    key = _view(c, "aten::transpose.int", c.b.any_strides(s.key), -2, -1)
    _decomposed(product, p, (s.query, key, v), s.scale, c)
