"""Nested tensors (jagged layout): a transformer block over sequences of different lengths, forward and backward.

AOTAutograd unwraps the nested tensor into its values and offsets, so the block reaches the backend as dense ops over
all tokens; torch itself runs attention and the ops on offsets that it needs.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright import report
from fusewright.bench.accuracy import compare

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]

WIDTH, HEADS = 32, 4
LENGTHS = ((3, 5, 2), (4, 1, 6), (7, 7, 1))


class Block(nn.Module):
    """Pre-norm attention and MLP, each with its residual."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = attention
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.attention:
            given = self.before(x)
            q, k, v = (f(given).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.between(x))))


def sequences(lengths: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(sum(lengths))
    parts = [torch.randn(n, WIDTH, generator=g).to(dtype) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def step(module: nn.Module, fn: Any, lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Run forward and backward; return the values of the result and all gradients."""
    module.zero_grad()
    x = sequences(lengths, dtype)
    y = fn(x)
    assert y.is_nested and y.offsets().tolist() == x.offsets().tolist()
    y.values().square().sum().backward()
    assert x.grad is not None
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [y.values().detach(), x.grad.values(), *grads]


@pytest.mark.parametrize(
    ("backend", "attention"), [("nvidia_triton", False), ("nvidia_triton", True), ("rocm_triton", True)]
)
def test_forward_and_backward(backend: str, attention: bool) -> None:
    module, wide = Block(attention), Block(attention).double()
    compiled = torch.compile(module, backend=backend, options={"simulate": True, "strict": True})
    for lengths in LENGTHS:
        reference = step(wide, wide, lengths, torch.float64)
        verdict = compare(reference, step(module, module, lengths), step(module, compiled, lengths), "fp32")
        assert verdict.passed, verdict.reason


def test_the_block_is_lowered_whole_and_compiled_twice_at_most() -> None:
    """Once for the first sizes that Dynamo sees, then once for all sizes."""
    module = Block(attention=False)
    compiled = torch.compile(module, backend="nvidia_triton", options={"simulate": True, "strict": True})
    with report.recording() as reports:
        for lengths in LENGTHS:
            step(module, compiled, lengths)
    assert [r.phase for r in reports] == ["forward", "backward"] * 2
    assert not any(r.count("eager") for r in reports)
