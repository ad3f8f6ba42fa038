"""Images, volumes and videos."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.published import Call
from tests.zoo.written import call


class Residual(nn.Module):
    """A block of a diffusion net: group norms, SiLU, and the step added in between."""

    def __init__(self, a: int, b: int, step: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(32, a), nn.GroupNorm(32, b)])
        self.convs = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)])
        self.step = nn.Linear(step, b)
        self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        h = self.convs[0](F.silu(self.norms[0](x))) + self.step(F.silu(step))[:, :, None, None]
        return self.skip(x) + self.convs[1](F.silu(self.norms[1](h)))


class Attended(nn.Module):
    """Attention of pixels to each other, then to a text."""

    def __init__(self, width: int, text: int, heads: int = 8) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(32, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.own, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.ModuleList([nn.Linear(width, width) for _ in range(2)]),
        )
        self.query, self.text = nn.Linear(width, width, bias=False), nn.Linear(text, 2 * width, bias=False)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def _heads(self, *given: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in given)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        h = self.norm(x).flatten(2).transpose(1, 2)
        h = h + self.out[0](self._heads(*self.own(self.norms[0](h)).chunk(3, -1)))
        h = h + self.out[1](self._heads(self.query(self.norms[1](h)), *self.text(text).chunk(2, -1)))
        value, gate = self.up(self.norms[2](h)).chunk(2, -1)
        h = h + self.down(value * F.gelu(gate))
        return x + h.transpose(1, 2).reshape(x.shape)


class Denoiser(nn.Module):
    """Rombach et al., 2022, with half of the channels."""

    def __init__(self, widths: Sequence[int] = (160, 320, 640), text: int = 768) -> None:
        super().__init__()
        step = 4 * widths[0]
        self.first, self.step = (
            nn.Conv2d(4, widths[0], 3, padding=1),
            nn.Sequential(nn.Linear(160, step), nn.SiLU(), nn.Linear(step, step)),
        )
        pairs = list(zip((widths[0], *widths), widths, strict=False))
        self.down = nn.ModuleList(
            [nn.ModuleList([Residual(a, b, step), Attended(b, text), nn.Conv2d(b, b, 3, 2, 1)]) for a, b in pairs]
        )
        last = widths[-1]
        self.middle = nn.ModuleList([Residual(last, last, step), Attended(last, text), Residual(last, last, step)])
        self.up = nn.ModuleList(
            [
                nn.ModuleList([Residual(2 * b, a, step), Attended(a, text), nn.Conv2d(b, b, 3, padding=1)])
                for a, b in reversed(pairs)
            ]
        )
        self.out = nn.Sequential(nn.GroupNorm(32, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 4, 3, padding=1))

    def forward(self, x: Tensor, when: Tensor, text: Tensor) -> Tensor:
        waves = when[:, None] * torch.exp(-math.log(10000) / 80 * torch.arange(80, device=x.device))
        step = self.step(torch.cat([waves.cos(), waves.sin()], -1).to(x.dtype))
        x, kept = self.first(x), []
        for block, attend, shrink in self.down:  # type: ignore[misc]
            x = attend(block(x, step), text)
            kept.append(x)
            x = shrink(x)
        x = self.middle[2](self.middle[1](self.middle[0](x, step), text), step)
        for block, attend, grow in self.up:  # type: ignore[misc]
            x = grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            x = attend(block(torch.cat([x, kept.pop()], 1), step), text)
        return self.out(x)


def denoiser() -> Call:
    return call(Denoiser(), torch.randn(8, 4, 64, 64), torch.arange(8) * 100.0, torch.randn(8, 77, 768))


class Transformed(nn.Module):
    """A block of DiT (Peebles and Xie, 2023): scale, shift and gate follow the step."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.how = heads, nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.norms = nn.ModuleList([nn.LayerNorm(width, elementwise_affine=False) for _ in range(2)])
        self.own, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        a, b, c, d, e, f = self.how(step)[:, None].chunk(6, -1)
        q, k, v = self.own(self.norms[0](x) * (1 + a) + b).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + c * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + f * self.mlp(self.norms[1](x) * (1 + d) + e)


class DiffusionTransformer(nn.Module):
    def __init__(self, width: int = 384, depth: int = 12, heads: int = 6) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(4, width, 2, 2), nn.Parameter(torch.randn(1, 256, width) * 0.02)
        self.step = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks, self.out = (
            nn.ModuleList([Transformed(width, heads) for _ in range(depth)]),
            nn.Linear(width, 2 * 2 * 8),
        )

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        step = self.step(when)
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x, step)
        return (
            self.out(x).unflatten(-1, (2, 2, 8)).unflatten(1, (16, 16)).permute(0, 5, 1, 3, 2, 4).reshape(-1, 8, 32, 32)
        )


