"""Constant fills: rewrite `full_like(x, v)` and `x.new_full(size, v)` to `full(size, v)`, which neither waits for `x` nor keeps
it alive, and turn numbers into tensors for ops that have no other tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph.refused import refusal
from fusewright.graph.spec import value_of
from fusewright.interface import HOST

LIKE = {"full_like": 1, "new_full": 2}
"""Row of the opset -> position of the value."""


def size_fills(graph: Graph) -> None:
    """Rewrite an ATen graph in place, where sizes are static and the result is contiguous.

    This matters most before a joint graph is cut in two: a fill need not be saved for backward.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and compat.is_overload(node.target):
            _size_fill(graph, node)


def _size_fill(graph: Graph, node: Node) -> None:
    row, val = ops.row_of(node.target), node.meta.get("val")
    if row is None or row.name not in LIKE or not isinstance(val, torch.Tensor):
        return
    found = ops.canonical(node.target, node.args, node.kwargs)
    if found is None:
        return
    if not all(isinstance(s, int) for s in val.shape) or val.layout != torch.strided or not val.is_contiguous():
        return
    if refusal(node.target, *torch.fx.node.map_arg((node.args, dict(node.kwargs)), value_of), val) is not None:
        return
    _, args, _ = found
    value = args[LIKE[row.name]]
    options: dict[str, Any] = {"dtype": val.dtype, "layout": val.layout, "device": val.device, "pin_memory": False}
    with graph.inserting_before(node):
        full = graph.call_function(torch.ops.aten.full.default, (list(val.shape), value), options)
    full.meta.update(node.meta)
    node.replace_all_uses_with(full)
    graph.erase_node(node)


def number_fills(graph: Graph) -> None:
    """Rewrite `_to_copy(2, dtype=...)`, as torch.func's vmap emits for a number, to take a 0-dim tensor."""
    for node in list(graph.nodes):
        val = node.meta.get("val")
        if node.op != "call_function" or not compat.is_overload(node.target) or not isinstance(val, torch.Tensor):
            continue
        if not any(isinstance(n.meta.get("val"), torch.Tensor | tuple | list) for n in node.all_input_nodes):
            formals = node.target._schema.arguments
            node.args = tuple(_filled(graph, node, f, a) for f, a in zip(formals, node.args, strict=False))


def _filled(graph: Graph, node: Node, formal: Any, given: Any) -> Any:
    if str(formal.type) != "Tensor" or not isinstance(given, bool | int | float | complex):
        return given
    val = node.meta["val"]
    options: dict[str, Any] = {"dtype": torch.tensor(given).dtype, "device": torch.device(HOST), "pin_memory": False}
    with graph.inserting_before(node):
        full = graph.call_function(torch.ops.aten.full.default, ([], given), options)
    with compat.fake_mode_of(val):
        full.meta.update(node.meta, val=torch.full([], given, dtype=options["dtype"]))
    return full
