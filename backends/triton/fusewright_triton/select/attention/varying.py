"""Attention of lengths that differ from call to call: a cache that grows, prompts and images of any size."""

from __future__ import annotations

from fusewright.interface import OpView, TensorSpec, hint
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.kernels import attention_ops, decode_ops
from fusewright_triton.select.attention import decode
from fusewright_triton.select.calls import Calls


def reason(op: OpView) -> str | None:
    """Return why torch's own choice among its kernels is left alone."""
    specs = q, k, v = [spec_of(op.arg(n)) for n in ("query", "key", "value")]
    if all(s.static for s in specs):
        return "fixed lengths, for which a library plans once"
    if not all(s.rank == 4 and isinstance(s.shape[3], int) for s in specs) or op.arg("dropout_p"):
        return "not [B, H, L, D], or dropout"
    return None if q.dtype == k.dtype == v.dtype else "of several types"


def _few_queries(m: Match, c: Calls) -> Match | None:
    """Bind the keys and values of a cache that grows, if heads and queries are few and known."""
    op = m.anchor
    q, k, v = (spec_of(op.arg(n)) for n in ("query", "key", "value"))
    known = all(isinstance(n, int) for n in (*q.shape, k.shape[1])) and decode.alike(k, v) and q.shape[::3] == k.shape[::3]
    if not known or op.arg("is_causal") or q.shape[3] > decode_ops.LARGEST_DIM or _measured_otherwise(k, c):  # type: ignore[operator]
        return None
    return decode.of_one_cache(m, c) if 0 < k.shape[1] and not q.shape[1] % k.shape[1] else None  # type: ignore[operator]


def _measured_otherwise(k: TensorSpec, c: Calls) -> bool:
    """Return whether nobody measured the kernel of few queries on this target, or for so few keys."""
    return not c.ctx.device.simulated and (c.target.fitted is None or hint(k.shape[2]) < c.target.bounds.decode_keys)


def _write_few(m: Match, c: Calls) -> None:
    decode.write(m, c, decode_ops.GROWING)


def _dense(m: Match, c: Calls) -> Match | None:
    """Bind the order in which the result's dims lie in memory, without gaps."""
    out = spec_of(m.out)
    shape, stride = ([hint(n) for n in sizes] for sizes in (out.shape, out.stride))
    order = tuple(sorted(range(out.rank), key=lambda d: -stride[d]))
    dense = attention_ops.strides_in(shape, order)
    return m.with_ops(at=m.anchor, order=order) if list(dense) == stride else None


def _write(m: Match, c: Calls) -> None:
    op = m.anchor
    q, k, v, mask = (c.b.any_strides(op.arg(n)) for n in ("query", "key", "value", "attn_mask"))
    given = (q, k, v, mask, op.arg("is_causal"), op.arg("scale"), m["order"], c.ctx.device.arch)
    c.b.call(attention_ops.VARYING, *given, out=op.out, op=op)


ROWS = (
    Row(
        "triton.attention.growing", chain("sdpa"), extend=_few_queries, write=_write_few,
        note="attention of few queries over a growing cache",
    ),
    Row("triton.attention.varying", chain("sdpa"), extend=_dense, write=_write, note="attention of varying lengths"),
)  # fmt: skip
