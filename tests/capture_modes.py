"""Runs both capture modes on the same Dynamo graph, side by side with the graph itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_map_only

from fusewright.capture import capture, direct
from fusewright.graph.effects import asserts
from tests.compare import SEED, differences


@dataclass
class Roads:
    """A `torch.compile` backend that records in `problems` where the direct capture is less accurate than AOTAutograd's.

    `taken` holds the direct capture's answer for each graph: "direct", or the reason against it.
    """

    problems: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        straight = self._direct(gm, example_inputs)

        def compile_graph(aten: GraphModule, phase: str, const: frozenset[Node], mode: str) -> Callable[..., Any]:
            if straight is None:
                return lambda args: Interpreter(aten).boxed_run(args)
            if (here := _checks(straight)) < (there := _checks(aten)):
                self.problems.append(f"the direct graph has {here} assertions, AOTAutograd's has {there}")
            return lambda args: self._side_by_side(gm, straight, aten, args)

        return capture.through_aot(gm, example_inputs, compile_graph, "aot")

    def _direct(self, gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule | None:
        try:
            graph, _ = direct.capture(gm, example_inputs)
        except direct.UnsupportedCapture as doubt:
            self.taken.append(str(doubt))
            return None
        self.taken.append("direct")
        return graph

    def _side_by_side(self, gm: GraphModule, straight: GraphModule, aten: GraphModule, args: list[Any]) -> Any:
        tokens = len(args) - len(gm.graph.find_nodes(op="placeholder"))  # effect tokens: additional inputs and results
        given = args[tokens:]
        right, ours = _outcome(gm.forward, given), _outcome(Interpreter(straight).run, given)
        theirs = _outcome(lambda *a: Interpreter(aten).run(*args[:tokens], *a)[tokens:], given)
        for problem in _differ(right, ours):
            if problem not in _differ(right, theirs):
                self.problems.append(f"direct: {problem}")
        if isinstance(theirs, Exception):
            raise theirs
        return [*args[:tokens], *theirs[0]]


def _checks(gm: GraphModule) -> int:
    """Count a graph's assertions, including those that AOTAutograd wraps in its operator for effects."""
    return sum(asserts(n) or getattr(n.target, "__name__", "") == "with_effects" for n in gm.graph.nodes)


def _outcome(run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return the results and the inputs after the call, or the error."""
    torch.manual_seed(SEED)
    fresh = tree_map_only(torch.Tensor, _twin, list(args))
    try:
        return run(*fresh), fresh
    except (RuntimeError, IndexError, ValueError, TypeError) as e:
        return e


def _twin(t: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, preserving strides."""
    if t.layout is not torch.strided:
        return t.clone()
    twin = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage().clone())
    return twin.as_strided(t.shape, t.stride(), t.storage_offset())


def _differ(right: Any, found: Any) -> list[str]:
    if isinstance(right, Exception) or isinstance(found, Exception):
        return [] if type(right) is type(found) else [f"{found!r} instead of {right!r}"]
    flat = [[*(r if isinstance(r, tuple | list) else (r,)), *inputs] for r, inputs in (right, found)]
    return differences(*flat, exact=False)


@contextlib.contextmanager
def side_by_side(fn: Callable[..., Any], **how: Any) -> Iterator[tuple[Callable[..., Any], Roads]]:
    """Compile `fn` with a `Roads` backend; yield both."""
    modes = Roads()
    torch.compiler.reset()
    yield torch.compile(fn, backend=modes, **how), modes
    torch.compiler.reset()
