"""Passes over the joint forward and backward graph, before the cut decides what is saved and what is recomputed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tag
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fusewright import _torch_compat as compat
from fusewright.capture.tables import host_tables
from fusewright.graph.cse import merge_common
from fusewright.graph.fills import full_before, host_scalars, size_fills
from fusewright.graph.retrace import called, fake_like
from fusewright.graph.spec import value_of
from fusewright.graph.view import dependents
from fusewright.interface import DevicePolicy

aten = torch.ops.aten

_MASKED = (aten.hardtanh_backward.default, aten.threshold_backward.default, aten.leaky_relu_backward.default)
"""Gradients that read which elements an activation has clamped, or scaled, from its result."""

_EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default

_WITH_STATISTICS = (
    aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default,
    aten._native_batch_norm_legit_functional.default,
)  # fmt: skip
"""Norms whose gradients read the operand, the mean and the reciprocal of the standard deviation."""

_NORMS = (*_WITH_STATISTICS, aten._native_batch_norm_legit.no_stats)

_NORM_GRADIENTS = (aten.native_group_norm_backward.default, aten.native_batch_norm_backward.default)

_OF_A_LOSS = (
    aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
)  # fmt: skip
"""Ops that read one class of each sample, or none."""

MANY_CLASSES = 512
"""Fewer are computed and saved in no time."""

_ALIASES = (aten.alias.default, aten.detach.default)

_MOVES = (
    *_ALIASES, aten.gather.default, aten.index.Tensor, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default,
    aten.view.default, aten.permute.default,
)  # fmt: skip
"""Ops that move values and round none."""


_JOINS = (aten.cat.default, aten.stack.default)

_MOST_JOINED = 4
"""More tensors side by side are saved as one: a kernel that reads them all has a branch for each."""

_REDUCTIONS = (
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default, aten._softmax.default,
    aten._log_softmax.default,
)  # fmt: skip


POINTWISE: frozenset[Any] = frozenset(
    getattr(aten, name)
    for name in """
    elu elu_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu leaky_relu_backward
    log_sigmoid_forward log_sigmoid_backward mish mish_backward _prelu_kernel _prelu_kernel_backward softplus softplus_backward
    mse_loss_backward huber_loss_backward smooth_l1_loss_backward binary_cross_entropy_backward glu_backward
    """.split()
)
"""Activations and gradients that kernels compute element by element, beside those that torch tags so: it lists what Inductor
decomposes them to. What they read may be computed again in a kernel of theirs."""


def before_cut(graph: Graph, policy: DevicePolicy) -> None:
    """Rewrite a joint graph in place."""
    write_out_steps(graph)
    without_aliases(graph)
    host_scalars(graph)
    size_fills(graph)
    unread_statistics(graph)
    unread_seeds(graph)
    clamped_by_result(graph)
    cropped_from_padded(graph)
    normalized_by_statistics(graph)
    if policy.multiple is not None:
        from fusewright.capture.aligned import pad_products

        pad_products(graph, policy.multiple)
    if policy.adds_bias:
        biases_apart(graph)
    _side_by_side(graph)
    merge_common(graph)
    host_tables(graph)
    tested_for_equality(graph)
    joined_again(graph)
    copied_for_norms(graph)
    normalized_again(graph)


def without_aliases(graph: Graph) -> None:
    """Read what `detach` and `alias` return of: autograd writes them between a result and its gradient, and the cut would save what
    is detached rather than compute it again."""
    for node in [n for t in _ALIASES for n in graph.find_nodes(op="call_function", target=t)]:
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")
        if not node.users:
            graph.erase_node(node)


def joined_again(graph: Graph) -> None:
    """Join a few tensors again for gradients that kernels compute from what they join, rather than save both (a loss that mixes two
    distributions reduces a stack of them)."""
    for join in (n for t in _JOINS for n in graph.find_nodes(op="call_function", target=t)):
        if len(join.all_input_nodes) <= _MOST_JOINED and all(map(_in_kernels, _readers(join))):
            join.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)


def biases_apart(graph: Graph) -> None:
    """Add the bias of a convolution in an op of its own where kernels alone read the result, a gradient among them: each of them
    adds it to what the convolution returns, which is saved, rather than one kernel store the sum."""
    for conv in graph.find_nodes(op="call_function", target=aten.convolution.default):
        x, weight, bias, *how = conv.args
        readers = [*_readers(conv, (*_MOVES, aten._to_copy.default))]
        forward = [r for r in readers if "backward" not in str(r.target)]
        if bias is None or len(forward) == len(readers) or not all(r.target in _NORMS or _in_kernels(r) for r in forward):
            continue
        channels = [1, -1, *[1] * (value_of(conv).dim() - 2)]
        with graph.inserting_after(conv):
            plain = called(graph, conv, aten.convolution.default, x, weight, None, *how)
        with graph.inserting_after(plain):
            wide = called(graph, conv, aten.view.default, bias, channels)
        with graph.inserting_after(wide):
            total = called(graph, conv, aten.add.Tensor, plain, wide)
        total.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        conv.replace_all_uses_with(total)
        graph.erase_node(conv)


def _readers(x: Node, moves: Sequence[Any] = _MOVES) -> Iterator[Node]:
    """The ops that read the values of `x`, moved or not."""
    for user in x.users:
        if user.target in moves:
            yield from _readers(user, moves)
        else:
            yield user


def _in_kernels(reader: Node) -> bool:
    """Whether a kernel can compute an op from what it joins as it reads."""
    return reader.target in _REDUCTIONS or _is_pointwise(reader)


def _is_pointwise(node: Node) -> bool:
    target: Any = node.target
    return compat.is_overload(target) and (Tag.pointwise in target.tags or target.overloadpacket in POINTWISE)


def normalized_again(graph: Graph) -> None:
    """Let gradients that kernels compute read what a norm returns, and activations of that, as computed from the norm's operand and
    statistics. Its own gradient reads these, so that they are saved, and the result need not be; and one kernel with both gradients
    reads one tensor less."""
    norms = [n for t in _WITH_STATISTICS for n in graph.find_nodes(op="call_function", target=t)]
    gradients = dependents(n for n in graph.find_nodes(op="placeholder") if compat.is_tangent(n)) if norms else set()
    for norm in norms:
        made = {n.args[1]: n for n in norm.users}
        own = {u for k in (1, 2) if k in made for u in made[k].users if u in gradients}
        if 0 in made and own and _normalizes_again(norm, made):
            _normalize_for(graph, norm, made, own, gradients)


def _normalizes_again(norm: Node, made: Mapping[Any, Node]) -> bool:
    """Whether a norm's result can be computed from its statistics as exactly."""
    x, mean, rstd = (value_of(made[k]) for k in (0, 1, 2))
    wide = all(s.dtype == torch.promote_types(x.dtype, torch.float32) and s.numel() for s in (mean, rstd))
    grouped = norm.target is aten.native_group_norm.default
    return wide and "recompute" not in made[0].meta and not (grouped and any(not isinstance(n, int) for n in x.shape))


