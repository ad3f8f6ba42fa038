"""Sequences without attention, and results that a loop refines."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.published import Call
from tests.zoo.written import call


def _sums(x: Tensor) -> Tensor:
    """Return sums of all segments of the last dim, minus infinity above the diagonal."""
    n = x.shape[-1]
    total = x.cumsum(-1)
    seen = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
    return (total[..., :, None] - total[..., None, :]).masked_fill(~seen, -torch.inf)


class Duality(nn.Module):
    """Mamba 2's layer in blocks of 64 (Dao and Gu, 2024, listing 1)."""

    def __init__(self, width: int, heads: int, state: int = 64, block: int = 64) -> None:
        super().__init__()
        inner = 2 * width
        self.heads, self.state, self.block, self.inner = heads, state, block, inner
        self.norm, self.ins = nn.RMSNorm(width), nn.Linear(width, 2 * inner + 2 * state + heads, bias=False)
        self.conv = nn.Conv1d(inner + 2 * state, inner + 2 * state, 4, padding=3, groups=inner + 2 * state)
        self.log_a, self.skip = nn.Parameter(torch.rand(heads).log()), nn.Parameter(torch.ones(heads))
        self.gated, self.out = nn.RMSNorm(inner), nn.Linear(inner, width, bias=False)

    def _scan(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        x, b, c = (t.unflatten(1, (-1, self.block)) for t in (x, b, c))
        a = a.unflatten(1, (-1, self.block)).permute(0, 3, 1, 2)
        total = a.cumsum(-1)
        inside = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, _sums(a).exp(), x)
        states = torch.einsum("bcln,bhcl,bclhp->bchpn", b, (total[..., -1:] - total).exp(), x)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        decay = _sums(F.pad(total[..., -1], (1, 0))).exp()
        states = torch.einsum("bhzc,bchpn->bzhpn", decay, states)[:, :-1]
        return (inside + torch.einsum("bcln,bchpn,bhcl->bclhp", c, states, total.exp())).flatten(1, 2)

    def forward(self, h: Tensor) -> Tensor:
        gate, x, step = self.ins(self.norm(h)).split([self.inner, self.inner + 2 * self.state, self.heads], -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : h.shape[1]].transpose(1, 2))
        x, b, c = x.float().split([self.inner, self.state, self.state], -1)
        x, step = x.unflatten(-1, (self.heads, -1)), F.softplus(step.float())
        y = self._scan(x * step[..., None], -self.log_a.float().exp() * step, b, c) + x * self.skip.float()[:, None]
        return h + self.out(self.gated(y.flatten(2).to(h.dtype) * F.silu(gate)))


def duality() -> Call:
    return call(nn.Sequential(*[Duality(768, 24) for _ in range(4)]), torch.randn(4, 1024, 768))


