"""AOTAutograd: how it is called, and what it says of the graphs that it makes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def aot_compile(
    gm: GraphModule, inputs: Sequence[Any], *, forward: _Compiler, backward: _Compiler, inference: _Compiler,
    joint: Callable[[Graph], None],
) -> Callable[..., Any]:
    """Pass a Dynamo graph to AOTAutograd with the min-cut partitioner, as the `aot_eager` backend does. `joint` rewrites the
    joint graph of forward and backward before it is cut in two, and merges equal calls: torch's own pass imports all of
    Inductor's lowerings (0.7 s) to count writes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def cut(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        joint(gm.graph)
        with config.patch(cse=False):
            return min_cut_rematerialization_partition(gm, *args, **kwargs)

    compilers = {"fw_compiler": forward, "bw_compiler": backward, "inference_compiler": inference}
    with _resizing_whole():
        return aot_autograd(**compilers, partition_fn=cut, keep_inference_input_mutations=True)(gm, inputs)


_RESIZING = ("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d")


@contextlib.contextmanager
def _resizing_whole() -> Iterator[None]:
    """Make autograd record resizing as one operator and its gradient as another. AOTAutograd would otherwise trace torch's
    Python forms, whose gradient is one accumulating scatter per tap. Symbolic sizes keep the Python forms, because the shape
    functions of the gradients do not support them."""
    from torch._decomp.decompositions import upsample_compute_output_size as sizes

    def whole(packet: Any, decomposed: Any, x: Any, size: Any, *rest: Any) -> Any:
        *flags, factors = rest
        out = sizes(x.size(), size, factors)
        if any(isinstance(n, torch.SymInt) for n in (*x.size(), *out)):
            return decomposed(x, size, *rest)
        with torch._C._DisablePythonDispatcher():
            return packet.default(x, out, *flags, *(factors or (None, None)))

    packets = [getattr(torch.ops.aten, name) for name in _RESIZING]
    before = [dict(p.vec.py_kernels) for p in packets]
    try:
        for p, kernels in zip(packets, before, strict=True):
            p.vec.py_kernels.update({key: functools.partial(whole, p, kernel) for key, kernel in kernels.items()})
            p.vec._dispatch_cache.clear()
        yield
    finally:
        for p, kernels in zip(packets, before, strict=True):
            p.vec.py_kernels.update(kernels)
            p.vec._dispatch_cache.clear()


SHARED_ELEMENTS = "more than one element of the written-to tensor refers to a single memory location"
"""AOTAutograd's message for a graph that writes into an expanded input."""


def static_input_indices() -> frozenset[int]:
    """Positions of parameters and buffers among the inputs of the graph that AOTAutograd is compiling; empty if unknown."""
    from torch._guards import TracingContext

    meta = getattr(TracingContext.try_get(), "fw_metadata", None)
    return frozenset(getattr(meta, "static_input_indices", None) or ())


def forward_results() -> int:
    """How many results of the forward graph that AOTAutograd is compiling are not saved for backward; they come first."""
    from torch._guards import TracingContext

    meta = getattr(TracingContext.try_get(), "fw_metadata", None)
    return int(getattr(meta, "num_forward", 0) or 0)


def keep_sources(made: GraphModule, gm: GraphModule) -> None:
    """Copy to a rewritten Dynamo graph what AOTAutograd reads from `gm`: the sources of inputs, which tell parameters and
    buffers. Dynamo stores them in attributes, which copies of a graph lose."""
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            setattr(made, name, getattr(gm, name))
    for old, new in zip(*(g.graph.find_nodes(op="placeholder") for g in (gm, made)), strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source


LITERAL = "_tensor_constant"  # how AOTAutograd's names of literals begin


def is_literal(node: Node) -> bool:
    """Whether a node is a tensor literal of the program, which nobody else references."""
    return node.op == "get_attr" and str(node.target).startswith(LITERAL)


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a placeholder of AOTAutograd's backward graph is an incoming gradient, not a saved value."""
    return node.name.startswith("tangents")


def drop_dead_code(graph: Graph, kept: Callable[[torch.fx.Node], bool]) -> None:
    """Erase unread nodes, except those with an effect according to torch or `kept`."""
    graph.eliminate_dead_code(lambda node: bool(node.users) or node.is_impure() or kept(node))
