"""Ways to train and to compute: adapters, fine-tuning, checkpoints, momentum, margins, routing, spikes, gradients of samples."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.published import Call
from tests.zoo.written import call


class Adapted(nn.Module):
    """A frozen linear with a trained product of low rank (Hu et al., 2021)."""

    def __init__(self, ins: int, outs: int, rank: int = 16) -> None:
        super().__init__()
        self.base, self.down, self.up = (
            nn.Linear(ins, outs, bias=False),
            nn.Linear(ins, rank, bias=False),
            nn.Linear(rank, outs, bias=False),
        )
        self.base.weight.requires_grad_(False)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(self.dropout(x)))


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    """A layer of Llama's form whose products are `linear`."""

    def __init__(self, width: int, heads: int, linear: type[nn.Module]) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.q, self.k, self.v, self.out = (linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = linear(width, 3 * width), linear(width, 3 * width), linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h, at = self.norms[0](x), torch.arange(x.shape[1], device=x.device)
        size = x.shape[-1] // self.heads
        angle = at[:, None] * 10_000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(_turned(q, angle), _turned(k, angle), v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Sentences(nn.Module):
    """BERT's base geometry with a head for two classes (Devlin et al., 2019), as people fine-tune it: sentences are padded."""

    def __init__(self, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.word, self.place, self.norm = nn.Embedding(30_522, width), nn.Embedding(512, width), nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.1, "gelu", batch_first=True)
        self.net = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.pool, self.out, self.dropout = nn.Linear(width, width), nn.Linear(width, 2), nn.Dropout(0.1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.word(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        x = self.net(self.dropout(self.norm(x)), src_key_padding_mask=ids == 0)
        return F.cross_entropy(self.out(self.dropout(self.pool(x[:, 0]).tanh())).float(), labels)


def sentences() -> Call:
    ids, labels = torch.randint(1, 30_522, (32, 128)), torch.randint(0, 2, (32,))
    for row, x in enumerate(ids):
        x[128 - 3 * row :] = 0
    return call(Sentences(), ids, labels)


class Language(nn.Module):
    def __init__(
        self, linear: type[nn.Module], layers: int, width: int = 1024, vocabulary: int = 32_000, recompute: bool = False
    ) -> None:
        super().__init__()
        self.embed, self.recompute = nn.Embedding(vocabulary, width), recompute
        self.layers = nn.ModuleList([Block(width, 16, linear) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Plain(nn.Linear):
    def __init__(self, ins: int, outs: int) -> None:
        super().__init__(ins, outs, bias=False)


class Ternary(nn.Linear):
    """BitNet b1.58 (Ma et al., 2024): weights of three values, inputs of eight bits, straight-through gradients."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__(ins, outs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.rms_norm(x, x.shape[-1:])
        scale = 127.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        x = x + ((x * scale).round().clamp(-128, 127) / scale - x).detach()
        mean = self.weight.abs().mean().clamp(min=1e-5)
        w = self.weight + ((self.weight / mean).round().clamp(-1, 1) * mean - self.weight).detach()
        return F.linear(x, w)


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 32_000, (batch, length))


def adapters() -> Call:
    net = Language(Adapted, 6)
    for p in (*net.embed.parameters(), *net.head.parameters(), *net.norm.parameters()):
        p.requires_grad_(False)
    return call(net, _tokens(4, 512))


def recomputed() -> Call:
    return call(Language(Plain, 6, recompute=True), _tokens(4, 512))


def ternary() -> Call:
    return call(Language(Ternary, 6), _tokens(4, 512))


class Small(nn.Module):
    """A ResNet for images of 32 pixels, with the norms given."""

    def __init__(self, outs: int, width: int = 64, groups: bool = False) -> None:
        super().__init__()

        def norm(n: int) -> nn.Module:
            return nn.GroupNorm(8, n) if groups else nn.BatchNorm2d(n)

        def unit(a: int, b: int, stride: int) -> nn.ModuleDict:
            return nn.ModuleDict({
                "a": nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), norm(b), nn.ReLU()),
                "b": nn.Sequential(nn.Conv2d(b, b, 3, 1, 1, bias=False), norm(b)),
                "skip": nn.Identity() if a == b else nn.Conv2d(a, b, 1, stride, bias=False),
            })  # fmt: skip

        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(width), nn.ReLU())
        self.units = nn.ModuleList([unit(width, width, 1), unit(width, 2 * width, 2), unit(2 * width, 4 * width, 2)])
        self.out = nn.Linear(4 * width, outs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for u in self.units:
            x = F.relu(u["b"](u["a"](x)) + u["skip"](x))
        return self.out(x.mean((2, 3)))


class Momentum(nn.Module):
    """MoCo (He et al., 2020): a second encoder follows the first, and keys of earlier batches are kept in a buffer."""

    def __init__(self, size: int = 128, kept: int = 16_384) -> None:
        super().__init__()
        self.net, self.slow = Small(size), Small(size)
        self.slow.load_state_dict(self.net.state_dict())
        self.slow.requires_grad_(False)
        self.register_buffer("keys", F.normalize(torch.randn(size, kept), dim=0))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = F.normalize(self.net(x), dim=1)
        with torch.no_grad():
            if self.training:
                for fast, slow in zip(self.net.parameters(), self.slow.parameters(), strict=True):
                    slow.lerp_(fast, 0.001)
            k = F.normalize(self.slow(y), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.keys.clone().detach().to(q.dtype)], 1) / 0.07
        if self.training:
            place = (self.at + torch.arange(len(k), device=k.device)) % self.keys.shape[1]
            self.keys.index_copy_(1, place, k.T.to(self.keys.dtype))
            self.at.add_(len(k)).remainder_(self.keys.shape[1])
        return F.cross_entropy(logits.float(), torch.zeros(len(x), dtype=torch.long, device=x.device))


def momentum() -> Call:
    return call(Momentum(), torch.randn(128, 3, 32, 32), torch.randn(128, 3, 32, 32))


class Margin(nn.Module):
    """ArcFace (Deng et al., 2019): angles to 20,000 classes, a margin on the right one."""

    def __init__(self, classes: int = 20_000, size: int = 512) -> None:
        super().__init__()
        self.net, self.centers = Small(size), nn.Parameter(torch.randn(classes, size))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cos = F.linear(F.normalize(self.net(x)), F.normalize(self.centers)).float()
        own = cos.gather(1, y[:, None]).clamp(-1 + 1e-6, 1 - 1e-6)
        turned = torch.cos(torch.acos(own) + 0.5)
        turned = torch.where(own > math.cos(math.pi - 0.5), turned, own - math.sin(math.pi - 0.5) * 0.5)
        return F.cross_entropy(64.0 * cos.scatter(1, y[:, None], turned), y)


def margin() -> Call:
    return call(Margin(), torch.randn(128, 3, 32, 32), torch.randint(0, 20_000, (128,)))


class Private(nn.Module):
    """Gradients of each sample, clipped (Abadi et al., 2016), by `torch.func`: no step is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Small(10, 32, groups=True)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        given = {k: v.detach() for k, v in self.net.named_parameters()}

        def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(self.net, p, (x[None],)).float(), y[None])

        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0), randomness="different")(given, x, y)
        size = torch.stack([g.flatten(1).float().square().sum(1) for g in each.values()]).sum(0).sqrt()
        part = (1.0 / (size + 1e-6)).clamp(max=1.0)
        return {k: torch.einsum("n,n...->...", part.to(g.dtype), g) for k, g in each.items()}


def private() -> Call:
    return call(Private(), torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)))


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g / (1 + (math.pi * x).square())


class Spiking(nn.Module):
    """Leaky neurons that fire (Fang et al., 2021), eight steps of time."""

    def __init__(self, width: int = 64, steps: int = 8) -> None:
        super().__init__()
        self.steps = steps
        sizes = [3, width, width, 2 * width, 2 * width]
        self.convs = nn.ModuleList(
            [nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in itertools.pairwise(sizes)]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(b) for b in sizes[1:]])
        self.out = nn.Linear(2 * width, 10)

    def _fired(self, x: Tensor) -> Tensor:
        v, fired = torch.zeros_like(x[0]), []
        for now in x:
            v = v + (now - v) / 2.0
            s = _Spike.apply(v - 1.0)
            v = v * (1 - s)
            fired.append(s)
        return torch.stack(fired)

    def forward(self, x: Tensor) -> Tensor:
        h = x.expand(self.steps, *x.shape)
        for k, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            h = self._fired(norm(conv(h.flatten(0, 1))).unflatten(0, (self.steps, -1)))
            if k % 2:
                h = F.max_pool2d(h.flatten(0, 1), 2).unflatten(0, (self.steps, -1))
        return self.out(h.mean((0, 3, 4)))


