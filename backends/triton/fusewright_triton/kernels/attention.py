"""Attention in one pass over the keys (Dao, FlashAttention-2, 2023), with what torch's fused kernels refuse.

That is: masks of any strides (0 included), and the bias of decomposed relative positions (Li et al., MViTv2, 2022,
section 4.1), which is never a matrix of queries by keys here: rel_h[q, k // W] + rel_w[q, k % W].

This module is compiled by Triton, and interpreted in simulation, where other modules stand for its imports.
"""

# mypy: disable-error-code="no-untyped-def"
# Parameters are Triton tensors, which have no static type.
import triton
import triton.language as tl

from fusewright_triton.emit import device as fw


@triton.jit
def fold(s, shift, v, acc, total, top, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """One block of scores s [M, N] + shift [M, 1] and its values v [N, D] into the running softmax of M rows.

    EXACT keeps scores near the largest float apart, as masks of that size need; it costs an operation per score.
    """
    new = tl.maximum(top, fw.reduce_max(s, 1) + shift)
    base = tl.where(new == float("-inf"), 0.0, new)  # a row without any key so far
    if EXACT:
        p = tl.exp2((s - (base - shift)) * 1.4426950408889634)
    else:
        p = tl.exp2(s * 1.4426950408889634 - (base - shift) * 1.4426950408889634)
    fade = tl.exp2((top - base) * 1.4426950408889634)
    total = total * fade + fw.reduce_sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade, input_precision=PRECISION)
    return acc, total, new


