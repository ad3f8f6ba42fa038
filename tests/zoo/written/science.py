"""The natural sciences: proteins, molecules, fields, equations and densities."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.published import Call
from tests.zoo.written import call


class Gated(nn.Module):
    """Attention over the last but one dim, with a bias of pairs and a gate (Jumper et al., 2021, algorithm 7)."""

    def __init__(self, width: int, heads: int, pair: int = 0) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.gate, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.pair = nn.Sequential(nn.LayerNorm(pair), nn.Linear(pair, heads, bias=False)) if pair else None

    def forward(self, x: Tensor, pair: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        score = torch.einsum("...qhd,...khd->...hqk", q, k) / math.sqrt(q.shape[-1])
        if self.pair is not None and pair is not None:
            score = score + self.pair(pair).movedim(-1, 0)
        seen = torch.einsum("...hqk,...khd->...qhd", score.softmax(-1), v).flatten(-2)
        return self.out(self.gate(x).sigmoid() * seen)


class Triangle(nn.Module):
    """The triangle's product, along outgoing or incoming edges (algorithms 11 and 12)."""

    def __init__(self, width: int, formula: str) -> None:
        super().__init__()
        self.formula, self.norms = formula, nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.ends, self.gates = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, z: Tensor) -> Tensor:
        z = self.norms[0](z)
        a, b = (self.ends(z) * self.gates(z).sigmoid()).chunk(2, -1)
        return self.gate(z).sigmoid() * self.out(self.norms[1](torch.einsum(self.formula, a, b)))


class Evoformer(nn.Module):
    """Two blocks of the Evoformer, 128 residues and an alignment of 64 sequences."""

    def __init__(self, width: int = 256, pair: int = 128, blocks: int = 2) -> None:
        super().__init__()

        def transition(n: int) -> nn.Module:
            return nn.Sequential(nn.LayerNorm(n), nn.Linear(n, 4 * n), nn.ReLU(), nn.Linear(4 * n, n))

        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "rows": Gated(width, 8, pair),
                    "columns": Gated(width, 8),
                    "msa": transition(width),
                    "norm": nn.LayerNorm(width),
                    "ends": nn.Linear(width, 64),
                    "mean": nn.Linear(32 * 32, pair),
                    "outgoing": Triangle(pair, "ikc,jkc->ijc"),
                    "incoming": Triangle(pair, "kic,kjc->ijc"),
                    "starts": Gated(pair, 4, pair),
                    "stops": Gated(pair, 4, pair),
                    "pair": transition(pair),
                }
            )
            for _ in range(blocks)
        )

    def forward(self, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        for b in self.blocks:
            m = m + b["rows"](m, z)
            m = m + b["columns"](m.transpose(0, 1)).transpose(0, 1)
            m = m + b["msa"](m)
            left, right = b["ends"](b["norm"](m)).chunk(2, -1)
            z = z + b["mean"](torch.einsum("sia,sjb->ijab", left, right).flatten(-2) / m.shape[0])
            z = z + b["outgoing"](z)
            z = z + b["incoming"](z)
            z = z + b["starts"](z, z)
            t = z.transpose(0, 1)
            z = z + b["stops"](t, t).transpose(0, 1)
            z = z + b["pair"](z)
        return m, z


def evoformer() -> Call:
    return call(Evoformer(), torch.randn(64, 128, 256), torch.randn(128, 128, 128))


class Fourier(nn.Module):
    """A Fourier neural operator in two dims (Li et al., 2021)."""

    def __init__(self, width: int = 64, modes: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.modes, self.lift = modes, nn.Conv2d(3, width, 1)
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(2, width, width, modes, modes, 2) / width) for _ in range(layers)]
        )
        self.ways = nn.ModuleList([nn.Conv2d(width, width, 1) for _ in range(layers)])
        self.down = nn.Sequential(nn.Conv2d(width, 128, 1), nn.GELU(), nn.Conv2d(128, 1, 1))

    def _spectral(self, x: Tensor, weight: Tensor) -> Tensor:
        n, w = self.modes, torch.view_as_complex(weight.float())
        f = torch.fft.rfft2(x.float())
        out = torch.zeros_like(f)
        out[:, :, :n, :n] = torch.einsum("bixy,ioxy->boxy", f[:, :, :n, :n], w[0])
        out[:, :, -n:, :n] = torch.einsum("bixy,ioxy->boxy", f[:, :, -n:, :n], w[1])
        return torch.fft.irfft2(out, s=x.shape[-2:]).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for weight, way in zip(self.weights, self.ways, strict=True):
            x = F.gelu(self._spectral(x, weight) + way(x))
        return self.down(x)


