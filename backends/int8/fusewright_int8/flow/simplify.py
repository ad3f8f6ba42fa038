"""Padding and limits around a graph's products, said in the words that int8 calls have; no value changes."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

aten, q = torch.ops.aten, torch.ops.quantized_decomposed
_PADS = (aten.pad.default, aten.constant_pad_nd.default)
_CLAMPS = (aten.hardtanh.default, aten.hardtanh_.default, aten.clamp.default, aten.clamp_.default, aten.relu6.default)


def before_observing(model: GraphModule) -> GraphModule:
    """Zeros around the input of a convolution are its padding, where there are as many on both sides; a padding of nothing goes.
    Calibration then sees, and convolutions read, what was there before (TensorFlow's "same" pads each layer so)."""
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
    """Other zeros are put around the quantized tensor, and limits that quantization has anyway are left to it: so both products
    beside them end and begin in 8 bits."""
    for node in [n for n in model.graph.nodes if n.target is q.quantize_per_tensor.default]:
        _pad_behind(model, node)
        _leave_limits(model, node)
    return _tidy(model)


def _tidy(model: GraphModule) -> GraphModule:
    model.graph.eliminate_dead_code()
    model.recompile()
    return model


def _zeros_around(node: Node) -> list[int] | None:
    """How many zeros on each side, the last dimension first; None where it is padding of another kind or of unknown size."""
    args: tuple[Any, ...] = node.args
    _, pads, *rest = args
    given = dict(zip(("mode", "value") if node.target is _PADS[0] else ("value",), rest, strict=False)) | node.kwargs
    if given.get("mode", "constant") != "constant" or given.get("value"):
        return None
    known = isinstance(pads, list | tuple) and all(isinstance(p, int) and p >= 0 for p in pads)
    return list(pads) if known else None


def _padding(conv: Node, pad: Node, pads: list[int]) -> list[int] | None:
    """The padding of a 2-d convolution with what `pad` puts around its input; None where it cannot be said so."""
    if conv.target is not aten.conv2d.default or conv.args[0] is not pad or len(pads) > 4 or len(conv.args) < 4:
        return None
    left, right, top, bottom = (*pads, 0, 0)[:4]
    own: Any = conv.args[4] if len(conv.args) > 4 else conv.kwargs.get("padding", 0)
    own = [own] * 2 if isinstance(own, int) else list(own) * (2 // len(own))
    if left != right or top != bottom or not all(isinstance(p, int) for p in own):
        return None
    return [own[0] + top, own[1] + left]


def _pad_behind(model: GraphModule, quantize: Node) -> None:
    """quantize(pad(x)) as a padding of quantize(x) by the zero point, which stands for zero."""
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
    """clamp(x, 0, high) as relu(x) before a quantization that has no level above that of `high`."""
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
    """What is clamped, and to what."""
    if clamp.target is aten.relu6.default:
        return clamp.args[0], 0, 6
    hard = clamp.target in (aten.hardtanh.default, aten.hardtanh_.default)
    names = ("min_val", "max_val") if hard else ("min", "max")
    given = dict(zip(names, clamp.args[1:], strict=False)) | clamp.kwargs
    least, high = (given.get(name, default) for name, default in zip(names, (-1.0, 1.0) if hard else (None, None), strict=True))
    return clamp.args[0], least, high
