"""Ten small models, one of each common kind, with a loss for training. Seeded, in eval mode, without downloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright.interface import HOST


@dataclass(frozen=True)
class Model:
    """A module and its inputs. Dimension 0 of every input is the batch."""

    module: nn.Module
    inputs: tuple[Tensor, ...]


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).log_softmax(-1)


class Attention(nn.Module):
    """Multi-head self-attention. [B, T, C] in and out."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.second = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Encoder(nn.Module):
    """Maps tokens with a padding mask to classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 32), nn.Embedding(12, 32)
        self.block, self.head = Block(32, 4, causal=False), nn.Linear(32, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        kept = (tokens != 0).unsqueeze(-1)
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.block(x).masked_fill(~kept, 0.0)
        return torch.tanh(self.head(x.sum(1) / kept.sum(1).clamp(min=1)))


class Decoder(nn.Module):
    """Maps tokens to next-token logits, causally, with the embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block, self.norm = nn.Embedding(40, 32), Block(32, 2, causal=True), nn.LayerNorm(32)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.norm(self.block(self.words(tokens))), self.words.weight)


class Gated(nn.Module):
    """A Llama layer: RMS norm, rotary positions, SiLU gates."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*n, bias=False) for n in ((32, 64), (32, 64), (64, 32)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self._norm(x)).chunk(3, -1)
        q, k = self._turned(q), self._turned(k)
        y = F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal=True).squeeze(1)
        x = x + self.out(y)
        h = self._norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale

    def _turned(self, x: Tensor) -> Tensor:
        n = x.shape[-1] // 2
        places = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        angles = places[:, None] / 100 ** (torch.arange(n, device=x.device, dtype=x.dtype) / n)
        a, b = x[..., :n], x[..., n:]
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Residual(nn.Module):
    """A ResNet's stem, block and head: convolutions, batch norms and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.a, self.b = nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.Conv2d(8, 8, 3, 1, 1, bias=False)
        self.first, self.second, self.head = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        x = F.relu(x + self.second(self.b(F.relu(self.first(self.a(x))))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Mobile(nn.Module):
    """Depthwise convolutions, squeeze and excitation, hard activations."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Conv2d(4, 16, 1), nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        self.squeeze, self.excite, self.narrow = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.hardswish(self.deep(F.hardswish(self.wide(x))))
        s = F.hardsigmoid(self.excite(F.relu(self.squeeze(h.mean((2, 3), keepdim=True)))))
        return x + self.narrow(h * s)


class Hourglass(nn.Module):
    """A U-Net with group norms: down, up and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.norm, self.up = nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 8, 2, 2)
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.down(x))
        b = self.up(F.silu(self.norm(self.middle(F.avg_pool2d(a, 2)))))
        c = F.interpolate(F.avg_pool2d(b, 2), scale_factor=2.0, mode="nearest")
        return torch.sigmoid(self.last(torch.cat([a, b + c], 1)))


class Recurrent(nn.Module):
    """Eight unrolled steps of a gated cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(10, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 16)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.head(h)


class Graph(nn.Module):
    """Messages along edges, summed and averaged at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(8, 8), nn.Linear(16, 4)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 2, 4, 5, 3], [1, 2, 0, 4, 5, 3, 3]]))

    def forward(self, nodes: Tensor) -> Tensor:
        sources, targets = self.edges[0], self.edges[1]  # type: ignore[index]
        sent = F.relu(self.message(nodes[:, sources]))
        total = torch.zeros_like(nodes).index_add(1, targets, sent)
        return self.update(torch.cat([nodes, total], -1)).softmax(-1)


class Vision(nn.Module):
    """A ViT: patches, a learned token, one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.block, self.head = nn.Conv2d(3, 32, 4, 4), Block(32, 4, causal=False), nn.Linear(32, 7)
        self.token = nn.Parameter(torch.randn(1, 1, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.block(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1))
        return self.head(x[:, 0])


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


def _tokens(most: int) -> Callable[..., Tensor]:
    return lambda *shape: torch.randint(0, most, shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[int, ...]]] = {
    "perceptron": (Perceptron, _numbers, (24,)),
    "encoder": (Encoder, _tokens(50), (12,)),
    "decoder": (Decoder, _tokens(40), (10,)),
    "gated": (Gated, _numbers, (9, 32)),
    "residual": (Residual, _numbers, (3, 18, 18)),
    "mobile": (Mobile, _numbers, (4, 9, 9)),
    "hourglass": (Hourglass, _numbers, (3, 12, 12)),
    "recurrent": (Recurrent, _numbers, (8, 10)),
    "graph": (Graph, _numbers, (6, 8)),
    "vision": (Vision, _numbers, (3, 16, 16)),
}
"""Name -> module, its input's values, the input's shape without the batch."""


def build(name: str, device: str = HOST, dtype: torch.dtype = torch.float32, batch: int = 3) -> Model:
    """A model of the table with newly seeded weights. Norms have processed some data first, so that their statistics differ
    from the initial ones."""
    make, fill, shape = MODELS[name]
    torch.manual_seed(0)
    module = make()
    module(fill(8, *shape))
    torch.manual_seed(batch)
    x = fill(batch, *shape)
    module = module.to(device, dtype).eval()
    return Model(module, (x.to(device, dtype if x.is_floating_point() else x.dtype),))


def outputs(model: Model, fn: Any, *inputs: Tensor) -> list[Tensor]:
    """The results of one seeded call without gradients."""
    torch.manual_seed(3)
    with torch.no_grad():
        found = fn(*(inputs or model.inputs))
    return list(found) if isinstance(found, tuple | list) else [found]


def train_step(model: Model, fn: Any) -> list[Tensor]:
    """The loss of one seeded step in training mode, and the gradients of all parameters."""
    model.module.train()
    model.module.zero_grad()
    torch.manual_seed(3)
    loss = fn(*model.inputs).float().square().mean()
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.module.parameters() if p.grad is not None)]
    model.module.eval()
    return found
