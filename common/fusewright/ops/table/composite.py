"""Composite rows: ops that stay whole until a backend needs their primitives. Formulas and decompositions are in
`ops.semantics`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusewright.ops import dtype_rules as dt
from fusewright.ops import shape_rules as sh
from fusewright.ops.core import Args, Kind, Op, Shape, row
from fusewright.ops.rules import device_type
from fusewright.ops.semantics import adaptive, resize
from fusewright.ops.semantics import composite as m
from fusewright.ops.semantics import norm as nm

_op = partial(row, Kind.COMPOSITE)


def _activation(name: str, doc: str, reference: Any, decompose: Any, source: str = "", dtype_rule: Any = dt.SELF) -> Op:
    return _op(name, f"aten::{name}", dtype_rule, sh.SAME, reference, doc, source, decompose, activation=True)


def softmax_dtype(a: Args) -> tuple[torch.dtype]:
    """fp32 when `half_to_float`, else the dtype of `self`."""
    return (torch.float32 if a["half_to_float"] else a["self"].dtype,)


def sdpa_shape(a: Args) -> tuple[Shape]:
    """[..., n, e] x [..., s, e] x [..., s, v] -> [..., n, v]; batch dimensions broadcast, or are the
    query's under GQA."""
    q, k, v = (tuple(a[n].shape) for n in ("query", "key", "value"))
    batch = q[:-2] if a["enable_gqa"] else sh.broadcast_shapes([q[:-2], k[:-2], v[:-2]])
    return ((*batch, q[-2], v[-1]),)


def sdpa_lse_shapes(a: Args) -> tuple[Shape, Shape]:
    """Output [b, h, n, v] and log-sum-exp [b, h, n]; key and value may have fewer heads."""
    q = tuple(a["query"].shape)
    return (*q[:-1], a["value"].shape[-1]), q[:-1]


def lse_dtypes(a: Args) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of query; statistics are fp32 for half inputs."""
    d = a["query"].dtype
    return d, torch.float32 if d in (torch.bfloat16, torch.float16) else d


def inference_stats(a: Args) -> tuple[Shape, Shape, Shape]:
    """The input's shape, and two statistics, which are empty on a CPU."""
    return tuple(a["input"].shape), _given(a), _given(a)


def _given(a: Args) -> Shape:
    """Return the shape of the statistics in inference."""
    return (0,) if device_type(a["input"]) == "cpu" else tuple(a["running_mean"].shape)


def bn_train_dtypes(a: Args) -> tuple[torch.dtype, ...]:
    """The input's dtype; statistics as in `norm_stats`; running statistics keep their dtype."""
    return *_BATCH_NORM(a), a["running_mean"].dtype, a["running_var"].dtype


def bn_train_shapes(a: Args) -> tuple[Shape, ...]:
    """The input's shape, and [C] four times; on a CPU, batch statistics that are not computed are empty."""
    channels = tuple(a["input"].shape[1:2])
    batch = channels if a["training"] else _given(a)
    return (tuple(a["input"].shape), batch, batch, channels, channels)


def bn_batch_shapes(a: Args) -> tuple[Shape, Shape, Shape]:
    """The input's shape, and [C] twice."""
    channels = tuple(a["input"].shape[1:2])
    return tuple(a["input"].shape), channels, channels


def rms_shapes(a: Args) -> tuple[Shape, Shape]:
    """The input's shape, and the shape of the reciprocal root mean square."""
    return sh.norm_shapes(a)[:2]


