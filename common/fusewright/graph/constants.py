"""Which values of a graph depend on weights alone. Only this module decides it: the stage `constants` marks them before
partition, backends see the mark on their specs, and a plan moves the instructions that make them to its `prepare` part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph import spec
from fusewright.graph.effects import (
    asserts,
    communicates,
    draws,
    exposed,
    names_sizes,
    operator_asserts,
    unknown,
    writes,
)
from fusewright.graph.view import GraphIndex, is_op, is_projection
from fusewright.interface import Phase, TensorSpec, is_static
from fusewright.ops import namespaces

COMPUTED_ONCE = "computed once"
"""Mark in a node's metadata: computed from weights, it is a constant however much room it takes."""

FOLD_LIMIT = 1 << 20
"""Bytes that a constant may take beyond the constants that it is computed from (masks, positions, tables)."""


@dataclass(frozen=True)
class Constants:
    """Constant nodes of one graph. `values` are weights and results computed from them: casts under autocast, transposed or
    sliced weights, masks and tables built from creations alone. `creations` are creations that no other constant reads: a
    kernel computes them where it needs them, and a call for one needs to run only once."""

    values: frozenset[Node]
    creations: frozenset[Node] = frozenset()

    def index(self, graph: Graph, phase: Phase) -> GraphIndex:
        """The index of the graph, with marks on the specs of `values`."""
        return GraphIndex(graph, self.values, phase, self.creations)


def find(graph: Graph, weights: frozenset[Node], phase: Phase, widened: frozenset[str] = frozenset()) -> Constants:
    """Find the constants of a graph, including literal tensors (`torch.tensor(3)`). Excluded are values that the caller could
    see and modify, and values much larger than what they are computed from, except by ops named in `widened`. In training,
    weights change, so nothing is derived from them."""
    if phase != "infer":
        return Constants(weights)
    seen = exposed(graph)
    found = set(weights) | {n for n in graph.find_nodes(op="get_attr") if compat.is_literal(n) and n not in seen}
    for node in graph.nodes:
        if node not in seen and all(i in found for i in node.all_input_nodes):
            wanted = COMPUTED_ONCE in node.meta or _name(node) in widened
            if is_projection(node) or (is_op(node) and is_repeatable(node) and (wanted or _fits(node))):
                found.add(node)
    alone = _unread_creations(graph, found)
    return Constants(frozenset(found - alone), frozenset(alone))


def _name(node: Node) -> str | None:
    row = ops.find(node.target)
    return None if row is None else row.name


def _unread_creations(graph: Graph, found: set[Node]) -> set[Node]:
    alone: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in found and is_op(node) and not node.all_input_nodes and not any(u in found for u in node.users):
            alone.add(node)
    return alone


def is_repeatable(node: Node) -> bool:
    """Whether the node returns the same values every time."""
    row = ops.find(node.target)
    effect = writes(node) or draws(node) or asserts(node) or names_sizes(node) or communicates(node)
    return not (effect or unknown(node)) and (row is None or "empty" not in row.name)


def repeatable(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], known: bool) -> bool:
    """Whether a call, as a backend may add it to a plan, returns the same tensors every time. `known`: the backend says so; an
    operator of unknown origin may wait for other processes, or count its calls."""
    if operator is None or ops.is_mutating(operator) or operator_asserts(operator):
        return False
    if ops.call_draws(operator, args, kwargs):
        return False
    if any(r.type.kind() not in ("TensorType", "ListType") for r in operator._schema.returns):
        return False  # a number, which sizes may depend on
    row, space = ops.find(operator), operator.namespace
    if namespaces.communicates(space, unknown=not known) or (namespaces.may_keep(space) and not known):
        return False
    return row is None or "empty" not in row.name


def fits(made: Iterable[TensorSpec], given: Iterable[TensorSpec]) -> bool:
    """Whether results have fixed sizes and take little more room than the constants that they are computed from."""
    made = list(made)
    room = FOLD_LIMIT + sum(s.bytes_hint() for s in given)
    return all(is_static(s.shape) for s in made) and sum(s.bytes_hint() for s in made) <= room


def _fits(node: Node) -> bool:
    return fits(_specs(node), (s for i in node.all_input_nodes for s in _specs(i)))


def _specs(node: Node) -> list[TensorSpec]:
    val = spec.value_of(node)
    vals = val if isinstance(val, tuple | list) else (val,)
    return [spec.tensor_spec(t) for t in vals if isinstance(t, torch.Tensor)]
