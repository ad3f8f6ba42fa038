"""Attention of few queries: the kernels against fp64 in Triton's interpreter, and the graphs that use them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusewright import report
from fusewright_triton.kernels import decode_ops as kernel

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def right(ours: Tensor, eager: Tensor, exact: Tensor, score: float = 0.0) -> bool:
    """`score` is the largest score: its fp32 rounding changes its weight by as much."""
    floor = 4 * torch.finfo(ours.dtype).eps * exact.abs().mean()
    floor += torch.finfo(torch.float32).eps * score * exact.abs().max()
    return bool((ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + floor)


def qkv(batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Return queries [B, H, Q, D] with a projection's strides, and a cache of keys and values [B, Hk, K, D]."""
    torch.manual_seed(keys)
    q = torch.randn(batch, queries, heads, dim).to(dtype).transpose(1, 2)
    return [q, *(torch.randn(batch, kv_heads, keys, dim).to(dtype) for _ in range(2))]


def hidden(kind: str, batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    shape = (batch, 1, queries, keys)
    if kind == "bool":
        return torch.rand(shape) > 0.4
    if kind == "one row":
        return (
            torch.where(torch.arange(keys) < keys // 2, 0.0, -torch.inf).to(dtype).expand(batch, heads, queries, keys)
        )
    return torch.randn(1, heads, 1, 1).to(dtype).expand(shape[0], heads, queries, keys) if kind == "stride 0" else None


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 2), kv_heads=st.integers(1, 3), group=st.sampled_from([1, 2, 4]), queries=st.integers(1, 4),
    keys=st.integers(1, 300), dim=st.sampled_from([16, 40, 64]), dtype=st.sampled_from(sorted(DTYPES)),
    mask=st.sampled_from(["none", "bool", "one row", "stride 0"]), scale=st.sampled_from([None, 0.3]),
)  # fmt: skip
def test_against_fp64(
    batch: int, kv_heads: int, group: int, queries: int, keys: int, dim: int, dtype: str, mask: str, scale: float | None
) -> None:
    heads, t = kv_heads * group, DTYPES[dtype]
    q, k, v = qkv(batch, heads, kv_heads, queries, keys, dim, t)
    m = hidden(mask, batch, heads, queries, keys, t)
    wide = m.double() if m is not None and m.is_floating_point() else m
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), wide, scale=scale, enable_gqa=True)
    eager = scaled_dot_product_attention(q, k, v, m, scale=scale, enable_gqa=True)
    ours = kernel.attention_decode(q, k, v, m, None, None, None, scale, q.stride(), "sm_90")
    assert ours.stride() == q.stride()
    scores = q.double() @ k.double().repeat_interleave(group, 1).mT * (scale or dim**-0.5)
    assert right(ours, eager, exact, float(scores.abs().max()))


def test_a_query_that_sees_no_key_gives_zeros_and_nan_passes_through() -> None:
    q, k, v = qkv(1, 2, 1, 2, 100, 16, torch.float32)
    mask = torch.ones(1, 1, 2, 100, dtype=torch.bool)
    mask[:, :, 1] = False
    q[0, 1, 0, 3] = torch.nan
    ours = kernel.attention_decode(q, k, v, mask, None, None, None, None, q.stride(), "sm_90")
    eager = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    torch.testing.assert_close(ours, eager, equal_nan=True)
    assert (ours[:, :, 1] == 0).all() and ours[0, 1, 0].isnan().all()


@pytest.mark.parametrize(("batches", "keys"), [(1, 64), (8, 1024), (8, 1000), (300, 70), (1, 1 << 20)])
def test_parts_cover_all_keys_and_none_is_empty(batches: int, keys: int) -> None:
    chunk, parts = kernel.parts(batches, keys, 132, 32)
    assert chunk % 32 == 0 and parts <= kernel.MOST_PARTS
    assert (parts - 1) * chunk < keys <= parts * chunk


# ---------------------------------------------------------------- in graphs


def repeated(x: Tensor, times: int) -> Tensor:
    """Repeat every head, as transformers does."""
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, times, length, dim).reshape(batch, heads * times, length, dim)


def plan_of(fn: Any, *args: Tensor) -> str:
    options: dict[str, Any] = {"simulate": True, "strict": True, "cache": False}
    with report.recording() as reports, torch.no_grad():
        ours = torch.compile(fn, backend="nvidia_triton", options=options)(*args)
        eager, exact = fn(*args), fn(*(a.double() if a.is_floating_point() else a for a in args))
    for o, e, x in zip(*((r if isinstance(r, tuple) else (r,)) for r in (ours, eager, exact)), strict=True):
        assert right(o, e, x)
    return reports[0].texts["plan"]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions as transformers does."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def angles(queries: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    at = torch.outer(torch.arange(5, 5 + queries), 10000.0 ** -(torch.arange(dim) % (dim // 2) / (dim // 2)))
    return [f(at).to(dtype)[None, None] for f in (torch.cos, torch.sin)]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("queries", [1, 3])
def test_queries_are_turned_on_the_way(queries: int, dtype: str) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return scaled_dot_product_attention(rotated(q * 2, cos, sin), repeated(k + 1, 4), repeated(v + 1, 4))

    given = qkv(2, 8, 2, queries, 128, 40, DTYPES[dtype])
    plan = plan_of(step, *given, *angles(queries, 40, DTYPES[dtype]))
    assert "attention_decode" in plan and "cat" not in plan


def test_turned_queries_that_others_read_stay() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q = rotated(q * 2, cos, sin)
        return scaled_dot_product_attention(q, k + 1, v + 1), q

    plan_of(step, *qkv(1, 2, 2, 1, 128, 32, torch.float32), *angles(1, 32, torch.float32))


@pytest.mark.parametrize("other", [lambda x: x.flip(-1), lambda x: torch.cat((x[..., 16:], -x[..., :16]), -1)])
def test_what_only_resembles_a_rotation_is_computed_as_it_is(other: Any) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = q * 2
        return scaled_dot_product_attention(q * cos + other(q) * sin, k + 1, v + 1)

    plan_of(step, *qkv(1, 2, 2, 1, 128, 32, torch.float32), *angles(1, 32, torch.float32))


def test_heads_of_a_group_read_the_cache_as_it_is() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return scaled_dot_product_attention(q * 2, repeated(k + 1, 4), repeated(v + 1, 4), seen)

    q, k, v = qkv(1, 8, 2, 1, 128, 32, torch.float32)
    plan = plan_of(step, q, k, v, torch.rand(1, 1, 1, 128) > 0.5)
    assert "attention_decode" in plan and "clone" not in plan and "scaled_dot" not in plan


def test_what_is_repeated_stays_where_others_read_it() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k = repeated(k + 1, 4)
        return scaled_dot_product_attention(q * 2, k, repeated(v + 1, 4)), k

    assert "attention_decode" in plan_of(step, *qkv(1, 8, 2, 1, 128, 32, torch.float32))


def test_the_flag_of_torch_is_understood() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q * 2, k + 1, v + 1, enable_gqa=True)

    assert "attention_decode" in plan_of(step, *qkv(2, 8, 2, 2, 128, 32, torch.float32))


@pytest.mark.parametrize(("queries", "keys", "causal"), [(17, 128, False), (2, 128, True), (2, 30, False)])
def test_many_queries_few_keys_and_causal_masks_stay_with_torch(queries: int, keys: int, causal: bool) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q * 2, k + 1, v + 1, is_causal=causal)

    assert "attention_decode" not in plan_of(step, *qkv(1, 2, 2, queries, keys, 32, torch.float32))
