"""Models as users write them, which no library's catalogue contains."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, dict[str, Any], Callable[[int], dict[str, Any]] | None]


class DoubleConv(nn.Sequential):
    def __init__(self, a: int, b: int) -> None:
        layers = [m for i, o in ((a, b), (b, b)) for m in (nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())]
        super().__init__(*layers)


class UNet(nn.Module):
    """Ronneberger et al., 2015: skips are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([DoubleConv(3, 8), DoubleConv(8, 16), DoubleConv(16, 32)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.join = nn.ModuleList([DoubleConv(32, 16), DoubleConv(16, 8)])
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down[0](x)
        b = self.down[1](F.max_pool2d(a, 2))
        c = self.down[2](F.max_pool2d(b, 2))
        d = self.join[0](torch.cat([b, self.up[0](c)], 1))
        return self.out(self.join[1](torch.cat([a, self.up[1](d)], 1)))


class GraphConv(nn.Module):
    """Kipf and Welling, 2017, on a list of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 7)])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        ones = torch.ones_like(target, dtype=torch.float32)
        degree = torch.zeros(x.shape[0], device=x.device).index_add_(0, target, ones) + 1
        weight = (degree[source] * degree[target]).rsqrt()[:, None].to(x.dtype)
        for k, layer in enumerate(self.layers):
            x = layer(x)
            x = x / degree[:, None].to(x.dtype) + torch.zeros_like(x).index_add_(0, target, x[source] * weight)
            x = x.relu() if k == 0 else x
        return x.log_softmax(-1)


class GraphAttention(nn.Module):
    """Veličković et al., 2018: a softmax over the edges of each target, by scatters."""

    def __init__(self, heads: int = 4, width: int = 8) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.project = nn.Linear(16, heads * width)
        self.source, self.target = nn.Parameter(torch.randn(heads, width)), nn.Parameter(torch.randn(heads, width))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.project(x).view(-1, self.heads, self.width)
        score = F.leaky_relu((h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target], 0.2)
        index = target[:, None].expand_as(score)
        top = x.new_full((x.shape[0], self.heads), -torch.inf).scatter_reduce(0, index, score, "amax")
        e = (score - top[target]).exp()
        total = torch.zeros_like(top).scatter_add(0, index, e)
        weight = (e / total[target]).unsqueeze(-1)
        out = torch.zeros_like(h).index_add(0, target, h[source] * weight)
        return F.elu(out.flatten(1))


class VariationalAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.SiLU(), nn.Flatten())
        self.moments = nn.Linear(16 * 49, 16)
        self.decoder = nn.Sequential(
            nn.Linear(8, 16 * 49), nn.Unflatten(1, (16, 7, 7)), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.SiLU(),
            nn.ConvTranspose2d(8, 1, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.moments(self.encoder(x)).chunk(2, -1)
        made = self.decoder(mean + (0.5 * log_variance).exp() * noise).sigmoid()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1)
        return made, F.binary_cross_entropy(made.float(), x.float().sigmoid(), reduction="none").sum((1, 2, 3)) + divergence


class Recurrent(nn.Module):
    """Torch's LSTM followed by its GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(48, 16, batch_first=True)
        self.out = nn.Linear(16, 50)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.gru(self.lstm(self.embed(ids))[0])[0])


class UnrolledCell(nn.Module):
    """A handwritten recurrent cell, stepped by a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(8 + 16, 4 * 16)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 16)
        out = []
        for t in range(x.shape[1]):
            i, f, g, o = self.gates(torch.cat([x[:, t], h], -1)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            out.append(h)
        return torch.stack(out, 1)


class MixtureOfExperts(nn.Module):
    """Shazeer et al., 2017: the two best experts of four, each on the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == k)
            out.index_add_(0, token, expert(flat[token]) * weight[token, slot, None])
        return out.view_as(x)


class StateSpace(nn.Module):
    """A handwritten selective scan (Gu and Dao, 2023)."""

    def __init__(self, width: int = 16, state: int = 4) -> None:
        super().__init__()
        self.a = nn.Parameter(-torch.rand(width, state) - 0.5)
        self.select = nn.Linear(width, width + 2 * state)
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        step, b, c = self.select(x).split([x.shape[-1], self.state, self.state], -1)
        step = F.softplus(step)
        decay = (step[..., None] * self.a).exp()
        put = step[..., None] * b[:, :, None] * x[..., None]
        h, out = torch.zeros_like(put[:, 0]), []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + put[:, t]
            out.append((h * c[:, t, None]).sum(-1))
        return torch.stack(out, 1) + x


