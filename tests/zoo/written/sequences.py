"""Texts, sounds, points, graphs, rays and tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.published import Call
from tests.zoo.written import call


class ConformerBlock(nn.Module):
    """Gulati et al., 2020: half a feed-forward net on either side of attention and a depthwise convolution."""

    def __init__(self, width: int, heads: int, window: int = 31) -> None:
        super().__init__()
        self.halves = nn.ModuleList(
            [
                nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, 4 * width),
                    nn.SiLU(),
                    nn.Dropout(0.1),
                    nn.Linear(4 * width, width),
                )
                for _ in range(2)
            ]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.conv = nn.Sequential(
            nn.Conv1d(width, 2 * width, 1), nn.GLU(1), nn.Conv1d(width, width, window, padding=window // 2, groups=width),
            nn.BatchNorm1d(width), nn.SiLU(), nn.Conv1d(width, width, 1), nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        x = x + 0.5 * self.halves[0](x)
        h = self.norms[0](x)
        x = x + self.attention(h, h, h, key_padding_mask=padded, need_weights=False)[0]
        x = x + self.conv(self.norms[1](x).transpose(1, 2)).transpose(1, 2)
        return self.norms[2](x + 0.5 * self.halves[1](x))


class Conformer(nn.Module):
    def __init__(self, width: int = 256, depth: int = 12) -> None:
        super().__init__()
        self.shrink = nn.Sequential(nn.Conv2d(1, width, 3, 2), nn.ReLU(), nn.Conv2d(width, width, 3, 2), nn.ReLU())
        self.first, self.out = nn.Linear(width * 19, width), nn.Linear(width, 1000)
        self.blocks = nn.ModuleList([ConformerBlock(width, 4) for _ in range(depth)])

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.first(self.shrink(x[:, None]).transpose(1, 2).flatten(2))
        padded = torch.arange(h.shape[1], device=x.device) >= lengths[:, None]
        for block in self.blocks:
            h = block(h, padded)
        return self.out(h).log_softmax(-1)


def conformer() -> Call:
    return call(Conformer(), torch.randn(16, 1000, 80), torch.arange(16) * 8 + 120)


class Waves(nn.Module):
    """WaveNet (van den Oord et al., 2016): gated dilated convolutions, skips summed."""

    def __init__(self, width: int = 64, skip: int = 128, stacks: int = 3, depth: int = 10) -> None:
        super().__init__()
        self.first, self.dilations = nn.Conv1d(1, width, 1), [2**k for _ in range(stacks) for k in range(depth)]
        self.gates = nn.ModuleList([nn.Conv1d(width, 2 * width, 2, dilation=d) for d in self.dilations])
        self.skips = nn.ModuleList([nn.Conv1d(width, skip + width, 1) for _ in self.dilations])
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(skip, skip, 1), nn.ReLU(), nn.Conv1d(skip, 256, 1))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), 0.0
        for gate, out, d in zip(self.gates, self.skips, self.dilations, strict=True):
            a, b = gate(F.pad(x, (d, 0))).chunk(2, 1)
            skip, more = out(a.tanh() * b.sigmoid()).split([self.skip, x.shape[1]], 1)
            x, total = x + more, total + skip
        return self.out(total)


def waves() -> Call:
    return call(Waves(), torch.randn(4, 1, 16000))


class Separator(nn.Module):
    """Conv-TasNet (Luo and Mesgarani, 2019): depthwise separable convolutions with global norms."""

    def __init__(self, basis: int = 512, width: int = 128, wide: int = 512, repeats: int = 3, depth: int = 8) -> None:
        super().__init__()
        self.encode, self.decode = (
            nn.Conv1d(1, basis, 16, 8, bias=False),
            nn.ConvTranspose1d(basis, 1, 16, 8, bias=False),
        )
        self.first = nn.Sequential(nn.GroupNorm(1, basis), nn.Conv1d(basis, width, 1))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, wide, 1), nn.PReLU(), nn.GroupNorm(1, wide),
                nn.Conv1d(wide, wide, 3, padding=2**k, dilation=2**k, groups=wide), nn.PReLU(),
                nn.GroupNorm(1, wide), nn.Conv1d(wide, width, 1),
            ) for _ in range(repeats) for k in range(depth)
        )  # fmt: skip
        self.mask = nn.Sequential(nn.PReLU(), nn.Conv1d(width, 2 * basis, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        basis = F.relu(self.encode(x))
        h = self.first(basis)
        for block in self.blocks:
            h = h + block(h)
        parts = self.mask(h).unflatten(1, (2, -1)) * basis[:, None]
        return self.decode(parts.flatten(0, 1)).view(len(x), 2, -1)


def separator() -> Call:
    return call(Separator(), torch.randn(4, 1, 32000))


class Points(nn.Module):
    """PointNet (Qi et al., 2017): shared layers over points, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        pairs = ((3, 64), (64, 64), (64, 64), (64, 128), (128, 1024))
        self.points = nn.Sequential(*(m for a, b in pairs for m in (nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())))
        pairs = ((1024, 512), (512, 256))
        self.whole = nn.Sequential(
            *(m for a, b in pairs for m in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU())),
            nn.Dropout(0.3),
            nn.Linear(256, 40),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(self.points(x).max(-1).values).log_softmax(-1)


