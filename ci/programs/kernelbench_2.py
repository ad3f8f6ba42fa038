"""One hundred programs of a first layer and a chain of operations: KernelBench's second level, in our own words.

https://github.com/ScalingIntelligence/KernelBench, at the sizes its problems have had since their batches were raised. `m.first`
is the layer, the module's other attributes are the parts named behind the chain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ci.programs.program import Given, Program, Size, chain, conv, group_norm, linear, module

WIDE = 8192
VOLUME = (16, 32, 32)
IMAGE = (128, 128)
LARGE = (256, 256)
DOUBLES: dict[str, Any] = {"transposed": True, "stride": 2, "padding": 1, "output_padding": 1}
"""A transposed convolution that doubles lengths; without output padding, to one less."""
ODD: dict[str, Any] = {"transposed": True, "stride": 2, "padding": 1}


def gemm(batch: int = 1024, inputs: int = WIDE, outputs: int = WIDE, **how: Any) -> Program:
    return linear(batch, inputs, outputs, **how)


def swish(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * x


def lse(x: Tensor) -> Tensor:
    return torch.logsumexp(x, dim=1, keepdim=True)


def leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, negative_slope=0.01)


def _twice_scaled(m: Any, x: Tensor) -> Tensor:
    return torch.clamp(torch.clamp(m.first(x) + m.bias, 0.0, 1.0) * 2.0, 0.0, 1.0) / 2.0


def _kept(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    before = y.clone().detach()
    return ((y + m.bias) + before) * before + before


def _scaled_residual(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    before = y.clone().detach()
    return y * 0.5 + before


def _residual_of_input(m: Any, x: Tensor) -> Tensor:
    before = x.clone().detach()
    return F.gelu(lse(torch.mean(m.first(x) - m.subtract, dim=1, keepdim=True))) + before


def _doubled_clamped(m: Any, x: Tensor) -> Tensor:
    y = m.first(x) * 2.0
    y = lse(torch.clamp(y + y, -10.0, 10.0))
    return y * F.mish(y)


def _added_to(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = m.first(x) + y
    return z * F.hardswish(z)


def _normalized_rows(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = m.norm(m.first(x).unsqueeze(1).unsqueeze(1)).squeeze(1).squeeze(1)
    return (z + y) * y


def _softmax_of_volumes(m: Any, x: Tensor) -> Tensor:
    y = torch.clamp(m.first(m.pool(x)), 0.0, 1.0)
    return torch.softmax(y.flatten(2), dim=2).view(y.shape) * m.scale


def _minus_mean(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.first(x))
    return y - torch.mean(y, dim=(2, 3, 4), keepdim=True)


def _self_gated(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    return torch.multiply(torch.tanh(F.softplus(y)), y)


def _doubled(x: Tensor) -> Tensor:
    return x + x


def _sixth_of_swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x + 3) / 6


def _gate(x: Tensor) -> Tensor:
    return x * torch.clamp((x + 3) / 6, 0, 1)


def _sum_of_sigmoid(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    return torch.sigmoid(y) * 2.0 + y


def _largest_minus_mean(m: Any, x: Tensor) -> Tensor:
    y = torch.max(m.first(x), dim=1, keepdim=True).values
    return F.gelu(y - y.mean(dim=1, keepdim=True))


def _clamped_tanh(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    return torch.clamp(torch.tanh(torch.clamp(y * torch.sigmoid(y) / 2.0, -1.0, 1.0)), -1.0, 1.0)


def _with_its_norm(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    return lse(y + F.hardswish(torch.tanh(m.norm(y))))


def _swish_before(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.first(x))
    y = y * torch.sigmoid(y) * m.scale
    return y * torch.sigmoid(y)


def _least(x: Tensor, limit: float) -> Tensor:
    return torch.min(x, torch.tensor(limit, device=x.device))


def _pooled(pool: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Windows along rows of a matrix."""
    return pool(x.unsqueeze(1)).squeeze(1)


def _volume_input(size: Size) -> Given:
    lengths = (2 * n for n in size.points((16, 16, 16)))
    return Given((size.batch(128), 64, *lengths))


def _rows_input(size: Size) -> Given:
    return Given((size.batch(1024, 8), size.width(WIDE)))


