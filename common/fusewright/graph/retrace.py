"""Mending traced metadata, and passing the change on to what depends on it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright.graph.spec import value_of

__all__ = ["downstream", "fake_like", "mend", "mend_alike", "mend_item", "value_of"]


def fake_like(
    val: torch.Tensor, *, dtype: torch.dtype | None = None, stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A FakeTensor like `val` with another dtype or other strides."""
    with compat.fake_mode_of(val):
        return torch.empty_strided(val.shape, stride or val.stride(), dtype=dtype or val.dtype, device=val.device)


def mend(graph: Graph, node: Node, actual: torch.Tensor) -> None:
    """Give `node` the dtype and strides of the tensor that it really makes, and bring its users up to date.

    ValueError when the shape differs: that is no slip of the metadata.
    """
    val = value_of(node)
    if not isinstance(val, torch.Tensor) or val.dim() != actual.dim():
        raise ValueError(f"{node.name} makes a {tuple(actual.shape)} where {val!r} was traced")
    static = not any(isinstance(s, torch.SymInt) for s in (*val.shape, *val.stride()))
    node.meta["val"] = fake_like(val, dtype=actual.dtype, stride=actual.stride() if static else None)
    downstream(graph, node)


def mend_item(graph: Graph, node: Node, position: int, actual: torch.Tensor) -> None:
    """`mend` for one result of a node that makes several."""
    items = list(value_of(node))
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] == position:
            mend(graph, user, actual)
            items[position] = value_of(user)
    node.meta["val"] = tuple(items)


def mend_alike(graph: Graph, node: Node, actual: torch.Tensor) -> None:
    """`mend` for `node` and for every later node that computes the same from inputs of the same kinds: the same untruth
    was traced for each layer of a model. Where that is wrong, the next run says so."""
    key, traced = _computation(node), _kind(value_of(node))
    mend(graph, node, actual)
    later = list(graph.nodes)
    for other in later[later.index(node) + 1 :]:
        if other.op == "call_function" and _kind(value_of(other)) == traced and _computation(other) == key:
            mend(graph, other, actual)


def _computation(node: Node) -> Any:
    """What a node computes: its operator, the kinds of its tensors and its other arguments."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return node.args[1], _computation(node.args[0])
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: (_kind(value_of(n)),))
    return node.target, args, kwargs


def downstream(graph: Graph, changed: Node) -> None:
    """Compute the metadata of every node that depends on `changed` anew."""
    stale = {changed}
    for node in graph.nodes:
        if node.op != "call_function" or node is changed or not stale & set(node.all_input_nodes):
            continue
        before, after = value_of(node), _infer(node)
        node.meta["val"] = after
        if _kind(before) != _kind(after):
            stale.add(node)


def _infer(node: Node) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    if node.target is operator.getitem:
        return operator.getitem(*args)
    fakes = [value_of(n) for n in node.all_input_nodes if isinstance(value_of(n), torch.Tensor)]
    with compat.fake_mode_of(fakes[0]):
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _kind(val: Any) -> Any:
    if isinstance(val, tuple | list):
        return [_kind(v) for v in val]
    return (val.dtype, val.shape, val.stride()) if isinstance(val, torch.Tensor) else val