def rms_dtypes(a: Args) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of input; the statistic is fp32 for half inputs."""
    d = a["input"].dtype
    return d, torch.float32 if d.itemsize < 4 else d


def loss_shapes(a: Args) -> tuple[Shape, Shape]:
    """[N] or 0-dim by `reduction` (0: none), and the 0-dim total weight."""
    s = tuple(a["self"].shape)
    return (s[:1] if a["reduction"] == 0 and len(s) == 2 else ()), ()


def loss2d_shapes(a: Args) -> tuple[Shape, Shape]:
    """The shape of target, or 0-dim by `reduction`, and the 0-dim total weight."""
    return (tuple(a["target"].shape) if a["reduction"] == 0 else ()), ()


def pointwise_loss_shape(a: Args) -> tuple[Shape]:
    """Broadcast when `reduction` is 0 (none), else 0-dim."""
    return (sh.broadcast_shapes([tuple(a["self"].shape), tuple(a["target"].shape)]) if a["reduction"] == 0 else (),)


_SELF_INT64 = dt.dtypes(dt.SELF, dt.INT64)
_NORM = dt.dtypes(dt.INPUT, dt.norm_stats())
_GROUP_NORM = dt.dtypes(dt.INPUT, dt.norm_stats(wide=False))
_BATCH_NORM = dt.dtypes(dt.INPUT, dt.norm_stats("running_mean"))

# On a CPU a half input with fp32 weights has fp32 statistics; FakeTensor says half.
_STATISTICS = (1, 2)

# fmt: off
ROWS: tuple[Op, ...] = (
    # products
    _op("linear", "aten::linear", dt.INPUT, sh.linear, m.linear_ref, "input @ weight.T + bias",
        decompose=m.linear),
    _op("matmul", "aten::matmul", dt.SELF, sh.matmul, torch.matmul,
        "matrix product with batch dimensions broadcast", "NumPy matmul", m.matmul),
    _op("sdpa", "aten::scaled_dot_product_attention", dt.dtype_of("query"), sdpa_shape, m.sdpa_ref,
        "softmax(scale * query @ key.T + mask) @ value", "Vaswani et al., arXiv:1706.03762", m.sdpa),
    _op("sdpa_with_lse", "aten::_scaled_dot_product_flash_attention_for_cpu", lse_dtypes, sdpa_lse_shapes,
        m.sdpa_lse_ref, "sdpa, and the log-sum-exp of the scores that its backward needs",
        "Dao et al., arXiv:2205.14135", m.sdpa_lse),
    # normalisation
    _op("softmax", "aten::_softmax", softmax_dtype, sh.SAME, nm.softmax_ref,
        "exp(self) / sum(exp(self)) along dim", "", nm.softmax),
    _op("safe_softmax", "aten::_safe_softmax", dt.attr_or_self, sh.SAME, nm.safe_softmax_ref,
        "softmax, but zeros where a whole row is -inf", "", nm.safe_softmax),
    _op("log_softmax", "aten::_log_softmax", softmax_dtype, sh.SAME, nm.log_softmax_ref,
        "log of softmax along dim", "", nm.log_softmax),
    _op("layer_norm", "aten::native_layer_norm", _NORM, sh.norm_shapes, nm.layer_norm_ref,
        "(input - mean) * rstd * weight + bias over the last dimensions; mean; rstd",
        "Ba et al., arXiv:1607.06450", nm.layer_norm, fake_differs=_STATISTICS),
    _op("rms_norm", "aten::_fused_rms_norm", rms_dtypes, rms_shapes, nm.rms_norm_ref,
        "input * rrms * weight over the last dimensions; rrms", "Zhang & Sennrich, arXiv:1910.07467",
        nm.rms_norm),
    _op("group_norm", "aten::native_group_norm", _GROUP_NORM, sh.group_norm_shapes, nm.group_norm_ref,
        "normalised over groups of channels; mean; rstd", "Wu & He, arXiv:1803.08494", nm.group_norm,
        fake_differs=_STATISTICS),
    _op("batch_norm", "aten::_native_batch_norm_legit_no_training", _BATCH_NORM, inference_stats,
        nm.batch_norm_ref, "normalised by running statistics; these, or on a CPU two empty tensors",
        "Ioffe & Szegedy, arXiv:1502.03167", nm.batch_norm, fake_differs=_STATISTICS),
    _op("batch_norm_train", "aten::_native_batch_norm_legit_functional", bn_train_dtypes, bn_train_shapes,
        nm.batch_norm_train_ref, "normalised by batch statistics; mean; rstd; new running mean and variance",
        "Ioffe & Szegedy, arXiv:1502.03167", nm.batch_norm_train, fake_differs=(1, 2, 3, 4)),
    _op("batch_norm_no_stats", "aten::_native_batch_norm_legit.no_stats", _NORM, bn_batch_shapes,
        nm.batch_norm_no_stats_ref, "normalised by batch statistics, of which none are kept; mean; rstd",
        "Ioffe & Szegedy, arXiv:1502.03167; Ulyanov et al., arXiv:1607.08022", nm.batch_norm_no_stats, fake_differs=_STATISTICS),
    _op("weight_norm", "aten::_weight_norm_interface", nm.weight_norm_dtypes, nm.weight_norm_shapes,
        nm.weight_norm_ref, "v * g / |v|, norms along all dimensions but dim; the norms",
        "Salimans & Kingma, arXiv:1602.07868", nm.weight_norm),
    # activations
    _activation("gelu", "self * Phi(self); approximate='tanh' for the tanh form", m.gelu_ref, m.gelu,
        "Hendrycks & Gimpel, arXiv:1606.08415"),
    _activation("silu", "self * sigmoid(self)", m.silu_ref, m.silu, "Elfwing et al., arXiv:1702.03118"),
    _activation("mish", "self * tanh(softplus(self))", m.mish_ref, m.mish, "Misra, arXiv:1908.08681"),
    _activation("hardswish", "self * clamp(self + 3, 0, 6) / 6", m.hardswish_ref, m.hardswish,
        "Howard et al., arXiv:1905.02244"),
    _activation("hardsigmoid", "clamp(self + 3, 0, 6) / 6", m.hardsigmoid_ref, m.hardsigmoid,
        "Howard et al., arXiv:1905.02244"),
    _activation("leaky_relu", "self, times negative_slope where not positive", m.leaky_relu_ref, m.leaky_relu,
        "ONNX LeakyRelu"),
    _activation("elu", "scale * self, or scale * alpha * (exp(self * input_scale) - 1) where not positive",
        m.elu_ref, m.elu, "Clevert et al., arXiv:1511.07289"),
    _activation("softplus", "log(1 + exp(beta * self)) / beta; self above threshold", m.softplus_ref,
        m.softplus, "ONNX Softplus"),
    _op("log_sigmoid", "aten::log_sigmoid_forward", dt.dtype_of("self", 2), m.log_sigmoid_shapes,
        m.log_sigmoid_ref, "log(sigmoid(self)); a buffer whose content is private"),
    _activation("threshold", "self where above threshold, else value", m.threshold_ref, m.threshold),
    _op("prelu", "aten::_prelu_kernel", dt.SELF, sh.broadcast("self", "weight"), m.prelu_ref,
        "self, times weight where not positive", "He et al., arXiv:1502.01852", m.prelu),
    _op("glu", "aten::glu", dt.SELF, m.glu_shape, m.glu_ref,
        "first half along dim times the sigmoid of the second half", "Dauphin et al., arXiv:1612.08083",
        m.glu),
    # lookups, pooling, resizing
    _op("embedding", "aten::embedding", dt.dtype_of("weight"), sh.embedded, m.embedding_ref, "weight[indices]",
        "ONNX Gather", m.embedding),
    _op("max_pool2d", "aten::max_pool2d_with_indices", _SELF_INT64, sh.pooled(2, 2), m.max_pool_ref(2),
        "largest of each window, and its flat index in the plane", "ONNX MaxPool"),
    _op("avg_pool2d", "aten::avg_pool2d", dt.SELF, sh.pooled(1, 2), m.avg_pool_ref(2), "mean of each window",
        "ONNX AveragePool"),
    _op("max_pool3d", "aten::max_pool3d_with_indices", _SELF_INT64, sh.pooled(2, 3), m.max_pool_ref(3),
        "largest of each window, and its flat index in the volume", "ONNX MaxPool"),
    _op("avg_pool1d", "aten::avg_pool1d", dt.SELF, sh.pooled(1, 1), m.avg_pool_ref(1), "mean of each window",
        "ONNX AveragePool"),
    _op("avg_pool3d", "aten::avg_pool3d", dt.SELF, sh.pooled(1, 3), m.avg_pool_ref(3), "mean of each window",
        "ONNX AveragePool"),
    *(_op(f"adaptive_avg_pool{n}d", f"aten::_adaptive_avg_pool{n}d", dt.SELF, sh.resized(n), adaptive.avg_ref(n),
        "means of a given number of cells", "", adaptive.avg(n), opened=True) for n in (2, 3)),
    *(_op(f"adaptive_max_pool{n}d", f"aten::adaptive_max_pool{n}d", _SELF_INT64, sh.shapes(sh.resized(n), sh.resized(n)),
        adaptive.max_ref(n), "maxima of a given number of cells, and their flat indices", "", adaptive.max_pool(n), opened=True)
        for n in (2, 3)),
    *(_op(f"upsample_nearest{n}d", f"aten::upsample_nearest{n}d", dt.SELF, sh.resized(n), m.nearest_ref, "resized, nearest pixel",
        "ONNX Resize", m.torch_decomposition(f"aten::upsample_nearest{n}d")) for n in (1, 2, 3)),
    _op("upsample_bilinear2d", "aten::upsample_bilinear2d", dt.SELF, sh.resized(2), m.bilinear2d_ref,
        "resized, bilinear", "ONNX Resize", resize.bilinear2d),
    *(_op(f"upsample_nearest_exact{n}d", f"aten::_upsample_nearest_exact{n}d", dt.SELF, sh.resized(n), m.nearest_exact_ref,
        "resized, the pixel at the middle", "Pillow, Resampling.NEAREST") for n in (1, 2, 3)),
    _op("upsample_linear1d", "aten::upsample_linear1d", dt.SELF, sh.resized(1), torch.ops.aten.upsample_linear1d.default,
        "resized, linear", "ONNX Resize"),
    _op("upsample_trilinear3d", "aten::upsample_trilinear3d", dt.SELF, sh.resized(3), torch.ops.aten.upsample_trilinear3d.default,
        "resized, trilinear", "ONNX Resize"),
    _op("upsample_bicubic2d", "aten::upsample_bicubic2d", dt.SELF, sh.resized(2), m.bicubic2d_ref,
        "resized, bicubic", "ONNX Resize", m.torch_decomposition("aten::upsample_bicubic2d")),
    *(_op(f"grid_sampler_{n}d", f"aten::grid_sampler_{n}d", dt.INPUT, m.sampled_shape,
        getattr(torch.ops.aten, f"grid_sampler_{n}d").default, "input at the places of grid, interpolated",
        "Jaderberg et al., arXiv:1506.02025") for n in (2, 3)),
    _op("pixel_shuffle", "aten::pixel_shuffle", dt.SELF, m.pixel_shuffle_shape, m.pixel_shuffle_ref,
        "channels moved into r x r blocks of pixels", "Shi et al., arXiv:1609.05158", m.pixel_shuffle),
    _op("pixel_unshuffle", "aten::pixel_unshuffle", dt.SELF, m.pixel_unshuffle_shape, m.pixel_unshuffle_ref,
        "r x r blocks of pixels moved into channels", "Shi et al., arXiv:1609.05158", m.pixel_unshuffle),
    # losses
    _op("nll_loss", "aten::nll_loss_forward", dt.dtype_of("self", 2), loss_shapes, m.nll_loss_ref,
        "-weight[target] * self[target], reduced; total weight", "", m.nll_loss),
    _op("mse_loss", "aten::mse_loss", dt.promote("self", "target"), pointwise_loss_shape, m.mse_loss_ref,
        "(self - target)^2, reduced", "", m.mse_loss),
    _op("smooth_l1_loss", "aten::smooth_l1_loss", dt.promote("self", "target"), pointwise_loss_shape,
        m.smooth_l1_ref, "quadratic below beta, linear above, reduced", "Girshick, arXiv:1504.08083",
        m.smooth_l1),
    _op("huber_loss", "aten::huber_loss", dt.SELF, pointwise_loss_shape, m.huber_ref,
        "quadratic below delta, linear above, reduced", "Huber 1964", m.narrowed(m.huber_ref), fake_differs=(0,), opened=True),
    _op("soft_margin_loss", "aten::soft_margin_loss", dt.SELF, pointwise_loss_shape, m.soft_margin_ref,
        "log(1 + exp(-target * self)), reduced", "", m.narrowed(m.soft_margin_ref), fake_differs=(0,), opened=True),
    _op("nll_loss2d", "aten::nll_loss2d_forward", dt.dtype_of("self", 2), loss2d_shapes, m.nll_loss2d_ref,
        "nll_loss of every pixel; total weight", "", m.nll_loss2d),
    _op("bce_with_logits", "aten::binary_cross_entropy_with_logits", dt.dtype_of("target"), pointwise_loss_shape,
        m.bce_with_logits_ref, "binary cross entropy of sigmoid(self), reduced", "", m.bce_with_logits, opened=True),
)
# fmt: on