def fourier() -> Call:
    return call(Fourier(), torch.randn(16, 3, 64, 64))


class Equivariant(nn.Module):
    """EGNN (Satorras et al., 2021): messages between all pairs of atoms move their positions."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()

        def mlp(ins: int, outs: int) -> nn.Module:
            return nn.Sequential(nn.Linear(ins, width), nn.SiLU(), nn.Linear(width, outs))

        self.embed = nn.Linear(16, width)
        self.edges = nn.ModuleList([mlp(2 * width + 1, width) for _ in range(layers)])
        self.moves = nn.ModuleList([mlp(width, 1) for _ in range(layers)])
        self.nodes = nn.ModuleList([mlp(2 * width, width) for _ in range(layers)])

    def forward(self, h: Tensor, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h, n = self.embed(h), h.shape[1]
        pairs = (mask[:, :, None] * mask[:, None])[..., None]
        for edge, move, node in zip(self.edges, self.moves, self.nodes, strict=True):
            apart = x[:, :, None] - x[:, None]
            far = apart.square().sum(-1, keepdim=True)
            ends = [h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1)]
            message = F.silu(edge(torch.cat([*ends, far.to(h.dtype)], -1))) * pairs
            x = x + (apart / (far + 1e-8).sqrt() * move(message)).mean(2)
            h = h + node(torch.cat([h, message.sum(2)], -1))
        return h, x


def equivariant() -> Call:
    return call(Equivariant(), torch.randn(16, 48, 16), torch.randn(16, 48, 3), (torch.rand(16, 48) > 0.2).float())


class Continuous(nn.Module):
    """SchNet (Schütt et al., 2017): filters of distances, summed over edges, and forces' energies per molecule."""

    def __init__(self, width: int = 128, centers: int = 50, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.register_buffer("centers", torch.linspace(0, 5, centers))
        self.filters = nn.ModuleList(
            [nn.Sequential(nn.Linear(centers, width), nn.Softplus(), nn.Linear(width, width)) for _ in range(layers)]
        )
        self.ins = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(layers)])
        self.outs = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, width)) for _ in range(layers)]
        )
        self.energy = nn.Linear(width, 1)

    def forward(self, kinds: Tensor, x: Tensor, edges: Tensor, molecule: Tensor) -> Tensor:
        source, target = edges
        h, far = self.embed(kinds), (x[source] - x[target]).norm(dim=-1)
        spread = torch.exp(-10.0 * (far[:, None] - self.centers).square())
        near = 0.5 * (torch.cos(far * math.pi / 5) + 1) * (far < 5)
        for filters, ins, outs in zip(self.filters, self.ins, self.outs, strict=True):
            message = ins(h)[source] * (filters(spread) - math.log(2)) * near[:, None]
            h = h + outs(torch.zeros_like(h).index_add(0, target, message.to(h.dtype)))
        atoms = self.energy(h).squeeze(-1)
        return torch.zeros(64, device=x.device, dtype=atoms.dtype).index_add(0, molecule, atoms)


def continuous() -> Call:
    molecule = torch.arange(64).repeat_interleave(24)
    pairs = (molecule[:, None] == molecule) & ~torch.eye(len(molecule), dtype=torch.bool)
    return call(
        Continuous(), torch.randint(0, 90, (1536,)), 2 * torch.randn(1536, 3), pairs.nonzero().T.contiguous(), molecule
    )


