"""Layouts of a training step, where others than eager's are faster: images are channels-last between half-precision convolutions,
and a residual stream that begins as a transposed image is row-major.

Works on Dynamo's graph, before gradients are traced. Each convolution requests its image and weight in that layout, which is
free after another convolution; a transposed stream is copied where it begins. Ops behind follow by torch's own stride rules, so
forward and backward agree on the layouts of saved tensors. Eager's strides are kept where they matter: for results, for gradients
of weights, and for ops that draw random numbers, which visit elements in memory order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright.capture.masks import memory_written, storages
from fusewright.graph.effects import transforms
from fusewright.graph.spec import by_stride
from fusewright.graph.view import dependents
from fusewright.interface import Backend
from fusewright.ops.strides import CHANNELS_LAST

_CONVOLUTIONS = {
    getattr(torch, f"conv{kind}") for kind in ("1d", "2d", "3d", "_transpose1d", "_transpose2d", "_transpose3d")
}
_IMAGES: dict[Any, int] = {torch.conv2d: 4, torch.conv_transpose2d: 4, torch.conv3d: 5, torch.conv_transpose3d: 5}
"""Convolutions that libraries compute in channels-last, and the rank of their images in a batch."""
_FORWARDS: dict[Any, Callable[..., torch.Tensor]] = {torch.conv_transpose2d: torch.conv2d, torch.conv_transpose3d: torch.conv3d}
_NORMS = frozenset({"group_norm", "instance_norm"})
"""Norms of rows, for which eager copies images to planes."""
_ROW_NORMS = frozenset({"layer_norm", "rms_norm"})
_DRAWS = frozenset(
    """
    dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_
    feature_alpha_dropout native_dropout bernoulli bernoulli_ rand_like randn_like randint_like normal normal_ uniform_
    exponential_ geometric_ cauchy_ log_normal_ random_ multinomial rrelu rrelu_ gumbel_softmax
    """.split()
)
_POINTWISE = frozenset({"add", "sub", "mul", "truediv", "div", "addcmul", "lerp"})
"""Functions and methods whose result is laid as their first operand of its shape."""
_TRANSPOSES = frozenset({"transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis"})
_TELLS_STRIDES = frozenset({"as_strided", "as_strided_", "set_", "resize_", "resize_as_", "stride", "untyped_storage", "data_ptr"})
_PLAIN = frozenset({"torch", "_operator", "math", "builtins", "einops"})
"""Packages whose functions return the same values for any strides; operators that others registered under torch do not count."""
_OPAQUE = (torch._ops.HigherOrderOperator, torch._ops.OpOverload, torch._ops.OpOverloadPacket)


MANY = 32
"""Channels of a group, in and out, from which on grouped convolutions measured faster in channels-last, for any window."""
RUN, WINDOW = 8, 5
"""In smaller groups: what the channels of several together, MANY at most, are a multiple of, and the longest side of a window."""


class _Weight(torch.autograd.Function):
    """A weight in channels-last whose gradient has the weight's own layout; autograd would make a second copy of any other. If
    `turned`, that of a transposed convolution as a convolution's."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, turned: bool) -> torch.Tensor:
        last = CHANNELS_LAST[weight.dim()]
        ctx.layout, ctx.turned = torch.contiguous_format if weight.is_contiguous() else last, turned
        return (_turned(weight) if turned else weight).contiguous(memory_format=last)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (_turned(gradient) if ctx.turned else gradient).contiguous(memory_format=ctx.layout), None


def _turned(weight: torch.Tensor) -> torch.Tensor:
    return weight.flip(tuple(range(2, weight.dim()))).transpose(0, 1)


def channels_last_weight(weight: torch.Tensor, turned: bool = False) -> torch.Tensor:
    found: torch.Tensor = _Weight.apply(weight, turned)
    return found


class _Image(torch.autograd.Function):
    """An image whose gradient is channels-last."""

    @staticmethod
    def forward(ctx: Any, image: torch.Tensor) -> torch.Tensor:
        return image.view_as(image)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous(memory_format=CHANNELS_LAST[gradient.dim()])


