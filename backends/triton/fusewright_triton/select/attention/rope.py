"""Rotary embeddings in a graph: heads that are turned by an angle of their position (Su et al., RoFormer, 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from fusewright.interface import OpView, Value
from fusewright_triton.select.attention.decomposed_bias import made_for_one, shape_of
from fusewright_triton.select.calls import Calls, spec_of


@dataclass(frozen=True)
class Turned:
    """`source` * `cos` + (its halves exchanged, the second one negated) * `sin`, all of one type; `ops` compute it, and nobody
    else reads what is in between."""

    source: Value
    cos: Value
    sin: Value
    ops: tuple[OpView, ...]


def turned(value: Value, c: Calls) -> Turned | None:
    """What a value [B, H, L, D] is, if it is turned so, as transformers writes it."""
    total = made_for_one(value, c)
    if total is None or total.op != "add" or total.arg("alpha") != 1 or spec_of(value).rank != 4:
        return None
    products = [made_for_one(v, c) if isinstance(v, Value) else None for v in (total.arg("self"), total.arg("other"))]
    for plain, other in (products, products[::-1]):
        found = _turned(plain, other, c) if plain is not None and other is not None else None
        if found is not None and all(_suits(v, value) for v in (found.source, found.cos, found.sin)):
            return Turned(found.source, found.cos, found.sin, (total, *found.ops))
    return None


def _turned(plain: OpView, other: OpView, c: Calls) -> Turned | None:
    if plain.op != "mul" or other.op != "mul":
        return None
    for exchanged, sin in (other.args[:2], other.args[1::-1]):
        halves = _exchanged(exchanged, c) if isinstance(exchanged, Value) else None
        if halves is None or not isinstance(sin, Value):
            continue
        source, ops = halves
        for x, cos in (plain.args[:2], plain.args[1::-1]):
            if x == source and isinstance(cos, Value):
                return Turned(source, cos, sin, (plain, other, *ops))
    return None


def _exchanged(value: Value, c: Calls) -> tuple[Value, tuple[OpView, ...]] | None:
    """What a value has the halves of, the second one first and negated."""
    joined = made_for_one(value, c)
    pair = joined.arg("tensors") if joined is not None and joined.op == "cat" and joined.arg("dim") in (-1, 3) else ()
    if joined is None or len(pair) != 2:
        return None
    negated, first = (made_for_one(v, c) for v in pair)
    second = made_for_one(negated.arg("self"), c) if negated is not None and negated.op == "neg" else None
    if first is None or second is None or negated is None or first.arg("self") != second.arg("self"):
        return None
    dim = shape_of(value)[-1]
    if dim % 2 or not _is_slice(first, 0, dim // 2) or not _is_slice(second, dim // 2, dim):
        return None
    return first.arg("self"), (joined, negated, first, second)


def _is_slice(op: OpView, start: int, end: int) -> bool:
    """Whether an op takes these columns."""
    if op.op != "slice" or op.arg("dim") not in (-1, 3) or op.arg("step") != 1:
        return False
    columns = shape_of(op.arg("self"))[-1]
    last = columns if op.arg("end") is None else min(op.arg("end"), columns)
    return (op.arg("start") or 0, last) == (start, end)


def _suits(v: Value, whole: Value) -> bool:
    """Whether it is of the whole's type, and broadcasts to it without its last dimension."""
    a, b = spec_of(v), spec_of(whole)
    return (
        a.dtype == b.dtype
        and a.rank == 4
        and a.shape[3] == b.shape[3]
        and all(n in (1, m) for n, m in zip(a.shape, b.shape, strict=True))
    )
