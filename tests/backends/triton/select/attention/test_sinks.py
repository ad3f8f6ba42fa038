"""Attention sinks: one more score of each row, which has no value. The kernels against fp64, and the graphs that use them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fusewright import report
from fusewright.bench.accuracy import compare
from fusewright_triton.kernels import attention_ops, decode_ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADS, DIM = 4, 32


def spelled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink: Tensor, shifted: bool = True) -> Tensor:
    """Attention with a sink as gpt-oss of transformers computes it."""
    group = q.shape[1] // k.shape[1]
    k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).reshape(q.shape[0], q.shape[1], *x.shape[2:]) for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    joined = torch.cat([scores, sink.expand(*scores.shape[:-1], 1).to(scores.dtype)], dim=-1)
    if shifted:
        joined = joined - joined.max(dim=-1, keepdim=True).values
    return torch.matmul(torch.softmax(joined, -1)[..., :-1].to(v.dtype), v)


def qkv(batch: int, kv_heads: int, group: int, queries: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(keys)
    q = torch.randn(batch, queries, kv_heads * group, DIM).to(dtype).transpose(1, 2)
    return [q, *(torch.randn(batch, kv_heads, keys, DIM).to(dtype) for _ in range(2))]


@settings(max_examples=20, deadline=None)
@given(
    batch=st.integers(1, 2), kv_heads=st.integers(1, 2), group=st.sampled_from([1, 2, 4]), queries=st.sampled_from([1, 3, 70]),
    keys=st.sampled_from([1, 63, 130]), dtype=st.sampled_from(sorted(DTYPES)), masked=st.booleans(), each=st.booleans(),
    few=st.booleans(),
)  # fmt: skip
def test_kernels_against_fp64(
    batch: int, kv_heads: int, group: int, queries: int, keys: int, dtype: str, masked: bool, each: bool, few: bool
) -> None:
    q, k, v = qkv(batch, kv_heads, group, queries, keys, DTYPES[dtype])
    mask = torch.randn(batch, 1, queries, keys).to(q.dtype) if masked else None
    sink = torch.randn((batch, kv_heads * group, queries, 1) if each else (1, kv_heads * group, 1, 1)).to(q.dtype)
    if few and group * queries <= decode_ops.MOST_ROWS:
        ours = decode_ops.attention_decode(q, k, v, mask, sink, None, None, None, q.stride(), "sm_90")
    else:
        ours = attention_ops.attention(q, k, v, mask, sink, False, None, False, q.stride(), "sm_90")
    wide = spelled(q.double(), k.double(), v.double(), None if mask is None else mask.double(), sink.double())
    verdict = compare([wide], [spelled(q, k, v, mask, sink)], [ours], "bf16" if dtype == "fp16" else dtype)
    assert verdict.passed and ours.stride() == q.stride(), verdict


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e30, -1e30])
def test_extreme_sinks_and_rows_without_a_key_are_those_of_a_softmax(value: float, few: bool) -> None:
    q, k, v = qkv(1, 1, 2, 2, 70, torch.float32)
    mask = torch.zeros(1, 1, 2, 70)
    mask[:, :, 1] = -math.inf
    sink = torch.tensor([value, 0.5]).view(1, 2, 1, 1)
    if few:
        ours = decode_ops.attention_decode(q, k, v, mask, sink, None, None, None, q.stride(), "sm_90")
    else:
        ours = attention_ops.attention(q, k, v, mask, sink, False, None, False, q.stride(), "sm_90")
    torch.testing.assert_close(ours, spelled(q, k, v, mask, sink), equal_nan=True)
    assert (ours[:, 1, 1] == 0).all(), "the sink takes all of the weight"


class Attention(nn.Module):
    """Projections around attention with a learned sink of each head."""

    def __init__(self, kv_heads: int, inner: Callable[..., Tensor]) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(64, HEADS * DIM), nn.Linear(64, 2 * kv_heads * DIM)
        self.sinks, self.inner = nn.Parameter(torch.randn(HEADS)), inner

    def forward(self, x: Tensor, past: Tensor, mask: Tensor) -> Tensor:
        batch, queries, _ = x.shape
        q = self.q(x).view(batch, queries, HEADS, DIM).transpose(1, 2)
        k, v = self.kv(past).view(batch, past.shape[1], -1, 2, DIM).permute(3, 0, 2, 1, 4)
        y = self.inner(q, k, v, mask, self.sinks.reshape(1, -1, 1, 1).expand(batch, -1, queries, -1))
        return y.transpose(1, 2).reshape(batch, queries, -1)


def wide_cat(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT) * 0.2 + mask
    return torch.matmul(torch.cat([scores, sink], -1).float().softmax(-1)[..., :-1].to(v.dtype), v)


def first_dropped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT) * 0.2 + mask
    return torch.matmul(torch.cat([scores, sink], -1).softmax(-1)[..., 1:], v)


def weights_kept(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    joined = torch.cat([torch.matmul(q, k.mT) * 0.2 + mask, sink], -1)
    return torch.matmul(joined.softmax(-1)[..., :-1], v) + joined[..., -1:]


def unshifted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    return spelled(q, k, v, mask, sink, shifted=False)


def interleaved(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """Values that are repeated so are viewed as a stack of matrices at once, without a dim for heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.matmul(q, k.mT) * 0.2 + mask
    return torch.matmul(torch.cat([scores, sink], -1).softmax(-1)[..., :-1], v)


@pytest.mark.parametrize(
    ("inner", "kv_heads", "queries", "operator"),
    [
        (spelled, 2, 9, "attention"), (spelled, 4, 9, "attention"), (spelled, 2, 1, "attention_decode"),
        (unshifted, 1, 9, "attention"), (unshifted, 2, 1, "attention_decode"), (wide_cat, 4, 9, "attention"),
        (interleaved, 2, 9, "attention"), (interleaved, 2, 1, "attention_decode"),
        (first_dropped, 4, 9, None), (weights_kept, 4, 9, None),
    ],
)  # fmt: skip
def test_which_graphs_have_a_sink(inner: Callable[..., Tensor], kv_heads: int, queries: int, operator: str | None) -> None:
    torch.manual_seed(1)
    model = Attention(kv_heads, inner).bfloat16().eval()
    given = [torch.randn(2, queries, 64), torch.randn(2, 80, 64), torch.randn(2, 1, queries, 80)]
    half = [x.bfloat16() for x in given]
    with torch.no_grad(), report.recording() as reports:
        ours = torch.compile(model, backend="nvidia_triton", options={"simulate": True, "strict": True, "cache": False})(*half)
        eager, wide = model(*half), copy.deepcopy(model).double()(*(x.double() for x in half))
    assert compare([wide], [eager], [ours], "bf16").passed
    text = reports[0].texts["plan"].partition("def run")[2]
    found = [line.split("fusewright_triton_")[1].split("_default")[0] for line in text.splitlines() if "triton_attention" in line]
    assert found == ([operator] if operator else [])
    if operator:
        assert "bmm" not in text
        assert kv_heads == HEADS or f"empty_strided((2, {HEADS}, 80" not in text, "heads of keys and values are not repeated"