def _normalize_for(graph: Graph, norm: Node, made: Mapping[Any, Node], own: set[Node], gradients: set[Node]) -> None:
    """Replace what gradients read of a norm's result; `own` are the norm's gradients."""
    again: dict[Node, Node] = {}
    for x in _computed_from(made[0], gradients):
        readers = [u for u in x.users if u in gradients]
        saved = not all(map(_in_kernels, readers))
        for reader in readers:
            if _in_kernels(reader) and (not saved or _leads_to(reader, own)):
                again = again or {made[0]: _normalized(graph, norm, made)}
                reader.replace_input_with(x, _again(graph, x, again))


def _computed_from(x: Node, gradients: set[Node]) -> list[Node]:
    """`x`, and what is computed element by element from it alone in the forward."""
    found = [x]
    for node in found:
        for user in node.users:
            alone = user not in gradients and user not in found and all(i in found for i in user.all_input_nodes)
            if alone and "recompute" not in user.meta and (_is_pointwise(user) or user.target is aten._to_copy.default):
                found.append(user)
    return found


def _again(graph: Graph, x: Node, again: dict[Node, Node]) -> Node:
    """`x`, computed from what `again` has in place of nodes."""
    if x not in again:
        given = {i: _again(graph, i, again) for i in x.all_input_nodes}
        with graph.inserting_after(max(given.values())):
            again[x] = graph.node_copy(x, given.__getitem__)
        again[x].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return again[x]


def _leads_to(x: Node, ends: set[Node]) -> bool:
    """Whether an end reads `x`, or what is computed element by element from it."""
    found, todo = {x}, [x]
    for node in todo:
        if not ends.isdisjoint(node.users):
            return True
        new = [u for u in node.users if u not in found and _is_pointwise(u)]
        found.update(new)
        todo += new
    return False


