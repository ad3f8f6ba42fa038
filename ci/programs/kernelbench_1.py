"""One hundred programs of one operator each: the geometry of KernelBench's first level, in our own words.

https://github.com/ScalingIntelligence/KernelBench, at the sizes its problems have had since their batches were raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ci.programs.program import Call, Given, Made, Program, Size, conv

N = 4096
K = 8192
LONG = 32768


def product(*shapes: tuple[int, ...], call: Callable[..., Tensor] = torch.matmul, kind: str = "uniform") -> Program:
    """A call on matrices."""
    return lambda size: (Call(call), [Given(tuple(size.width(n, 64) for n in shape), kind) for shape in shapes])


def rows(call: Callable[..., Tensor], batch: int = N, length: int = 393216) -> Program:
    """A call on rows."""
    return lambda size: (Call(call), [Given((size.batch(batch, 4), size.width(length, 1024)))])


def layer(make: Callable[[Size], nn.Module], batch: int, channels: int, *points: int) -> Program:
    """A module on images."""
    return lambda size: (make(size), [Given((size.batch(batch), channels, *size.points(points)))])


def reduction(call: Callable[..., Tensor]) -> Program:
    """A call that reduces the middle of three dimensions."""
    return lambda size: (Call(call), [Given((size.batch(128), size.width(N), size.width(N - 1)))])


def loss(call: Callable[..., Tensor], batch: int, length: int, *kinds: tuple[str, bool]) -> Program:
    """A call on predictions and targets: the kind of each, and whether it has a gradient."""
    return lambda size: (Call(call), [_of_loss(size, batch, length, kind, grad) for kind, grad in kinds])


def _of_loss(size: Size, batch: int, length: int, kind: str, grad: bool) -> Given:
    n, m = size.batch(batch, 8), size.width(length, 512)
    # Signs are one for each column, classes one for each row.
    return Given((n,) if kind == "class" else (m,) if kind == "sign" else (n, m), kind, grad)


def depthwise(batch: int, channels: int, points: tuple[int, int], kernel: Any) -> Program:
    return conv(batch, channels, channels, points, kernel, groups=channels, bias=False)


def plain(*args: Any, **how: Any) -> Program:
    """A convolution without a bias."""
    return conv(*args, bias=False, **how)


def transposed(batch: int, inputs: int, outputs: int, points: Sequence[int], kernel: Any, **how: Any) -> Program:
    return conv(batch, inputs, outputs, points, kernel, transposed=True, bias=False, **how)


def _separable(size: Size) -> Made:
    both = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False), nn.Conv2d(64, 128, 1, bias=False))
    return both, [Given((size.batch(16), 64, *size.points((512, 512))))]


def _attention(size: Size) -> Made:
    shape = (size.batch(32), 32 if not size.small else 2, *(size.width(n) for n in (512, 1024)))
    return Call(F.scaled_dot_product_attention), [Given(shape)] * 3


def _masked(size: Size) -> Made:
    shape = (size.batch(LONG, 4), size.width(LONG, 1024))
    return Call(lambda x, mask: torch.cumsum(x * mask, dim=1)), [Given(shape), Given(shape, "mask", False)]


def _exclusive(x: Tensor) -> Tensor:
    return torch.cumsum(torch.cat((torch.zeros_like(x[:, :1]), x), dim=1)[:, :-1], dim=1)


def _tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _rms(x: Tensor) -> Tensor:
    return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5)


PRODUCTS: dict[str, Program] = {
    "p001_square_matmul": product((N, N), (N, N)),
    "p002_standard_matmul": product((2048, K), (K, N)),
    "p003_batched_matmul": product((128, 512, 1024), (128, 1024, 2048), call=torch.bmm),
    "p004_matvec": product((2048, 1048576), (1048576, 1)),
    "p005_matrix_scalar": rows(lambda a: a * 3.14, 65536, 16384),
    "p006_matmul_large_k": product((256, 524288), (524288, 256)),
    "p007_matmul_small_k": product((LONG, 64), (64, LONG)),
    "p008_matmul_irregular": product((8205, 2949), (2949, 5921)),
    "p009_tall_skinny": product((LONG, 32), (32, LONG)),
    "p010_tensor3d_matmul": product((16, 1024, 2048), (2048, 768)),
    "p011_tensor4d_matmul": product((8, 256, 512, 256), (256, 768), call=lambda a, b: torch.einsum("bijl,lk->bijk", a, b)),
    "p012_diagonal": product((N,), (N, N), call=lambda a, b: torch.diag(a) @ b),
    "p013_symmetric": product((N, N), (N, N), kind="symmetric"),
    "p014_upper_triangular": product((N, N), (N, N), call=lambda a, b: torch.triu(torch.matmul(a, b)), kind="upper"),
    "p015_lower_triangular": product((N, N), (N, N), call=lambda a, b: torch.tril(torch.matmul(a, b)), kind="lower"),
    "p016_transposed_a": product((K, 2048), (K, N), call=lambda a, b: torch.matmul(a.T, b)),
    "p017_transposed_b": product((2048, K), (N, K), call=lambda a, b: torch.matmul(a, b.T)),
    "p018_transposed_both": product((K, 2048), (N, K), call=lambda a, b: torch.matmul(a.T, b.T)),
}
ACTIVATIONS: dict[str, Program] = {
    "p019_relu": rows(torch.relu),
    "p020_leaky_relu": rows(lambda x: F.leaky_relu(x, 0.01)),
    "p021_sigmoid": rows(torch.sigmoid),
    "p022_tanh": rows(torch.tanh),
    "p023_softmax": rows(lambda x: torch.softmax(x, dim=1)),
    "p024_log_softmax": rows(lambda x: F.log_softmax(x, dim=1)),
    "p025_swish": rows(lambda x: x * torch.sigmoid(x)),
    "p026_gelu": rows(F.gelu),
    "p027_selu": rows(torch.selu),
    "p028_hardsigmoid": rows(F.hardsigmoid),
    "p029_softplus": rows(F.softplus),
    "p030_softsign": rows(lambda x: x / (1 + torch.abs(x))),
    "p031_elu": rows(lambda x: F.elu(x, alpha=1.0)),
    "p032_hardtanh": rows(lambda x: F.hardtanh(x, min_val=-1.0, max_val=1.0)),
}
NORMS: dict[str, Program] = {
    "p033_batch_norm": layer(lambda _: nn.BatchNorm2d(64), 64, 64, 512, 512),
    "p034_instance_norm": layer(lambda _: nn.InstanceNorm2d(64), 112, 64, 512, 512),
    "p035_group_norm": layer(lambda _: nn.GroupNorm(8, 64), 112, 64, 512, 512),
    "p036_rms_norm": layer(lambda _: Call(_rms), 112, 64, 512, 512),
    "p037_frobenius_norm": layer(lambda _: Call(lambda x: x / torch.norm(x, p="fro")), 112, 64, 512, 512),
    "p038_l1_norm": rows(lambda x: x / torch.mean(torch.abs(x), dim=1, keepdim=True), LONG, 65535),
    "p039_l2_norm": rows(lambda x: x / torch.norm(x, p=2, dim=1, keepdim=True), LONG, 65535),
    "p040_layer_norm": layer(lambda size: nn.LayerNorm((64, *size.points((256, 256)))), 16, 64, 256, 256),
}
POOLS: dict[str, Program] = {
    "p041_max_pool1d": layer(lambda _: nn.MaxPool1d(8, 1, 4, 3), 64, 192, 65536),
    "p042_max_pool2d": layer(lambda _: nn.MaxPool2d(4, 1, 1, 1), 32, 64, 512, 512),
    "p043_max_pool3d": layer(lambda _: nn.MaxPool3d(3, 2, 1, 3), 16, 32, 128, 128, 128),
    "p044_avg_pool1d": layer(lambda _: nn.AvgPool1d(8, 1, 4), 64, 128, 65536),
    "p045_avg_pool2d": layer(lambda _: nn.AvgPool2d(11), 16, 64, 2048, 2048),
    "p046_avg_pool3d": layer(lambda _: nn.AvgPool3d(3, 2, 1), 16, 32, 128, 128, 256),
}
REDUCTIONS: dict[str, Program] = {
    "p047_sum": reduction(lambda x: torch.sum(x, dim=1, keepdim=True)),
    "p048_mean": reduction(lambda x: torch.mean(x, dim=1)),
    "p049_max": reduction(lambda x: torch.max(x, dim=1)[0]),
    "p051_argmax": reduction(lambda x: torch.argmax(x, dim=1)),
    "p052_argmin": reduction(lambda x: torch.argmin(x, dim=1)),
    "p053_min": reduction(lambda x: torch.min(x, dim=1)[0]),
}
CONVOLUTIONS: dict[str, Program] = {
    "p050_conv2d_alexnet": conv(256, 3, 96, (224, 224), 11, stride=4, padding=2),
    "p054_conv3d": plain(16, 3, 64, (64, 64, 64), 3),
    "p055_conv2d_wide": plain(8, 64, 128, (512, 1024), 3),
    "p056_conv2d_asym_kernel": plain(8, 64, 128, (512, 256), (5, 7)),
    "p057_conv_t2d": transposed(8, 64, 64, (1024, 1024), 3),
    "p058_conv_t3d_asym": transposed(16, 32, 16, (16, 32, 64), (3, 5, 7)),
    "p059_conv3d_kernel_331": plain(16, 3, 64, (256, 256, 10), (3, 3, 1)),
    "p060_conv3d_asym_kernel": plain(16, 3, 64, (64, 64, 64), (3, 5, 7)),
    "p061_conv_t3d": transposed(8, 48, 48, (64, 64, 64), 3),
    "p062_conv2d_kernel_59": plain(8, 32, 64, (512, 512), (5, 9)),
    "p063_conv2d_square": plain(16, 16, 128, (1024, 1024), 3),
    "p064_conv_t1d": transposed(64, 128, 128, (65536,), 3),
    "p065_conv_t2d_kernel_37": transposed(8, 64, 64, (512, 512), (3, 7)),
    "p066_conv3d_asym": plain(8, 3, 64, (16, 128, 128), (3, 5, 7)),
    "p067_conv1d": plain(32, 64, 128, (131072,), 3),
    "p068_conv_t3d_kernel_355": transposed(16, 32, 64, (64, 64, 64), (3, 5, 5)),
    "p069_conv_t2d_asym": transposed(64, 64, 128, (128, 256), (3, 5)),
    "p070_conv_t3d_cube": transposed(8, 48, 24, (96, 96, 96), 3),
    "p071_conv_t2d_wide": transposed(8, 32, 32, (512, 1024), 3),
    "p072_conv_t3d_strided_grouped": transposed(
        8, 32, 32, (12, 24, 48), (3, 5, 7), stride=2, padding=(1, 2, 3), output_padding=1, groups=4
    ),
    "p073_conv_t3d_grouped": transposed(4, 32, 32, (32, 64, 128), 3, stride=2, padding=1, groups=4),
    "p074_conv_t1d_dilated": transposed(32, 32, 64, (131072,), 5, dilation=3),
    "p075_conv_t2d_everything": transposed(
        16, 32, 64, (128, 256), (3, 5), stride=(2, 3), padding=(1, 2), dilation=(2, 1), groups=4
    ),
    "p076_conv1d_dilated_strided": plain(64, 64, 128, (524280,), 3, stride=3, dilation=4),
    "p077_conv_t3d_dilated": transposed(16, 32, 64, (16, 32, 32), 3, stride=2, padding=1, dilation=2),
    "p078_conv_t2d_padded": transposed(8, 32, 32, (512, 1024), (3, 7), padding=(1, 3)),
    "p079_conv_t1d_strided_dilated": transposed(16, 32, 64, (131072,), 3, stride=2, padding=1, dilation=2),
    "p080_conv2d_dilated_padded": plain(8, 32, 64, (512, 512), (5, 9), padding=(2, 4), dilation=(2, 3)),
    "p081_conv_t2d_stride5": transposed(16, 32, 64, (64, 128), 3, stride=5, padding=1, dilation=2),
    "p082_depthwise": depthwise(16, 64, (512, 512), 3),
    "p083_depthwise_3x1": depthwise(64, 8, (512, 512), (3, 1)),
    "p084_depthwise_wide": depthwise(64, 128, (256, 512), 3),
    "p085_depthwise_3x7": depthwise(32, 128, (128, 256), (3, 7)),
    "p086_depthwise_separable": _separable,
    "p087_pointwise": plain(16, 64, 128, (1024, 1024), 1),
}
SCANS: dict[str, Program] = {
    "p088_new_gelu": rows(_tanh_gelu, K, K),
    "p089_cumsum": rows(lambda x: torch.cumsum(x, dim=1), LONG, LONG),
    "p090_cumprod": rows(lambda x: torch.cumprod(x, dim=1), LONG, LONG),
    "p091_cumsum_reverse": rows(lambda x: torch.cumsum(x.flip(1), dim=1).flip(1), LONG, LONG),
    "p092_cumsum_exclusive": rows(_exclusive, LONG, LONG),
    "p093_masked_cumsum": _masked,
}
LOSSES: dict[str, Program] = {
    "p094_mse_loss": loss(lambda x, y: torch.mean((x - y) ** 2), LONG, LONG, ("pareto", True), ("pareto", False)),
    "p095_cross_entropy": loss(F.cross_entropy, LONG, N, ("uniform", True), ("class", False)),
    "p096_huber_loss": loss(F.smooth_l1_loss, LONG, LONG, ("scaled pareto", True), ("pareto", False)),
    "p097_sdpa": _attention,
    "p098_kl_div": loss(
        lambda x, y: F.kl_div(torch.log(x), y, reduction="batchmean"), 16384, 16384,
        ("scaled distribution", True), ("distribution", False),
    ),
    "p099_triplet_margin": loss(F.triplet_margin_loss, LONG, K, ("scaled", True), ("uniform", True), ("uniform", True)),
    "p100_hinge_loss": loss(
        lambda x, y: torch.mean(torch.clamp(1 - x * y, min=0)), LONG, LONG, ("pareto", True), ("sign", False)
    ),
}  # fmt: skip

PROGRAMS: dict[str, Program] = dict(
    sorted((PRODUCTS | ACTIVATIONS | NORMS | POOLS | REDUCTIONS | CONVOLUTIONS | SCANS | LOSSES).items())
)