class Graphormer(nn.Module):
    """Attention biased by distances and edges of a graph (Ying et al., 2021)."""

    def __init__(self, width: int = 512, heads: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.heads, self.kinds, self.degrees = heads, nn.Embedding(512, width), nn.Embedding(64, width)
        self.far, self.edge = nn.Embedding(64, heads), nn.Embedding(128, heads)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attend": nn.Linear(width, 3 * width), "out": nn.Linear(width, width), "norm": nn.LayerNorm(width),
                           "mlp": nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))})
            for _ in range(layers)
        )  # fmt: skip

    def forward(self, kinds: Tensor, degrees: Tensor, far: Tensor, edges: Tensor) -> Tensor:
        h = self.kinds(kinds) + self.degrees(degrees)
        bias = self.far(far) + self.edge(edges).sum(-2) / far.clamp(min=1)[..., None]
        bias = bias.permute(0, 3, 1, 2).masked_fill((kinds == 0)[:, None, None], -torch.inf).to(h.dtype)
        for layer in self.layers:
            q, k, v = layer["attend"](layer["norm"](h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            h = h + layer["out"](seen.transpose(1, 2).flatten(2))
            h = h + layer["mlp"](h)
        return h[:, 0]


def graphormer() -> Call:
    kinds = torch.randint(1, 512, (32, 64))
    kinds[:, 50:] *= torch.rand(32, 14) > 0.5
    return call(
        Graphormer(),
        kinds,
        torch.randint(0, 64, (32, 64)),
        torch.randint(0, 20, (32, 64, 64)),
        torch.randint(0, 128, (32, 64, 64, 3)),
    )


class Informed(nn.Module):
    """The residual of Burgers' equation (Raissi et al., 2019): first and second derivatives of a net by its points."""

    def __init__(self, width: int = 128, layers: int = 6) -> None:
        super().__init__()
        sizes = [2, *[width] * layers, 1]
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])

    def _at(self, t: Tensor, x: Tensor) -> Tensor:
        h = torch.stack([t, x], -1)
        for layer in self.layers[:-1]:
            h = torch.tanh(layer(h))
        return self.layers[-1](h).squeeze(-1)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        def first(t: Tensor, x: Tensor) -> Tensor:
            return torch.func.jvp(lambda x: self._at(t, x), (x,), (torch.ones_like(x),))[1]

        u = self._at(t, x)
        u_t = torch.func.jvp(lambda t: self._at(t, x), (t,), (torch.ones_like(t),))[1]
        u_x, u_xx = torch.func.jvp(lambda x: first(t, x), (x,), (torch.ones_like(x),))
        return u_t + u * u_x - 0.01 / math.pi * u_xx


def informed() -> Call:
    return call(Informed(), torch.rand(20_000), 2 * torch.rand(20_000) - 1)


class Ordinary(nn.Module):
    """A neural ordinary differential equation (Chen et al., 2018): eight steps of Runge and Kutta's fourth order."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.GroupNorm(32, width), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1)
        )
        self.norms = nn.ModuleList([nn.GroupNorm(32, width) for _ in range(3)])
        self.convs = nn.ModuleList([nn.Conv2d(width + 1, width, 3, padding=1) for _ in range(2)])
        self.out = nn.Linear(width, 10)

    def _slope(self, t: float, x: Tensor) -> Tensor:
        h = F.relu(self.norms[0](x))
        for conv, norm in zip(self.convs, self.norms[1:], strict=True):
            h = norm(conv(torch.cat([torch.full_like(h[:, :1], t), F.relu(h)], 1)))
        return h

    def forward(self, x: Tensor, steps: int = 8) -> Tensor:
        x, d = self.stem(x), 1 / steps
        for k in range(steps):
            a = self._slope(k * d, x)
            b = self._slope((k + 0.5) * d, x + d / 2 * a)
            c = self._slope((k + 0.5) * d, x + d / 2 * b)
            x = x + d / 6 * (a + 2 * b + 2 * c + self._slope((k + 1) * d, x + d * c))
        return self.out(x.mean((2, 3)))


def ordinary() -> Call:
    return call(Ordinary(), torch.randn(128, 3, 32, 32))


class Flow(nn.Module):
    """Glow (Kingma and Dhariwal, 2018): normalized activations, 1x1 convolutions with determinants, affine couplings."""

    def __init__(self, channels: int = 12, width: int = 256, steps: int = 8) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.zeros(2, channels, 1, 1)) for _ in range(steps)])
        self.mixes = nn.ParameterList(
            [nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0]) for _ in range(steps)]
        )
        def net() -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(channels // 2, width, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(width, width, 1),
                nn.ReLU(),
                nn.Conv2d(width, channels, 3, padding=1),
            )

        self.nets = nn.ModuleList(net() for _ in range(steps))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_unshuffle(x + torch.rand_like(x) / 256, 2)
        total, pixels = x.new_zeros(len(x), dtype=torch.float32), x.shape[-1] * x.shape[-2]
        for (scale, shift), mix, net in zip(self.scales, self.mixes, self.nets, strict=True):
            x = x * scale.exp() + shift
            x = F.conv2d(x, mix[..., None, None])
            a, b = x.chunk(2, 1)
            log_s, t = net(a).chunk(2, 1)
            s = torch.sigmoid(log_s + 2)
            x = torch.cat([a, (b + t) * s], 1)
            total = (
                total
                + pixels * (scale.float().sum() + torch.linalg.slogdet(mix.float())[1])
                + s.float().log().sum((1, 2, 3))
            )
        prior = -0.5 * (x.float().square() + math.log(2 * math.pi)).sum((1, 2, 3))
        return -(prior + total) / (math.log(2) * x[0].numel())


def flow() -> Call:
    return call(Flow(), torch.rand(64, 3, 32, 32))


class Transport(nn.Module):
    """Sinkhorn's divergence of two clouds (Cuturi, 2013), in logarithms, twenty rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: Tensor, y: Tensor, eps: float = 0.5) -> Tensor:
        cost = torch.cdist(self.net(x).float(), self.net(y).float(), p=2.0).square() / eps
        f = g = torch.zeros(cost.shape[:2], device=x.device)
        for _ in range(20):
            f = -torch.logsumexp(g[:, None] - cost, -1)
            g = -torch.logsumexp(f[..., None] - cost, -2)
        plan = (f[..., None] + g[:, None] - cost).exp()
        return (plan * cost).sum((1, 2)) * eps


