"""Attention of few queries (decoding): one kernel that reads a cache once, however many query heads share its heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.toolkit.backend.candidates import Thunk
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.kernels import decode_ops as kernel
from fusewright_triton.select.attention.decomposed_bias import RESHAPES
from fusewright_triton.select.attention.rope import turned
from fusewright_triton.select.attention.sdpa import samples
from fusewright_triton.select.calls import Calls, spec_of

REPEATS = 10


def reason(op: OpView) -> str | None:
    """Why this is no attention of few queries."""
    q, k, v = (spec_of(op.arg(n)) for n in ("query", "key", "value"))
    mask = op.arg("attn_mask")
    specs = [q, k, v, *([] if mask is None else [spec_of(mask)])]
    if not all(s.static for s in specs) or q.rank != 4 or k.rank != 4 or 0 in (*q.shape, *k.shape):
        return "symbolic, empty, or not [B, H, L, D]"
    heads, queries, dim = q.shape[1:]
    if queries > kernel.MOST_ROWS or op.arg("dropout_p") or op.arg("is_causal"):  # type: ignore[operator]
        return "many queries, dropout or a causal mask"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in kernel.DTYPES or dim > kernel.LARGEST_DIM:  # type: ignore[operator]
        return "types or a head that the kernel does not take"
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or heads % k.shape[1]:  # type: ignore[operator]
        return "values of another shape than keys"
    return None


def _of_one_cache(m: Match, c: Calls) -> Match | None:
    """Keys and values as they are before they are repeated for every query head of a group, and what turns the queries."""
    op, ops = m.anchor, list[OpView]()
    key, value = (_unrepeated(op.arg(n), c, ops) for n in ("key", "value"))
    if spec_of(key).shape != spec_of(value).shape:
        ops.clear()
        key, value = op.arg("key"), op.arg("value")
    heads, queries = spec_of(op.arg("query")).shape[1:3]
    if heads // spec_of(key).shape[1] * queries > kernel.MOST_ROWS or c.graph.phase != "infer":  # type: ignore[operator]
        return None
    rotation = turned(op.arg("query"), c)
    return m.with_ops(*ops, *(rotation.ops if rotation else ()), at=op, key=key, value=value, rotation=rotation)


def _pays(m: Match, c: Calls) -> bool:
    """Whether the kernel is faster than torch's, where it was not fitted by a short measurement."""
    op = m.anchor
    specs = q, k, *_ = [spec_of(v) for v in (op.arg("query"), m["key"], op.arg("attn_mask")) if v is not None]
    if k.shape[2] < c.target.bounds.decode_keys:  # type: ignore[operator]
        return False
    stride, arch = spec_of(op.out).stride, c.ctx.device.arch
    sizes = " ".join(f"{list(s.shape)}{list(s.stride)}" for s in specs)
    key = f"attention of few {str(q.dtype).removeprefix('torch.')} {sizes}"
    ours = partial(_measured, kernel.attention_decode, specs, op.arg("scale"), stride, arch)
    return c.pays(key, partial(_measured, kernel.by_torch, specs, op.arg("scale"), stride, arch), ours)


def _measured(run: Callable[..., Any], specs: Sequence[TensorSpec], scale: float | None, stride: Any, arch: str) -> Thunk:
    q, k, *mask = samples(specs)

    def repeated() -> None:
        for _ in range(REPEATS):
            run(q, k, k, mask[0] if mask else None, None, None, scale, stride, arch)
        torch.cuda.synchronize(q.device)

    return repeated


def _write(m: Match, c: Calls) -> None:
    op, rotation = m.anchor, m["rotation"]
    query = rotation.source if rotation else op.arg("query")
    angles = (rotation.cos, rotation.sin) if rotation else (None, None)
    q, k, v, mask, cos, sin = (c.b.any_strides(x) for x in (query, m["key"], m["value"], op.arg("attn_mask"), *angles))
    given = (q, k, v, mask, cos, sin, op.arg("scale"), spec_of(op.out).stride, c.ctx.device.arch)
    c.b.call(kernel.OPERATOR, *given, out=op.out, op=op)


def _unrepeated(value: Value, c: Calls, ops: list[OpView]) -> Value:
    """[B, Hk, L, D] of which [B, H, L, D] is a copy with every head repeated; the ops in between that nobody else needs."""
    between: list[OpView] = []
    source = value
    while (made := c.graph.producer(source)) is not None and made.op in RESHAPES:
        between.append(made)
        source = next(made.inputs())
    if made is None or made.op != "expand":
        return value
    between.append(made)
    whole, one = spec_of(source).shape, spec_of(next(made.inputs())).shape
    batch, heads, length, dim = spec_of(value).shape
    if len(whole) != 5 or one != (*whole[:2], 1, *whole[3:]) or whole != (batch, whole[1], whole[2], length, dim):
        return value
    if math.prod(whole[1:3]) != heads:  # type: ignore[arg-type]
        return value
    inner = next(made.inputs())
    made = c.graph.producer(inner)
    if made is None or made.op != "unsqueeze" or spec_of(next(made.inputs())).shape != (batch, whole[1], length, dim):
        return value
    between.append(made)
    for op in between:  # from the last one back: what others read stays, with what it is made of
        if c.graph.only_user(op.out) is None:
            break
        ops.append(op)
    return next(made.inputs())


ROWS = (
    Row("triton.attention.decode", chain("sdpa"), extend=_of_one_cache, pays=_pays, write=_write, note="attention of few queries"),
)
