"""Quantized rows. A value q represents (q - zero_point) * scale.

The `quantized_decomposed` ops exist once torchao or `_torch_compat.register_quantized_decomposed` has defined them, the
`onednn` ones if torch was built with oneDNN on x86.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusewright.ops import dtype_rules as dt
from fusewright.ops import shape_rules as sh
from fusewright.ops.core import Args, Kind, Op, Shape, row
from fusewright.ops.semantics.composite import widened

_op = partial(row, Kind.COMPOSITE)
_INT8 = "Jacob et al., arXiv:1712.05877"


def _channels(t: Any, like: Any, axis: int) -> Any:
    return t.reshape([-1 if d == axis % like.dim() else 1 for d in range(like.dim())])


def _quantized(x: Any, scale: Any, zero_point: Any, low: Any, high: Any, dtype: torch.dtype) -> Any:
    return torch.clamp(torch.round(x * (1.0 / scale)) + zero_point, low, high).to(dtype)


def quantize(x: Any, scale: Any, zero_point: Any, low: Any, high: Any, dtype: torch.dtype) -> Any:
    return _quantized(widened(x), scale, zero_point, low, high, dtype)


def quantize_channels(x: Any, scales: Any, zero_points: Any, axis: int, low: int, high: int, dtype: torch.dtype) -> Any:
    return _quantized(x, _channels(scales, x, axis), _channels(zero_points, x, axis), low, high, dtype)


def dequantize_ref(
    x: Any, scale: Any, zero_point: Any, low: Any, high: Any, dtype: Any, *, out_dtype: Any = None
) -> Any:
    return (x.to(torch.float64) - zero_point) * scale


def dequantize(x: Any, scale: Any, zero_point: Any, low: Any, high: Any, dtype: Any, *, out_dtype: Any = None) -> Any:
    return ((x.to(torch.float32) - zero_point) * scale).to(out_dtype or torch.float32)


def dequantize_channels_ref(
    x: Any, scales: Any, zero_points: Any, axis: int, *_: Any, out_dtype: Any = None, wide: torch.dtype = torch.float64
) -> Any:
    """The canonical arguments after `axis` (the limits and type of `x`) are not needed."""
    zeros = 0 if zero_points is None else _channels(zero_points, x, axis)
    return (x.to(wide) - zeros) * _channels(scales, x, axis)


def dequantize_channels(x: Any, scales: Any, *rest: Any, out_dtype: Any = None) -> Any:
    """`dequantize_channels_ref` in fp32."""
    return dequantize_channels_ref(x, scales, *rest, wide=torch.float32).to(out_dtype or torch.float32)


def choose_qparams_ref(x: Any, low: int, high: int, eps: float, dtype: torch.dtype) -> tuple[Any, Any]:
    least, most = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = ((most - least) / (high - low)).clamp(min=eps)
    zero_point = torch.clamp(low - torch.round(least / scale), low, high).to(torch.int64)
    return scale.reshape(1), zero_point.reshape(1)


def quantize_tokens(x: Any, scales: Any, zero_points: Any, low: int, high: int, dtype: torch.dtype) -> Any:
    return torch.clamp(torch.round(x * (1.0 / scales) + zero_points), low, high).to(dtype)


def dequantize_tokens_ref(x: Any, scales: Any, zero_points: Any, *_: Any) -> Any:
    return (x.to(torch.float64) - zero_points) * scales


def dequantize_tokens(x: Any, scales: Any, zero_points: Any, low: int, high: int, dtype: Any, out_dtype: Any) -> Any:
    return ((x - zero_points) * scales).to(out_dtype)


def choose_token_qparams_ref(x: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return scales, torch.zeros_like(scales)


def choose_asymmetric_token_qparams_ref(x: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    least, most = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scales = ((most - least) / 255).clamp(min=torch.finfo(torch.float32).eps)
    low, high = least / scales, most / scales
    zeros = torch.where((low - 128) + (high + 127) > 0, -128 - low, 127 - high)
    return scales, torch.clamp(zeros, -128, 127).round().to(torch.int64)


_POST_OPS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "swish": lambda x: x * torch.sigmoid(x),
}


def _finished(out: Any, post: str, dtype: torch.dtype | None, scale: float, zero_point: int, like: Any) -> Any:
    if post not in _POST_OPS:
        raise NotImplementedError(f"the reference has no post-op {post!r}")
    out, dtype = _POST_OPS[post](out), dtype or like.dtype
    if dtype.is_floating_point:
        return out
    info = torch.iinfo(dtype)
    return torch.clamp(torch.round(out / scale) + zero_point, info.min, info.max)


def q_linear_ref(
    qx: Any,
    x_scale: Any,
    x_zero_point: Any,
    qw: Any,
    w_scale: Any,
    w_zero_point: Any,
    bias: Any,
    output_scale: float,
    output_zero_point: int,
    output_dtype: Any,
    post: str,
    post_args: Any,
    post_algorithm: str,
) -> Any:
    # The packed weight is [in, out].
    w = (qw.to_dense().to(torch.float64) - w_zero_point) * w_scale
    out = torch.matmul((qx.to(torch.float64) - x_zero_point) * x_scale, w)
    out = out if bias is None else out + bias
    return _finished(out, post, output_dtype, output_scale, output_zero_point, qx)


def q_conv_ref(
    qx: Any,
    x_scale: Any,
    x_zero_point: Any,
    qw: Any,
    w_scale: Any,
    w_zero_point: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    output_scale: float,
    output_zero_point: int,
    output_dtype: Any,
    post: str,
    post_args: Any,
    post_algorithm: Any,
) -> Any:
    w = qw.to_dense()
    w = (w.to(torch.float64) - _channels(w_zero_point, w, 0)) * _channels(w_scale, w, 0)
    x = (qx.to(torch.float64) - x_zero_point) * x_scale
    out = torch.convolution(x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return _finished(out, post, output_dtype, output_scale, output_zero_point, qx)


def out_dtype(a: Args) -> tuple[torch.dtype]:
    """The `out_dtype` argument, else fp32."""
    return (a["out_dtype"] or torch.float32,)


def output_dtype(a: Args) -> tuple[torch.dtype]:
    """The `output_dtype` argument, else the dtype of the quantized input."""
    return (a["output_dtype"] or a["qx"].dtype,)


def q_linear_shape(a: Args) -> tuple[Shape]:
    """[..., k] x packed [k, n] -> [..., n]."""
    return ((*a["qx"].shape[:-1], a["qw"].shape[1]),)


def q_conv_shape(a: Args) -> tuple[Shape]:
    """As conv."""
    zeros = [0] * len(a["stride"])
    return sh.conv({**a, "input": a["qx"], "weight": a["qw"], "transposed": False, "output_padding": zeros})


def qparams_dtypes(a: Args) -> tuple[torch.dtype, torch.dtype]:
    """An fp64 scale and an int64 zero point."""
    return torch.float64, torch.int64


def token_shapes(a: Args) -> tuple[Shape, Shape]:
    """One value per row: [..., n] -> [..., 1], twice."""
    rows = (*a["input"].shape[:-1], 1)
    return rows, rows


def token_dtypes(a: Args) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the input, but fp32 for fp16."""
    found = torch.float32 if a["input"].dtype == torch.float16 else a["input"].dtype
    return found, found


