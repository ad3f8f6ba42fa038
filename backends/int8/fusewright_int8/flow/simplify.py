"""Rewrite padding and clamps around a graph's products into forms that int8 calls support; no value changes."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

aten, q = torch.ops.aten, torch.ops.quantized_decomposed
_PADS = (aten.pad.default, aten.constant_pad_nd.default)
_CLAMPS = (aten.hardtanh.default, aten.hardtanh_.default, aten.clamp.default, aten.clamp_.default, aten.relu6.default)


def before_observing(model: GraphModule) -> GraphModule:
    """Fold symmetric zero padding of a convolution's input into the convolution, and drop empty padding. Calibration then observes
    the tensor before the padding, which the convolution reads (TensorFlow's "same" pads each layer like this)."""
    for node in [n for n in model.graph.nodes if n.target in _PADS]:
        pads = _zeros_around(node)
        if pads is None:
            continue
        if not any(pads):
            node.replace_all_uses_with(node.args[0])
            continue
        for user in list(node.users):
            if (padding := _padding(user, node, pads)) is not None:
                user.args = (node.args[0], *user.args[1:4], padding, *user.args[5:])
                user.kwargs = {k: v for k, v in user.kwargs.items() if k != "padding"}
    return _tidy(model)


def after_converting(model: GraphModule) -> GraphModule:
    """Move other zero padding behind the quantization, and drop upper limits that quantization enforces anyway, so that the
    products on both sides exchange 8-bit tensors."""
    for node in [n for n in model.graph.nodes if n.target is q.quantize_per_tensor.default]:
        _pad_behind(model, node)
        _leave_limits(model, node)
    return _tidy(model)


def _tidy(model: GraphModule) -> GraphModule:
    model.graph.eliminate_dead_code()
    model.recompile()
    return model


def _zeros_around(node: Node) -> list[int] | None:
    """Return the number of zeros on each side, last dimension first; None for other padding or symbolic sizes."""
    args: tuple[Any, ...] = node.args
    _, pads, *rest = args
    given = dict(zip(("mode", "value") if node.target is _PADS[0] else ("value",), rest, strict=False)) | node.kwargs
    if given.get("mode", "constant") != "constant" or given.get("value"):
        return None
    known = isinstance(pads, list | tuple) and all(isinstance(p, int) and p >= 0 for p in pads)
    return list(pads) if known else None


def _padding(conv: Node, pad: Node, pads: list[int]) -> list[int] | None:
    """Return the padding of a 2-d convolution including that of `pad`, or None if it cannot be expressed."""
    if conv.target is not aten.conv2d.default or conv.args[0] is not pad or len(pads) > 4 or len(conv.args) < 4:
        return None
    left, right, top, bottom = (*pads, 0, 0)[:4]
    own: Any = conv.args[4] if len(conv.args) > 4 else conv.kwargs.get("padding", 0)
    own = [own] * 2 if isinstance(own, int) else list(own) * (2 // len(own))
    if left != right or top != bottom or not all(isinstance(p, int) for p in own):
        return None
    return [own[0] + top, own[1] + left]


def _pad_behind(model: GraphModule, quantize: Node) -> None:
    """Rewrite quantize(pad(x)) as quantize(x) padded with the zero point, which represents zero."""
    given: tuple[Any, ...] = quantize.args
    pad, scale, zero, low, high, dtype = given
    if not isinstance(pad, Node) or pad.target not in _PADS or _zeros_around(pad) is None or not low <= zero <= high:
        return
    x, pads = pad.args[:2]
    with model.graph.inserting_before(quantize):
        levels = model.graph.call_function(q.quantize_per_tensor.default, (x, scale, zero, low, high, dtype))
        moved = model.graph.call_function(aten.constant_pad_nd.default, (levels, pads, zero))
    moved.meta = dict(quantize.meta)
    quantize.replace_all_uses_with(moved)
    if "val" in quantize.meta and isinstance(x, Node) and "val" in x.meta:
        levels.meta = dict(quantize.meta, val=x.meta["val"].to(dtype))
    _leave_limits(model, levels)


def _leave_limits(model: GraphModule, quantize: Node) -> None:
    """Rewrite clamp(x, 0, high) as relu(x) before a quantization whose largest level does not exceed that of `high`."""
    given: tuple[Any, ...] = quantize.args
    clamp, scale, zero, _, most, _ = given
    if not isinstance(clamp, Node) or clamp.target not in _CLAMPS:
        return
    x, least, high = _limits(clamp)
    if least != 0 or not isinstance(high, int | float) or not isinstance(scale, float) or not scale > 0:
        return
    level = torch.round(torch.tensor(high, dtype=torch.float32) * (1.0 / scale)) + zero
    if bool(level >= most):
        with model.graph.inserting_before(clamp):
            relu = model.graph.call_function(aten.relu.default, (x,))
        relu.meta = dict(clamp.meta)
        quantize.replace_input_with(clamp, relu)


def _limits(clamp: Node) -> tuple[Any, Any, Any]:
    """Return the clamped value and its limits."""
    if clamp.target is aten.relu6.default:
        return clamp.args[0], 0, 6
    hard = clamp.target in (aten.hardtanh.default, aten.hardtanh_.default)
    names = ("min_val", "max_val") if hard else ("min", "max")
    given = dict(zip(names, clamp.args[1:], strict=False)) | clamp.kwargs
    least, high = (given.get(name, default) for name, default in zip(names, (-1.0, 1.0) if hard else (None, None), strict=True))
    return clamp.args[0], least, high
