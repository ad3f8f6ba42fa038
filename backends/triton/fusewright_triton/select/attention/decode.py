"""Attention of few queries (decoding): one kernel that reads a cache once for all query heads that share its heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fusewright.interface import Dim, OpView, TensorSpec
from fusewright.toolkit.backend.candidates import Thunk
from fusewright.toolkit.region.attention import not_few_queries, unrepeated
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.kernels import decode_ops as kernel
from fusewright_triton.select.attention.rope import turned
from fusewright_triton.select.attention.sdpa import samples
from fusewright_triton.select.calls import Calls

REPEATS = 10


def reason(op: OpView) -> str | None:
    """Return why this is no attention of few queries."""
    return not_few_queries(op, kernel.MOST_ROWS, kernel.DTYPES, kernel.LARGEST_DIM)


def alike(key: TensorSpec, value: TensorSpec) -> bool:
    """Return whether keys and values have one shape, as attention requires. Each of their lengths may have a symbol of its own."""
    pairs = zip(key.shape, value.shape, strict=True)
    return all(a == b or (isinstance(a, Dim) and isinstance(b, Dim) and a.hint == b.hint) for a, b in pairs)


def of_one_cache(m: Match, c: Calls) -> Match | None:
    """Bind keys and values before they are repeated for the query heads of a group, and the rotary embedding of the queries."""
    op, ops = m.anchor, list[OpView]()
    key, value = (unrepeated(op.arg(n), c.graph, ops) for n in ("key", "value"))
    if not alike(spec_of(key), spec_of(value)):
        ops.clear()
        key, value = op.arg("key"), op.arg("value")
    heads, queries = spec_of(op.arg("query")).shape[1:3]
    if heads // spec_of(key).shape[1] * queries > kernel.MOST_ROWS or c.graph.phase != "infer":  # type: ignore[operator]
        return None
    rotation = turned(op.arg("query"), c)
    return m.with_ops(*ops, *(rotation.ops if rotation else ()), at=op, key=key, value=value, rotation=rotation)


def _pays(m: Match, c: Calls) -> bool:
    """Return whether the kernel is faster than torch's; where it was not fitted, by a short measurement."""
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
            run(q, k, k, mask[0] if mask else None, None, None, None, scale, stride, arch)
        torch.cuda.synchronize(q.device)

    return repeated


def write(m: Match, c: Calls, operator: str = kernel.OPERATOR) -> None:
    """Emit the call of an attention of few queries."""
    op, rotation = m.anchor, m["rotation"]
    query = rotation.source if rotation else op.arg("query")
    angles = (rotation.cos, rotation.sin) if rotation else (None, None)
    q, k, v, mask, cos, sin = (c.b.any_strides(x) for x in (query, m["key"], m["value"], op.arg("attn_mask"), *angles))
    given = (q, k, v, mask, None, cos, sin, op.arg("scale"), spec_of(op.out).stride, c.ctx.device.arch)
    c.b.call(operator, *given, out=op.out, op=op)


ROWS = (
    Row("triton.attention.decode", chain("sdpa"), extend=of_one_cache, pays=_pays, write=write, note="attention of few queries"),
)