class DiffusionBlock(nn.Module):
    """A residual block of a diffusion UNet: time embedding, group norm, attention over pixels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, width) for _ in range(3)])
        self.convs = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(2)])
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, width))
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        wave = torch.exp(torch.arange(16, device=x.device) * (-math.log(10000.0) / 16))
        angle = (step[:, None].float() * wave).to(x.dtype)
        emb = self.time(torch.cat([angle.sin(), angle.cos()], -1))
        h = self.convs[0](F.silu(self.norms[0](x))) + emb[:, :, None, None]
        x = x + self.convs[1](F.silu(self.norms[1](h)))
        q, k, v = self.qkv(self.norms[2](x)).flatten(2).unflatten(1, (3, 4, 8)).transpose(-1, -2).unbind(1)
        a = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(a.transpose(-1, -2).reshape(x.shape))


class Vocoder(nn.Module):
    """Upsampling and gated dilated convolutions with weight norm (van den Oord et al., 2016; HiFi-GAN's shape)."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.up = nn.ModuleList([norm(nn.ConvTranspose1d(a, b, 8, 4, 2)) for a, b in ((20, 16), (16, 8))])
        self.gated = nn.ModuleList([nn.Conv1d(8, 16, 3, padding=2**k, dilation=2**k) for k in range(3)])
        self.out = nn.Conv1d(8, 1, 7, padding=3)

    def forward(self, mel: Tensor) -> Tensor:
        x = mel
        for up in self.up:
            x = F.leaky_relu(up(x), 0.1)
        for conv in self.gated:
            a, b = conv(x).chunk(2, 1)
            x = x + a.tanh() * b.sigmoid()
        return self.out(x).tanh()


class RadianceField(nn.Module):
    """Mildenhall et al., 2020: encoded positions, a small MLP, transmittance along a ray."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, points: Tensor, lengths: Tensor) -> Tensor:
        scaled = points[..., None] * (2.0 ** torch.arange(6, device=points.device)).to(points.dtype)
        colour, density = self.net(torch.cat([scaled.sin(), scaled.cos()], -1).flatten(-2)).split([3, 1], -1)
        alpha = 1 - torch.exp(-F.relu(density[..., 0]) * lengths)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-6], 1), 1)[:, :-1]
        return ((alpha * through)[..., None] * colour.sigmoid()).sum(1)


class Siamese(nn.Module):
    """Two towers with a contrastive loss, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        logits = F.normalize(self.left(a), dim=-1) @ F.normalize(self.right(b), dim=-1).T * self.scale.exp()
        target = torch.arange(a.shape[0], device=a.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def _edges(nodes: int) -> dict[str, Any]:
    return {"x": torch.randn(nodes, 16), "edges": torch.randint(0, nodes, (2, 4 * nodes))}


def _one(make: Callable[[], nn.Module], given: Callable[[int], dict[str, Any]]) -> Callable[[], Made]:
    """Return a maker of the model with its inputs: `given(0)` is the example, larger arguments give other sizes."""
    return lambda: (make(), given(0), given)


MODELS: dict[str, Callable[[], Made]] = {
    "unet": _one(UNet, lambda k: {"x": torch.randn(1 + k, 3, 32 + 8 * k, 32)}),
    "graph_conv": _one(GraphConv, lambda k: _edges(30 + 11 * k)),
    "graph_attention": _one(GraphAttention, lambda k: _edges(30 + 11 * k)),
    "vae": _one(VariationalAutoencoder, lambda k: {"x": torch.randn(2 + k, 1, 28, 28), "noise": torch.randn(2 + k, 8)}),
    "recurrent": _one(Recurrent, lambda k: {"ids": torch.randint(0, 50, (2, 12 + 3 * k))}),
    "unrolled_cell": _one(UnrolledCell, lambda k: {"x": torch.randn(2 + k, 10, 8)}),
    "mixture_of_experts": _one(MixtureOfExperts, lambda k: {"x": torch.randn(2, 9 + k, 16)}),
    "state_space": _one(StateSpace, lambda k: {"x": torch.randn(2 + k, 12, 16)}),
    "diffusion_block": _one(DiffusionBlock, lambda k: {"x": torch.randn(2 + k, 32, 8, 8), "step": torch.arange(2 + k) * 17}),
    "vocoder": _one(Vocoder, lambda k: {"mel": torch.randn(1 + k, 20, 16 + 4 * k)}),
    "radiance_field": _one(RadianceField, lambda k: {"points": torch.randn(8 + k, 16, 3), "lengths": torch.rand(8 + k, 16)}),
    "siamese": _one(Siamese, lambda k: {"a": torch.randn(4 + k, 12), "b": torch.randn(4 + k, 12)}),
}
