"""Attention of a few queries over many keys, as decoding asks for (Dao et al., Flash-Decoding, 2023).

The keys are divided among programs, each of which serves all query heads that share a head of keys (Ainslie et al., GQA,
2023), so that a cache is read once. A second kernel combines the parts.

This module is compiled by Triton, and interpreted in simulation, where other modules stand for its imports.
"""

# mypy: disable-error-code="no-untyped-def"
# Parameters are Triton tensors, which have no static type.
import triton
import triton.language as tl

from fusewright_triton.emit import device as fw


@triton.jit
def parts(
    q_ptr, k_ptr, v_ptr, mask_ptr, cos_ptr, sin_ptr, acc_ptr, top_ptr, total_ptr, scale, kv_heads, group, queries, keys,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, mask_b, mask_h, mask_q, mask_k, cos_b, cos_h, cos_s, sin_b, sin_h, sin_s,
    CHUNK: tl.constexpr, SPLIT: tl.constexpr, MASK: tl.constexpr, ROTARY: tl.constexpr, D: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries of one head of keys against CHUNK keys: sums of values [BR, BD], largest scores and sums of weights [BR].

    Rows are the `group` query heads of this head of keys, with `queries` queries each. MASK: 0 none, 1 added, 2 of bytes
    (0 hides). ROTARY: queries are turned by angles whose cos and sin are given, and rounded where eager rounds.
    """
    part = tl.program_id(0) % SPLIT
    n = tl.program_id(0) // SPLIT
    b = (n // kv_heads).to(tl.int64)
    kv = (n % kv_heads).to(tl.int64)
    rows = tl.arange(0, BR)
    inside = rows < group * queries
    head = kv * group + rows // queries
    at = rows % queries
    dims = tl.arange(0, BD)
    there = dims < D
    row = q_ptr + b * q_b + (head * q_h + at * q_s)[:, None]
    here = inside[:, None] & there[None, :]
    q = tl.load(row + dims[None, :], mask=here, other=0.0)
    if ROTARY:
        first = dims < D // 2
        other = tl.load(row + tl.where(first, dims + D // 2, dims - D // 2)[None, :], mask=here, other=0.0)
        cos = tl.load(cos_ptr + b * cos_b + (head * cos_h + at * cos_s)[:, None] + dims[None, :], mask=here, other=0.0)
        sin = tl.load(sin_ptr + b * sin_b + (head * sin_h + at * sin_s)[:, None] + dims[None, :], mask=here, other=0.0)
        plain = (q.to(tl.float32) * cos.to(tl.float32)).to(q.dtype).to(tl.float32)
        crossed = (other.to(tl.float32) * sin.to(tl.float32)).to(q.dtype).to(tl.float32)
        q = (plain + tl.where(first[None, :], -crossed, crossed)).to(q.dtype)
    k_ptr += b * k_b + kv * k_h
    v_ptr += b * v_b + kv * v_h
    mask_at = mask_ptr + b * mask_b + head * mask_h + at * mask_q
    acc = tl.full([BR, BD], 0.0, tl.float32)
    total = tl.full([BR, 1], 0.0, tl.float32)
    top = tl.full([BR, 1], float("-inf"), tl.float32)
    for start in range(part * CHUNK, tl.minimum((part + 1) * CHUNK, keys), BN):
        key = start + tl.arange(0, BN).to(tl.int64)
        known = key < keys
        k = tl.load(k_ptr + key[None, :] * k_s + dims[:, None], mask=known[None, :] & there[:, None], other=0.0)
        v = tl.load(v_ptr + key[:, None] * v_s + dims[None, :], mask=known[:, None] & there[None, :], other=0.0)
        s = tl.dot(q, k, input_precision=PRECISION) * scale
        if MASK == 1:
            m = tl.load(mask_at[:, None] + key[None, :] * mask_k, mask=inside[:, None] & known[None, :], other=0.0)
            s = s + m.to(tl.float32)
        if MASK == 2:
            seen = tl.load(mask_at[:, None] + key[None, :] * mask_k, mask=inside[:, None] & known[None, :], other=0)
            s = tl.where(seen != 0, s, float("-inf"))
        s = tl.where(known[None, :], s, float("-inf"))
        new = fw.maximum(top, fw.reduce_max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # a row without any key so far
        p = tl.exp2((s - base) * 1.4426950408889634)
        fade = tl.exp2((top - base) * 1.4426950408889634)
        total = total * fade + fw.reduce_sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade, input_precision=PRECISION)
        top = new
    row = ((n * SPLIT + part) * BR + rows)[:, None]
    tl.store(acc_ptr + row * BD + dims[None, :], acc)
    tl.store(top_ptr + row, top)
    tl.store(total_ptr + row, total)


@triton.jit
def combined(
    acc_ptr, top_ptr, total_ptr, sink_ptr, out_ptr, kv_heads, group, queries, sink_b, sink_h, sink_q, out_b, out_h, out_s,
    SINK: tl.constexpr, SPLIT: tl.constexpr, BP: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One query's result of its SPLIT parts. A row that sees no key is 0, as torch has it, but NaN behind a softmax with a SINK
    (see `attention`) of -inf."""
    row = tl.program_id(0) % (group * queries)
    n = tl.program_id(0) // (group * queries)
    part = tl.arange(0, BP)
    dims = tl.arange(0, BD)
    made = part < SPLIT
    at = (n * SPLIT + part) * BR + row
    top = tl.load(top_ptr + at, mask=made, other=float("-inf"))
    total = tl.load(total_ptr + at, mask=made, other=0.0)
    acc = tl.load(acc_ptr + at[None, :] * BD + dims[:, None], mask=made[None, :], other=0.0)
    most = fw.reduce_max(top, 0)
    b = (n // kv_heads).to(tl.int64)
    head = (n % kv_heads).to(tl.int64) * group + row // queries
    if SINK:
        at = sink_ptr + b * sink_b + head * sink_h + (row % queries) * sink_q
        sink = tl.load(at + tl.arange(0, 1)).to(tl.float32)
        most = fw.maximum(most, sink)
    base = tl.where(most == float("-inf"), 0.0, most)
    weight = tl.exp2((top - base) * 1.4426950408889634)
    whole = fw.reduce_sum(total * weight, 0)
    if SINK:
        whole += tl.exp2((sink - base) * 1.4426950408889634)
    else:
        whole = tl.where(whole == 0.0, 1.0, whole)
    out = fw.reduce_sum(acc * weight[None, :], 1) / whole
    to = out_ptr + b * out_b + head * out_h + (row % queries) * out_s + dims[:, None]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=(dims < D)[:, None])