def diffusion_transformer() -> Call:
    return call(DiffusionTransformer(), torch.randn(64, 4, 32, 32), torch.randn(64, 256))


def _double(
    conv: type[nn.Module], norm: type[nn.Module], a: int, b: int, act: Callable[[], nn.Module]
) -> nn.Sequential:
    return nn.Sequential(*(m for i in (a, b) for m in (conv(i, b, 3, padding=1, bias=False), norm(b), act())))


class Segmenter(nn.Module):
    """A U-Net (Ronneberger et al., 2015), in two dimensions with batch norms or in three as nnU-Net (Isensee et al., 2021)."""

    def __init__(self, dims: int, widths: Sequence[int], ins: int, outs: int) -> None:
        super().__init__()
        conv, up, norm = (
            (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d)
            if dims == 2
            else (nn.Conv3d, nn.ConvTranspose3d, nn.InstanceNorm3d)
        )
        act: Callable[[], nn.Module] = nn.ReLU if dims == 2 else (lambda: nn.LeakyReLU(0.01))
        pairs = list(zip((ins, *widths), widths, strict=False))
        self.down = nn.ModuleList([_double(conv, norm, a, b, act) for a, b in pairs])
        self.up = nn.ModuleList([up(b, a, 2, 2) for a, b in reversed(pairs[1:])])
        self.join = nn.ModuleList([_double(conv, norm, 2 * a, a, act) for a, _ in reversed(pairs[1:])])
        self.pool, self.out = nn.MaxPool2d(2) if dims == 2 else nn.MaxPool3d(2), conv(widths[0], outs, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for k, block in enumerate(self.down):
            x = block(self.pool(x) if k else x)
            kept.append(x)
        kept.pop()
        for grow, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), grow(x)], 1))
        return self.out(x)


def unet() -> Call:
    return call(Segmenter(2, (64, 128, 256, 512), 3, 21), torch.randn(16, 3, 256, 256))


def unet_3d() -> Call:
    return call(Segmenter(3, (32, 64, 128, 256), 1, 4), torch.randn(2, 1, 96, 96, 96))


class Video(nn.Module):
    """Tran et al., 2018: a ResNet of 3-d convolutions, factored into space and time if asked."""

    def __init__(self, factored: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, 64, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False), nn.BatchNorm3d(64), nn.ReLU()
        )
        layers, width = [], 64
        for k, out in enumerate((64, 64, 128, 128, 256, 256, 512, 512)):
            layers.append(_VideoBlock(width, out, 2 if k in (2, 4, 6) else 1, factored))
            width = out
        self.blocks, self.out = nn.Sequential(*layers), nn.Linear(512, 400)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.stem(x)).mean((2, 3, 4)))


class _VideoBlock(nn.Module):
    def __init__(self, a: int, b: int, stride: int, factored: bool) -> None:
        super().__init__()
        self.first, self.second = self._conv(a, b, stride, factored), self._conv(b, b, 1, factored)
        self.norms = nn.ModuleList([nn.BatchNorm3d(b), nn.BatchNorm3d(b)])
        self.skip = (
            nn.Sequential(nn.Conv3d(a, b, 1, stride, bias=False), nn.BatchNorm3d(b)) if stride > 1 else nn.Identity()
        )

    @staticmethod
    def _conv(a: int, b: int, s: int, factored: bool) -> nn.Module:
        if not factored:
            return nn.Conv3d(a, b, 3, s, 1, bias=False)
        middle = 3 * 3 * 3 * a * b // (3 * 3 * a + 3 * b)
        space = nn.Conv3d(a, middle, (1, 3, 3), (1, s, s), (0, 1, 1), bias=False)
        return nn.Sequential(
            space, nn.BatchNorm3d(middle), nn.ReLU(), nn.Conv3d(middle, b, (3, 1, 1), (s, 1, 1), (1, 0, 0), bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(h)) + self.skip(x))


def video() -> Call:
    return call(Video(False), torch.randn(8, 3, 16, 112, 112))


def video_factored() -> Call:
    return call(Video(True), torch.randn(8, 3, 16, 112, 112))


