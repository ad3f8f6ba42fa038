"""Attention whose lengths differ from call to call: which kernels take it, and that no length is planned for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusewright import report
from fusewright_triton.kernels import attention_ops, decode_ops
from tests.backends.triton.select.attention.test_decode import qkv, repeated, right

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BF16 = torch.bfloat16


@settings(max_examples=15, deadline=None)
@given(keys=st.integers(1, 700), batch=st.integers(1, 2), masked=st.booleans(), queries=st.integers(1, 2))
def test_growing_keys_against_fp64(keys: int, batch: int, masked: bool, queries: int) -> None:
    """Parts that lie beyond the keys are empty."""
    q, k, v = qkv(batch, 4, 2, queries, keys, 16, BF16)
    mask = torch.rand(batch, 1, queries, keys) > 0.4 if masked else None
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, enable_gqa=True)
    eager = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    ours = decode_ops.attention_decode(q, k, v, mask, None, None, None, None, q.stride(), "sm_90", growing=True)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 4
    assert right(ours, eager, exact, float(scores.abs().max()))


def test_kernels_for_growing_keys_stay_until_there_are_twice_as_many() -> None:
    found = [decode_ops.parts(8, keys, 132, 64, growing=True) for keys in (1, 200, 1088, 1089, 2176, 2177)]
    assert found == [(64, 17)] * 3 + [(128, 17)] * 2 + [(256, 17)]
    assert all(chunk * parts >= keys for (chunk, parts), keys in zip(found, (1, 200, 1088, 1089, 2176, 2177), strict=True))


def test_values_of_another_length_than_keys_are_refused() -> None:
    q, k, v = qkv(1, 2, 2, 1, 40, 16, BF16)
    with pytest.raises(RuntimeError, match="need values of that shape"):
        decode_ops.attention_decode(q, k, v[:, :, :39], None, None, None, None, None, q.stride(), "sm_90")


def test_a_length_that_comes_often_may_be_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(1, 2, 2, 8, 8, 16, BF16)
    chosen: list[bool] = []

    def noting(*args: Any) -> Tensor:
        chosen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return q

    monkeypatch.setattr(attention_ops, "by_torch", noting)
    monkeypatch.setattr(attention_ops, "_calls", {})
    monkeypatch.setattr(attention_ops, "OFTEN", 2)
    for length in (8, 8, 7, 8):
        attention_ops.attention_varying(q, k[:, :, :length], v[:, :, :length], None, False, None, (0, 1, 2, 3), "sm_90")
    assert chosen == [False, False, False, True] and torch.backends.cuda.cudnn_sdp_enabled()


def test_who_asks_for_cudnn_alone_gets_it() -> None:
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.CUDNN_ATTENTION]), attention_ops.without_plans():
        assert torch.backends.cuda.cudnn_sdp_enabled()
    with attention_ops.without_plans():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_results_lie_in_the_order_of_the_graph(order: tuple[int, ...]) -> None:
    q, k, v = qkv(2, 4, 4, 5, 9, 16, BF16)
    ours = attention_ops.attention_varying(q, k, v, None, False, None, order, "sm_90")
    torch.testing.assert_close(ours, scaled_dot_product_attention(q, k, v))
    assert ours.permute(order).is_contiguous()


# ---------------------------------------------------------------- in graphs


def plans_of(fn: Callable[..., Tensor], calls: list[tuple[Any, ...]], **options: Any) -> list[str]:
    """Return the plans of these calls in a row, whose results are right."""
    run = torch.compile(fn, backend="nvidia_triton", options={"simulate": True, "strict": True, "cache": False, **options})
    with report.recording() as reports, torch.no_grad():
        for args in calls:
            exact = fn(*(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args))
            assert right(run(*args), fn(*args), exact)
    return [r.texts["plan"] for r in reports]


def grown(length: int, kv_heads: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(length)
    q = torch.randn(2, 1, 4, 16).to(BF16).transpose(1, 2)
    cache = [torch.randn(2, kv_heads, length, 16).to(BF16) for _ in range(2)]
    return q, *cache, *(torch.randn(2, kv_heads, 1, 16).to(BF16) for _ in range(2))


@pytest.mark.parametrize("masked", [False, True])
def test_a_cache_that_grows_is_read_once_for_all_heads(masked: bool) -> None:
    """Keys and values are concatenated and repeated as transformers does; each has a symbol of its own."""

    def f(q: Tensor, k: Tensor, v: Tensor, k1: Tensor, v1: Tensor) -> Tensor:
        k, v = (repeated(torch.cat(pair, 2), 2) for pair in ((k, k1), (v, v1)))
        mask = torch.arange(k.shape[2], device=k.device) % 3 > 0 if masked else None
        return scaled_dot_product_attention(q, k, v, None if mask is None else mask.expand(2, 1, 1, -1)).tanh()

    *_, plan = plans_of(f, [grown(n) for n in (20, 21, 22, 40)])
    assert "attention_growing" in plan and "scaled_dot_product" not in plan
    assert "[2, 4, " not in plan.partition("def run")[2].replace("[2, 4, 1, 16]", ""), "keys are not repeated in memory"


@pytest.mark.parametrize("causal", [False, True])
def test_a_prompt_of_any_length_is_planned_for_by_nobody(causal: bool) -> None:
    def f(x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in x.chunk(3, -1))
        return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)

    *_, plan = plans_of(f, [(torch.randn(2, n, 192).to(BF16),) for n in (20, 21, 33)])
    assert "attention_varying" in plan and "contiguous" not in plan


def test_fixed_lengths_and_single_precision_are_left_to_torch() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q.sin(), k, v)

    wide = [tuple(torch.randn(2, 4, n, 16) for _ in range(3)) for n in (20, 21)]
    fixed = [tuple(torch.randn(2, 4, 40, 16).to(BF16) for _ in range(3))] * 2
    for calls in (wide, fixed):
        torch._dynamo.reset()
        assert "attention_varying" not in plans_of(f, calls)[-1]


def test_steps_of_training_of_any_length_are_traced_without_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[bool] = []
    monkeypatch.setattr(
        torch.backends.cuda, "enable_cudnn_sdp", lambda on, set=torch.backends.cuda.enable_cudnn_sdp: (traced.append(on), set(on))
    )
    run = torch.compile(lambda x: (x @ x.mT).tanh().sum(), backend="nvidia_triton", options={"simulate": True, "cache": False})
    run(torch.randn(4, 5, requires_grad=True)).backward()
    assert not traced
    for length in (6, 7):
        run(torch.randn(4, length, requires_grad=True)).backward()
    assert traced == [False, True]
