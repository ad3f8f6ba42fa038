"""The torch operators that plans of `x86_int8` call: a set for each engine (our core, oneDNN), all with the same arguments.

Each weight is packed once (`pack_*`). A weight that no longer fits 8 bits after subtracting its zero points stays in floats, and
so does its product, so that every graph computes what it specifies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusewright.interface import TensorSpec
from fusewright.plan.ir import BINDS, DIRECT, Call, Ref, call_directly, launch_directly
from fusewright_int8.run import native
from fusewright_int8.run.bound import binds, runner
from fusewright_int8.run.reference import RULES, Epilogue, dequantize, quantize_dynamic

NAMESPACE = "fusewright_int8"
_library = torch.library.Library(NAMESPACE, "DEF")

_EPILOGUE = (
    "Tensor? residual, float residual_scale, int residual_zero_point, str post, float[] post_args, ScalarType out_dtype, "
    "float out_scale, int out_zero_point, int out_low, int out_high"
)
_INPUT = "Tensor x, Tensor packed, Tensor w_scale, Tensor? bias, float x_scale, int x_zero_point"
_GEOMETRY = "int[] kernel_size, int[] stride, int[] padding, int[] dilation, int groups"


def name(op: str) -> str:
    """Return the name of an operator in a plan."""
    return f"{NAMESPACE}::{op}.default"


def _operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def define(run: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema)
        op = schema.partition("(")[0]
        for key in ("CPU", "MkldnnCPU"):  # oneDNN's packed weights dispatch as MkldnnCPU
            _library.impl(op, run, key)
        call_directly(name(op), lambda: run)
        return run

    return define


def _epilogue(
    residual: Tensor | None, residual_scale: float, residual_zero_point: int, post: str, post_args: Sequence[float],
    out_dtype: torch.dtype, out_scale: float, out_zero_point: int, out_low: int, out_high: int,
) -> Epilogue:  # fmt: skip
    return Epilogue(
        residual,
        residual_scale,
        residual_zero_point,
        post,
        post_args,
        out_dtype,
        out_scale,
        out_zero_point,
        out_low,
        out_high,
    )


_NAMES = (
    "residual", "residual_scale", "residual_zero_point", "post", "post_args", "out_dtype", "out_scale", "out_zero_point", "out_low",
    "out_high",
)  # fmt: skip


def _named(rest: Sequence[Any]) -> dict[str, Any]:
    """Return an epilogue's arguments as keyword arguments of the core's functions."""
    found = dict(zip(_NAMES, rest, strict=True))
    if found["out_dtype"].is_floating_point:
        found["out_low"] = found["out_high"] = None
    return found


# -- weights


@_operator("center(Tensor weight, Tensor? zero_points) -> Tensor")
def center(weight: Tensor, zero_points: Tensor | None) -> Tensor:
    """Return weight - zero_points (one per index of the first dimension, or one for all) as int8 if it fits, else fp32."""
    if zero_points is None or not zero_points.any():
        return weight.clone(memory_format=torch.contiguous_format)
    column = zero_points.reshape(-1, *[1] * (weight.dim() - 1)).to(torch.int32)
    moved = weight.to(torch.int32) - column
    fits = bool(moved.amin() >= -128) and bool(moved.amax() <= 127)
    return moved.to(torch.int8 if fits else torch.float32).contiguous()


@_operator("scales(Tensor scale, int n) -> Tensor")
def scales(scale: Tensor, n: int) -> Tensor:
    """Return fp32 [n], given one scale for all or one for each."""
    return scale.reshape(-1).to(torch.float32, copy=True).expand(n).contiguous()


def _unless_wide(pack: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda weight, *rest: weight.clone() if weight.dtype.is_floating_point else pack(weight, *rest)


_operator("pack_linear(Tensor weight) -> Tensor")(_unless_wide(native.pack_linear))
_operator("pack_conv(Tensor weight, int groups) -> Tensor")(_unless_wide(native.pack_conv2d))
_operator("pack_linear_onednn(Tensor weight) -> Tensor")(
    _unless_wide(lambda weight: torch.ops.onednn.qlinear_prepack(weight, None))
)


@_operator(
    "pack_conv_onednn(Tensor weight, Tensor w_scale, float x_scale, int x_zero_point, int[] stride, int[] padding, "
    "int[] dilation, int groups, int[] x_shape) -> Tensor"
)
def pack_conv_onednn(weight: Tensor, w_scale: Tensor, *geometry: Any) -> Tensor:
    """Pack for inputs of `x_shape`. Other shapes compute the same, but may reorder the weight in every call."""
    if weight.dtype.is_floating_point:
        return weight.clone()
    return torch.ops.onednn.qconv_prepack(weight, w_scale, *geometry)


# -- products of quantized inputs


def _wide_linear(
    x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None, scale: float, zero: int, after: Epilogue
) -> Tensor:
    product = F.linear(dequantize(x, scale, zero), weight * w_scale[:, None], None if bias is None else bias.float())
    return after.apply(product)


@_operator(f"linear({_INPUT}, {_EPILOGUE}) -> Tensor")
def linear(
    x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, scale: float, zero: int, *rest: Any
) -> Tensor:
    """Compute with our core."""
    if packed.dtype.is_floating_point:
        return _wide_linear(x, packed, w_scale, bias, scale, zero, _epilogue(*rest))
    return native.linear(x, packed, w_scale, bias, scale, zero, **_named(rest))


@_operator(
    f"matmul(Tensor x, Tensor y, float x_scale, int x_zero_point, float y_scale, int y_zero_point, {_EPILOGUE}) -> Tensor"
)
def matmul(x: Tensor, y: Tensor, x_scale: float, x_zero: int, y_scale: float, y_zero: int, *rest: Any) -> Tensor:
    """Multiply two activations with our core, which adds no residual here."""
    given = {k: v for k, v in _named(rest).items() if not k.startswith("residual")}
    return native.matmul(x, y, x_scale, x_zero, y_scale, y_zero, **given)


def _unsigned(x: Tensor, zero: int) -> tuple[Tensor, int]:
    """Shift int8 to uint8, zero point included: oneDNN multiplies signed activations with its reference, 3,000 times slower."""
    return (x.view(torch.uint8) ^ 0x80, zero + 128) if x.dtype is torch.int8 else (x, zero)


ONEDNN_POSTS = {
    "none": ("none", "none"), "relu": ("relu", "none"), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"),
}  # fmt: skip
"""The core's post-ops -> oneDNN's name and algorithm for them."""


def _onednn_out(after: Epilogue) -> tuple[Any, ...]:
    attr, algorithm = ONEDNN_POSTS[after.post]
    return after.out_scale, after.out_zero_point, after.out_dtype, attr, [], algorithm


@_operator("other_sign(Tensor x) -> Tensor")
def other_sign(x: Tensor) -> Tensor:
    """Return bytes in the type of the other sign, 128 more or less."""
    return x.view(torch.uint8) ^ 0x80 if x.dtype is torch.int8 else x.view(torch.int8) ^ -128


def _binary(after: Epilogue, kind: str) -> tuple[Any, ...]:
    attr, algorithm = ONEDNN_POSTS[after.post]
    summand = after.residual_scale, after.residual_zero_point, kind, 1.0
    return after.out_scale, after.out_zero_point, after.out_dtype, *summand, attr, [], algorithm


@_operator(f"linear_onednn({_INPUT}, {_EPILOGUE}) -> Tensor")
def linear_onednn(
    x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, scale: float, zero: int, *rest: Any
) -> Tensor:
    """Compute with oneDNN, which clamps only to the limits of the type; `engines` says which residuals it adds."""
    after = _epilogue(*rest)
    if packed.dtype.is_floating_point:
        return _wide_linear(x, packed, w_scale, bias, scale, zero, after)
    zeros = _zeros(w_scale.numel())
    bias = None if bias is None else bias.float()
    x, zero = _unsigned(x, zero)
    if (r := after.residual) is None:
        return torch.ops.onednn.qlinear_pointwise.default(x, scale, zero, packed, w_scale, zeros, bias, *_onednn_out(after))
    # The sum overwrites the residual, the addition does not.
    r, kind = (r, "add") if r.dtype.is_floating_point else (r.clone(), "sum")
    return torch.ops.onednn.qlinear_pointwise.binary(x, scale, zero, packed, w_scale, zeros, r, bias, *_binary(after, kind))


@_operator(f"conv({_INPUT}, {_GEOMETRY}, {_EPILOGUE}) -> Tensor")
def conv(
    x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, scale: float, zero: int, kernel_size: Sequence[int],
    *rest: Any,
) -> Tensor:  # fmt: skip
    """Compute with our core."""
    if packed.dtype.is_floating_point:
        return _wide_conv(x, packed, w_scale, bias, scale, zero, rest[:4], _epilogue(*rest[4:]))
    stride, padding, dilation, groups, *after = rest
    given = packed, kernel_size, w_scale, bias, scale, zero, stride, padding, dilation, groups
    return native.conv2d(x, *given, **_named(after))


def _conv_onednn(
    run: Callable[..., Tensor], x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, scale: float, zero: int,
    kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, *rest: Any,
) -> Tensor:  # fmt: skip
    """Compute with oneDNN, with the restrictions of `linear_onednn`."""
    after, geometry = _epilogue(*rest), (stride, padding, dilation, groups)
    if packed.dtype.is_floating_point:
        return _wide_conv(x, packed, w_scale, bias, scale, zero, geometry, after)
    x, bias = x.contiguous(memory_format=torch.channels_last), None if bias is None else bias.float()
    x, zero = _unsigned(x, zero)
    return run((x, scale, zero, packed, w_scale, _zeros(w_scale.numel())), bias, geometry, after)


def _convolved(given: Any, bias: Tensor | None, geometry: Any, after: Epilogue) -> Tensor:
    y = torch.ops.onednn.qconv_pointwise.default(*given, bias, *geometry, *_onednn_out(after))
    return y.contiguous(memory_format=torch.channels_last)


def _summed(given: Any, bias: Tensor | None, geometry: Any, after: Epilogue) -> Tensor:
    assert after.residual is not None
    y = after.residual.contiguous(memory_format=torch.channels_last)
    torch.ops.onednn.qconv2d_pointwise.binary(*given, y, bias, *geometry, *_binary(after, "sum"))
    return y


_operator(f"conv_onednn({_INPUT}, {_GEOMETRY}, {_EPILOGUE}) -> Tensor")(partial(_conv_onednn, _convolved))
_operator(f"conv_sum_onednn({_INPUT}, {_GEOMETRY}, {_EPILOGUE.replace('Tensor?', 'Tensor(a!)')}) -> Tensor(a!)")(
    partial(_conv_onednn, _summed)
)
"""It overwrites the residual, of the result's type and channels-last, by the result, and returns it."""