class SuperResolution(nn.Module):
    """EDSR (Lim et al., 2017) with the channel attention of RCAN (Zhang et al., 2018)."""

    def __init__(self, width: int = 64, depth: int = 16, scale: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
                for _ in range(depth)
            ]
        )
        self.gates = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(width, width // 16, 1), nn.ReLU(), nn.Conv2d(width // 16, width, 1), nn.Sigmoid()
                )
                for _ in range(depth)
            ]
        )
        self.grow = nn.Sequential(
            nn.Conv2d(width, width * scale**2, 3, padding=1), nn.PixelShuffle(scale), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.first(x)
        for block, gate in zip(self.blocks, self.gates, strict=True):
            y = block(h)
            h = h + y * gate(y.mean((2, 3), keepdim=True))
        return self.grow(first + self.last(h))


def super_resolution() -> Call:
    return call(SuperResolution(), torch.randn(16, 3, 96, 96))


class Translator(nn.Module):
    """CycleGAN's generator (Zhu et al., 2017): instance norms, mirrored borders, transposed convolutions."""

    def __init__(self, width: int = 64, depth: int = 9) -> None:
        super().__init__()

        def layer(conv: nn.Module, b: int, pad: int = 0) -> list[nn.Module]:
            return [*([nn.ReflectionPad2d(pad)] if pad else []), conv, nn.InstanceNorm2d(b), nn.ReLU()]

        self.down = nn.Sequential(
            *layer(nn.Conv2d(3, width, 7), width, 3), *layer(nn.Conv2d(width, 2 * width, 3, 2, 1), 2 * width),
            *layer(nn.Conv2d(2 * width, 4 * width, 3, 2, 1), 4 * width),
        )  # fmt: skip
        wide = 4 * width
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(*layer(nn.Conv2d(wide, wide, 3), wide, 1), *layer(nn.Conv2d(wide, wide, 3), wide, 1)[:-1])
                for _ in range(depth)
            ]
        )
        self.up = nn.Sequential(
            *layer(nn.ConvTranspose2d(wide, 2 * width, 3, 2, 1, 1), 2 * width),
            *layer(nn.ConvTranspose2d(2 * width, width, 3, 2, 1, 1), width),
            nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        for block in self.blocks:
            x = x + block(x)
        return self.up(x)


def translator() -> Call:
    return call(Translator(), torch.randn(4, 3, 256, 256))


class Modulated(nn.Module):
    """StyleGAN2's convolution (Karras et al., 2020): each image has its own weights, so images are groups."""

    def __init__(self, a: int, b: int, style: int, up: bool) -> None:
        super().__init__()
        self.weight, self.style, self.up = nn.Parameter(torch.randn(b, a, 3, 3)), nn.Linear(style, a), up
        self.noise, self.bias = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(b, 1, 1))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        n, a = x.shape[:2]
        weight = self.weight * (self.style(w) + 1)[:, None, :, None, None] / math.sqrt(9 * a)
        weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        if self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        x = F.conv2d(x.reshape(1, n * a, *x.shape[2:]), weight.flatten(0, 1), padding=1, groups=n)
        return F.leaky_relu(x.view(n, -1, *x.shape[2:]) + self.bias, 0.2) * math.sqrt(2)


class StyleGenerator(nn.Module):
    def __init__(self, style: int = 512, widths: Sequence[int] = (512, 512, 512, 256, 128, 64)) -> None:
        super().__init__()
        self.map = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(style, style), nn.LeakyReLU(0.2))))
        self.start = nn.Parameter(torch.randn(1, widths[0], 4, 4))
        pairs = list(itertools.pairwise(widths))
        self.convs = nn.ModuleList(
            [nn.ModuleList([Modulated(a, b, style, True), Modulated(b, b, style, False)]) for a, b in pairs]
        )
        self.colors = nn.ModuleList([nn.Conv2d(b, 3, 1) for _, b in pairs])

    def forward(self, z: Tensor) -> Tensor:
        w = self.map(z * (z.square().mean(1, keepdim=True) + 1e-8).rsqrt())
        x, shown = self.start.expand(len(z), -1, -1, -1), None
        for (grow, keep), color in zip(self.convs, self.colors, strict=True):  # type: ignore[misc]
            x = keep(grow(x, w), w)
            shown = (
                color(x)
                if shown is None
                else color(x) + F.interpolate(shown, scale_factor=2.0, mode="bilinear", align_corners=False)
            )
        assert shown is not None
        return shown


def style_generator() -> Call:
    return call(StyleGenerator(), torch.randn(16, 512))


