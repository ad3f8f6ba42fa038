"""Prefill and decode in a small Llama geometry whose key-value cache is written in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright import accuracy
from tests.backends.acl.test_models import compiled, on_arm, without_references

WIDTH, HEADS, KV_HEADS, LENGTH, STEP = 64, 4, 2, 24, 16


class Block(nn.Module):
    """Attention with rotary positions and grouped heads, and a gated MLP, each after an RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.register_buffer("keys", torch.zeros(1, KV_HEADS, LENGTH, head))
        self.register_buffer("values", torch.zeros(1, KV_HEADS, LENGTH, head))

    def forward(self, x: Tensor, at: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (p(y).view(1, x.shape[1], -1, WIDTH // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v))
        self.keys.index_copy_(2, at, _turned(k, cos, sin))
        self.values.index_copy_(2, at, v)
        mask = torch.arange(LENGTH) <= at[:, None]
        keys, values = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (self.keys, self.values))
        attended = F.scaled_dot_product_attention(_turned(q, cos, sin), keys, values, mask)
        x = x + self.o(attended.transpose(1, 2).reshape(1, -1, WIDTH))
        z = self.norms[1](x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(96, WIDTH), nn.Linear(WIDTH, 96, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        x = self.tokens(ids)
        angles = at[:, None] / 10_000.0 ** (torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, at, cos, sin)
        return self.head(x)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=on_arm)])
def test_prefill_and_decode(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    eager = Llama().to(dtype).eval()
    ours, wide = copy.deepcopy(eager), copy.deepcopy(eager).double()
    run = compiled(ours, prepack="always")
    ids = torch.randint(0, 96, (1, STEP + 3))
    with torch.no_grad():
        for first, last in ((0, STEP), *((k, k + 1) for k in range(STEP, STEP + 3))):
            given = ids[:, first:last], torch.arange(first, last)
            got = without_references(lambda given=given: run(*given))
            verdict = accuracy.compare([wide(*given)], [eager(*given)], [got], "fp32" if dtype is torch.float32 else "bf16")
            assert verdict.passed, (first, verdict)
    assert torch.allclose(ours.blocks[1].keys, eager.blocks[1].keys, rtol=2e-2, atol=2e-2)