def channels_last_gradient(image: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _Image.apply(image)
    return found


def preferred(gm: GraphModule, backend: Backend) -> GraphModule | None:
    """Return a copy of a training step in the layouts that the backend prefers; None if these are eager's."""
    if any(map(transforms, gm.graph.nodes)):
        return None
    rows = row_major(gm) if backend.row_major_training else None
    images = channels_last(rows or gm) if backend.channels_last_training else None
    return images or rows


def channels_last(gm: GraphModule) -> GraphModule | None:
    """Return a copy of the graph with its convolutions in channels-last; None unless a convolution of a training step reads the
    output of another one or is worth the copies before and behind it, or if strides may matter. The graph itself is not changed."""
    convs = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in _CONVOLUTIONS]
    if not all(map(_wanted, convs)):
        return None
    images = dependents(convs)
    worth = [n for n in convs if _given(n, 0, "input") in images or _is_depthwise(n) or _has_overlaps(n)]
    if not any(_example(n).requires_grad for n in worth):
        return None
    edits: dict[Node, Edit] = {n: _in_channels_last for n in convs if _IMAGES.get(n.target) == _example(n).dim()}
    norms = [n for n in gm.graph.nodes if n in images and _name(n) in _NORMS and _example(n).dim() in CHANNELS_LAST]
    edits |= dict.fromkeys(norms, _norm_in_channels_last)
    inputs = {x for n in norms if (x := _given(n, 0, "input")) in images and x not in edits}
    if inputs:  # also what else reads them, such as the sum behind the block
        changes = memory_written(gm)
        edits |= {x: _behind_in_channels_last for x in inputs if not changes(x)}
    return _copied(gm, images, edits)


def row_major(gm: GraphModule) -> GraphModule | None:
    """Return a copy of the graph whose residual streams are row-major; None if no stream of a training step begins as a transposed
    tensor and stays so, or if strides may matter. The graph itself is not changed."""
    turned: set[Node] = set()
    edits: dict[Node, Edit] = {}
    streams = [n for n in gm.graph.nodes if _is_stream(n)]
    if not streams:
        return None
    changes = memory_written(gm)
    for n in streams:
        if changes(n):
            continue
        operand = _leading(n)
        if operand is None:
            edits[n] = _behind
        elif operand not in turned:
            edits[n] = partial(_in_front, operand)
        turned.add(n)
    return _copied(gm, dependents(edits), edits) if edits else None


Edit = Callable[[Graph, dict[Node, Node], Node], Node]
"""(copy of the graph, the copies of nodes, a node) -> what readers of the node read; may change the node's copy."""


def _copied(gm: GraphModule, changed: Collection[Node], edits: Mapping[Node, Edit]) -> GraphModule | None:
    """Return a copy of the graph with these edits, which may change the strides of `changed`; None if strides may matter."""
    drawn = [n for n in gm.graph.nodes if n in changed and _draws(n)]
    results = [n for n in gm.graph.output_node().all_input_nodes if n in changed]
    owners, alone = _owners(gm.graph, results)
    kept = {*alone, *(i for n in drawn for i in n.all_input_nodes if i in changed)}
    begun = owners & set(changed)
    if any(map(_bound_to_strides, gm.graph.nodes)) or None in map(_order, kept | begun):
        return None
    graph = Graph(tracer_cls=gm.graph._tracer_cls)
    made: dict[Node, Node] = {}

    def at_hand(i: Node) -> Node:
        return made[i]

    def as_traced(i: Node) -> Node:
        return _as(i, _laid(graph, made[i], i)) if i in kept else made[i]

    for n in gm.graph.nodes:
        made[n] = graph.node_copy(n, as_traced if n.op == "output" or n in drawn else at_hand)
        if n in edits:
            made[n] = _as(n, edits[n](graph, made, n))
        if n in begun:
            made[n] = _as(n, _laid(graph, made[n], n))
    found = GraphModule(gm, graph)
    found.meta = gm.meta
    compat.keep_sources(found, gm)
    return found


def _as(traced: Node, made: Node) -> Node:
    """Give `made` what Dynamo knows of the node in whose place it is."""
    made.meta = {**traced.meta, **made.meta}
    return made


def _is_stream(n: Node) -> bool:
    """Whether a node is a transposed tensor that several ops read: by itself, or as the result of pointwise ops on one."""
    x = _example(n)
    if not x.requires_grad or not _by_columns(x) or len(n.users) < 2:
        return False
    if _name(n) in _TRANSPOSES:
        return any(_leading(u) is n and _by_columns(_example(u)) for u in n.users)
    return _leading(n) is not None


def _by_columns(x: torch.Tensor) -> bool:
    """Whether rows of a dense tensor of fixed sizes are not contiguous."""
    fixed = x.dim() == 3 and x.is_floating_point() and all(isinstance(s, int) for s in x.shape)
    return fixed and x.stride(-1) != 1 and x.shape[-1] != 1 and x.permute(tuple(by_stride(x))).is_contiguous()