class Hyena(nn.Module):
    """Long convolutions whose filters are computed (Poli et al., 2023), by Fourier transforms."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norm, self.ins, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.short = nn.Conv1d(3 * width, 3 * width, 3, padding=2, groups=3 * width)
        self.filters = nn.ModuleList([nn.Linear(9, 64), nn.Linear(64, 64), nn.Linear(64, width, bias=False)])
        self.bias = nn.Parameter(torch.randn(width))
        t = torch.linspace(0, 1, length)[:, None]
        self.register_buffer(
            "at", torch.cat([t, *(f(2 * math.pi * k * t) for k in range(1, 5) for f in (torch.sin, torch.cos))], 1)
        )
        self.register_buffer("decay", torch.exp(-t * torch.linspace(3, 30, width)))

    def forward(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        q, k, v = self.short(self.ins(self.norm(h)).transpose(1, 2))[..., :n].chunk(3, 1)
        f = self.at[:n]
        for layer in self.filters[:-1]:
            f = torch.sin(10 * layer(f))
        f = (self.filters[-1](f) * self.decay[:n]).T
        u = (k * v).float()
        y = torch.fft.irfft(torch.fft.rfft(u, 2 * n) * torch.fft.rfft(f.float(), 2 * n), n=2 * n)[..., :n]
        y = (y + u * self.bias.float()[:, None]).to(h.dtype)
        return h + self.out((q * y).transpose(1, 2))


def hyena() -> Call:
    return call(nn.Sequential(*[Hyena(512, 2048) for _ in range(4)]), torch.randn(4, 2048, 512))


class Diagonal(nn.Module):
    """S4D (Gu et al., 2022): a kernel of complex exponentials, convolved by Fourier transforms."""

    def __init__(self, width: int, state: int = 64) -> None:
        super().__init__()
        self.norm, self.skip = nn.LayerNorm(width), nn.Parameter(torch.randn(width))
        self.log_step = nn.Parameter(torch.rand(width) * 4 - 7)
        self.log_real = nn.Parameter(torch.log(0.5 * torch.ones(width, state // 2)))
        self.imaginary = nn.Parameter(math.pi * torch.arange(state // 2).repeat(width, 1))
        self.c = nn.Parameter(torch.randn(width, state // 2, 2))
        self.out = nn.Sequential(nn.Conv1d(width, 2 * width, 1), nn.GLU(1))

    def _kernel(self, n: int) -> Tensor:
        step, a = self.log_step.float().exp(), torch.complex(-self.log_real.float().exp(), self.imaginary.float())
        da = a * step[:, None]
        k = (da[..., None] * torch.arange(n, device=a.device)).exp()
        c = torch.view_as_complex(self.c.float()) * (da.exp() - 1) / a
        return 2 * torch.einsum("hn,hnl->hl", c, k).real

    def forward(self, h: Tensor) -> Tensor:
        n, u = h.shape[1], self.norm(h).transpose(1, 2)
        f = torch.fft.rfft(self._kernel(n), 2 * n)
        y = torch.fft.irfft(torch.fft.rfft(u.float(), 2 * n) * f, 2 * n)[..., :n].to(h.dtype)
        return h + self.out(F.gelu(y + u * self.skip[:, None])).transpose(1, 2)


def diagonal() -> Call:
    return call(nn.Sequential(*[Diagonal(256) for _ in range(4)]), torch.randn(8, 1024, 256))


class Matrix(nn.Module):
    """xLSTM's matrix memory, all steps at once (Beck et al., 2024, appendix A.3)."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm, self.up, self.down = (
            heads,
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(2 * width, width),
        )
        self.conv = nn.Conv1d(2 * width, 2 * width, 4, padding=3, groups=2 * width)
        self.qk, self.v, self.gates = (
            nn.Linear(2 * width, 4 * width),
            nn.Linear(2 * width, 2 * width),
            nn.Linear(2 * width, 2 * heads),
        )
        self.last = nn.GroupNorm(heads, 2 * width)

    def forward(self, h: Tensor) -> Tensor:
        x, gate = self.up(self.norm(h)).chunk(2, -1)
        n = x.shape[1]
        c = F.silu(self.conv(x.transpose(1, 2))[..., :n].transpose(1, 2))
        q, k = self.qk(c).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, self.v(x)))
        i, f = self.gates(x).float().unflatten(-1, (2, self.heads)).permute(2, 0, 3, 1)
        total = F.logsigmoid(f).cumsum(-1)
        d = total[..., :, None] - total[..., None, :] + i[..., None, :]
        d = d.masked_fill(~torch.ones(n, n, dtype=torch.bool, device=x.device).tril(), -torch.inf)
        top = d.amax(-1, keepdim=True)
        s = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).float() * (d - top).exp()
        s = s / (torch.maximum(s.sum(-1, keepdim=True).abs(), (-top).exp()) + 1e-6)
        y = (s.to(v.dtype) @ v).transpose(1, 2).flatten(2)
        y = self.last(y.flatten(0, 1)).view_as(y)
        return h + self.down(y * F.silu(gate))


def matrix() -> Call:
    return call(nn.Sequential(*[Matrix(512) for _ in range(4)]), torch.randn(4, 512, 512))