def transport() -> Call:
    return call(Transport(), torch.randn(16, 256, 32), torch.randn(16, 256, 32))


class Splines(nn.Module):
    """A KAN (Liu et al., 2024): each weight is a cubic B-spline, by de Boor's recursion."""

    def __init__(self, sizes: tuple[int, ...] = (64, 128, 128, 16), knots: int = 8, order: int = 3) -> None:
        super().__init__()
        self.order = order
        self.register_buffer("grid", torch.arange(-order, knots + order + 1) * (2 / knots) - 1)
        pairs = list(itertools.pairwise(sizes))
        self.coefficients = nn.ParameterList([nn.Parameter(0.1 * torch.randn(b, a, knots + order)) for a, b in pairs])
        self.bases = nn.ModuleList([nn.Linear(a, b, bias=False) for a, b in pairs])

    def _basis(self, x: Tensor) -> Tensor:
        x, t = x[..., None], self.grid
        b = ((x >= t[:-1]) & (x < t[1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - t[: -k - 1]) / (t[k:-1] - t[: -k - 1]) * b[..., :-1]
            b = left + (t[k + 1 :] - x) / (t[k + 1 :] - t[1:-k]) * b[..., 1:]
        return b

    def forward(self, x: Tensor) -> Tensor:
        for base, c in zip(self.bases, self.coefficients, strict=True):
            x = base(F.silu(x)) + F.linear(self._basis(x).flatten(1), c.flatten(1))
        return x


def splines() -> Call:
    return call(Splines(), torch.randn(8192, 64))


class Hashed(nn.Module):
    """Instant NGP (Müller et al., 2022): features of hashed grid corners, interpolated at sixteen resolutions."""

    def __init__(self, levels: int = 16, size: int = 2**17) -> None:
        super().__init__()
        self.size, self.tables = size, nn.Parameter(1e-2 * torch.randn(levels, size, 2))
        self.register_buffer("scales", 16.0 * 1.4 ** torch.arange(levels))
        self.register_buffer("corners", torch.tensor([[k >> 2 & 1, k >> 1 & 1, k & 1] for k in range(8)]))
        self.register_buffer("primes", torch.tensor([1, 2654435761, 805459861]))
        self.net = nn.Sequential(nn.Linear(2 * levels, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        at = x.float()[:, None] * self.scales.float()[:, None]
        low = at.floor()
        part, whole = (at - low)[:, :, None], low.long()[:, :, None] + self.corners
        mixed = whole * self.primes
        place = (mixed[..., 0] ^ mixed[..., 1] ^ mixed[..., 2]) % self.size
        weight = torch.where(self.corners.bool(), part, 1 - part).prod(-1, keepdim=True)
        level = torch.arange(len(self.tables), device=x.device)[:, None]
        found = (self.tables[level, place] * weight.to(self.tables.dtype)).sum(2)
        return self.net(found.flatten(1))


def hashed() -> Call:
    return call(Hashed(), torch.rand(65_536, 3))
