"""Backward rows: composites in AOTAutograd's backward graphs. References are formulas or autograd in fp64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fusewright.ops import dtype_rules as dt
from fusewright.ops import shape_rules as sh
from fusewright.ops.core import Args, DtypeRule, Kind, Op, Shape, row
from fusewright.ops.semantics import adaptive, resize
from fusewright.ops.semantics import backward as b
from fusewright.ops.semantics import composite as m
from fusewright.ops.semantics.composite import torch_decomposition

_op = partial(row, Kind.COMPOSITE)
_GRAD = dt.dtype_of("grad_output")


_RESULT = (0,)
"""The result of rows whose dtype FakeTensor gets wrong for operands of several dtypes (`Op.fake_differs`)."""


def _elementwise(
    name: str, reference: Any, doc: str, second: str = "self", dtype_rule: Any = None, decompose: Any = None
) -> Op:
    q = f"aten::{name}"
    rule = dtype_rule or dt.promote("grad_output", second)
    decompose = decompose or torch_decomposition(q)
    differs = _RESULT if name in ("mish_backward", "threshold_backward") else ()
    return _op(name, q, rule, sh.broadcast("grad_output", second), reference, doc, "", decompose, differs)


def softmax_backward_dtype(a: Args) -> tuple[torch.dtype]:
    """`input_dtype` if a half input was widened, else the dtype of the gradient."""
    return (a["input_dtype"] if a["grad_output"].dtype != a["input_dtype"] else a["grad_output"].dtype,)


def conv_backward_shapes(a: Args) -> tuple[Shape | None, ...]:
    """The shapes of input, weight and bias, where `output_mask` asks for them."""
    w = tuple(a["weight"].shape)
    bias = w[1] * a["groups"] if a["transposed"] else w[0]
    return sh.masked_shapes(lambda x: (tuple(x["input"].shape), w, (bias,)))(a)


def norm_backward_shapes(a: Args) -> tuple[Shape | None, ...]:
    """The shapes of input, weight and bias, where `output_mask` asks for them."""
    n = _normalized(a)
    return sh.masked_shapes(lambda x: (tuple(x["input"].shape), n, n))(a)


def _normalized(a: Args) -> Shape:
    """Return the normalized shape, taken from the input: torch 2.11 passes symbols of `normalized_shape` on as addresses."""
    return tuple(a["input"].shape)[-len(a["normalized_shape"]) :]


def rms_backward_shapes(a: Args) -> tuple[Shape | None, ...]:
    """The shapes of input and weight, where `output_mask` asks for them."""
    return sh.masked_shapes(lambda x: (tuple(x["input"].shape), _normalized(x)))(a)


def channel_backward_shapes(a: Args) -> tuple[Shape | None, ...]:
    """The shape of input and twice [C], where `output_mask` asks for them."""
    return sh.masked_shapes(sh.channel_stats)(a)


def norm_backward_dtypes(a: Args) -> tuple[torch.dtype | None, ...]:
    """The input's dtype, then the weight's (the input's without weight), where `output_mask` asks for
    them."""
    w = a["input"].dtype if a["weight"] is None else a["weight"].dtype
    return dt.masked(lambda x: (x["input"].dtype, *(w,) * (len(x["output_mask"]) - 1)))(a)


def embedding_grad_shape(a: Args) -> tuple[Shape]:
    """[num_weights, d]."""
    return ((a["num_weights"], a["grad_output"].shape[-1]),)


def sdpa_backward_shapes(a: Args) -> tuple[Shape, ...]:
    """The shapes of query, key and value."""
    return tuple(tuple(a[n].shape) for n in ("query", "key", "value"))


def sdpa_backward_dtypes(a: Args) -> tuple[torch.dtype, ...]:
    """The dtypes of query, key and value."""
    return tuple(a[n].dtype for n in ("query", "key", "value"))


def weight_norm_grad_dtypes(a: Args) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of v and g."""
    return a["saved_v"].dtype, a["saved_g"].dtype


def weight_norm_grad_shapes(a: Args) -> tuple[Shape, Shape]:
    """The shapes of v and g."""
    return tuple(a["saved_v"].shape), tuple(a["saved_g"].shape)


def prelu_grad_shapes(a: Args) -> tuple[Shape | None, ...]:
    """Twice the broadcast shape of input and weight."""
    (s,) = sh.broadcast("grad_output", "self", "weight")(a)
    return s, s


def prelu_grad_dtypes(a: Args) -> tuple[torch.dtype, torch.dtype]:
    """Twice the dtype of the input."""
    return a["self"].dtype, a["self"].dtype


def _grad_of_input(name: str, reference: Any, doc: str, qualname: str = "", opened: Any = None) -> Op:
    """A row; `opened` computes it in primitives."""
    q = f"aten::{qualname or name}"
    return _op(name, q, _GRAD, sh.SAME, reference, doc, "", opened, opened=opened is not None)


def _resize_grad(name: str, doc: str, decompose: Callable[..., Any] | None = None, opened: bool = False) -> Op:
    shape = sh.attr_shape("input_size")
    return _op(name, f"aten::{name}", _GRAD, shape, b.resize_backward(name), doc, "", decompose, opened=opened)


SAVED: dict[str, tuple[tuple[str, str], DtypeRule]] = {
    "layer_norm_backward": (("mean", "rstd"), dt.norm_stats()),
    "group_norm_backward": (("mean", "rstd"), dt.norm_stats(wide=False)),
    "batch_norm_backward": (("save_mean", "save_invstd"), dt.norm_stats("running_mean", "weight")),
}
"""Arguments saved by a forward, and their real dtypes (see `Op.fake_differs`)."""

# fmt: off
ROWS: tuple[Op, ...] = (
    _elementwise("gelu_backward", b.gelu_backward, "gradient of gelu"),
    _elementwise("silu_backward", b.silu_backward, "gradient of silu"),
    _elementwise("mish_backward", b.mish_backward_ref, "gradient of mish", dtype_rule=dt.SELF,
        decompose=b.mish_backward),
    _elementwise("tanh_backward", b.tanh_backward, "gradient of tanh from its output", "output"),
    _elementwise("sigmoid_backward", b.sigmoid_backward, "gradient of sigmoid from its output", "output"),
    _elementwise("threshold_backward", b.threshold_backward, "gradient of relu and threshold"),
    _elementwise("hardtanh_backward", b.hardtanh_backward, "gradient of hardtanh and relu6"),
    _elementwise("hardswish_backward", b.hardswish_backward, "gradient of hardswish"),
    _elementwise("hardsigmoid_backward", b.hardsigmoid_backward, "gradient of hardsigmoid"),
    _elementwise("leaky_relu_backward", b.leaky_relu_backward, "gradient of leaky_relu"),
    _op("prelu_backward", "aten::_prelu_kernel_backward", prelu_grad_dtypes, prelu_grad_shapes, b.prelu_backward,
        "gradients of prelu by input and weight, before it broadcast", "", torch_decomposition("aten::_prelu_kernel_backward")),
    _op("log_sigmoid_backward", "aten::log_sigmoid_backward", _GRAD, sh.shape_of("grad_output"), b.log_sigmoid_backward,
        "gradient of log_sigmoid", "", torch_decomposition("aten::log_sigmoid_backward")),
    _elementwise("elu_backward", b.elu_backward, "gradient of elu", "self_or_result"),
    _elementwise("softplus_backward", b.softplus_backward, "gradient of softplus"),
    _op("glu_backward", "aten::glu_backward", _GRAD, sh.SAME, b.glu_backward, "gradient of glu", "",
        torch_decomposition("aten::glu_backward")),
    _op("dropout_backward", "aten::native_dropout_backward", dt.promote("grad_output", "scale"),
        sh.shape_of("grad_output"), b.dropout_backward, "grad_output * mask * scale", "",
        torch_decomposition("aten::native_dropout_backward")),
    _op("softmax_backward", "aten::_softmax_backward_data", softmax_backward_dtype, sh.shape_of("grad_output"),
        b.softmax_backward, "gradient of softmax from its output", "",
        torch_decomposition("aten::_softmax_backward_data")),
    _op("log_softmax_backward", "aten::_log_softmax_backward_data", softmax_backward_dtype,
        sh.shape_of("grad_output"), b.log_softmax_backward, "gradient of log_softmax from its output", "",
        torch_decomposition("aten::_log_softmax_backward_data")),
    _op("layer_norm_backward", "aten::native_layer_norm_backward", norm_backward_dtypes, norm_backward_shapes,
        b.layer_norm_backward, "gradients of layer_norm", "",
        torch_decomposition("aten::native_layer_norm_backward")),
    _op("rms_norm_backward", "aten::_fused_rms_norm_backward", norm_backward_dtypes, rms_backward_shapes,
        b.rms_norm_backward, "gradients of rms_norm", "",
        torch_decomposition("aten::_fused_rms_norm_backward")),
    _op("group_norm_backward", "aten::native_group_norm_backward", norm_backward_dtypes,
        channel_backward_shapes, b.group_norm_backward, "gradients of group_norm", "",
        torch_decomposition("aten::native_group_norm_backward")),
    _op("batch_norm_backward", "aten::native_batch_norm_backward", norm_backward_dtypes,
        channel_backward_shapes, b.batch_norm_backward, "gradients of batch_norm_train", "",
        torch_decomposition("aten::native_batch_norm_backward")),
    _op("conv_backward", "aten::convolution_backward", norm_backward_dtypes, conv_backward_shapes,
        b.conv_backward, "gradients of conv by input, weight and bias"),
    _op("embedding_backward", "aten::embedding_dense_backward", _GRAD, embedding_grad_shape,
        b.embedding_backward_ref, "gradient rows added up by index; padding_idx gets none", "",
        b.embedding_backward),
    _op("sdpa_backward", "aten::_scaled_dot_product_flash_attention_for_cpu_backward", sdpa_backward_dtypes,
        sdpa_backward_shapes, b.sdpa_backward, "gradients of sdpa_with_lse", "Dao et al., arXiv:2205.14135"),
    _op("nll_loss_backward", "aten::nll_loss_backward", dt.SELF, sh.SAME, b.nll_loss_backward,
        "gradient of nll_loss", "", torch_decomposition("aten::nll_loss_backward")),
    _op("mse_loss_backward", "aten::mse_loss_backward", dt.SELF, sh.broadcast("self", "target"),
        b.mse_loss_backward, "gradient of mse_loss", "", torch_decomposition("aten::mse_loss_backward"), _RESULT),
    _op("smooth_l1_loss_backward", "aten::smooth_l1_loss_backward", dt.SELF, sh.broadcast("self", "target"),
        b.smooth_l1_backward, "gradient of smooth_l1_loss", "",
        torch_decomposition("aten::smooth_l1_loss_backward"), _RESULT),
    _op("huber_loss_backward", "aten::huber_loss_backward", dt.promote("grad_output", "self", "target"),
        sh.broadcast("self", "target"), b.huber_backward, "gradient of huber_loss"),
    _op("soft_margin_loss_backward", "aten::soft_margin_loss_backward", dt.SELF, sh.broadcast("self", "target"),
        b.soft_margin_backward, "gradient of soft_margin_loss", "", None, _RESULT),
    _op("nll_loss2d_backward", "aten::nll_loss2d_backward", dt.SELF, sh.SAME, b.nll_loss2d_backward, "gradient of nll_loss2d"),
    _op("weight_norm_backward", "aten::_weight_norm_interface_backward", weight_norm_grad_dtypes,
        weight_norm_grad_shapes, b.weight_norm_backward, "gradients of weight_norm by v and g"),
    *(_grad_of_input(f"max_pool{n}d_backward", b.max_pool_backward(n), f"gradient of max_pool{n}d",
        f"max_pool{n}d_with_indices_backward") for n in (2, 3)),
    *(_grad_of_input(f"avg_pool{n}d_backward", b.avg_pool_backward(m.avg_pool_ref(n)), f"gradient of avg_pool{n}d")
        for n in (2, 3)),
    *(_grad_of_input(f"adaptive_avg_pool{n}d_backward", b.adaptive_avg_backward(n), f"gradient of adaptive_avg_pool{n}d",
        f"_adaptive_avg_pool{n}d_backward", adaptive.avg_backward(n)) for n in (2, 3)),
    *(_grad_of_input(f"adaptive_max_pool{n}d_backward", b.max_pool_backward(n), f"gradient of adaptive_max_pool{n}d",
        opened=adaptive.max_backward(n)) for n in (2, 3)),
    *(_resize_grad(f"upsample_nearest{n}d_backward", f"gradient of upsample_nearest{n}d", resize.nearest_backward(n), opened=True)
        for n in (1, 2, 3)),
    _resize_grad("upsample_bilinear2d_backward", "gradient of upsample_bilinear2d", resize.bilinear2d_backward),
    _resize_grad("upsample_bicubic2d_backward", "gradient of upsample_bicubic2d"),
    *(_grad_of_input(f"reflection_pad{n}d_backward", b.pad_backward("reflect"), f"gradient of reflection_pad{n}d",
        opened=b.reflection_backward) for n in (1, 2, 3)),
    *(_grad_of_input(f"replication_pad{n}d_backward", b.pad_backward("replicate"), f"gradient of replication_pad{n}d",
        opened=b.replication_backward) for n in (1, 2, 3)),
    _op("select_backward", "aten::select_backward", _GRAD, sh.attr_shape("input_sizes"), b.select_backward,
        "zeros with the gradient at one index of dim", "", torch_decomposition("aten::select_backward")),
    _op("slice_backward", "aten::slice_backward", _GRAD, sh.attr_shape("input_sizes"), b.slice_backward,
        "zeros with the gradient at start:end:step of dim", "", torch_decomposition("aten::slice_backward")),
    _op("unfold_backward", "aten::unfold_backward", dt.dtype_of("grad_in"), sh.attr_shape("input_sizes"),
        b.unfold_backward, "gradient of unfold: windows added up", "",
        b.unfold_backward_opened),
)
# fmt: on