_D = "quantized_decomposed::"
# fmt: off
ROWS: tuple[Op, ...] = (
    _op("quantize", _D + "quantize_per_tensor", dt.attr("dtype"), sh.SAME_INPUT, quantize,
        "clamp(round(input / scale) + zero_point)", _INT8, quantize),
    _op("quantize_tensor", _D + "quantize_per_tensor.tensor", dt.attr("dtype"), sh.SAME_INPUT, quantize,
        "quantize, scale and zero point being tensors", _INT8, quantize),
    _op("quantize_per_channel", _D + "quantize_per_channel", dt.attr("dtype"), sh.SAME_INPUT, quantize_channels,
        "quantize, one scale and zero point per index of axis", _INT8, quantize_channels),
    _op("dequantize", _D + "dequantize_per_tensor", out_dtype, sh.SAME_INPUT, dequantize_ref,
        "(input - zero_point) * scale", _INT8, dequantize),
    _op("dequantize_tensor", _D + "dequantize_per_tensor.tensor", out_dtype, sh.SAME_INPUT, dequantize_ref,
        "dequantize, scale and zero point being tensors", _INT8, dequantize),
    _op("dequantize_per_channel", _D + "dequantize_per_channel", out_dtype, sh.SAME_INPUT,
        dequantize_channels_ref, "dequantize, one scale and zero point per index of axis", _INT8,
        dequantize_channels),
    _op("quantize_per_token", _D + "quantize_per_token", dt.attr("dtype"), sh.SAME_INPUT, quantize_tokens,
        "quantize, one scale and zero point per row, which is added before rounding", _INT8, quantize_tokens),
    _op("dequantize_per_token", _D + "dequantize_per_token", dt.attr("output_dtype"), sh.SAME_INPUT,
        dequantize_tokens_ref, "dequantize, one scale and zero point per row", _INT8, dequantize_tokens),
    _op("choose_qparams_per_token", _D + "choose_qparams_per_token", token_dtypes, token_shapes,
        choose_token_qparams_ref, "for each row the scale that covers its largest magnitude; zero points are 0", _INT8),
    _op("choose_qparams_per_token_asymmetric", _D + "choose_qparams_per_token_asymmetric", qparams_dtypes, token_shapes,
        choose_asymmetric_token_qparams_ref, "for each row scale and zero point that cover its range and zero", _INT8),
    _op("choose_qparams", _D + "choose_qparams.tensor", qparams_dtypes, sh.constant_shape((1,), (1,)),
        choose_qparams_ref, "scale and zero point that cover the input's range and zero", _INT8),
    _op("q_linear", "onednn::qlinear_pointwise", output_dtype, q_linear_shape, q_linear_ref,
        "int8 linear on a packed weight, with a post-op, requantized", "oneDNN Matmul, quantization"),
    _op("q_linear_tensor", "onednn::qlinear_pointwise.tensor", output_dtype, q_linear_shape, q_linear_ref,
        "q_linear, the input's scale and zero point being tensors", "oneDNN Matmul, quantization"),
    _op("q_conv", "onednn::qconv_pointwise", output_dtype, q_conv_shape, q_conv_ref,
        "int8 convolution on a packed weight, with a post-op, requantized",
        "oneDNN Convolution, quantization"),
    row(Kind.CONTRACTION, "int_mm", "aten::_int_mm", dt.fixed(torch.int32), sh.mm,
        lambda x, y: torch.mm(x.to(torch.int32), y.to(torch.int32)), "int8 matrix product, summed in int32"),
)
# fmt: on
