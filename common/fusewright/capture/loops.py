"""Which training steps may hold unrolled loops, to be rewritten before gradients are traced (`rewrite.training`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusewright import _torch_compat as compat

LEAST_STEPS = 8
"""Fewer steps stay as they are written."""

_PIECES = frozenset("getitem select narrow".split())
"""Functions and methods of tensors, by name, that take a piece of one."""


def may_loop(gm: GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a Dynamo graph of a training step, or a part of it, takes many pieces of one tensor, calls one function many times
    from one line of one module, or has the levels of vmap that trees have."""
    if not torch.is_grad_enabled() or not any(getattr(x, "requires_grad", False) for x in example_inputs):
        return False
    return any(_takes_many(m.graph) for m in gm.modules() if isinstance(m, GraphModule))


def _takes_many(graph: Graph) -> bool:
    pieces, lines = Counter(_taken_apart(graph)), Counter(map(_line, graph.nodes))
    del lines[None]
    most = max((*pieces.values(), *lines.values()), default=0)
    return most >= LEAST_STEPS or any(compat.of_vmap(n.target) for n in graph.nodes)


def _line(n: Node) -> Any:
    """What a call calls, where it is written, and in which module: layers are modules of their own."""
    if n.op not in ("call_function", "call_method") or not (trace := n.meta.get("stack_trace")):
        return None
    return n.target, trace, tuple(path for path, _ in n.meta.get("nn_module_stack", {}).values())


def _taken_apart(graph: Graph) -> Iterator[Node]:
    for n in graph.nodes:
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        if n.op in ("call_function", "call_method") and name in _PIECES and n.args and isinstance(n.args[0], Node):
            yield n.args[0]
