"""Common subexpression elimination."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright.graph.effects import asserts, communicates, draws, exposed, names_sizes, unknown, writes


def merge_common(graph: Graph) -> int:
    """Eliminate common subexpressions among pure ops. Tensors whose memory is visible outside or written stay separate."""
    kept = exposed(graph)
    seen: dict[Any, Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if writes(node):
            seen.clear()  # the same call before and after a write may differ
        if node.op != "call_function" or node in kept or not _pure(node):
            continue
        key = _key(node)
        first = seen.setdefault(key, node) if key is not None else node
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            merged += 1
    return merged


def _pure(node: Node) -> bool:
    if not compat.is_overload(node.target):
        return getattr(node.target, "__module__", "") in ("_operator", "operator", "math")
    return not (draws(node) or writes(node) or asserts(node) or names_sizes(node) or communicates(node) or unknown(node))


def _key(node: Node) -> Any:
    def freeze(a: Any) -> Any:
        if isinstance(a, list | tuple):
            return tuple(freeze(x) for x in a)
        if isinstance(a, dict):
            return tuple(sorted((k, freeze(v)) for k, v in a.items()))
        # 1, 1.0 and True are equal in Python but not to an op; the same holds for -0.0 and 0.0
        return a if isinstance(a, Node) else (type(a), repr(a) if isinstance(a, float | complex) else a)

    key = (node.target, freeze(node.args), freeze(node.kwargs))
    try:
        hash(key)
    except TypeError:
        return None
    return key