class Retention(nn.Module):
    """RetNet's layer, all steps at once (Sun et al., 2023)."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkvg, self.out = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.register_buffer("decay", torch.log(1 - 2.0 ** (-5 - torch.arange(heads))))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v, g = self.qkvg(self.norms[0](h)).unflatten(-1, (4, self.heads, -1)).permute(2, 0, 3, 1, 4)
        at = torch.arange(h.shape[1], device=h.device)
        apart = (at[:, None] - at).clamp(min=0)
        mask = (apart * self.decay.float()[:, None, None]).exp().tril()
        mask = mask / mask.sum(-1, keepdim=True).sqrt()
        s = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) * mask.to(q.dtype)
        s = s / s.detach().float().sum(-1, keepdim=True).abs().clamp(min=1).to(s.dtype)
        y = F.rms_norm(s @ v, v.shape[-1:])
        h = h + self.out((F.silu(g) * y).transpose(1, 2).flatten(2))
        return h + self.mlp(self.norms[1](h))


def retention() -> Call:
    return call(nn.Sequential(*[Retention(768) for _ in range(4)]), torch.randn(4, 512, 768))


class Joint(nn.Module):
    """A block of a diffusion transformer over images and text together (Esser et al., 2024)."""

    def __init__(self, width: int, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.parts = nn.ModuleList(
            nn.ModuleDict({"shift": nn.Linear(width, 6 * width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width),
                           "q": nn.RMSNorm(width // heads), "k": nn.RMSNorm(width // heads),
                           "mlp": nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))})
            for _ in range(2)
        )  # fmt: skip

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        *both, when = given
        shifts = [p["shift"](F.silu(when))[:, None].chunk(6, -1) for p in self.parts]
        qkv = []
        for x, p, s in zip(both, self.parts, shifts, strict=True):
            h = F.layer_norm(x, x.shape[-1:]) * (1 + s[1]) + s[0]
            q, k, v = p["qkv"](h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            qkv.append((p["q"](q), p["k"](k), v))
        q, k, v = (torch.cat(t, 2) for t in zip(*qkv, strict=True))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        outs = []
        for x, p, s, y in zip(both, self.parts, shifts, seen.split([x.shape[1] for x in both], 1), strict=True):
            x = x + s[2] * p["out"](y)
            outs.append(x + s[5] * p["mlp"](F.layer_norm(x, x.shape[-1:]) * (1 + s[4]) + s[3]))
        return outs[0], outs[1], when


class Images(nn.Module):
    def __init__(self, width: int = 1024, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Joint(width) for _ in range(blocks)])

    def forward(self, x: Tensor, text: Tensor, when: Tensor) -> Tensor:
        given = (x, text, when)
        for block in self.blocks:
            given = block(given)
        return given[0]


def joint() -> Call:
    return call(Images(), torch.randn(4, 1024, 1024), torch.randn(4, 154, 1024), torch.randn(4, 1024))


class Optical(nn.Module):
    """RAFT (Teed and Deng, 2020): correlations of all pairs, looked up around a flow that six rounds refine."""

    def __init__(self, width: int = 128, radius: int = 3, rounds: int = 6) -> None:
        super().__init__()
        self.radius, self.rounds, seen = radius, rounds, 4 * (2 * radius + 1) ** 2

        def encoder(norm: type[nn.Module]) -> nn.Module:
            sizes = [(3, 64, 7), (64, 96, 3), (96, width, 3)]
            return nn.Sequential(
                *[nn.Sequential(nn.Conv2d(a, b, k, 2, k // 2), norm(b), nn.ReLU()) for a, b, k in sizes],
                nn.Conv2d(width, 2 * width, 1),
            )

        self.net, self.context = encoder(nn.InstanceNorm2d), encoder(nn.BatchNorm2d)
        self.motion = nn.Sequential(nn.Conv2d(seen + 2, 96, 3, padding=1), nn.ReLU())
        self.gates, self.new = (
            nn.Conv2d(2 * width + 98, 2 * width, 3, padding=1),
            nn.Conv2d(2 * width + 98, width, 3, padding=1),
        )
        self.out = nn.Sequential(nn.Conv2d(width, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 2, 3, padding=1))

    def _look(self, pyramid: list[Tensor], at: Tensor) -> Tensor:
        n, _, h, w = at.shape
        r = torch.arange(-self.radius, self.radius + 1, device=at.device, dtype=at.dtype)
        around = torch.stack(torch.meshgrid(r, r, indexing="ij"), -1)
        seen = []
        for level, c in enumerate(pyramid):
            p = at.permute(0, 2, 3, 1).reshape(-1, 1, 1, 2) / 2**level + around
            size = torch.tensor([c.shape[-1], c.shape[-2]], device=at.device)
            found = F.grid_sample(c, 2 * p / (size - 1) - 1, align_corners=True)
            seen.append(found.reshape(n, h, w, -1))
        return torch.cat(seen, -1).permute(0, 3, 1, 2)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        a, b = self.net(torch.cat([one, two])).float().chunk(2)
        n, c, h, w = a.shape
        pairs = (torch.einsum("nchw,ncij->nhwij", a, b) / math.sqrt(c)).reshape(n * h * w, 1, h, w)
        pyramid = [pairs]
        for _ in range(3):
            pyramid.append(F.avg_pool2d(pyramid[-1], 2))
        hidden, context = self.context(one).chunk(2, 1)
        hidden, context = torch.tanh(hidden), F.relu(context)
        y, x = torch.meshgrid(torch.arange(h, device=a.device), torch.arange(w, device=a.device), indexing="ij")
        start = torch.stack([x, y]).float()[None]
        at = start.expand(n, -1, -1, -1)
        for _ in range(self.rounds):
            at = at.detach()
            moved = (at - start).to(hidden.dtype)
            seen = self.motion(torch.cat([self._look(pyramid, at).to(hidden.dtype), moved], 1))
            given = torch.cat([context, seen, moved], 1)
            z, r = self.gates(torch.cat([hidden, given], 1)).sigmoid().chunk(2, 1)
            hidden = (1 - z) * hidden + z * torch.tanh(self.new(torch.cat([r * hidden, given], 1)))
            at = at + self.out(hidden).float()
        return F.interpolate(at - start, scale_factor=8, mode="bilinear", align_corners=True) * 8


def optical() -> Call:
    return call(Optical(), torch.randn(2, 3, 256, 384), torch.randn(2, 3, 256, 384))


class Stereo(nn.Module):
    """PSMNet's volume of costs (Chang and Chen, 2018): shifted features, 3-d convolutions, an expected disparity."""

    def __init__(self, width: int = 32, shifts: int = 24) -> None:
        super().__init__()
        self.shifts = shifts
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 2, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.volume = nn.Sequential(
            *[
                nn.Sequential(nn.Conv3d(a, width, 3, padding=1), nn.BatchNorm3d(width), nn.ReLU())
                for a in (2 * width, width, width)
            ],
            nn.Conv3d(width, 1, 3, padding=1),
        )

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.net(left), self.net(right)
        n, c, h, w = a.shape
        cost = a.new_zeros(n, 2 * c, self.shifts, h, w)
        for k in range(self.shifts):
            cost[:, :c, k, :, k:] = a[..., k:]
            cost[:, c:, k, :, k:] = b[..., : w - k]
        found = F.interpolate(self.volume(cost).float(), scale_factor=4, mode="trilinear", align_corners=False).squeeze(
            1
        )
        far = torch.arange(found.shape[1], device=a.device, dtype=torch.float32)
        return (found.softmax(1) * far[:, None, None]).sum(1)