def _wide_conv(
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    scale: float,
    zero: int,
    geometry: Any,
    after: Epilogue,
) -> Tensor:
    weight = weight * w_scale.reshape(-1, 1, 1, 1)
    images, (stride, padding, *rest) = dequantize(x, scale, zero), geometry
    if len(padding) == 4:
        top, left, bottom, right = padding
        images, padding = F.pad(images, (left, right, top, bottom)), (0, 0)
    y = F.conv2d(images, weight, None if bias is None else bias.float(), stride, padding, *rest)
    return after.apply(y).contiguous(memory_format=torch.channels_last)


@functools.lru_cache(64)
def _zeros(n: int) -> Tensor:
    """Return zero points of weights, which oneDNN's operators require but do not read."""
    return torch.zeros(n, dtype=torch.int32)


# -- products that quantize

_FLOAT = "Tensor x, Tensor packed, Tensor w_scale, Tensor? bias"
_AFTER = "Tensor? residual, str post, float[] post_args, ScalarType out_dtype"


def _float_linear(x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None, rest: Sequence[Any]) -> Tensor:
    """Compute a product whose weight does not fit 8 bits. The input is not quantized, which is more exact than the graph."""
    residual, post, post_args, out_dtype = rest
    product = F.linear(x.float(), weight * w_scale[:, None], None if bias is None else bias.float())
    return Epilogue(residual, post=post, post_args=post_args, out_dtype=out_dtype).apply(product)