class _Cross(nn.Module):
    """YOLO's cross-stage block: half of the channels pass through bottlenecks."""

    def __init__(self, a: int, b: int, depth: int, add: bool = True) -> None:
        super().__init__()
        self.add, self.left, self.right, self.out = add, _silu(a, b // 2, 1), _silu(a, b // 2, 1), _silu(b, b, 1)
        self.blocks = nn.ModuleList(
            [nn.Sequential(_silu(b // 2, b // 2, 1), _silu(b // 2, b // 2, 3)) for _ in range(depth)]
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.left(x)
        for block in self.blocks:
            h = h + block(h) if self.add else block(h)
        return self.out(torch.cat([h, self.right(x)], 1))


def _silu(a: int, b: int, k: int, s: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, k, s, (k - 1) // 2, bias=False), nn.BatchNorm2d(b), nn.SiLU())


class Detector(nn.Module):
    """A YOLO of size S (the published v5 layout): a pyramid of three scales."""

    def __init__(self, w: int = 32, outs: int = 255) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _silu(3, w, 6, 2),
            _silu(w, 2 * w, 3, 2),
            _Cross(2 * w, 2 * w, 1),
            _silu(2 * w, 4 * w, 3, 2),
            _Cross(4 * w, 4 * w, 2),
        )
        self.middle = nn.Sequential(_silu(4 * w, 8 * w, 3, 2), _Cross(8 * w, 8 * w, 3))
        self.deep = nn.Sequential(_silu(8 * w, 16 * w, 3, 2), _Cross(16 * w, 16 * w, 1))
        self.pool, self.pooled = _silu(16 * w, 8 * w, 1), _silu(32 * w, 16 * w, 1)
        self.lateral = nn.ModuleList([_silu(16 * w, 8 * w, 1), _silu(8 * w, 4 * w, 1)])
        self.up = nn.ModuleList([_Cross(16 * w, 8 * w, 1, False), _Cross(8 * w, 4 * w, 1, False)])
        self.shrink = nn.ModuleList([_silu(4 * w, 4 * w, 3, 2), _silu(8 * w, 8 * w, 3, 2)])
        self.down = nn.ModuleList([_Cross(8 * w, 8 * w, 1, False), _Cross(16 * w, 16 * w, 1, False)])
        self.heads = nn.ModuleList([nn.Conv2d(k * w, outs, 1) for k in (4, 8, 16)])

    def forward(self, x: Tensor) -> list[Tensor]:
        a = self.stem(x)
        b = self.middle(a)
        c = self.pool(self.deep(b))
        pools = [c]
        for _ in range(3):
            pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
        c = self.lateral[0](self.pooled(torch.cat(pools, 1)))
        b = self.lateral[1](self.up[0](torch.cat([F.interpolate(c, scale_factor=2.0), b], 1)))
        a = self.up[1](torch.cat([F.interpolate(b, scale_factor=2.0), a], 1))
        b = self.down[0](torch.cat([self.shrink[0](a), b], 1))
        c = self.down[1](torch.cat([self.shrink[1](b), c], 1))
        found = [
            head(y).unflatten(1, (3, -1)).permute(0, 1, 3, 4, 2) for head, y in zip(self.heads, (a, b, c), strict=True)
        ]
        return [torch.cat([y[..., :4].sigmoid() * 2, y[..., 4:].sigmoid()], -1) for y in found]


def detector() -> Call:
    return call(Detector(), torch.randn(16, 3, 640, 640))


class Quantizer(nn.Module):
    """VQ-VAE (van den Oord et al., 2017): the nearest of 512 codes, and gradients straight through."""

    def __init__(self, width: int = 128, codes: int = 512) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, 64, 3, padding=1),
        )
        self.codes = nn.Embedding(codes, 64)
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(64, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x).permute(0, 2, 3, 1)
        flat, codes = z.flatten(0, 2), self.codes.weight.to(z.dtype)
        away = flat.square().sum(1, keepdim=True) - 2 * flat @ codes.t() + codes.square().sum(1)
        nearest = self.codes(away.argmin(1)).view(z.shape).to(z.dtype)
        loss = F.mse_loss(nearest, z.detach()) + 0.25 * F.mse_loss(z, nearest.detach())
        return self.decode((z + (nearest - z).detach()).permute(0, 3, 1, 2)), loss


def quantizer() -> Call:
    return call(Quantizer(), torch.randn(32, 3, 128, 128))
