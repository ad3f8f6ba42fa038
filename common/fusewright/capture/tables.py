"""Tables that the host computes from literals alone, in graphs of another device: computed once, and kept on that device.

A model may build the index of its relative positions on the host at every call. A graph that reads such a tensor cannot be
replayed, and in training the table would be saved for backward. Runs before a plan's cache key is made from the graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph.constants import is_repeatable
from fusewright.graph.effects import exposed
from fusewright.graph.retrace import fake_like
from fusewright.graph.spec import tensor_spec, value_of
from fusewright.graph.view import is_op
from fusewright.interface import HOST, TensorSpec, is_static

MOST_BYTES = 1 << 24
"""Size of a table: one of 64-bit positions of 1,024 tokens fits twice."""

INDEXED = frozenset({"index", "index_put"})
"""Rows of which eager accepts indices of the host for a tensor of another device."""


def host_tables(graph: Graph) -> None:
    """Rewrite an ATen graph in place: indices that the host computes from literals alone, and copies of such tensors on another
    device, become tensors of that device that the graph holds.

    Excluded are tensors that the caller may write to, and those of more than MOST_BYTES.
    """
    if any(_is_elsewhere(n) for n in graph.nodes):
        with torch.no_grad(), compat.without_modes(), compat.disable_autocast():
            _host_tables(graph)


def _host_tables(graph: Graph) -> None:
    seen = exposed(graph)
    known: dict[Node, torch.Tensor] = {}
    moved: dict[tuple[Node, torch.device], Node] = {}
    for node in list(graph.nodes):
        value = None if node in seen else _computed(node, known)
        if value is not None and not _is_elsewhere(node):
            known[node] = value
        elif value is not None:
            node.replace_all_uses_with(_hold(graph, node, value))
            graph.erase_node(node)
        elif _row(node) in INDEXED and _is_elsewhere(node):
            device = value_of(node).device
            for table in [n for n in node.all_input_nodes if n in known]:
                if (table, device) not in moved:
                    moved[table, device] = _hold(graph, table, known[table].to(device))
                node.replace_input_with(table, moved[table, device])
    for node in reversed(known):
        if not node.users:
            graph.erase_node(node)


def _is_elsewhere(node: Node) -> bool:
    """Whether a node is a tensor of another device than the host."""
    val = value_of(node)
    return isinstance(val, torch.Tensor) and val.device.type != HOST


def _computed(node: Node, known: Mapping[Node, torch.Tensor]) -> torch.Tensor | None:
    """The value of a tensor of the host, or of its copy on another device, by eager's own call, if it depends on known ones."""
    val = value_of(node)
    if not isinstance(val, torch.Tensor) or val.layout != torch.strided or not _fits(tensor_spec(val)):
        return None
    if compat.is_literal(node):
        value = getattr(node.graph.owning_module, str(node.target))
    elif not is_op(node) or not is_repeatable(node) or not all(n in known for n in node.all_input_nodes):
        return None
    elif _is_elsewhere(node) and not node.all_input_nodes:  # a kernel computes it where it needs it
        return None
    else:
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
        try:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError):  # eager raises it at the call
            return None
    alike = not compat.is_fake(value) and (value.dtype, value.shape, value.device) == (val.dtype, val.shape, val.device)
    return value if alike else None


def _fits(spec: TensorSpec) -> bool:
    return is_static(spec.shape) and spec.bytes_hint() <= MOST_BYTES


def _row(node: Node) -> str:
    row = ops.row_of(node.target)
    return row.name if row is not None else ""


def _hold(graph: Graph, like: Node, value: torch.Tensor) -> Node:
    """Insert a tensor that the graph holds, under the name of a literal of the program, in front of a node with its value."""
    root = graph.owning_module
    names = (f"{compat.LITERAL}_of_host{k}" for k in range(len(graph.nodes) + 1))
    name = next(n for n in names if not hasattr(root, n))
    assert root is not None, "a joint graph has a module"
    root.register_buffer(name, value, persistent=False)
    with graph.inserting_before(like):
        node = graph.get_attr(name)
    node.meta.update(like.meta, val=fake_like(value_of(like), stride=value.stride(), device=value.device))
    return node
