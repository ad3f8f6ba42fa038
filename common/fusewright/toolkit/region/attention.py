"""Recognizes attention with few queries, and keys before model code repeated them for each head."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from fusewright.interface import OpView, Value
from fusewright.toolkit.region.graph import RegionGraph, spec_of

RESHAPES = frozenset({"view", "reshape", "clone", "alias"})
"""Ops that preserve the elements and their order."""


def not_few_queries(op: OpView, most: int, dtypes: Collection[torch.dtype], largest: int) -> str | None:
    """Why an `sdpa` is not an attention [B, H, Q, D] with at most `most` queries and heads of at most `largest` elements, or
    None if it is."""
    q, k, v = (spec_of(op.arg(n)) for n in ("query", "key", "value"))
    mask = op.arg("attn_mask")
    specs = [q, k, v, *([] if mask is None else [spec_of(mask)])]
    if not all(s.static for s in specs) or q.rank != 4 or k.rank != 4 or 0 in (*q.shape, *k.shape):
        return "symbolic, empty, or not [B, H, L, D]"
    heads, queries, dim = q.shape[1:]
    if queries > most or op.arg("dropout_p") or op.arg("is_causal"):  # type: ignore[operator]
        return "many queries, dropout or a causal mask"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in dtypes or dim > largest:  # type: ignore[operator]
        return "types or a head that the kernel does not take"
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or heads % k.shape[1]:  # type: ignore[operator]
        return "values of another shape than keys"
    return None


def unrepeated(value: Value, graph: RegionGraph, ops: list[OpView], shape: Sequence[Any] | None = None) -> Value:
    """Return the [B, Hk, L, D] tensor of which `value`, [B, H, L, D] (`shape`, where it is a view of that), is a copy with every
    head repeated. Append the ops in between that have no other users to `ops`."""
    between: list[OpView] = []
    source = value
    while (made := graph.producer(source)) is not None and made.op in RESHAPES:
        between.append(made)
        source = next(made.inputs())
    if made is None or made.op != "expand":
        return value
    between.append(made)
    inner = next(made.inputs())
    whole, one = spec_of(source).shape, spec_of(inner).shape
    if not _repeats(whole, one, spec_of(value).shape if shape is None else shape):
        return value
    made = graph.producer(inner)
    if made is None or made.op != "unsqueeze" or spec_of(next(made.inputs())).shape != (*whole[:2], *whole[3:]):
        return value
    between.append(made)
    for op in between:  # backwards from the last: an op with other readers stays, and so do its producers
        if graph.only_user(op.out) is None:
            break
        ops.append(op)
    return next(made.inputs())


def _repeats(whole: Any, one: Any, shape: Any) -> bool:
    """Whether [B, Hk, 1, L, D] became [B, Hk, G, L, D] and then [B, Hk * G, L, D]."""
    batch, heads, length, dim = shape
    if len(whole) != 5 or one != (*whole[:2], 1, *whole[3:]) or whole != (batch, whole[1], whole[2], length, dim):
        return False
    return math.prod(whole[1:3]) == heads
