"""What a node does besides computing its result: write in place, draw random numbers. Total over every kind of node."""

from __future__ import annotations

from torch.fx import Graph, Node

from fusewright import ops
from fusewright.graph.view import is_op


def writes(node: Node) -> bool:
    """Whether the node writes to one of its arguments."""
    return is_op(node) and ops.is_mutating(node.target)


def draws(node: Node) -> bool:
    """Whether the node draws random numbers; attention or dropout with probability 0 does not."""
    if not is_op(node):
        return False
    row = ops.find(node.target)
    return ops.is_random(node.target) if row is None else ops.draws(row, node.args, node.kwargs)


def has_writes(graph: Graph) -> bool:
    """Whether anything in the graph is written in place."""
    return any(writes(n) for n in graph.nodes)