def points() -> Call:
    return call(Points(), torch.randn(64, 3, 2048))


class EdgePoints(nn.Module):
    """DGCNN (Wang et al., 2019): features of the twenty nearest points, found anew in each layer."""

    def __init__(self, near: int = 20) -> None:
        super().__init__()
        self.near, pairs = near, ((6, 64), (128, 64), (128, 128), (256, 256))
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)) for a, b in pairs]
        )
        self.join, self.out = (
            nn.Sequential(nn.Conv1d(512, 1024, 1, bias=False), nn.BatchNorm1d(1024), nn.LeakyReLU(0.2)),
            nn.Linear(2048, 40),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers:
            square = x.square().sum(1)
            away = square[:, :, None] - 2 * x.transpose(1, 2) @ x + square[:, None]
            index = away.topk(self.near, -1, largest=False).indices
            near = (
                x.transpose(1, 2)
                .gather(1, index.flatten(1)[..., None].expand(-1, -1, x.shape[1]))
                .unflatten(1, index.shape[1:])
            )
            own = x.transpose(1, 2)[:, :, None].expand_as(near)
            x = layer(torch.cat([near - own, own], -1).permute(0, 3, 1, 2)).amax(-1)
            kept.append(x)
        h = self.join(torch.cat(kept, 1))
        return self.out(torch.cat([h.amax(-1), h.mean(-1)], -1))


def edge_points() -> Call:
    return call(EdgePoints(), torch.randn(16, 3, 1024))


class Recommender(nn.Module):
    """DLRM (Naumov et al., 2019): tables of categories, and products of all pairs."""

    def __init__(self, tables: int = 26, rows: int = 100_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)])
        self.bottom = nn.Sequential(
            *(m for a, b in ((13, 512), (512, 256), (256, width)) for m in (nn.Linear(a, b), nn.ReLU()))
        )
        ins = width + (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(ins, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        each = torch.stack([x, *(table(ids[:, k]) for k, table in enumerate(self.tables))], 1).to(x.dtype)
        pairs = each @ each.transpose(1, 2)
        i, j = torch.tril_indices(each.shape[1], each.shape[1], -1, device=x.device)
        return self.top(torch.cat([x, pairs[:, i, j]], 1)).squeeze(-1)


def recommender() -> Call:
    return call(Recommender(), torch.randn(4096, 13), torch.randint(0, 100_000, (4096, 26, 2)))


class Field(nn.Module):
    """NeRF (Mildenhall et al., 2020): encoded positions, eight layers, colors summed along rays."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(63 if k == 0 else width + (63 if k == 5 else 0), width) for k in range(8)]
        )
        self.density, self.color = (
            nn.Linear(width, 1),
            nn.Sequential(nn.Linear(width + 27, 128), nn.ReLU(), nn.Linear(128, 3)),
        )

    @staticmethod
    def _waves(x: Tensor, count: int) -> Tensor:
        y = (x[..., None] * 2.0 ** torch.arange(count, device=x.device, dtype=x.dtype)).flatten(-2)
        return torch.cat([x, y.sin(), y.cos()], -1)

    def forward(self, points: Tensor, views: Tensor, steps: Tensor) -> Tensor:
        given = h = self._waves(points, 10)
        for k, layer in enumerate(self.layers):
            h = F.relu(layer(torch.cat([h, given], -1) if k == 5 else h))
        view = self._waves(views, 4)[:, None].expand(-1, points.shape[1], -1)
        color = self.color(torch.cat([h, view], -1)).sigmoid()
        opaque = 1 - torch.exp(-F.relu(self.density(h)).squeeze(-1) * steps)
        seen = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque + 1e-10], 1), 1)[:, :-1]
        return ((opaque * seen)[..., None] * color).sum(1)


def field() -> Call:
    return call(Field(), torch.randn(4096, 64, 3), torch.randn(4096, 3), torch.rand(4096, 64))


class Graphs(nn.Module):
    """GAT (Veličković et al., 2018) of three layers on a list of edges."""

    def __init__(self, ins: int = 128, width: int = 64, heads: int = 4, outs: int = 40) -> None:
        super().__init__()
        self.heads, sizes = heads, ((ins, width), (heads * width, width), (heads * width, outs))
        self.layers = nn.ModuleList([nn.Linear(a, heads * b, bias=False) for a, b in sizes])
        self.ends = nn.ParameterList([nn.Parameter(torch.randn(2, heads, b)) for _, b in sizes])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for layer, ends in zip(self.layers, self.ends, strict=True):
            h = layer(x).unflatten(-1, (self.heads, -1))
            score = F.leaky_relu((h * ends[0]).sum(-1)[source] + (h * ends[1]).sum(-1)[target], 0.2)
            index = target[:, None].expand_as(score)
            top = score.new_full((len(x), self.heads), -torch.inf).scatter_reduce(0, index, score, "amax")
            e = (score - top[target]).exp()
            weight = e / torch.zeros_like(top).scatter_add(0, index, e)[target]
            x = F.elu(torch.zeros_like(h).index_add(0, target, h[source] * weight[..., None].to(h.dtype)).flatten(1))
        return x.unflatten(-1, (self.heads, -1)).mean(1)


def graphs() -> Call:
    edges = torch.cat([torch.randint(0, 40_000, (2, 240_000)), torch.arange(40_000).expand(2, -1)], 1)
    return call(Graphs(), torch.randn(40_000, 128), edges)


class Sequences(nn.Module):
    """Torch's own Transformer (Vaswani et al., 2017), with masks of padding and dropout."""

    def __init__(self, vocabulary: int = 16_000, width: int = 512) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(256, width)
        self.net, self.out = nn.Transformer(width, 8, 6, 6, 2048, batch_first=True), nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        place = self.place(torch.arange(source.shape[1], device=source.device))
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=source.device).triu(1)
        empty, none = source == 0, target == 0
        h = self.net(
            self.embed(source) + place,
            self.embed(target) + place,
            tgt_mask=causal,
            src_key_padding_mask=empty,
            tgt_key_padding_mask=none,
            memory_key_padding_mask=empty,
        )
        logits = self.out(h)
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def sequences() -> Call:
    ids = [torch.randint(1, 16_000, (32, 128)) for _ in range(2)]
    for row, x in enumerate(ids[0]):
        x[128 - 2 * row :] = 0
    return call(Sequences(), *ids)


class Gated(nn.Module):
    """A mixture of eight experts, each on the tokens that fit its capacity (Fedus et al., 2022)."""

    def __init__(self, width: int, experts: int = 8) -> None:
        super().__init__()
        self.route, self.experts = nn.Linear(width, experts, bias=False), experts
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, *s) * 0.02) for s in ((width, 4 * width), (4 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        capacity = 2 * flat.shape[0] // self.experts
        gate, chosen = self.route(flat).softmax(-1).max(-1)
        one = F.one_hot(chosen, self.experts)
        rank = (one.cumsum(0) * one).sum(-1) - 1
        kept = rank < capacity
        slot = torch.where(kept, chosen * capacity + rank, self.experts * capacity)
        given = flat.new_zeros(self.experts * capacity + 1, flat.shape[1]).index_copy(0, slot, flat)
        h = F.gelu(given[:-1].view(self.experts, capacity, -1) @ self.up) @ self.down
        out = torch.cat([h.flatten(0, 1), h.new_zeros(1, h.shape[-1])])[slot]
        return (out * (gate * kept)[:, None].to(out.dtype)).view(x.shape)


class MixtureModel(nn.Module):
    def __init__(self, width: int = 512, depth: int = 6, vocabulary: int = 32_000) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.own = nn.ModuleList([nn.Linear(width, 3 * width, bias=False) for _ in range(depth)])
        self.back = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(depth)])
        self.experts = nn.ModuleList([Gated(width) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2 * depth + 1)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for k, (own, back, experts) in enumerate(zip(self.own, self.back, self.experts, strict=True)):
            q, k_, v = (y.unflatten(-1, (8, -1)).transpose(1, 2) for y in own(self.norms[2 * k](x)).chunk(3, -1))
            x = x + back(F.scaled_dot_product_attention(q, k_, v, is_causal=True).transpose(1, 2).flatten(2))
            x = x + experts(self.norms[2 * k + 1](x))
        logits = self.out(self.norms[-1](x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def mixture() -> Call:
    return call(MixtureModel(), torch.randint(0, 32_000, (8, 512)))


class Forecast(nn.Module):
    """PatchTST (Nie et al., 2023): patches of each channel are tokens, batch norms between layers."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.patch, self.place = nn.Linear(16, width), nn.Parameter(torch.randn(42, width) * 0.02)
        self.own = nn.ModuleList(
            [nn.MultiheadAttention(width, 16, dropout=0.2, batch_first=True) for _ in range(depth)]
        )
        self.mlps = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, width))
                for _ in range(depth)
            ]
        )
        self.norms = nn.ModuleList([nn.BatchNorm1d(width) for _ in range(2 * depth)])
        self.out = nn.Linear(42 * width, 96)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = x.mean(1, keepdim=True).detach(), (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
        y = F.pad(((x - mean) / spread).transpose(1, 2), (0, 8), mode="replicate").unfold(-1, 16, 8)
        h = (self.patch(y) + self.place).flatten(0, 1)
        for k, (own, mlp) in enumerate(zip(self.own, self.mlps, strict=True)):
            h = self.norms[2 * k]((h + own(h, h, h, need_weights=False)[0]).transpose(1, 2)).transpose(1, 2)
            h = self.norms[2 * k + 1]((h + mlp(h)).transpose(1, 2)).transpose(1, 2)
        return self.out(h.flatten(1)).view(len(x), -1, 96).transpose(1, 2) * spread + mean


def forecast() -> Call:
    return call(Forecast(), torch.randn(64, 336, 21))


class Table(nn.Module):
    """FT-Transformer (Gorishniy et al., 2021): each column of a table is a token."""

    def __init__(self, columns: int = 50, width: int = 192, depth: int = 3) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(columns, width)), nn.Parameter(torch.randn(columns, width))
        self.token = nn.Parameter(torch.randn(width))
        layer = nn.TransformerEncoderLayer(width, 8, 256, 0.1, "relu", batch_first=True, norm_first=True)
        self.net, self.out = (
            nn.TransformerEncoder(layer, depth, enable_nested_tensor=False),
            nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), 1, -1), x[..., None] * self.weight + self.bias], 1)
        return self.out(self.net(h)[:, 0])


def table() -> Call:
    return call(Table(), torch.randn(1024, 50))


class Contrast(nn.Module):
    """NT-Xent (Chen et al., 2020) of two views, behind a small convolutional net."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        pairs = ((3, width), (width, 2 * width), (2 * width, 4 * width), (4 * width, 8 * width))
        self.net = nn.Sequential(
            *(m for a, b in pairs for m in (nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()))
        )
        self.head = nn.Sequential(nn.Linear(8 * width, 512), nn.ReLU(), nn.Linear(512, 128))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(self.head(self.net(torch.cat([a, b])).mean((2, 3))).float(), dim=-1)
        scores = z @ z.t() / 0.5
        scores = scores.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -torch.inf)
        return F.cross_entropy(scores, torch.arange(len(z), device=z.device).roll(len(a)))


def contrast() -> Call:
    return call(Contrast(), torch.randn(512, 3, 32, 32), torch.randn(512, 3, 32, 32))


class Speller(nn.Module):
    """A sequence-to-sequence net of LSTMs with attention (Luong et al., 2015)."""

    def __init__(self, vocabulary: int = 8_000, width: int = 512) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.encoder, self.decoder = (
            nn.LSTM(width, width // 2, 2, batch_first=True, bidirectional=True),
            nn.LSTM(width, width, 2, batch_first=True),
        )
        self.query, self.join = nn.Linear(width, width, bias=False), nn.Linear(2 * width, width)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        h, d = self.encoder(self.embed(source))[0], self.decoder(self.embed(target))[0]
        read = (self.query(d) @ h.transpose(1, 2)).softmax(-1) @ h
        return F.cross_entropy(
            self.out(self.join(torch.cat([d, read], -1)).tanh()).flatten(0, 1).float(), target.flatten()
        )


def speller() -> Call:
    return call(Speller(), torch.randint(0, 8_000, (64, 64)), torch.randint(0, 8_000, (64, 64)))


class Policy(nn.Module):
    """Actor and critic of a control task (Schulman et al., 2017), with their losses: a step is short."""

    def __init__(self, seen: int = 17, acts: int = 6, width: int = 256) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(seen, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, acts)
        )
        self.critic = nn.Sequential(
            nn.Linear(seen, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        self.spread = nn.Parameter(torch.zeros(acts))

    def forward(self, seen: Tensor, acts: Tensor, old: Tensor, gain: Tensor, returns: Tensor) -> Tensor:
        mean, spread = self.actor(seen).float(), self.spread.exp()
        log = (-((acts - mean) ** 2) / (2 * spread**2) - spread.log() - 0.919).sum(-1)
        ratio = (log - old).exp()
        actor = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return actor + 0.5 * F.mse_loss(self.critic(seen).squeeze(-1).float(), returns) - 0.01 * spread.log().sum()


def policy() -> Call:
    return call(
        Policy(), torch.randn(2048, 17), torch.randn(2048, 6), torch.randn(2048), torch.randn(2048), torch.randn(2048)
    )
