"""Attention of other than four dimensions, as attention of [batch, heads, length, width].

torch has fused kernels for four dimensions only. Any other attention (one head without a dimension of its own, windows of a grid of
windows) runs as two products and a softmax, in fp32 for half types.

Works on Dynamo's graph, before the attention kernel is selected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright.interface import HOST

MOST = 65535
"""The largest batch: a GPU launches no more blocks along its second and third dimension."""

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")

Shape = Sequence[Any]
Steps = Sequence[tuple[Any, ...]]
"""Views: names of methods with their arguments."""


def with_four_dimensions(gm: GraphModule, calls: Iterable[Node]) -> int:
    """Rewrite those attention calls of a Dynamo graph that have another number of dimensions; return how many. Calls with dropout,
    which would draw other numbers, stay, and those with gradients, which fused kernels compute with several times the error."""
    changed = sum(map(_rewrite, calls))
    if changed:
        gm.recompile()
    return changed


def _rewrite(call: Node) -> bool:
    given: dict[str, Any] = {**dict(zip(NAMES, call.args, strict=False)), **call.kwargs}
    operands, mask = [given.pop(n, None) for n in NAMES[:3]], given.pop("attn_mask", None)
    examples = [_example(n) for n in (*operands, call)]
    shape = _shared([x for x in examples if x is not None]) if not any(x is None for x in examples) else None
    if shape is None or given.get("dropout_p", 0.0) != 0.0 or given.get("enable_gqa"):
        return False
    there, back = _views(shape)
    of_mask = [] if mask is None else _views_of_mask(_example(mask), shape)
    if of_mask is None:
        return False
    with call.graph.inserting_before(call):
        four = tuple(_through(n, there, call) for n in operands)
        if mask is not None:
            given["attn_mask"] = _through(mask, of_mask, call)
        new = call.graph.call_function(call.target, four, given)  # type: ignore[arg-type]
        new.meta = _place(call)
        last = _through(new, [("contiguous",), *back], call)  # the caller's views may need eager's strides
    last.meta = call.meta
    call.replace_all_uses_with(last)
    call.graph.erase_node(call)
    return True


def _through(node: Node, views: Steps, call: Node) -> Node:
    for name, *args in views:
        node = node.graph.call_method(name, (node, *args))
        node.meta = _place(call)
    return node


def _place(call: Node) -> dict[str, Any]:
    return {k: v for k, v in call.meta.items() if k != "example_value"}


def _example(n: Any) -> torch.Tensor | None:
    found = n.meta.get("example_value") if isinstance(n, Node) else None
    return found if isinstance(found, torch.Tensor) and compat.is_fake(found) and not found.is_nested else None


def _shared(examples: Sequence[torch.Tensor]) -> Shape | None:
    """The dimensions in front of [length, width], heads included, if query, key, value and result share them; None unless the call
    can be rewritten."""
    made = examples[-1]
    alike = all(x.dim() == made.dim() and all(compat.statically_true(n != 0) for n in x.shape) for x in examples)
    if not alike or made.dim() < 2 or made.dim() == 4 or made.requires_grad or not _row_major(made):
        return None
    shape: Shape = made.shape[:-2]
    same = all(compat.statically_true(n == m) for x in examples for n, m in zip(x.shape[:-2], shape, strict=True))
    batch = shape if made.dim() == 3 else shape[:-1]
    fixed = all(isinstance(n, int) for n in batch)
    if not same or (not fixed and (made.dim() > 4 or made.device.type != HOST)):
        return None
    return shape if not fixed or 0 < math.prod(batch) <= MOST else None


def _row_major(x: torch.Tensor) -> bool:
    step: Any = 1
    for n, found in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not compat.statically_true(n == 1) and not compat.statically_true(found == step):
            return False
        step = step * n
    return True


def _views(shape: Shape) -> tuple[Steps, Steps]:
    """The views of operands to four dimensions, and of the result back."""
    if len(shape) > 2:
        return [("flatten", 0, len(shape) - 2)], [("unflatten", 0, tuple(shape[:-1]))]
    # one head: its result lies in rows
    added = [0] * (1 - len(shape)) + [1]
    return [("unsqueeze", d) for d in added], [("squeeze", d) for d in reversed(added)]


def _views_of_mask(mask: torch.Tensor | None, shape: Shape) -> Steps | None:
    """The views of a mask to two or four dimensions; None if there are none."""
    if mask is None or not 2 <= mask.dim() <= len(shape) + 2 or 0 in mask.shape:
        return None
    if mask.dim() == 2:
        return []
    if len(shape) == 1:
        return [("unsqueeze", 1)]
    if mask.dim() == 3:
        return [("unsqueeze", 0)]
    if all(n == 1 for n in mask.shape[:-3]):
        return [("flatten", 0, mask.dim() - 4)]
    return [("expand", *shape[:-1], -1, -1, -1), ("flatten", 0, len(shape) - 2)]