@triton.jit
def load_k(at, dims, start, cols, stride, limit, D: tl.constexpr, BD: tl.constexpr, TAIL: tl.constexpr):
    """Keys start + cols as [BD, N], zeros from `limit` columns and D dimensions on."""
    at = at + start.to(tl.int64) * stride + dims[:, None] + cols[None, :] * stride
    if TAIL and BD > D:
        x = tl.load(at, mask=(cols < limit)[None, :] & (dims < D)[:, None], other=0.0)
    elif TAIL:
        x = tl.load(at, mask=(cols < limit)[None, :], other=0.0)
    elif BD > D:
        x = tl.load(at, mask=(dims < D)[:, None], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def load_v(at, dims, start, rows, stride, limit, D: tl.constexpr, BD: tl.constexpr, TAIL: tl.constexpr):
    """Values (or queries) start + rows as [N, BD], zeros from `limit` rows and D dimensions on."""
    at = at + start.to(tl.int64) * stride + rows[:, None] * stride + dims[None, :]
    if TAIL and BD > D:
        x = tl.load(at, mask=(rows < limit)[:, None] & (dims < D)[None, :], other=0.0)
    elif TAIL:
        x = tl.load(at, mask=(rows < limit)[:, None], other=0.0)
    elif BD > D:
        x = tl.load(at, mask=(dims < D)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def masked(
    s, at, start, rows, cols, first, limit, left, mask_q, mask_k,
    MASK: tl.constexpr, EACH: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Scores s [M, N] of queries first + rows and keys start + cols with what hides keys from them.

    MASK: 0 none, 1 added, 2 of bytes (0 hides). EACH: every query has a row of it. TAIL: keys end in this block.
    """
    if MASK > 0:
        at = at + start.to(tl.int64) * mask_k
        inside = cols < limit
        if EACH:
            there = (rows < left)[:, None] & inside[None, :]
            m = tl.load(at + rows[:, None] * mask_q + cols[None, :] * mask_k, mask=there, other=0.0)
        else:
            m = tl.load(at + cols * mask_k, mask=inside, other=0.0)[None, :]
        if MASK == 2:
            s = tl.where(m != 0, s, float("-inf"))
        else:
            s = s + m.to(tl.float32)
    if CAUSAL and TAIL:
        s = tl.where((first + rows)[:, None] >= (start + cols)[None, :], s, float("-inf"))
    if TAIL:
        s = tl.where((cols < limit)[None, :], s, float("-inf"))
    return s


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, sink_ptr, h_ptr, w_ptr,
    scale, heads, group, queries, keys,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_s,
    mask_b, mask_h, mask_q, mask_k, sink_b, sink_h, sink_q,
    h_n, h_y, h_x, h_k, w_n, w_y, w_x, w_k,
    D: tl.constexpr, MASK: tl.constexpr, EACH: tl.constexpr, SINK: tl.constexpr, CAUSAL: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, QW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    LEAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """softmax(q k^T scale + mask or bias) v for BM queries of one head; a grid of (blocks of queries x heads).

    q [B, H, Q, D], k and v [B, H / group, K, D], out as q: dense in D, strides of the rest in elements. Scores,
    sums and results are fp32 inside. A row that sees no key gives 0 where ZERO, else NaN. SINK: each row has one more score,
    which has no value (Xiao et al., StreamingLLM, 2023, section 3.3).

    BIAS 1: keys in steps of one row of an image KW wide (KW <= BN), so rel_w stays in registers and rel_h is one number
    for a row of scores. BIAS 2: any KH, KW (KH + KW <= BR); the bias is the product of [rel_h, rel_w] and ones where a key
    has that row or column, which is exact. rel_h [n, y, x, KH] and rel_w [n, y, x, KW] by query (y, x), images QW wide.
    """
    blocks = (queries + BM - 1) // BM
    block = tl.program_id(0) % blocks
    n = tl.program_id(0) // blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest first
    b = (n // heads).to(tl.int64)
    head = n % heads
    first = block * BM
    left = queries - first
    rows = tl.arange(0, BM)
    cols = tl.arange(0, BN)
    dims = tl.arange(0, BD)
    inside = (rows < left)[:, None]
    q = load_v(q_ptr + b * q_b + head.to(tl.int64) * q_h, dims, first, rows, q_s, left, D, BD, True)
    kv = (head // group).to(tl.int64)
    k_ptr += b * k_b + kv * k_h
    v_ptr += b * v_b + kv * v_h
    acc = tl.full([BM, BD], 0.0, tl.float32)
    total = tl.full([BM, 1], 0.0, tl.float32)
    top = tl.full([BM, 1], float("-inf"), tl.float32)
    if SINK:
        at = sink_ptr + b * sink_b + head.to(tl.int64) * sink_h + (first + rows).to(tl.int64) * sink_q
        top = tl.load(at[:, None], mask=inside, other=0.0).to(tl.float32)
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    none = tl.full([BM, 1], 0.0, tl.float32)
    if BIAS > 0:
        y = (first + rows)[:, None] // QW
        x = (first + rows)[:, None] % QW
        h_at = h_ptr + n.to(tl.int64) * h_n + (y * h_y + x * h_x)
        w_at = w_ptr + n.to(tl.int64) * w_n + (y * w_y + x * w_x)
    if BIAS == 1:
        w = tl.load(w_at + cols[None, :] * w_k, mask=inside & (cols < KW)[None, :], other=float("-inf"))
        w = tl.where(inside, w.to(tl.float32), 0.0)
        h = tl.load(h_at, mask=inside, other=0.0)
        for row in range(KH):
            following = tl.load(h_at + tl.minimum(row + 1, KH - 1) * h_k, mask=inside, other=0.0)
            start = row * KW
            k = load_k(k_ptr, dims, start, cols, k_s, KW, D, BD, KW < BN)
            s = tl.dot(q, k, input_precision=PRECISION) * scale + w
            v = load_v(v_ptr, dims, start, cols, v_s, KW, D, BD, KW < BN)
            acc, total, top = fold(s, h.to(tl.float32), v, acc, total, top, False, PRECISION)
            h = following
    if BIAS == 2:
        parts = tl.arange(0, BR)
        r = tl.load(h_at + parts[None, :] * h_k, mask=inside & (parts < KH)[None, :], other=0.0).to(tl.float32)
        beyond = (parts >= KH) & (parts < KH + KW)
        r += tl.load(w_at + (parts - KH)[None, :] * w_k, mask=inside & beyond[None, :], other=0.0).to(tl.float32)
        # 0 times infinity must not reach other keys: -inf becomes the least number, +inf the NaN that its row ends in
        r = tl.where(r == float("-inf"), LEAST, tl.where(r == float("inf"), float("nan"), r)).to(q.dtype)
        for step in range((KH * KW + BN - 1) // BN):
            start = step * BN
            key = start + cols
            one = (parts[:, None] == (key // KW)[None, :]) | ((parts - KH)[:, None] == (key % KW)[None, :])
            k = load_k(k_ptr, dims, start, cols, k_s, KH * KW - start, D, BD, (KH * KW) % BN != 0)
            s = tl.dot(q, k, input_precision=PRECISION) * scale
            s = tl.dot(r, one.to(r.dtype), s, input_precision=PRECISION)
            if (KH * KW) % BN != 0:
                s = tl.where((key < KH * KW)[None, :], s, float("-inf"))
            v = load_v(v_ptr, dims, start, cols, v_s, KH * KW - start, D, BD, (KH * KW) % BN != 0)
            acc, total, top = fold(s, none, v, acc, total, top, False, PRECISION)
    if BIAS == 0:
        if MASK > 0:
            mask_ptr += b * mask_b + head.to(tl.int64) * mask_h + first.to(tl.int64) * mask_q
        stop = keys
        whole = keys // BN * BN
        if CAUSAL:
            stop = tl.minimum(keys, first + BM)
            whole = tl.minimum(whole, first // BN * BN)
        for step in range(whole // BN):
            start = step * BN
            k = load_k(k_ptr, dims, start, cols, k_s, BN, D, BD, False)
            s = tl.dot(q, k, input_precision=PRECISION) * scale
            s = masked(s, mask_ptr, start, rows, cols, first, BN, left, mask_q, mask_k, MASK, EACH, CAUSAL, False)
            v = load_v(v_ptr, dims, start, cols, v_s, BN, D, BD, False)
            acc, total, top = fold(s, none, v, acc, total, top, MASK == 1, PRECISION)
        for step in range(whole // BN, (stop + BN - 1) // BN):
            start = step * BN
            limit = keys - start
            k = load_k(k_ptr, dims, start, cols, k_s, limit, D, BD, True)
            s = tl.dot(q, k, input_precision=PRECISION) * scale
            s = masked(s, mask_ptr, start, rows, cols, first, limit, left, mask_q, mask_k, MASK, EACH, CAUSAL, True)
            v = load_v(v_ptr, dims, start, cols, v_s, limit, D, BD, True)
            acc, total, top = fold(s, none, v, acc, total, top, MASK == 1, PRECISION)
    if ZERO:
        total = tl.where(total == 0.0, 1.0, total)
    out_ptr += b * out_b + head.to(tl.int64) * out_h + first.to(tl.int64) * out_s
    there = inside & (dims < D)[None, :]
    tl.store(out_ptr + rows[:, None] * out_s + dims[None, :], (acc / total).to(out_ptr.dtype.element_ty), mask=there)
