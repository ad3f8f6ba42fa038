"""ATen -> opset: every call of a known overload becomes its row's canonical overload with normalised arguments."""

from __future__ import annotations

from torch.fx import Graph

from fusewright import _torch_compat as compat
from fusewright import ops


def canonicalize(graph: Graph) -> int:
    """Rewrite `graph` in place; nodes outside the opset stay as opaque ATen nodes. Returns how many nodes are in the opset."""
    known = 0
    for node in graph.nodes:
        if node.op != "call_function" or not compat.is_overload(node.target):
            continue
        found = ops.canonical(node.target, node.args, node.kwargs)
        if found is not None:
            row, node.args, node.kwargs = found
            node.target = row.target
            known += 1
    return known