def _normalized(graph: Graph, norm: Node, made: Mapping[Any, Node]) -> Node:
    """The result of a norm, computed from its operand and statistics as kernels do in the forward, and rounded."""
    result, mean, rstd = (made[k] for k in (0, 1, 2))
    x, shape, dtype, wide = norm.args[0], list(value_of(result).shape), value_of(result).dtype, value_of(mean).dtype
    by_rows, by_groups = (norm.target is t.default for t in (aten.native_layer_norm, aten.native_group_norm))
    channels = [1, -1, *[1] * (len(shape) - 2)]
    place = max(made.values())

    def call(target: Any, *args: Any, **named: Any) -> Node:
        nonlocal place
        with graph.inserting_after(place):
            place = called(graph, result, target, *args, **named)
        place.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        return place

    if dtype != wide:
        x = call(aten._to_copy.default, x, dtype=wide)
    if by_groups:
        n, groups = value_of(mean).shape
        x = call(aten.view.default, x, [n, groups, shape[1] // groups, *shape[2:]])
        mean, rstd = (call(aten.view.default, s, [n, groups, *[1] * (len(shape) - 1)]) for s in (mean, rstd))
    elif not by_rows:
        mean, rstd = (call(aten.view.default, s, channels) for s in (mean, rstd))
    y = call(aten.mul.Tensor, call(aten.sub.Tensor, x, mean), rstd)
    if by_groups:
        y = call(aten.view.default, y, shape)
    for op, parameter in zip((aten.mul.Tensor, aten.add.Tensor), norm.args[2:4] if by_rows else norm.args[1:3], strict=True):
        if isinstance(parameter, Node):
            y = call(op, y, parameter if by_rows else call(aten.view.default, parameter, channels))
    return y if dtype == wide else call(aten._to_copy.default, y, dtype=dtype)


def copied_for_norms(graph: Graph) -> None:
    """Save the images that group and instance norms copy to planes as they are: the gradient copies them again, which a kernel need
    not do."""
    for norm in (n for t in _NORM_GRADIENTS for n in graph.find_nodes(op="call_function", target=t)):
        copy: Any = _moved(norm.args[1])
        if copy.target is aten.clone.default and not copy.args[0].meta["val"].is_contiguous():
            copy.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
            if copy.args[0].target is aten._to_copy.default:
                copy.args[0].meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)


def write_out_steps(graph: Graph) -> None:
    """Write out the steps that were traced as one, if there are any; what traces them has imported the module that does."""
    if (repeated := sys.modules.get("fusewright.capture.repeated")) is not None:
        repeated.write_out(graph)


def _side_by_side(graph: Graph) -> None:
    """Join the gradients of pieces of a tensor, if there are any: most processes with a warm cache import nothing for it."""
    if any(graph.find_nodes(op="call_function", target=t) for t in (aten.select_backward.default, aten.slice_backward.default)):
        from fusewright.capture import pieces

        pieces.side_by_side(graph)


def tested_for_equality(graph: Graph) -> None:
    """Keep values that are tested for equality from being computed again: the gradient of a maximum asks which elements equal it,
    and a kernel with other neighbours may round them otherwise, so that none does."""
    for target in (aten.eq.Tensor, aten.ne.Tensor):
        for node in graph.find_nodes(op="call_function", target=target):
            for x in map(_moved, node.all_input_nodes):
                value = x.meta.get("val")
                computed = x.op == "call_function" and x.target is not aten.full.default
                if computed and isinstance(value, torch.Tensor) and value.is_floating_point():
                    x.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _moved(x: Node) -> Node:
    """The node whose values `x` holds, perhaps elsewhere."""
    while x.target in _MOVES:
        x = x.all_input_nodes[0]
    return x


def unread_statistics(graph: Graph) -> None:
    """Pass the weight in place of the running statistics to the gradient of a training batch norm, which reads only their type,
    so that they are not saved."""
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        _, _, weight, mean, var, _, _, train, *_ = node.args
        if train is True and all(_alike(weight, x) for x in (mean, var)):
            node.args = (*node.args[:3], weight, weight, *node.args[5:])


def unread_seeds(graph: Graph) -> None:
    """Pass zeros in place of the seeds of an attention without dropout, whose gradient does not read them: eager makes them on the
    host, and a graph of a device cannot be replayed with those."""
    for node in graph.find_nodes(op="call_function", target=_EFFICIENT_BACKWARD):
        *before, seed, _, dropout = node.args[:10]
        if dropout == 0:
            like, device = value_of(seed), value_of(node.args[0]).device
            zero = full_before(graph, node, 0, like, device)
            zero.meta["val"] = fake_like(like, device=device)
            node.args = (*before, zero, zero, *node.args[9:])


def clamped_by_result(graph: Graph) -> None:
    """Let the gradient of a clamp (relu6), or of a leaky relu, whose result has its operand's sign, read the result, as a relu's
    does: the next op saves that, and nobody the input."""
    for node in graph.find_nodes(op="call_function", target=aten.hardtanh_backward.default):
        _, x, *bounds = node.args
        made = (u for u in x.users if u.target is aten.hardtanh.default and [*u.args[1:], *(-1, 1)[len(u.args) - 1 :]] == bounds)
        result = next(made, None)
        if result is not None and all(map(_exact, bounds)):
            node.args = (node.args[0], result, *bounds)
    for node in graph.find_nodes(op="call_function", target=aten.leaky_relu_backward.default):
        grad, x, slope, is_result = node.args
        made = (u for u in x.users if u.target is aten.leaky_relu.default and (*u.args[1:], 0.01)[0] == slope)
        result = next(made, None)
        if result is not None and not is_result and isinstance(slope, int | float) and slope >= 0:
            node.args = (grad, result, slope, True)


def _exact(bound: Any) -> bool:
    """Whether no dtype rounds a bound; the result could be inside of a rounded one."""
    return isinstance(bound, int | float) and float(bound).is_integer() and abs(bound) <= 256


def normalized_by_statistics(graph: Graph) -> None:
    """Save, of a log-softmax over many classes of which a loss reads one in a row, its operand and two numbers a row. Its gradient
    computes it again from them, and it is never in memory."""
    for node in graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        x, dim, _ = node.args
        result = value_of(node)
        classes = result.shape[dim]
        moved = [node, *_moved_on(node)]
        if not isinstance(classes, int) or classes < MANY_CLASSES or not all(_of_loss(u, n) for n in moved for u in n.users):
            continue
        wide, call = torch.promote_types(result.dtype, torch.float32), partial(called, graph, node)
        with graph.inserting_before(node):
            made: Any = x if value_of(x).dtype == wide else call(aten._to_copy.default, x, dtype=wide)
            shifted: Any = call(aten.sub.Tensor, made, call(aten.amax.default, made, [dim], True))
            total = call(aten.sum.dim_IntList, call(aten.exp.default, shifted), [dim], True)
            found: Any = call(aten.sub.Tensor, shifted, call(aten.log.default, total))
            rounded = found if wide == result.dtype else call(aten._to_copy.default, found, dtype=result.dtype)
        for n in (shifted.args[1], found.args[1]):
            n.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for n in {made, shifted, found, rounded, *moved[1:]} - {x}:
            n.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.replace_all_uses_with(rounded)
        graph.erase_node(node)


def _moved_on(x: Node) -> Iterator[Node]:
    """Aliases of a value, and copies of other types."""
    for user in x.users:
        if user.target in _ALIASES or user.target is aten._to_copy.default:
            yield user
            yield from _moved_on(user)


def _of_loss(user: Node, x: Node) -> bool:
    """Whether a reader of a log-softmax, or of what it was moved to, is one of its loss."""
    return (
        user.target in (*_OF_A_LOSS, *_ALIASES, aten._to_copy.default)
        or (user.target is aten._log_softmax_backward_data.default and user.args[1] is x)
    )  # fmt: skip


def cropped_from_padded(graph: Graph) -> None:
    """Let gradients read an activation as a view of its padded copy where a convolution saves that anyway."""
    for pad in graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default):
        x, amounts = pad.args[:2]
        shape = x.meta["val"].shape
        grows = all(isinstance(n, int) and n >= 0 for n in (*shape, *amounts))
        if not grows or not _saved(pad) or _saved(x):
            continue
        readers = list(_masked_by(x))
        view = _cropped(graph, pad, shape, amounts) if readers else pad
        for reader in readers:
            reader.args = (reader.args[0], view, *reader.args[2:])


def _masked_by(x: Node) -> Iterator[Node]:
    """The gradients that read `x`, or an alias of it, as the result of their activation."""
    for user in x.users:
        if user.target in _ALIASES:
            yield from _masked_by(user)
        elif user.target in _MASKED and user.args[1] is x:
            yield user


def _saved(x: Node) -> bool:
    """Whether the gradient of a convolution reads `x` as its image."""
    return any(u.target is aten.convolution_backward.default and u.args[1] is x for u in x.users)


def _cropped(graph: Graph, pad: Node, shape: Sequence[int], amounts: Sequence[int]) -> Node:
    """Slice the padding off; `amounts` has those of the last dim first."""
    view = pad
    for k, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = len(shape) - 1 - k
        if before or after:
            where = (dim, before, before + shape[dim])
            with graph.inserting_after(view):
                view = called(graph, view, aten.slice.Tensor, view, *where)
    return view


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Node) or not isinstance(b, Node):
        return False
    x, y = a.meta["val"], b.meta["val"]
    return bool(x.dtype == y.dtype and x.shape == y.shape and x.device == y.device)
