"""Capture: Dynamo's graph through AOTAutograd to ATen graphs, one for inference or one each for forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.interface import Phase

Compile = Callable[[GraphModule, Phase, frozenset[Node]], Callable[[list[Any]], Any]]
"""(ATen graph, phase, constant placeholders) -> a callable that takes and empties a list of inputs."""


def through_aot(gm: GraphModule, example_inputs: Sequence[Any], compile_graph: Compile) -> Callable[..., Any]:
    """The long road: right for training, mutation, aliasing and tensor subclasses."""
    trackable = not any(isinstance(x, torch.Tensor) and x.is_inference() for x in example_inputs)

    def compiler(phase: Phase) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
        def compile_aten(aten: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            constants = constant_placeholders(aten) if phase == "infer" and trackable else frozenset()
            run = compile_graph(aten, phase, constants)
            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compile_aten

    return compat.aot_compile(
        gm, example_inputs, forward=compiler("forward"), backward=compiler("backward"), inference=compiler("infer")
    )


def constant_placeholders(aten: GraphModule) -> frozenset[Node]:
    """Parameters and buffers that the graph does not write: what may be prepacked as long as it does not change."""
    static = compat.static_input_indices()
    written = {
        n.args[0]
        for n in aten.graph.nodes
        if n.op == "call_function" and compat.is_overload(n.target) and ops.is_mutating(n.target)
    }
    placeholders = [n for n in aten.graph.nodes if n.op == "placeholder"]
    return frozenset(n for i, n in enumerate(placeholders) if i in static and n not in written)
