"""Capture: turn Dynamo's graph into ATen graphs, by the direct capture or through AOTAutograd (separate forward and backward
graphs)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright import storage
from fusewright.capture import direct
from fusewright.capture.joint import POINTWISE, before_cut, write_out_steps
from fusewright.graph.effects import may_share, writes, written
from fusewright.graph.spec import value_of
from fusewright.graph.view import is_op
from fusewright.interface import DevicePolicy, Phase

log = logging.getLogger("fusewright")

SHARED_ELEMENTS = "more than one element of the written-to tensor refers to a single memory location"
"""AOTAutograd's message for a graph that writes into an expanded input."""

Compile = Callable[[GraphModule, Phase, frozenset[Node], str], Callable[[list[Any]], Any]]
"""(ATen graph, phase, constant placeholders, mode) -> a callable that takes and empties a list of inputs."""


_NO_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten._unsafe_view.default)
"""Operators whose result shares memory with an argument, but is no view of it for autograd."""

Rewrite = Callable[[GraphModule, Sequence[Any]], GraphModule | None]
"""(Dynamo graph of a training step, inputs) -> an ATen graph in its place, or None; see `rewrite.training`."""


def capture(
    gm: GraphModule, example_inputs: Sequence[Any], compile_graph: Compile, rewrite: Rewrite = lambda *_: None,
    policy: DevicePolicy | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Compile a Dynamo graph: directly where that is known to be correct, else through AOTAutograd. `rewrite` may replace the
    graph of a training step before gradients are traced; `policy` is that of its device, if it is the backend's."""
    return storage.zeros_in_memory(_captured(gm, example_inputs, compile_graph, rewrite, policy), example_inputs)


def _captured(
    gm: GraphModule, example_inputs: Sequence[Any], compile_graph: Compile, rewrite: Rewrite, policy: DevicePolicy | None
) -> Callable[..., Any]:
    try:
        aten, constants = direct.capture(gm, example_inputs)
    except direct.UnsupportedCapture as doubt:
        mode = f"aot ({str(doubt).splitlines()[0]})"
        try:
            if (rewritten := rewrite(gm, example_inputs)) is not None:
                with compat.disable_autocast():
                    return _without_autocast(through_aot(rewritten, example_inputs, compile_graph, mode, policy))
            return through_aot(gm, example_inputs, compile_graph, mode, policy)
        except RuntimeError as e:
            if SHARED_ELEMENTS not in str(e) or not any(map(storage.overlaps, example_inputs)):
                raise
            log.warning("fusewright: eager runs a graph that writes into an input whose elements share memory")
            return gm.forward  # it raises its own error, or runs if eager allows it
    detached = _detached(aten)
    with compat.disable_autocast():  # it would change the types of products that the compiler makes or measures
        run = _bases(compile_graph(aten, "infer", constants, "direct"), detached)
    return _without_autocast(lambda *args: run(list(args)))


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """Switch autocast off around `run`: its casts are already ops of the graph."""
    if not compat.autocast_enabled():
        return run

    def without_autocast(*args: Any) -> Any:
        with compat.disable_autocast():
            return run(*args)

    return without_autocast


def through_aot(
    gm: GraphModule, example_inputs: Sequence[Any], compile_graph: Compile, mode: str, policy: DevicePolicy | None = None
) -> Callable[..., Any]:
    """Capture by AOTAutograd: correct for training, mutation, aliasing and tensor subclasses."""
    trackable = not any(isinstance(x, torch.Tensor) and x.is_inference() for x in example_inputs)
    untraced = next(filter(None, map(storage.untraced, example_inputs)), "")
    if wrapped := any(compat.is_wrapper(x) for x in example_inputs):
        compat.forget_shardings()

    def compiler(phase: Phase) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
        def compile_aten(aten: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            if phase == "infer":  # no result has gradients
                write_out_steps(aten.graph)
            constants = constant_placeholders(aten) if phase == "infer" and trackable else frozenset()
            if untraced:
                aten.meta[storage.UNTRACED] = untraced
            count, views = compat.forward_results() if phase != "backward" else (0, [])
            _read_from_inputs(aten.graph, views)
            detached = _detached(aten) if phase == "infer" else []
            run = compile_graph(aten, phase, constants, mode)
            run = _bases(run, _made(aten, count) if phase == "forward" else detached)
            run = storage.materializing(run, _unguarded(aten, phase, wrapped))
            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compile_aten

    return compat.aot_compile(
        gm,
        example_inputs,
        forward=compiler("forward"),
        backward=compiler("backward"),
        inference=compiler("infer"),
        joint=partial(before_cut, policy=policy or DevicePolicy()),
        fused=POINTWISE,
    )


def _read_from_inputs(graph: Graph, places: Sequence[int]) -> None:
    """Make the results at `places`, which are views of inputs, anew from those that are written: AOTAutograd asks each result where
    in the input's memory it begins."""
    made: dict[Any, Node] = {n.args[1]: n for n in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    for k in places if made else ():
        views, source = list[Node](), results[k]
        while isinstance(source, Node) and source not in made and is_op(source) and may_share(source):
            views.append(source)
            source = source.args[0]
        if source in made:
            with graph.inserting_before(output):
                for view in reversed(views):
                    made[view] = graph.node_copy(view, lambda n: made.get(n, n))
            results[k] = made[results[k]]
    output.args = (tuple(results),)


def _made(aten: GraphModule, count: int) -> list[int]:
    """Positions of the first `count` results that the graph makes; the others are its inputs, or views of them."""
    given = set(map(_memory, aten.graph.find_nodes(op="placeholder")))
    (output,) = aten.graph.find_nodes(op="output")
    return [k for k, n in enumerate(output.args[0][:count]) if isinstance(n, Node) and _memory(n) not in given]


def _detached(aten: GraphModule) -> list[int]:
    """Positions of the results that are no views in eager, by operators that plans make views or leave out."""
    (output,) = aten.graph.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else ()
    return [k for k, n in enumerate(results) if isinstance(n, Node) and n.target in _NO_VIEWS]


def _memory(node: Node) -> object:
    """What a node shares with others that show the same memory."""
    val = value_of(node)
    return compat.storage_id(val) if isinstance(val, torch.Tensor) and val.layout is torch.strided else node


def _bases(run: Callable[[list[Any]], Any], places: Sequence[int]) -> Callable[[list[Any]], Any]:
    """Wrap `run` so that no result at `places` is a view, as those of plans may be: autograd forbids writes to views that a custom
    function, such as AOTAutograd's, returned, and `detach_` of any view. It forbids those to pieces of inputs rightly: eager fails
    there too."""
    if not places:
        return run

    def call(args: list[Any]) -> Any:
        results = list(run(args))
        for k in places:
            if isinstance(r := results[k], torch.Tensor) and r._is_view():
                results[k] = r.detach()
        return results

    return call


def _unguarded(aten: GraphModule, phase: Phase, wrapped: bool) -> dict[int, str]:
    """Positions of the inputs that no guard checks for laziness, and the lazy state in which each was traced: gradients and complex
    tensors (an SVD's, saved by a forward graph on a GPU) that autograd passes to a backward graph, and those inside subclasses.
    Inputs that the graph writes are left out, since they must not be replaced."""
    changed = {w for n in aten.graph.nodes if writes(n) for w in written(n)}
    places = [(k, n) for k, n in enumerate(aten.graph.find_nodes(op="placeholder")) if n not in changed]
    return {k: storage.lazy(value_of(n)) for k, n in places if wrapped or (phase == "backward" and _is_passed(n))}


def _is_passed(n: Node) -> bool:
    val = value_of(n)
    return compat.is_tangent(n) or (isinstance(val, torch.Tensor) and val.is_complex())


def constant_placeholders(aten: GraphModule) -> frozenset[Node]:
    """Parameters and buffers that the graph does not write; they may be prepacked as long as they do not change."""
    static = compat.static_input_indices()
    changed = {w for n in aten.graph.nodes if writes(n) for w in written(n)}
    placeholders = [n for n in aten.graph.nodes if n.op == "placeholder"]
    return frozenset(n for i, n in enumerate(placeholders) if i in static and n not in changed)