def _floats(
    run: Callable[..., Tensor], x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, *rest: Any
) -> Tensor:
    *rule, residual, post, post_args, out_dtype = rest
    if packed.dtype.is_floating_point:
        return _float_linear(x, packed, w_scale, bias, rest[-4:])
    return run(x, packed, w_scale, bias, *rule, residual=residual, post=post, post_args=post_args, out_dtype=out_dtype)


_operator(f"dynamic_linear({_FLOAT}, str rule, {_AFTER}) -> Tensor")(partial(_floats, native.dynamic_linear))
_operator(f"weight_linear({_FLOAT}, {_AFTER}) -> Tensor")(partial(_floats, native.weight_linear))


@_operator(f"linear_tensor({_INPUT.replace('float x_scale, int', 'Tensor x_scale, Tensor')}, {_EPILOGUE}) -> Tensor")
def linear_tensor(
    x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, scale: Tensor, zero: Tensor, *rest: Any
) -> Tensor:
    """`linear` with the input's scale and zero point as tensors."""
    return linear(x, packed, w_scale, bias, float(scale), int(zero), *rest)


@_operator(
    f"linear_tensor_onednn({_INPUT.replace('float x_scale, int', 'Tensor x_scale, Tensor')}, {_EPILOGUE}) -> Tensor"
)
def linear_tensor_onednn(
    x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, scale: Tensor, zero: Tensor, *rest: Any
) -> Tensor:
    """`linear_onednn` with the input's scale and zero point as tensors."""
    return linear_onednn(x, packed, w_scale, bias, float(scale), int(zero), *rest)