def stereo() -> Call:
    return call(Stereo(), torch.randn(2, 3, 256, 512), torch.randn(2, 3, 256, 512))


class Speaking(nn.Module):
    """Tacotron 2's decoder with the sound given (Shen et al., 2018): forty steps of cells and attention to places."""

    def __init__(self, text: int = 512, mels: int = 80, width: int = 512, steps: int = 40) -> None:
        super().__init__()
        self.steps = steps
        self.pre = nn.Sequential(nn.Linear(mels, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.first, self.second = nn.LSTMCell(256 + text, width), nn.LSTMCell(width + text, width)
        self.query, self.memory, self.place = (
            nn.Linear(width, 128, bias=False),
            nn.Linear(text, 128, bias=False),
            nn.Linear(32, 128, bias=False),
        )
        self.conv, self.score, self.out = (
            nn.Conv1d(2, 32, 31, padding=15, bias=False),
            nn.Linear(128, 1, bias=False),
            nn.Linear(width + text, mels + 1),
        )

    def forward(self, text: Tensor, mels: Tensor) -> Tensor:
        n, length, _ = text.shape
        keys, given = self.memory(text), self.pre(mels)
        state = tuple(text.new_zeros(n, self.query.in_features) for _ in range(4))
        weight, total, context, outs = (
            text.new_zeros(n, length),
            text.new_zeros(n, length),
            text.new_zeros(n, text.shape[-1]),
            [],
        )
        for t in range(self.steps):
            h, c = self.first(
                torch.cat([given[:, t], context], -1), (state[0].to(context.dtype), state[1].to(context.dtype))
            )
            where = self.place(self.conv(torch.stack([weight, total], 1)).transpose(1, 2))
            weight = (
                self.score(torch.tanh(self.query(h)[:, None] + where + keys)).squeeze(-1).softmax(-1).to(text.dtype)
            )
            total, context = total + weight, torch.bmm(weight[:, None], text).squeeze(1)
            g, e = self.second(torch.cat([h, context], -1), (state[2].to(h.dtype), state[3].to(h.dtype)))
            state = (h, c, g, e)
            outs.append(self.out(torch.cat([g, context], -1)))
        return torch.stack(outs, 1)


def speaking() -> Call:
    return call(Speaking(), torch.randn(32, 80, 512), torch.randn(32, 40, 80))


class Correlated(nn.Module):
    """Autoformer's attention (Wu et al., 2021): series shifted by the delays that correlate most, and moving means."""

    def __init__(self, width: int = 512, heads: int = 8, top: int = 6) -> None:
        super().__init__()
        self.heads, self.top, self.qkv, self.out = heads, top, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    @staticmethod
    def _season(x: Tensor) -> Tensor:
        ends = [x[:, :1].expand(-1, 12, -1), x, x[:, -1:].expand(-1, 12, -1)]
        return x - F.avg_pool1d(torch.cat(ends, 1).transpose(1, 2), 25, 1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = self.qkv(x).float().unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 4, 1)
        found = torch.fft.irfft(torch.fft.rfft(q) * torch.fft.rfft(k).conj(), n=n)
        weight, delay = found.mean((1, 2)).topk(self.top, -1)
        weight, twice = weight.softmax(-1), torch.cat([v, v], -1)
        at, y = torch.arange(n, device=x.device).expand_as(v), torch.zeros_like(v)
        for j in range(self.top):
            y = y + twice.gather(-1, at + delay[:, j, None, None, None]) * weight[:, j, None, None, None]
        x = self._season(x + self.out(y.permute(0, 3, 1, 2).flatten(2).to(x.dtype)))
        return self._season(x + self.mlp(x))


def correlated() -> Call:
    return call(nn.Sequential(*[Correlated() for _ in range(3)]), torch.randn(32, 96, 512))


class Sounds(nn.Module):
    """DDSP (Engel et al., 2020): sixty-four harmonics and filtered noise from a pitch and a loudness."""

    def __init__(self, width: int = 256, harmonics: int = 64, bands: int = 65) -> None:
        super().__init__()
        self.harmonics, self.bands = harmonics, bands
        self.net = nn.Sequential(
            *[
                nn.Sequential(nn.Linear(2 if k == 0 else width, width), nn.LayerNorm(width), nn.LeakyReLU())
                for k in range(4)
            ]
        )
        self.out = nn.Linear(width, harmonics + 1 + bands)

    def forward(self, pitch: Tensor, loud: Tensor, hop: int = 64) -> Tensor:
        h = self.out(self.net(torch.stack([pitch / 1000, loud], -1))).float()
        size = 2 * h.sigmoid() ** math.log(10) + 1e-7
        total, each, noise = size.split([1, self.harmonics, self.bands], -1)
        k, f = torch.arange(1, self.harmonics + 1, device=pitch.device), pitch.float()[..., None]
        each = each * (f * k < 8000)
        each = each / each.sum(-1, keepdim=True) * total
        each = F.interpolate(each.transpose(1, 2), scale_factor=hop, mode="linear")
        f = F.interpolate(f.transpose(1, 2), scale_factor=hop, mode="linear")
        turned = torch.cumsum(2 * math.pi * f / 16_000, -1) * k[:, None]
        tone = (torch.sin(turned) * each).sum(1)
        impulse = torch.fft.irfft(torch.complex(noise, torch.zeros_like(noise)))
        impulse = torch.roll(impulse, self.bands - 1, -1) * torch.hann_window(impulse.shape[-1], device=pitch.device)
        drawn = torch.rand(*noise.shape[:2], hop, device=pitch.device) * 2 - 1
        length = hop + impulse.shape[-1]
        hiss = torch.fft.irfft(torch.fft.rfft(drawn, length) * torch.fft.rfft(impulse, length), n=length)[..., :hop]
        return tone + hiss.flatten(1)


def sounds() -> Call:
    return call(Sounds(), 100 + 400 * torch.rand(16, 250), torch.rand(16, 250))
