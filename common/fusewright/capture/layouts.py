"""Keep images of a training step channels-last between half-precision convolutions, on devices where that is faster.

Works on Dynamo's graph, before gradients are traced. Each convolution requests its image and weight in that layout, which is
free after another convolution; ops in between follow by torch's own stride rules, so forward and backward agree on the layouts
of saved tensors. Eager's strides are kept where they matter: for results, for gradients of weights, and for ops that draw
random numbers, which visit elements in memory order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright.graph.spec import by_stride
from fusewright.graph.view import dependents

LAST = torch.channels_last

_CONVOLUTIONS = {
    getattr(torch, f"conv{kind}") for kind in ("1d", "2d", "3d", "_transpose1d", "_transpose2d", "_transpose3d")
}
_DRAWS = frozenset(
    """
    dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_
    feature_alpha_dropout native_dropout bernoulli bernoulli_ rand_like randn_like randint_like normal normal_ uniform_
    exponential_ geometric_ cauchy_ log_normal_ random_ multinomial rrelu rrelu_ gumbel_softmax
    """.split()
)
_TELLS_STRIDES = frozenset({"as_strided", "as_strided_", "set_", "resize_", "resize_as_", "stride", "untyped_storage", "data_ptr"})
_PLAIN = frozenset({"torch", "_operator", "math", "builtins", "einops"})
"""Packages whose functions return the same values for any strides; operators that others registered under torch do not count."""
_OPAQUE = (torch._ops.HigherOrderOperator, torch._ops.OpOverload, torch._ops.OpOverloadPacket)


MANY = 32
"""Channels of a group, in and out, from which on grouped convolutions measured faster in channels-last."""


class _Weight(torch.autograd.Function):
    """A weight in channels-last whose gradient has the weight's own layout; autograd would make a second copy of any other."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.layout = torch.contiguous_format if weight.is_contiguous() else LAST
        return weight.contiguous(memory_format=LAST)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous(memory_format=ctx.layout)


def channels_last_weight(weight: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _Weight.apply(weight)
    return found


def channels_last(gm: GraphModule) -> GraphModule | None:
    """Return a copy of the graph with its convolutions in channels-last; None unless a convolution of a training step reads the
    output of another one, or if strides may matter. The graph itself is not changed."""
    convs = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in _CONVOLUTIONS]
    images = dependents(convs)
    behind = [n for n in convs if _given(n, 0, "input") in images]
    if not behind or not all(map(_wanted, convs)) or not any(_example(n).requires_grad for n in behind):
        return None
    drawn = [n for n in gm.graph.nodes if n in images and _name(n) in _DRAWS]
    results = [n for n in gm.graph.output_node().all_input_nodes if n in images]
    kept = {*results, *(i for n in drawn for i in n.all_input_nodes if i in images)}
    if any(map(_bound_to_strides, gm.graph.nodes)) or not _apart(results) or None in map(_order, kept):
        return None
    graph = Graph(tracer_cls=gm.graph._tracer_cls)
    made: dict[Node, Node] = {}

    def at_hand(i: Node) -> Node:
        return made[i]

    def as_traced(i: Node) -> Node:
        return _laid(graph, made[i], i) if i in kept else made[i]

    for n in gm.graph.nodes:
        made[n] = graph.node_copy(n, as_traced if n.op == "output" or n in drawn else at_hand)
        if n in convs and n.target is torch.conv2d:
            _rewrite(graph, made[n])
    found = GraphModule(gm, graph)
    found.meta = gm.meta
    compat.keep_sources(found, gm)
    return found


def _given(n: Node, position: int, name: str) -> Any:
    return n.args[position] if len(n.args) > position else n.kwargs.get(name)


def _example(n: Any) -> torch.Tensor:
    found = n.meta.get("example_value") if isinstance(n, Node) else None
    return found if isinstance(found, torch.Tensor) else torch.empty(0)


def _wanted(n: Node) -> bool:
    """Whether a convolution may run in channels-last: fixed sizes, half precision (in fp32, libraries would round to TF32 only
    in this layout), and groups, if any, for which libraries have kernels of this layout."""
    made, groups = _example(n), _given(n, 6, "groups")
    fits = made.dtype in (torch.bfloat16, torch.float16) and all(isinstance(s, int) for s in made.shape)
    return fits and (groups in (None, 1) or _has_kernels(n, groups))


def _has_kernels(n: Node, groups: int) -> bool:
    """Whether a convolution with groups is faster in this layout, in forward and both gradients together: depthwise ones of small
    squares (4 to 7 times), and groups of many channels (1.3 to 1.5 times). Groups of 4 channels, two outputs of each channel,
    larger squares and dilations measured 1.4 to 3 times slower."""
    shape = _example(_given(n, 1, "weight")).shape
    stride, dilation = (_given(n, i, k) for i, k in ((3, "stride"), (5, "dilation")))
    if n.target is not torch.conv2d or not _each(stride) <= {1, 2} or not _each(dilation) <= {1}:
        return False
    depthwise = tuple(shape) in {(groups, 1, k, k) for k in (3, 5, 7)}
    return depthwise or min(shape[0] // groups, shape[1]) >= MANY


def _each(given: Any) -> set[Any]:
    """The values given for the dims of a convolution, as one number or as several; 1 by default."""
    return {1} if given is None else set(given) if isinstance(given, (tuple, list)) else {given}


def _name(n: Node) -> str:
    return n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")


def _bound_to_strides(n: Node) -> bool:
    """Whether a node may observe strides: it queries them, or is code of unknown behaviour."""
    if n.op in ("call_function", "call_method") and _name(n) in _TELLS_STRIDES:
        return True
    package = str(getattr(n.target, "__module__", None) or "torch").partition(".")[0]
    return n.op == "call_module" or (n.op == "call_function" and (isinstance(n.target, _OPAQUE) or package not in _PLAIN))


def _apart(results: Sequence[Node]) -> bool:
    """Whether no two results share memory; copies of them would not."""
    storages = [_example(n).untyped_storage()._cdata for n in results]
    return len(set(storages)) == len(storages)


def _order(n: Node) -> tuple[int, ...] | None:
    """The dims of a node's result, outermost in memory first; None if it is not dense."""
    x = _example(n)
    order = tuple(by_stride(x))
    return order if x.permute(order).is_contiguous() else None


def _laid(graph: Graph, made: Node, traced: Node) -> Node:
    """Give `made` the traced strides; costs nothing if it has them already."""
    order = _order(traced)
    assert order is not None
    if order == tuple(range(len(order))):
        return graph.call_method("contiguous", (made,))
    dense = graph.call_method("contiguous", (graph.call_method("permute", (made, order)),))
    return graph.call_method("permute", (dense, tuple(map(order.index, range(len(order))))))


def _rewrite(graph: Graph, conv: Node) -> None:
    """Rewrite a convolution to take image and weight in channels-last."""
    image, weight = _given(conv, 0, "input"), _given(conv, 1, "weight")
    with graph.inserting_before(conv):
        last = graph.call_method("contiguous", (image,), {"memory_format": LAST})
        packed = graph.call_function(channels_last_weight, (weight,))
    conv.replace_input_with(image, last)
    conv.replace_input_with(weight, packed)
