"""Attention of few queries (decoding): two kernels that read the key cache once, however many query heads share a head of it."""

from __future__ import annotations

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.attention import not_few_queries, unrepeated
from fusewright.toolkit.region.builder import contiguous_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright_mps.kernels import decode as kernel
from fusewright_mps.kernels.handwritten import METAL
from fusewright_mps.select.calls import Calls

SHORTEST = 64
"""Fewest keys to use the kernels for: below, torch's attention is as fast, as on other GPUs (docs/studies/gpu-decoding.md)."""


def reason(op: OpView) -> str | None:
    """Return why this is not attention of few queries, or None."""
    return not_few_queries(op, kernel.MOST_ROWS, METAL, kernel.LARGEST_DIM)


def _of_one_cache(m: Match, c: Calls) -> Match | None:
    """Find keys and values before they are repeated for the query heads of a group."""
    op, ops = m.anchor, list[OpView]()
    key, value = (unrepeated(op.arg(n), c.graph, ops) for n in ("key", "value"))
    if spec_of(key).shape != spec_of(value).shape:
        ops.clear()
        key, value = op.arg("key"), op.arg("value")
    rows, dim = _rows(op, key), int(spec_of(key).shape[3])  # type: ignore[arg-type]
    if c.graph.phase != "infer" or int(spec_of(key).shape[2]) < SHORTEST:  # type: ignore[arg-type]
        return None
    if rows > kernel.MOST_ROWS or rows * dim > kernel.MOST_REGISTERS or spec_of(op.out).stride[-1] != 1:
        return None
    return m.with_ops(*ops, at=op, key=key, value=value)


def _rows(op: OpView, key: Value) -> int:
    """Return the number of queries that read one head of the cache."""
    heads, queries = (int(s) for s in spec_of(op.arg("query")).shape[1:3])  # type: ignore[arg-type]
    return heads // int(spec_of(key).shape[1]) * queries  # type: ignore[arg-type]


def _write(m: Match, c: Calls) -> None:
    op = m.anchor
    given = [_dense_rows(v, c) for v in (op.arg("query"), m["key"], m["value"])]
    (q, k, v), mask = [spec for _, spec in given], op.arg("attn_mask")
    (batch, h, queries, dim), (heads, keys) = (tuple(map(int, q.shape)), tuple(map(int, k.shape[1:3])))  # type: ignore[arg-type]
    strides = tuple(int(s) for spec in (q, k, v) for s in spec.stride[:3])  # type: ignore[arg-type]
    kind: kernel.Mask = "" if mask is None else "bool" if spec_of(mask).dtype == torch.bool else "added"
    if mask is not None:
        strides += _broadcast(c.b.spec(mask), (batch, h, queries, keys))
    chunk = kernel.chunk_for(keys, batch * heads, c.target)
    parts = kernel.Parts(METAL[q.dtype], kind, dim, batch, heads, h // heads, queries, keys, chunk, strides)
    of_parts = (batch * heads, parts.parts, parts.rows)
    made = [_temporary(shape, q.device, c) for shape in ((*of_parts, dim), of_parts, of_parts)]
    scale = dim**-0.5 if op.arg("scale") is None else float(op.arg("scale"))
    c.launch(parts, [*(r for r, _ in given), c.b.any_strides(mask)], [t.id for t in made], op, (scale,))
    whole = tuple(int(s) for s in spec_of(op.out).stride[:3])  # type: ignore[arg-type]
    combined = kernel.Combined(METAL[q.dtype], dim, batch, heads, h // heads, queries, parts.parts, whole)
    c.launch(combined, [Ref(t.id) for t in made], [op.out.id], op)


def _dense_rows(value: Value, c: Calls) -> tuple[Ref, TensorSpec]:
    """Return the value as it is if its last dimension is dense, else a row-major copy."""
    found = value if c.b.spec(value).stride[-1] == 1 else c.b.row_major(value)
    ref = c.b.any_strides(found)
    assert ref is not None
    return ref, c.b.spec(found)


def _broadcast(mask: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the mask's strides over [B, H, Q, K], 0 in broadcast dimensions."""
    missing = len(shape) - mask.rank
    own = tuple(0 if n == 1 else int(s) for n, s in zip(mask.shape, mask.stride, strict=True))  # type: ignore[arg-type]
    return (0,) * missing + own


def _temporary(shape: tuple[int, ...], device: str, c: Calls) -> Value:
    return c.ctx.value(TensorSpec(shape, contiguous_strides(shape), torch.float32, device))


DECODE = Row(
    "mps.attention.decode", chain("sdpa"), extend=_of_one_cache, write=_write, note="attention of few queries",
)  # fmt: skip
