"""Which values of a graph are made of weights alone. Backends see them as weights: what is made of them is made once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from fusewright import ops
from fusewright.graph import spec
from fusewright.graph.effects import asserts, communicates, draws, exposed, names_sizes, writes
from fusewright.graph.view import is_op, is_projection
from fusewright.interface import Phase, is_static
from fusewright.plan.build import FOLD_LIMIT


def derived(graph: Graph, const: frozenset[Node], phase: Phase) -> frozenset[Node]:
    """`const` and what is computed from it: casts under autocast, transposed or sliced weights.

    Not what the caller could see and change, nor what takes much more room than the weights (see `plan.build`), which
    keeps such values out of the work that is done once. Training changes its weights, so nothing is added there.
    """
    if phase != "infer":
        return const
    found = set(const)
    seen = exposed(graph)
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if inputs and node not in seen and all(i in found for i in inputs):
            if is_projection(node) or (is_op(node) and _repeatable(node) and _fits(node, inputs)):
                found.add(node)
    return frozenset(found)


def _repeatable(node: Node) -> bool:
    """Whether the node gives the same values every time."""
    row = ops.find(node.target)
    effect = writes(node) or draws(node) or asserts(node) or names_sizes(node) or communicates(node)
    return not effect and (row is None or "empty" not in row.name)


def _fits(node: Node, inputs: Iterable[Node]) -> bool:
    made = [spec.tensor_spec(t) for t in _tensors(node)]
    given = sum(spec.tensor_spec(t).bytes_hint() for i in inputs for t in _tensors(i))
    return all(is_static(s.shape) for s in made) and sum(s.bytes_hint() for s in made) <= FOLD_LIMIT + given


def _tensors(node: Node) -> list[torch.Tensor]:
    val = spec.value_of(node)
    return [t for t in (val if isinstance(val, tuple | list) else (val,)) if isinstance(t, torch.Tensor)]
