"""Attention of few queries as torch operators that a plan can name: `fusewright_triton::attention_decode`, and
`attention_growing` for keys whose number differs from call to call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from fusewright_triton.kernels import attention_ops
from fusewright_triton.kernels.attention_ops import power_of_two
from fusewright_triton.run.call_cache import allocated, same
from fusewright_triton.run.handwritten import NAMESPACE, Kernel, operator, or_else
from fusewright_triton.target import Target, named

PARTS, COMBINED = Kernel("decode", "parts"), Kernel("decode", "combined")
OPERATOR = f"{NAMESPACE}::attention_decode.default"
GROWING = f"{NAMESPACE}::attention_growing.default"

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_ROWS = 16
"""The most query heads that share a head of keys, times queries: rows of one block of a matrix instruction."""
LARGEST_DIM = 256
KEYS = 64
"""The most keys of one step."""
STEP_BYTES = 1 << 14
"""The most bytes of keys of one step: shared memory holds several such blocks."""
MOST_PARTS = 64


def step_of(t: Target, dtype: torch.dtype, dim: int) -> int:
    """Return the number of keys of one step."""
    if t.matrix == "wmma":
        return 16  # its registers hold no more
    few = STEP_BYTES // (power_of_two(dim) * dtype.itemsize)
    return max(16, min(few, KEYS) if t.triton == "cuda" else min(few // 2, KEYS))


def warps_of(t: Target) -> int:
    """Return the number of warps of a program."""
    return 8 if t.matrix == "wmma" else 4


def parts(batches: int, keys: int, units: int, step: int, growing: bool = False) -> tuple[int, int]:
    """Return the keys of a part, a multiple of `step`, and the number of parts: enough programs for every multiprocessor. For
    `growing` keys both stay until there are twice as many, since kernels are built for them; the last parts may be empty."""
    steps = -(-keys // step)
    wanted = max(1, min(MOST_PARTS, -(-units // batches)))
    if growing:
        return (1 << (-(-steps // wanted) - 1).bit_length()) * step, wanted
    chunk = -(-steps // wanted) * step
    return chunk, -(-keys // chunk)


def by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, sink: torch.Tensor | None,
    cos: torch.Tensor | None, sin: torch.Tensor | None, scale: float | None, stride: Sequence[int], target: str,
    growing: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute `attention_decode` by torch's own kernels."""
    if cos is not None and sin is not None:
        first, second = query.chunk(2, -1)
        query = query * cos + torch.cat((-second, first), -1) * sin
    return attention_ops.by_torch(query, key, value, mask, sink, False, scale, True, stride, target)


@or_else(by_torch)
def attention_decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, sink: torch.Tensor | None,
    cos: torch.Tensor | None, sin: torch.Tensor | None, scale: float | None, stride: Sequence[int], target: str,
    growing: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute `scaled_dot_product_attention` without dropout, with these strides of the result.

    query [B, H, Q, D], key and value [B, Hk, K, D] of one dtype, H a multiple of Hk, H / Hk * Q at most MOST_ROWS; mask is
    boolean or added, and broadcasts to [B, H, Q, K]. A fully masked row is 0. `sink`: see `attention`. With cos
    and sin, which broadcast to the queries, rotary embeddings are applied first (see `rotary`). `growing`: see `parts`.
    """
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    (batch, heads, queries, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    if v.shape != k.shape:
        raise RuntimeError(f"keys of shape {tuple(k.shape)} need values of that shape, not {tuple(v.shape)}")
    group, n = heads // kv_heads, batch * kv_heads
    t = named(target)
    step = step_of(t, q.dtype, dim)
    chunk, split = parts(n, keys, t.units, step, growing)
    kind, given = 0, q
    mask_strides: tuple[int, ...] = (0,) * 4
    if mask is not None:
        kind, given = (2, same(mask.view(torch.uint8), mask)) if mask.dtype == torch.bool else (1, mask)
        mask_strides = _broadcast(given, 4)
    angles: tuple[torch.Tensor, ...] = (q, q)
    angle_strides: tuple[int, ...] = (0,) * 6
    if cos is not None and sin is not None:
        angles = tuple(a if a.stride(-1) == 1 else a.contiguous() for a in (cos, sin))
        angle_strides = tuple(s for a in angles for s in _broadcast(a, 4)[:3])
    out = allocated(torch.empty_strided(q.shape, stride, dtype=q.dtype, device=q.device))
    wide = power_of_two(dim)
    acc = allocated(torch.empty((n, split, MOST_ROWS, wide), dtype=torch.float32, device=q.device))
    top, total = (allocated(torch.empty((n, split, MOST_ROWS), dtype=torch.float32, device=q.device)) for _ in range(2))
    numbers = (dim**-0.5 if scale is None else scale, kv_heads, group, queries, keys)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_strides, *angle_strides)
    shape = {"D": dim, "BR": MOST_ROWS, "BD": wide, "SPLIT": split}
    PARTS.launch(t, n * split, (q, k, v, given, *angles, acc, top, total, *numbers, *strides), {
        **shape, "CHUNK": chunk, "MASK": kind, "ROTARY": cos is not None, "BN": step, "PRECISION": "ieee"
    }, num_warps=warps_of(t))  # fmt: skip
    held = max(2, 1 << (split - 1).bit_length())
    also, sink_strides = attention_ops.sinks(sink, q)
    combined: tuple[Any, ...] = (acc, top, total, also, out, kv_heads, group, queries, *sink_strides, *out.stride()[:3])
    COMBINED.launch(t, n * group * queries, combined, {
        **shape, "SINK": sink is not None, "BP": held
    }, num_warps=warps_of(t))  # fmt: skip
    return out


def _broadcast(t: torch.Tensor, rank: int) -> tuple[int, ...]:
    """Return the strides of a tensor that is broadcast to this rank."""
    own = tuple(0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True))
    return (0,) * (rank - len(own)) + own


def _meta(query: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_strided(query.shape, args[-2], dtype=query.dtype, device=query.device)


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sink, Tensor? cos, Tensor? sin, float? scale, int[] stride, "
    "str target"
)
operator(f"attention_decode({_ARGUMENTS}) -> Tensor", attention_decode, _meta)
operator(f"attention_growing({_ARGUMENTS}) -> Tensor", functools.partial(attention_decode, growing=True), _meta, told=True)