def _leading(n: Node) -> Node | None:
    """The operand as which a pointwise op lays its result."""
    if n.op not in ("call_function", "call_method") or not (_name(n) in _POINTWISE or _is_inert(n)):
        return None
    return next((i for i in n.all_input_nodes if _example(i).shape == _example(n).shape), None)


def _in_front(operand: Node, graph: Graph, made: dict[Node, Node], n: Node) -> Node:
    """Copy the operand of a pointwise op to row-major."""
    with graph.inserting_before(made[n]):
        made[n].replace_input_with(made[operand], graph.call_method("contiguous", (made[operand],)))
    return made[n]


def _behind(graph: Graph, made: dict[Node, Node], n: Node, memory_format: torch.memory_format = torch.contiguous_format) -> Node:
    """Let readers of a tensor read it in this layout: a copy, unless it is laid so."""
    return graph.call_method("contiguous", (made[n],), {"memory_format": memory_format})


def _behind_in_channels_last(graph: Graph, made: dict[Node, Node], n: Node) -> Node:
    return _behind(graph, made, n, CHANNELS_LAST[_example(n).dim()])


def _given(n: Node, position: int, name: str) -> Any:
    return n.args[position] if len(n.args) > position else n.kwargs.get(name)


def _example(n: Any) -> torch.Tensor:
    found = n.meta.get("example_value") if isinstance(n, Node) else None
    return found if isinstance(found, torch.Tensor) else torch.empty(0)


def _wanted(n: Node) -> bool:
    """Whether a convolution may run in channels-last: fixed sizes and steps, half precision (in fp32, libraries would round to TF32
    only in this layout), and groups, if any, for which libraries have kernels of this layout."""
    made, groups = _example(n), _given(n, 6, "groups")
    geometry = (*n.args[3:], *(a for name, a in n.kwargs.items() if name not in ("input", "weight", "bias")))
    fixed = not any(isinstance(i, Node) for given in geometry for i in _each(given)) and all(isinstance(s, int) for s in made.shape)
    fits = fixed and made.dtype in (torch.bfloat16, torch.float16)
    return fits and (groups in (None, 1) or _has_kernels(n, groups))


def _is_depthwise(n: Node) -> bool:
    return _given(n, 6, "groups") not in (None, 1) and _example(_given(n, 1, "weight")).shape[1] == 1


def _has_overlaps(n: Node) -> bool:
    """Whether libraries would copy images in planes for a convolution, in each pass: if its windows overlap (others are rows of a
    product). Not where rows of the image are normalized, which lie apart in channels-last."""
    side = max(_example(_given(n, 1, "weight")).shape[2:], default=1)
    overlap = side > 1 if "transpose" in _name(n) else side > min(_each(_given(n, 3, "stride")))
    return overlap and _IMAGES.get(n.target) == _example(n).dim() and not _reaches(n, _ROW_NORMS)


def _reaches(n: Node, names: Collection[str]) -> bool:
    """Whether one of these functions reads an image, or what ops that keep its rank and order of dims make of it."""
    todo, seen = [n], {n}
    while todo:
        for user in todo.pop().users:
            if _name(user) in names:
                return True
            if user not in seen and _name(user) not in _TRANSPOSES and _example(user).dim() == _example(n).dim():
                seen.add(user)
                todo.append(user)
    return False


def _has_kernels(n: Node, groups: int) -> bool:
    """Whether a convolution with groups is faster in this layout, in forward and both gradients together: depthwise ones of small
    squares (4 to 7 times), and groups of several channels (1.1 to 20 times). Two outputs of each channel, and larger squares and
    dilations of depthwise ones, measured 1.4 to 3 times slower."""
    outs, ins, *window = _example(_given(n, 1, "weight")).shape
    stride, dilation = (_each(_given(n, i, k)) for i, k in ((3, "stride"), (5, "dilation")))
    if n.target is not torch.conv2d or not stride <= {1, 2} or _example(_given(n, 0, "input")).shape[0] == 1:
        return False  # a batch of one: groups are its images, each with weights of its own, which would be copied apart
    outs //= groups
    if ins == 1:
        return outs == 1 and window in ([3, 3], [5, 5], [7, 7]) and dilation <= {1}
    if max(window) <= WINDOW and len(stride) == 1 and _in_runs(ins, outs, groups):
        return True
    return min(ins, outs) >= MANY and dilation <= {1}


