"""Attention over few keys on Hopper (image encoders, short texts): a kernel without a running softmax."""

from __future__ import annotations

from fusewright.interface import OpView
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.kernels import short_sequence_ops as kernel
from fusewright_triton.select.calls import Calls


def reason(op: OpView) -> str | None:
    """Return why this is no attention over few keys, as far as the graph tells."""
    specs = q, k, v = [spec_of(op.arg(n)) for n in ("query", "key", "value")]
    if not all(s.static and s.rank == 4 and 0 not in s.shape for s in specs):
        return "symbolic, empty, or not [B, H, L, D]"
    if op.arg("attn_mask") is not None or op.arg("dropout_p") or op.arg("is_causal"):
        return "a mask, dropout or causal"
    scale = op.arg("scale")
    if scale is not None and not scale > 0:
        return "a scale that is not positive"
    queries, dim, keys = q.shape[2], q.shape[3], k.shape[2]
    # at the full length a library's kernel has no padding to do, and is as fast
    if keys >= kernel.MOST_KEYS or 2 * queries < kernel.ROWS or dim > kernel.LARGEST_DIM or dim % 8:  # type: ignore[operator]
        return "many keys, few queries or a wide head"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in kernel.DTYPES:
        return "not of one half type"
    if k.shape != v.shape or q.shape[0] != k.shape[0] or dim != k.shape[3] or q.shape[1] % k.shape[1]:  # type: ignore[operator]
        return "values of another shape than keys"
    return None


def _enough(m: Match, c: Calls) -> bool:
    """Return whether the device has the kernel's features, and the graph enough heads for the device's multiprocessors."""
    t, out = c.target, spec_of(m.out)
    batch, heads = out.shape[:2]
    if t.matrix != "wgmma" or t.fitted is None or c.graph.phase != "infer":
        return False
    if batch * heads < t.fitted.short_rows * t.units:  # type: ignore[operator]
        return False
    return kernel.describable(out.shape, out.stride, out.dtype.itemsize)  # type: ignore[arg-type]


def _write(m: Match, c: Calls) -> None:
    op = m.anchor
    q, k, v = (c.b.any_strides(op.arg(n)) for n in ("query", "key", "value"))
    c.b.call(kernel.OPERATOR, q, k, v, op.arg("scale"), spec_of(op.out).stride, c.ctx.device.arch, out=op.out, op=op)


ROWS = (Row("triton.attention.short_sequence", chain("sdpa"), when=_enough, write=_write, note="attention over few keys"),)
