"""Attention over few keys as a torch operator that a plan can name: `fusewright_triton::attention_short_sequence`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusewright_triton.kernels.attention_ops import attention, power_of_two
from fusewright_triton.kernels.product_ops import ALIGNED, units_of
from fusewright_triton.run.handwritten import NAMESPACE, Kernel, TensorDescriptor, operator, or_else
from fusewright_triton.target import Target, named

KERNEL = Kernel("short_sequence", "attention")
OPERATOR = f"{NAMESPACE}::attention_short_sequence.default"

DTYPES = (torch.bfloat16, torch.float16)
MOST_KEYS = 256
"""The most keys: 128 scores take half of a thread's registers."""
LARGEST_DIM = 64
"""The most elements of a head: a row of 128 bytes in shared memory."""

ROWS = 64
"""Queries of a block: 16 for each of a group's four warps."""
AHEAD = 2
"""Blocks of queries that are prefetched for each group."""
ROOM = 128 << 10
"""Bytes of shared memory for heads of keys and values."""
STARTING, MULTIPLYING = 168, 240
"""Registers per thread at the start, and later in the threads that multiply; the loading warp gives up the difference."""


def pieces(keys: int) -> tuple[int, int, int]:
    """Return falling powers of two from 16 on, or zeros: three blocks that hold `keys` keys with as little waste as possible."""
    total = -(-keys // 16) * 16
    while total.bit_count() > 3:
        total += total & -total
    found = [1 << bit for bit in reversed(range(total.bit_length())) if total >> bit & 1]
    return tuple((*found, 0, 0)[:3])  # type: ignore[return-value]


def describable(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> bool:
    """Return whether a descriptor can describe a tensor of these strides (CUDA driver API, cuTensorMapEncodeTiled)."""
    steps = [s for n, s in zip(shape[:-1], stride[:-1], strict=True) if n > 1]
    return stride[-1] == 1 and all(s > 0 and s * itemsize % ALIGNED == 0 for s in steps)


def attention_short_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    stride: Sequence[int],
    target: str,
) -> torch.Tensor:
    """Compute `scaled_dot_product_attention` without a mask, with these strides of the result, which a descriptor can describe.

    query [B, H, Q, D], key and value [B, Hk, K, D] of one half type, H a multiple of Hk, K up to MOST_KEYS, D up to
    LARGEST_DIM; `scale` is positive.
    """
    run = _in_steps if query.device.type == "cpu" else _at_once
    return run(named(target), query, key, value, scale, stride)


def _in_steps(
    t: Target, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, stride: Sequence[int]
) -> torch.Tensor:
    return attention(query, key, value, None, None, False, scale, True, stride, t.arch)


# Gluon's API still changes: another Triton may need other code.
@or_else(_in_steps, "the usual one runs instead")
def _at_once(
    t: Target, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, stride: Sequence[int]
) -> torch.Tensor:
    q, k, v = (_described(x) for x in (query, key, value))
    (batch, heads, queries, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    out = torch.empty_strided(q.shape, stride, dtype=q.dtype, device=q.device)
    count, wide, long = batch * heads, power_of_two(dim), power_of_two(keys)
    factor = (dim**-0.5 if scale is None else scale) * math.log2(math.e)
    n1, n2, n3 = pieces(keys)
    fixed = {
        "KEYS": keys, "BLOCKS": -(-queries // ROWS), "N1": n1, "N2": n2, "N3": n3,
        "STAGES": 4 if 4 * _bytes(long, wide) <= ROOM else 2, "AHEAD": AHEAD, "REGISTERS": MULTIPLYING,
    }  # fmt: skip
    given = [TensorDescriptor(x, (1, 1, rows, wide)) for x, rows in ((q, ROWS), (k, long), (v, long), (_renamed(out), ROWS))]
    args = (*given, factor, heads, heads // kv_heads, count)
    if count:
        KERNEL.launch(t, min(count, units_of(t, q.device)), args, fixed, num_warps=4, maxnreg=STARTING)
    return out


def _bytes(keys: int, dim: int) -> int:
    """Return the bytes of a head's keys and values."""
    return 2 * keys * dim * 2


def _described(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a descriptor can describe, a copy if need be."""
    if not describable(x.shape, x.stride(), x.element_size()) or x.data_ptr() % ALIGNED:
        x = x.clone(memory_format=torch.contiguous_format)
    return _renamed(x)


def _renamed(x: torch.Tensor) -> torch.Tensor:
    """Change the strides of dimensions of one element to ones that a descriptor accepts."""
    if 1 not in x.shape[:-1]:
        return x
    step = ALIGNED // x.element_size()
    return x.as_strided(
        x.shape, [*(step if n == 1 else s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)), 1]
    )


def _meta(query: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_strided(query.shape, args[-2], dtype=query.dtype, device=query.device)


operator(
    "attention_short_sequence(Tensor query, Tensor key, Tensor value, float? scale, int[] stride, str target) -> Tensor",
    attention_short_sequence,
    _meta,
)