def _in_runs(ins: int, outs: int, groups: int) -> bool:
    """Whether the channels of a group, or of a few groups together, in and out, are whole runs."""
    fitting = (k for k in range(1, max(1, MANY // max(ins, outs)) + 1) if groups % k == 0)
    return any(k * ins % RUN == k * outs % RUN == 0 for k in fitting)


def _draws(n: Node) -> bool:
    return _name(n) in _DRAWS and not _is_inert(n)


def _is_inert(n: Node) -> bool:
    """Whether a dropout returns its operand."""
    return _name(n) == "dropout" and (_given(n, 1, "p") == 0 or _given(n, 2, "training") is False or _given(n, 2, "train") is False)


def _each(given: Any) -> set[Any]:
    return set(_numbers(given))


def _numbers(given: Any) -> tuple[Any, ...]:
    """What is given for the dims of a convolution, as one number or as several; 1 by default."""
    return (1,) if given is None else tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _name(n: Node) -> str:
    """The name of a function or method."""
    return n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")


def _bound_to_strides(n: Node) -> bool:
    """Whether a node may observe strides: it queries them, or is code of unknown behaviour."""
    if n.op in ("call_function", "call_method") and _name(n) in _TELLS_STRIDES:
        return True
    package = str(getattr(n.target, "__module__", None) or "torch").partition(".")[0]
    return n.op == "call_module" or (n.op == "call_function" and (isinstance(n.target, _OPAQUE) or package not in _PLAIN))


def _owners(graph: Graph, results: Sequence[Node]) -> tuple[set[Node], list[Node]]:
    """The nodes of whose memory several results are views, as copies of these would not be, and the other results."""
    counts = Counter(s for n in results for s in storages(n))
    shared = {s for s, count in counts.items() if count > 1}
    owners: dict[int, Node] = {}
    for n in graph.nodes if shared else ():
        for s in shared & storages(n):
            owners.setdefault(s, n)
    return set(owners.values()), [n for n in results if not shared & storages(n)]


def _order(n: Node) -> tuple[int, ...] | None:
    """The dims of a node's result, outermost in memory first; None if it is not dense, or no tensor."""
    x = n.meta.get("example_value")
    if not isinstance(x, torch.Tensor):
        return None
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


def _in_channels_last(graph: Graph, made: dict[Node, Node], n: Node) -> Node:
    """Let a convolution read its image and weight in channels-last."""
    conv, around = made[n], _padding_of_convolution(n)
    image, weight = _given(conv, 0, "input"), _given(conv, 1, "weight")
    with graph.inserting_before(conv):
        last = graph.call_method("contiguous", (image,), {"memory_format": CHANNELS_LAST[_example(n).dim()]})
        if _example(_given(n, 0, "input")).shape[1] == 1:  # in either layout, so that the convolution would leave planes
            points = graph.call_method("squeeze", (last, 1))
            last = graph.call_method("movedim", (graph.call_method("unsqueeze", (points, -1)), -1, 1))
        packed = graph.call_function(channels_last_weight, (weight, around is not None))
    conv.replace_input_with(image, last)
    conv.replace_input_with(weight, packed)
    if around is not None:
        conv.target, conv.kwargs = _FORWARDS[n.target], {}
        conv.args = (last, packed, _given(conv, 2, "bias"), 1, around, _given(conv, 7, "dilation") or 1)
    return conv


def _padding_of_convolution(n: Node) -> tuple[int, ...] | None:
    """Return the padding with which a transposed convolution of few channels and stride 1 is a convolution, None for others. For
    the gradient of the former's weight a library may take seconds (16 to 64 channels of 16x32x128x128: 2.5 s, in planes 0.9 s).
    Those of 32 to 64 channels took 0.67 to 1.29 times as long so."""
    ones = (_each(_given(n, 3, "stride")), _each(_given(n, 6, "groups")))
    ins, _, *window = _example(_given(n, 1, "weight")).shape
    if n.target not in _FORWARDS or ones != ({1}, {1}) or _each(_given(n, 5, "output_padding") or 0) != {0} or ins >= MANY:
        return None
    dims = len(window)
    padding, dilation = ((_numbers(given) * dims)[:dims] for given in (_given(n, 4, "padding") or 0, _given(n, 7, "dilation")))
    around = tuple(d * (side - 1) - p for side, d, p in zip(window, dilation, padding, strict=True))
    return around if min(around) >= 0 else None


def _norm_in_channels_last(graph: Graph, made: dict[Node, Node], n: Node) -> Node:
    """Let readers of a group or instance norm read it in channels-last, and so what is behind its gradient: on GPUs eager copies
    images to planes for it, and its kernels leave them so."""
    norm, image = made[n], _given(made[n], 0, "input")
    with graph.inserting_before(norm):
        norm.replace_input_with(image, graph.call_function(channels_last_gradient, (image,)))
    return _behind_in_channels_last(graph, made, n)