def spiking() -> Call:
    return call(Spiking(), torch.randn(32, 3, 32, 32))


class Variational(nn.Module):
    """A variational autoencoder written with `torch.distributions`."""

    def __init__(self, width: int = 64, size: int = 128) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128 * width, 2 * size),
        )
        self.up = nn.Sequential(
            nn.Linear(size, 128 * width),
            nn.ReLU(),
            nn.Unflatten(1, (2 * width, 8, 8)),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.down(x).float().chunk(2, 1)
        found = torch.distributions.Normal(mean, F.softplus(log) + 1e-4, validate_args=False)
        z = found.rsample()
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=False)
        seen = torch.distributions.Bernoulli(logits=self.up(z.to(x.dtype)).float(), validate_args=False)
        return (torch.distributions.kl_divergence(found, prior).sum(1) - seen.log_prob(x.float()).sum((1, 2, 3))).mean()


def variational() -> Call:
    return call(Variational(), torch.rand(256, 3, 32, 32))


class Tagger(nn.Module):
    """A conditional random field over a convolutional encoder: the forward algorithm, 64 steps of logsumexp."""

    def __init__(self, tags: int = 24, width: int = 256) -> None:
        super().__init__()
        self.embed, self.convs = (
            nn.Embedding(20_000, width),
            nn.ModuleList([nn.Conv1d(width, width, 3, padding=1) for _ in range(3)]),
        )
        self.out, self.moves = nn.Linear(width, tags), nn.Parameter(torch.randn(tags, tags))

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        h = self.embed(ids).transpose(1, 2)
        for conv in self.convs:
            h = h + F.gelu(conv(h))
        score, moves = self.out(h.transpose(1, 2)).float(), self.moves.float()
        mask, every = ids != 0, score[:, 0]
        own = score.gather(2, tags[..., None]).squeeze(2)
        path = own[:, 0] + ((own[:, 1:] + moves[tags[:, :-1], tags[:, 1:]]) * mask[:, 1:]).sum(1)
        for t in range(1, ids.shape[1]):
            step = torch.logsumexp(every[:, :, None] + moves, 1) + score[:, t]
            every = torch.where(mask[:, t, None], step, every)
        return (torch.logsumexp(every, 1) - path).mean()