def _dynamic_onednn(
    x: Tensor, packed: Tensor, w_scale: Tensor, bias: Tensor | None, rule: str, *, out_dtype: torch.dtype, **after: Any
) -> Tensor:
    """Compute sum((q - zero) * w) as sum(q * w) - zero * sum(w), and scale each row: oneDNN takes only one scale for all rows."""
    q, scale, zero = quantize_dynamic(x.reshape(-1, x.shape[-1]), RULES[rule])

    def sums(rows: Tensor) -> Tensor:
        out: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "none")
        rows, base = _unsigned(rows, 0)
        return torch.ops.onednn.qlinear_pointwise.default(rows, 1.0, base, packed, w_scale, _zeros(w_scale.numel()), None, *out)

    y = sums(q)
    if bool(zero.any()):
        y = y - zero[:, None] * sums(torch.ones(1, q.shape[1], dtype=q.dtype))
    y = y * scale[:, None]
    y = (y if bias is None else y + bias.float()).reshape(*x.shape[:-1], -1)
    return Epilogue(out_dtype=out_dtype, **after).apply(y)


_operator(f"dynamic_linear_onednn({_FLOAT}, str rule, {_AFTER}) -> Tensor")(partial(_floats, _dynamic_onednn))


# -- launches

for _op in ("linear", "matmul", "dynamic_linear", "weight_linear"):
    launch_directly(name(_op), binds(_op))
launch_directly(name("conv"), binds("conv2d"))


def as_planned(target: str, *args: Any) -> Callable[[], Tensor]:
    """Return a call of an operator on these arguments as a plan makes it, to measure it: a launch where that is possible."""
    run = DIRECT[target]()
    out = run(*args)
    given = {0: out} | {k: x for k, x in enumerate(args, 1) if isinstance(x, Tensor)}
    specs = {k: TensorSpec(tuple(x.shape), tuple(x.stride()), x.dtype) for k, x in given.items()}
    call = Call(target, tuple(Ref(k) if k in given else x for k, x in enumerate(args, 1)), (0,))
    bound = BINDS[target](call, specs) if target in BINDS else None
    if bound is None or any(given[ref.id].dtype is not dtype for ref, dtype in bound.types):
        return lambda: run(*args)
    launch = runner(bound, given)

    def launched() -> Tensor:
        launch()
        return given[0]  # the others too must live as long as their addresses are used

    return launched
