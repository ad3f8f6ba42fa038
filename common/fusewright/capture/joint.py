"""Passes over the joint forward and backward graph, before the cut decides what is saved and what is recomputed."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright.graph.cse import merge_common
from fusewright.graph.fills import host_scalars, size_fills


def before_cut(graph: Graph) -> None:
    """Rewrite a joint graph in place."""
    host_scalars(graph)
    size_fills(graph)
    unread_statistics(graph)
    merge_common(graph)


def unread_statistics(graph: Graph) -> None:
    """Pass the weight in place of the running statistics to the gradient of a training batch norm, which reads only their type,
    so that they are not saved."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.native_batch_norm_backward.default):
        _, _, weight, mean, var, _, _, train, *_ = node.args
        if train is True and all(_alike(weight, x) for x in (mean, var)):
            node.args = (*node.args[:3], weight, weight, *node.args[5:])


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Node) or not isinstance(b, Node):
        return False
    x, y = a.meta["val"], b.meta["val"]
    return bool(x.dtype == y.dtype and x.shape == y.shape and x.device == y.device)