def tagger() -> Call:
    ids = torch.randint(1, 20_000, (64, 64))
    ids[32:, 48:] = 0
    return call(Tagger(), ids, torch.randint(0, 24, (64, 64)))


class Capsules(nn.Module):
    """Routing by agreement (Sabour et al., 2017), three rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first = nn.Conv2d(1, 256, 9), nn.Conv2d(256, 256, 9, 2)
        self.weight = nn.Parameter(0.05 * torch.randn(1152, 10, 16, 8))

    @staticmethod
    def _squashed(x: Tensor) -> Tensor:
        n = x.square().sum(-1, keepdim=True)
        return n / (1 + n) * x / (n + 1e-8).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        u = self._squashed(self.first(F.relu(self.conv(x))).unflatten(1, (8, 32)).flatten(2).transpose(1, 2))
        seen = torch.einsum("nijk,bnk->bnij", self.weight.to(u.dtype), u)
        logits = torch.zeros(seen.shape[:3], device=x.device, dtype=seen.dtype)
        still = seen.detach()
        for k in range(3):
            c = logits.softmax(2)[..., None]
            v = self._squashed((c * (seen if k == 2 else still)).sum(1))
            if k < 2:
                logits = logits + (still * v[:, None]).sum(-1)
        return v.float().square().sum(-1).sqrt()


def capsules() -> Call:
    return call(Capsules(), torch.rand(128, 1, 28, 28))


class Branches(nn.Module):
    """RepVGG in training (Ding et al., 2021): three branches with batch norms of their own, added up."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.wide, self.norms = (
            nn.Conv2d(a, b, 3, stride, 1, bias=False),
            nn.ModuleList([nn.BatchNorm2d(b), nn.BatchNorm2d(b)]),
        )
        self.narrow, self.own = (
            nn.Conv2d(a, b, 1, stride, bias=False),
            nn.BatchNorm2d(b) if (a, stride) == (b, 1) else None,
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.wide(x)) + self.norms[1](self.narrow(x))
        return F.relu(y if self.own is None else y + self.own(x))


class Reparametrized(nn.Module):
    def __init__(self, counts: tuple[int, ...] = (2, 4, 14, 1), widths: tuple[int, ...] = (96, 192, 384, 1408)) -> None:
        super().__init__()
        a, layers = 64, [Branches(3, 64, 2)]
        for count, b in zip(counts, widths, strict=True):
            for k in range(count):
                layers.append(Branches(a, b, 1 if k else 2))
                a = b
        self.layers, self.out = nn.Sequential(*layers), nn.Linear(a, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x).mean((2, 3)))


def reparametrized() -> Call:
    return call(Reparametrized(), torch.randn(64, 3, 224, 224))