PROGRAMS: dict[str, Program] = {
    "p001_conv2d_relu_bias": chain(
        conv(128, 64, 128, IMAGE, 3), lambda m, x: torch.relu(m.first(x)) + m.bias, bias=(128, 1, 1)
    ),
    "p002_conv_t2d_bias_clamp_scale_clamp_divide": chain(
        conv(128, 64, 64, IMAGE, 3, **DOUBLES), _twice_scaled, bias=(64, 1, 1)
    ),
    "p003_conv_t3d_sum_layernorm_avgpool_gelu": chain(
        # The norm is over the last dimension, whose length is as many as the channels.
        conv(32, 32, 64, VOLUME, 3, **DOUBLES),
        lambda m, x: F.gelu(m.pool(m.norm(m.first(x) + m.weight))),
        weight=1.0, norm=lambda size: nn.LayerNorm(2 * size.points(VOLUME)[-1]), pool=module(nn.AvgPool3d, 2),
    ),
    "p004_conv2d_mish_mish": chain(conv(64, 64, 128, LARGE, 3), lambda m, x: F.mish(F.mish(m.first(x)))),
    "p005_conv_t2d_subtract_tanh": chain(
        conv(32, 64, 64, LARGE, 4, **DOUBLES), lambda m, x: torch.tanh(m.first(x) - m.bias), bias=(64, 1, 1)
    ),
    "p006_conv3d_softmax_maxpool_maxpool": chain(
        conv(128, 3, 16, VOLUME, 3), lambda m, x: m.second(m.pool(torch.softmax(m.first(x), dim=1))),
        pool=module(nn.MaxPool3d, 2), second=module(nn.MaxPool3d, 2),
    ),
    "p007_conv3d_relu_leaky_gelu_sigmoid_bias": chain(
        conv(64, 8, 32, (32, 64, 64), 3),
        lambda m, x: torch.sigmoid(F.gelu(leaky(torch.relu(m.first(x))))) + m.bias, bias=(32, 1, 1, 1),
    ),
    "p008_conv3d_divide_max_avgpool_bias_sum": chain(
        conv(128, 8, 16, (16, 64, 64), 3),
        lambda m, x: torch.sum(F.adaptive_avg_pool3d(m.pool(m.first(x) / 2.0), 1) + m.bias, dim=1),
        pool=module(nn.MaxPool3d, 2), bias=(16, 1, 1, 1),
    ),
    "p009_gemm_subtract_multiply_relu": chain(gemm(), lambda m, x: torch.relu((m.first(x) - 2.0) * 1.5)),
    "p010_conv_t2d_maxpool_hardtanh_mean_tanh": chain(
        conv(128, 64, 64, LARGE, 3, transposed=True, padding=1),
        lambda m, x: torch.tanh(torch.mean(F.hardtanh(m.pool(m.first(x))), dim=(2, 3), keepdim=True)),
        pool=module(nn.MaxPool2d, 2),
    ),
    "p011_conv_t2d_batchnorm_tanh_maxpool_groupnorm": chain(
        conv(512, 64, 128, (32, 32), 5, transposed=True, padding=1),
        lambda m, x: m.norm(m.pool(torch.tanh(m.batch_norm(m.first(x))))),
        batch_norm=module(nn.BatchNorm2d, 128), pool=module(nn.MaxPool2d, 2), norm=group_norm(8, 128),
    ),
    "p012_gemm_multiply_leaky": chain(gemm(), lambda m, x: F.leaky_relu(m.first(x) * 2.0, 0.1)),
    "p013_conv_t3d_mean_add_softmax_tanh_scale": chain(
        conv(16, 16, 64, (32, 128, 128), 3, transposed=True, padding=1),
        lambda m, x: torch.tanh(torch.softmax(m.first(x).mean(dim=2, keepdim=True) + m.bias, dim=1)) * 2.0,
        bias=(1, 64, 1, 1, 1),
    ),
    "p014_gemm_divide_sum_scale": chain(
        gemm(bias=False), lambda m, x: torch.sum(torch.matmul(x, m.first.weight.T) / 2, dim=1, keepdim=True) * 1.5
    ),
    "p015_conv_t3d_batchnorm_subtract": chain(
        conv(16, 16, 32, VOLUME, 3, **ODD), _minus_mean, norm=module(nn.BatchNorm3d, 32)
    ),
    "p016_conv_t2d_mish_add_hardtanh_scale": chain(
        conv(128, 64, 64, IMAGE, 3, **DOUBLES), lambda m, x: F.hardtanh(F.mish(m.first(x)) + 0.5) * 2
    ),
    "p017_conv2d_instancenorm_divide": chain(
        conv(128, 64, 128, IMAGE, 3), lambda m, x: m.norm(m.first(x)) / 2.0, norm=module(nn.InstanceNorm2d, 128)
    ),
    "p018_gemm_sum_max_mean_lse_lse": chain(
        gemm(),
        lambda m, x: lse(lse(torch.mean(
            torch.max(torch.sum(m.first(x), dim=1, keepdim=True), dim=1, keepdim=True)[0], dim=1, keepdim=True
        ))),
    ),
    "p019_conv_t2d_gelu_groupnorm": chain(
        conv(128, 64, 64, LARGE, 3, transposed=True), lambda m, x: m.norm(F.gelu(m.first(x))), norm=group_norm(8, 64)
    ),
    "p020_conv_t3d_sum_residual_multiply_residual": chain(
        conv(16, 32, 64, VOLUME, 3, **DOUBLES), _kept, bias=(64, 1, 1, 1)
    ),
    "p021_conv2d_add_scale_sigmoid_groupnorm": chain(
        conv(128, 8, 32, LARGE, 3), lambda m, x: m.norm(torch.sigmoid((m.first(x) + m.bias) * m.scale)),
        bias=(32, 1, 1), scale=(32, 1, 1), norm=group_norm(8, 32),
    ),
    "p022_gemm_scale_residual_clamp_lse_mish": chain(gemm(), _doubled_clamped),
    "p023_conv3d_groupnorm_mean": chain(
        conv(128, 3, 24, (24, 32, 32), 3), lambda m, x: m.norm(m.first(x)).mean(dim=[1, 2, 3, 4]), norm=group_norm(8, 24)
    ),
    "p024_conv3d_min_softmax": chain(
        conv(128, 3, 24, (24, 32, 32), 3), lambda m, x: torch.softmax(torch.min(m.first(x), dim=2)[0], dim=1)
    ),
    "p025_conv2d_min_tanh_tanh": chain(
        conv(128, 16, 64, LARGE, 3), lambda m, x: torch.tanh(torch.tanh(torch.min(m.first(x), dim=1, keepdim=True)[0]))
    ),
    "p026_conv_t3d_add_hardswish": chain(conv(128, 32, 64, (16, 16, 16), 3, **DOUBLES), _added_to, _volume_input),
    "p027_conv3d_hardswish_groupnorm_mean": chain(
        conv(1024, 3, 16, VOLUME, 4), lambda m, x: torch.mean(m.norm(F.hardswish(m.first(x))), dim=[2, 3, 4]),
        norm=group_norm(4, 16),
    ),
    "p028_gemm_instancenorm_sum_residual_multiply": chain(
        gemm(), _normalized_rows, _rows_input, norm=module(nn.InstanceNorm2d, WIDE)
    ),
    "p029_gemm_mish_mish": chain(gemm(), lambda m, x: F.mish(F.mish(m.first(x)))),
    "p030_gemm_groupnorm_hardtanh": chain(
        gemm(), lambda m, x: F.hardtanh(m.norm(m.first(x)), -2.0, 2.0), norm=group_norm(16, WIDE)
    ),
    "p031_conv2d_min_add_multiply": chain(
        conv(128, 64, 128, IMAGE, 3), lambda m, x: (torch.min(m.first(x), torch.tensor(0.5)) + m.bias) * 2.0, bias=(128, 1, 1)
    ),
    "p032_conv2d_scale_min": chain(
        conv(64, 64, 128, LARGE, 3), lambda m, x: torch.min(m.first(x) * 2.0, dim=1, keepdim=True)[0]
    ),
    "p033_gemm_scale_batchnorm": chain(
        gemm(), lambda m, x: m.norm(m.first(x) * m.scale), scale=(WIDE,), norm=module(nn.BatchNorm1d, WIDE)
    ),
    "p034_conv_t3d_layernorm_gelu_scale": chain(
        conv(32, 32, 64, VOLUME, 4, **ODD), lambda m, x: F.gelu(m.norm(m.first(x))) * 1.0,
        norm=lambda size: nn.LayerNorm(2 * size.points(VOLUME)[-1]),
    ),
    "p035_conv2d_subtract_hardswish_maxpool_mish": chain(
        conv(128, 64, 128, IMAGE, 3), lambda m, x: F.mish(m.pool(F.hardswish(m.first(x) - 0.5))), pool=module(nn.MaxPool2d, 2)
    ),
    "p036_conv_t2d_min_sum_gelu_add": chain(
        conv(16, 64, 128, IMAGE, 3, **DOUBLES),
        lambda m, x: F.gelu(torch.sum(torch.min(m.first(x), dim=1, keepdim=True)[0], dim=2, keepdim=True)) + m.bias,
        bias=(1, 1, 1),
    ),
    "p037_gemm_swish_sum_groupnorm": chain(
        gemm(32768, 1024, 4096), lambda m, x: m.norm(swish(m.first(x)) + m.bias), bias=(4096,), norm=group_norm(64, 4096)
    ),
    "p038_conv_t3d_avgpool_clamp_softmax_multiply": chain(
        # The pool comes first, so the layer sees half of the lengths.
        conv(32, 32, 64, (32, 64, 64), 3, **DOUBLES), _softmax_of_volumes, pool=module(nn.AvgPool3d, 2), scale=(1, 64, 1, 1, 1)
    ),
    "p039_gemm_scale_batchnorm": chain(
        gemm(16384, 4096, 4096), lambda m, x: m.norm(m.first(x) * m.scale), scale=(4096,), norm=module(nn.BatchNorm1d, 4096)
    ),
    "p040_gemm_scale_residual": chain(gemm(16384, 4096, 4096), _scaled_residual),
    "p041_gemm_batchnorm_gelu_relu": chain(
        gemm(16384, 4096, 4096), lambda m, x: torch.relu(F.gelu(m.norm(m.first(x)))), norm=module(nn.BatchNorm1d, 4096)
    ),
    "p042_conv_t2d_avgpool_bias_lse_sum_multiply": chain(
        conv(16, 64, 128, (512, 512), 3, transposed=True),
        lambda m, x: torch.sum(lse(torch.mean(m.first(x), dim=(2, 3), keepdim=True) + m.bias), dim=(2, 3)) * 10.0,
        bias=(128, 1, 1),
    ),
    "p043_conv3d_max_lse_relu": chain(
        conv(4, 32, 64, (32, 128, 128), 3, padding=1), lambda m, x: torch.relu(lse(m.pool(m.first(x)))),
        pool=module(nn.MaxPool3d, 2),
    ),
    "p044_conv_t2d_multiply_avgpool_avgpool": chain(
        conv(16, 64, 128, IMAGE, 3, **DOUBLES),
        lambda m, x: torch.mean(torch.mean(m.first(x) * 0.5, dim=[2, 3], keepdim=True), dim=[2, 3], keepdim=True),
    ),
    "p045_gemm_sigmoid_gemm_lse": chain(
        gemm(16384, 2048, 4096), lambda m, x: torch.logsumexp(m.second(torch.sigmoid(m.first(x))), dim=1),
        second=module(nn.Linear, 4096, 1024),
    ),
    "p046_conv2d_subtract_tanh_subtract_avgpool": chain(
        conv(128, 64, 128, IMAGE, 3), lambda m, x: m.pool(torch.tanh(m.first(x) - 0.5) - 0.2), pool=module(nn.AvgPool2d, 2)
    ),
    "p047_conv3d_mish_tanh": chain(conv(16, 32, 64, (32, 64, 64), 3), lambda m, x: torch.tanh(F.mish(m.first(x)))),
    "p048_conv3d_scale_tanh_multiply_sigmoid": chain(
        conv(128, 3, 16, (16, 64, 64), 3), lambda m, x: torch.sigmoid(torch.tanh(m.first(x) * m.scale) * m.bias),
        scale=(16, 1, 1, 1), bias=(16, 1, 1, 1),
    ),
    "p049_conv_t3d_softmax_sigmoid": chain(
        conv(16, 32, 64, VOLUME, 3, **DOUBLES), lambda m, x: torch.sigmoid(torch.softmax(m.first(x), dim=1))
    ),
    "p050_conv_t3d_scale_avgpool_bias_scale": chain(
        conv(128, 3, 16, VOLUME, 3, **ODD), lambda m, x: (m.pool(m.first(x) * m.before) + m.bias) * m.after,
        before=0.5, pool=module(nn.AvgPool3d, 2), bias=(16, 1, 1, 1), after=1.0,
    ),
    "p051_gemm_subtract_avgpool_lse_gelu_residual": chain(gemm(2048), _residual_of_input, subtract=(WIDE,)),
    "p052_conv2d_activation_batchnorm": chain(
        conv(64, 64, 128, IMAGE, 3), lambda m, x: m.norm(_self_gated(m, x)), norm=module(nn.BatchNorm2d, 128)
    ),
    "p053_gemm_scale_hardtanh_gelu": chain(gemm(2048), lambda m, x: F.gelu(F.hardtanh(m.first(x) * 0.5, -2, 2))),
    "p054_conv2d_multiply_leaky_gelu": chain(
        conv(64, 64, 64, LARGE, 3), lambda m, x: F.gelu(leaky(m.first(x) * m.scale)), scale=(64, 1, 1)
    ),
    "p055_gemm_maxpool_sum_scale": chain(
        gemm(128, 32768, 32768), lambda m, x: torch.sum(_pooled(m.pool, m.first(x)), dim=1) * 0.5, pool=module(nn.MaxPool1d, 2)
    ),
    "p056_gemm_sigmoid_sum": chain(
        gemm(128, 32768, 32768), lambda m, x: torch.sum(torch.sigmoid(m.first(x)), dim=1, keepdim=True)
    ),
    "p057_conv2d_relu_hardswish": chain(conv(128, 8, 64, IMAGE, 3), lambda m, x: _gate(torch.relu(m.first(x)))),
    "p058_conv_t3d_lse_hardswish_subtract_clamp": chain(
        conv(128, 3, 16, VOLUME, 3, **ODD), lambda m, x: torch.clamp(_sixth_of_swish(lse(m.first(x))) - m.bias, -1, 1),
        bias=(1, 1, 1, 1),
    ),
    "p059_gemm_swish_scale": chain(gemm(128, 32768, 32768), lambda m, x: swish(m.first(x)) * 2.0),
    "p060_conv_t3d_swish_groupnorm_hardswish": chain(
        conv(128, 3, 16, VOLUME, 3, **ODD), lambda m, x: F.hardswish(m.norm(swish(m.first(x)))), norm=group_norm(4, 16)
    ),
    "p061_conv_t3d_relu_groupnorm": chain(
        conv(16, 64, 128, (32, 32, 32), 3, transposed=True, bias=False), lambda m, x: m.norm(torch.relu(m.first(x))),
        norm=group_norm(8, 128),
    ),
    "p062_gemm_groupnorm_leaky_sum": chain(
        gemm(), lambda m, x: _doubled(leaky(m.norm(m.first(x)))), norm=group_norm(512, WIDE)
    ),
    "p063_gemm_relu_divide": chain(gemm(), lambda m, x: torch.relu(m.first(x)) / 2.0),
    "p064_gemm_lse_leaky_leaky_gelu_gelu": chain(gemm(), lambda m, x: F.gelu(F.gelu(leaky(leaky(lse(m.first(x))))))),
    "p065_conv2d_avgpool_sigmoid_sum": chain(
        conv(128, 8, 64, (384, 384), 3), lambda m, x: torch.sum(torch.sigmoid(m.pool(m.first(x))), dim=[1, 2, 3]),
        pool=module(nn.AvgPool2d, 4),
    ),
    "p066_gemm_dropout_softmax": chain(
        gemm(128, 16384, 16384), lambda m, x: torch.softmax(m.drop(m.first(x)), dim=1), drop=module(nn.Dropout, 0.2)
    ),
    "p067_conv2d_gelu_avgpool": chain(
        conv(128, 8, 64, LARGE, 3), lambda m, x: F.adaptive_avg_pool2d(F.gelu(m.first(x)), 1).squeeze(-1).squeeze(-1)
    ),
    "p068_gemm_min_subtract": chain(
        gemm(128, 16384, 16384), lambda m, x: torch.min(m.first(x), m.constant) - m.constant, constant=2.0
    ),
    "p069_conv2d_hardswish_relu": chain(conv(128, 8, 64, IMAGE, 3), lambda m, x: torch.relu(F.hardswish(m.first(x)))),
    "p070_gemm_sigmoid_scale_residual": chain(gemm(), _sum_of_sigmoid),
    "p071_conv2d_divide_leaky": chain(conv(128, 8, 64, IMAGE, 3), lambda m, x: leaky(m.first(x) / 2)),
    "p072_conv_t3d_batchnorm_avgpool_avgpool": chain(
        conv(64, 3, 16, (32, 32, 32), 3, **ODD), lambda m, x: m.second(m.pool(m.norm(m.first(x)))),
        norm=module(nn.BatchNorm3d, 16), pool=module(nn.AvgPool3d, 2), second=module(nn.AvgPool3d, 2),
    ),
    "p073_conv2d_batchnorm_scale": chain(
        conv(128, 8, 64, IMAGE, 3), lambda m, x: m.norm(m.first(x)) * 2.0, norm=module(nn.BatchNorm2d, 64)
    ),
    "p074_conv_t3d_leaky_multiply_leaky_max": chain(
        conv(16, 16, 32, VOLUME, 3, **DOUBLES),
        lambda m, x: m.pool(F.leaky_relu(F.leaky_relu(m.first(x), 0.2) * m.scale, 0.2)),
        scale=(32, 1, 1, 1), pool=module(nn.MaxPool3d, 2),
    ),
    "p075_gemm_groupnorm_min_bias": chain(
        gemm(), lambda m, x: torch.min(m.norm(m.first(x)), dim=1, keepdim=True)[0] + m.bias,
        norm=group_norm(512, WIDE), bias=(1, WIDE, 1, 1),
    ),
    "p076_gemm_add_relu": chain(gemm(bias=False), lambda m, x: torch.relu(m.first(x) + m.bias), bias=(WIDE,)),
    "p077_conv_t3d_scale_batchnorm_avgpool": chain(
        conv(16, 64, 128, VOLUME, 5, transposed=True), lambda m, x: F.adaptive_avg_pool3d(m.norm(m.first(x) * 2.0), 1),
        norm=module(nn.BatchNorm3d, 128),
    ),
    "p078_conv_t3d_max_max_sum": chain(
        conv(16, 32, 64, (32, 32, 32), 5, transposed=True, stride=2, padding=2),
        lambda m, x: torch.sum(m.second(m.pool(m.first(x))), dim=1, keepdim=True),
        pool=module(nn.MaxPool3d, 2), second=module(nn.MaxPool3d, 3),
    ),
    "p079_conv3d_multiply_instancenorm_clamp_multiply_max": chain(
        conv(128, 3, 16, VOLUME, 3),
        lambda m, x: torch.max(torch.clamp(m.norm(m.first(x) * m.scale), -1.0, 1.0) * m.scale, dim=1)[0],
        scale=(16, 1, 1, 1), norm=module(nn.InstanceNorm3d, 16),
    ),
    "p080_gemm_max_subtract_gelu": chain(gemm(), _largest_minus_mean),
    "p081_gemm_swish_divide_clamp_tanh_clamp": chain(gemm(), _clamped_tanh),
    "p082_conv2d_tanh_scale_bias_max": chain(
        conv(128, 8, 64, LARGE, 3), lambda m, x: m.pool(torch.tanh(m.first(x)) * 2.0 + m.bias),
        bias=(64, 1, 1), pool=module(nn.MaxPool2d, 4),
    ),
    "p083_conv3d_groupnorm_min_clamp_dropout": chain(
        conv(128, 3, 16, (16, 64, 64), 3), lambda m, x: m.drop(torch.clamp(_least(m.norm(m.first(x)), 0.0), 0.0, 1.0)),
        norm=group_norm(8, 16), drop=module(nn.Dropout, 0.2),
    ),
    "p084_gemm_batchnorm_scale_softmax": chain(
        gemm(), lambda m, x: torch.softmax(m.scale * m.norm(m.first(x)), dim=1), norm=module(nn.BatchNorm1d, WIDE), scale=(1,)
    ),
    "p085_conv2d_groupnorm_scale_maxpool_clamp": chain(
        conv(128, 8, 64, IMAGE, 3), lambda m, x: torch.clamp(m.pool(m.norm(m.first(x)) * m.scale), 0.0, 1.0),
        norm=group_norm(16, 64), scale=(64, 1, 1), pool=module(nn.MaxPool2d, 4),
    ),
    "p086_gemm_divide_gelu": chain(gemm(), lambda m, x: F.gelu(m.first(x) / 10.0)),
    "p087_conv2d_subtract_subtract_mish": chain(conv(128, 8, 64, LARGE, 3), lambda m, x: F.mish(m.first(x) - 0.5 - 0.2)),
    "p088_gemm_groupnorm_swish_multiply_swish": chain(gemm(), _swish_before, norm=group_norm(256, WIDE), scale=(WIDE,)),
    "p089_conv_t3d_maxpool_softmax_subtract_swish_max": chain(
        conv(128, 3, 16, VOLUME, 3, **DOUBLES),
        lambda m, x: torch.max(swish(torch.softmax(m.pool(m.first(x)), dim=1) - m.subtract.view(1, -1, 1, 1, 1)), dim=1)[0],
        pool=module(nn.MaxPool3d, 2), subtract=(16,),
    ),
    "p090_conv3d_leaky_sum_clamp_gelu": chain(
        conv(128, 8, 64, (16, 64, 64), 3),
        lambda m, x: F.gelu(torch.clamp(F.leaky_relu(m.first(x), 0.2) + m.bias, -1.0, 1.0)), bias=(64, 1, 1, 1),
    ),
    "p091_conv_t2d_softmax_bias_scale_sigmoid": chain(
        conv(128, 64, 128, (64, 64), 4, **DOUBLES),
        lambda m, x: torch.sigmoid((torch.softmax(m.first(x), dim=1) + m.bias) * 2.0), bias=(128, 1, 1),
    ),
    "p092_conv2d_groupnorm_tanh_hardswish_residual_lse": chain(
        conv(128, 8, 64, IMAGE, 3), _with_its_norm, norm=group_norm(16, 64)
    ),
    "p093_conv_t2d_add_min_gelu_multiply": chain(
        conv(128, 64, 128, (64, 64), 4, transposed=True, stride=2), lambda m, x: F.gelu(_least(m.first(x) + 0.5, 0.0)) * 2.0
    ),
    "p094_gemm_bias_hardtanh_mish_groupnorm": chain(
        gemm(), lambda m, x: m.norm(F.mish(F.hardtanh(m.first(x) + m.bias))), bias=(WIDE,), norm=group_norm(256, WIDE)
    ),
    "p095_gemm_add_swish_tanh_gelu_hardtanh": chain(
        gemm(), lambda m, x: F.hardtanh(F.gelu(torch.tanh(swish(m.first(x) + m.bias)))), bias=(WIDE,)
    ),
    "p096_conv_t3d_multiply_max_avgpool_clamp": chain(
        conv(128, 3, 16, VOLUME, 3, **ODD),
        lambda m, x: torch.clamp(F.adaptive_avg_pool3d(m.pool(m.first(x) * 0.5), 1), 0, 1), pool=module(nn.MaxPool3d, 2),
    ),
    "p097_gemm_batchnorm_bias_divide_swish": chain(
        gemm(), lambda m, x: swish((m.norm(m.first(x)) + m.bias) / 1.0), norm=module(nn.BatchNorm1d, WIDE), bias=(1,)
    ),
    "p098_gemm_avgpool_gelu_scale_max": chain(
        gemm(), lambda m, x: torch.max(F.gelu(_pooled(m.pool, m.first(x))) * 2.0, dim=1).values, pool=module(nn.AvgPool1d, 16)
    ),
    "p099_gemm_gelu_softmax": chain(gemm(), lambda m, x: torch.softmax(F.gelu(m.first(x)), dim=1)),
    "p100_conv_t3d_clamp_divide": chain(
        conv(16, 64, 128, (24, 48, 48), 3, **ODD), lambda m, x: torch.clamp(m.first(x), min=-1.0) / 2.0
    ),
}  # fmt: skip
