"""Expand composites on claim: only if a backend rejects the whole, or would carry or refuse a call that is better opened, but
takes every primitive in it."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph import constants
from fusewright.graph.canonicalize import canonicalize
from fusewright.graph.constants import Constants
from fusewright.graph.effects import draws, drop_dead_code
from fusewright.graph.spec import value_of
from fusewright.graph.verify import UNTRUSTED
from fusewright.graph.view import GraphIndex, is_op, is_projection
from fusewright.interface import Backend, OpView, Phase, Verdict, Why
from fusewright.partition.partition import ask

log = logging.getLogger("fusewright")


def on_claim(
    graph: Graph, const: Constants, backend: Backend, denied: Mapping[str, Verdict], phase: Phase
) -> tuple[Graph, Constants]:
    """Return `graph`, or a copy with some composites replaced by their primitives, and the constants of the result; constants
    inside a composite are found as in the graph."""
    claims_nothing = type(backend).supports is Backend.supports
    chosen = {} if claims_nothing else _openable(graph, const.values, backend, denied, phase)
    if not chosen:
        return graph, const
    copy = Graph(graph.owning_module)
    mapping: dict[Node, Node] = {}
    output = copy.graph_copy(graph, mapping)
    (original,) = graph.find_nodes(op="output")
    copy.output(output).meta.update(original.meta)
    for node, inside in chosen.items():
        _splice(copy, mapping[node], inside)
    drop_dead_code(copy)
    held = frozenset(mapping[n] for n in const.values if n.op != "call_function")
    return copy, constants.find(copy, held, phase, backend.widened)


def _openable(
    graph: Graph, const: frozenset[Node], backend: Backend, denied: Mapping[str, Verdict], phase: Phase
) -> dict[Node, Graph]:
    """Composites that the backend wants expanded, with their contents. Equal composites are traced once."""
    candidates = [
        n for n in graph.nodes
        if is_op(n) and n.name not in denied and UNTRUSTED not in n.meta and not draws(n)
        and (row := ops.find(n.target)) is not None and row.decompose is not None
    ]  # fmt: skip
    if not candidates:
        return {}
    views = GraphIndex(graph, const, phase).ops
    chosen: dict[Node, Graph] = {}
    traced: dict[Any, Graph | None] = {}
    for node in candidates:
        view = views[node]
        why, row = ask(backend, view, node).why, ops.find(node.target)
        assert row is not None
        if why is not Why.NO_LOWERING and not (row.opened and why in (Why.CARRIED, Why.ATTR)):
            continue
        key = (view.op, tuple((v.spec, v.dim) for v in view.inputs()), _given(node))
        if key not in traced:
            traced[key] = _traced_if_claimed(node, backend, phase)
        inside = traced[key]
        if inside is not None:
            chosen[node] = inside
    return chosen


def _given(node: Node) -> str:
    """A key of a node's arguments, with its inputs numbered, so that repeated inputs are told apart from distinct ones."""
    places = {n: ("%", k) for k, n in enumerate(node.all_input_nodes)}
    return repr(torch.fx.node.map_arg((node.args, dict(sorted(node.kwargs.items()))), places.__getitem__))


def _traced_if_claimed(node: Node, backend: Backend, phase: Phase) -> Graph | None:
    row = ops.find(node.target)
    assert row is not None and row.decompose is not None
    nodes = list(node.all_input_nodes)
    fakes = [value_of(n) for n in nodes]
    tensors = [f for f in fakes if isinstance(f, torch.Tensor)]
    if not tensors:
        return None
    decompose = row.decompose

    def body(*values: Any) -> Any:
        env = dict(zip(nodes, values, strict=True))
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        return _apart(_laid_out(decompose(*args, **kwargs), value_of(node)), value_of(node), values)

    try:
        with compat.fake_mode_of(tensors[0]), compat.assuming_nothing(tensors[0]):
            inside = make_fx(body)(*fakes).graph
    except compat.SizesAssumed:  # nothing would check the assumption, so eager runs the whole
        return None
    except RuntimeError as e:  # eager runs the whole, and refuses it in its own words
        log.info("%s is not opened: its primitives refuse the call: %s", row.name, str(e).partition("\n")[0])
        return None
    canonicalize(inside)
    drop_dead_code(inside)
    views = GraphIndex(inside, frozenset(), phase).ops
    if any(n.target is node.target for n in views):
        return None
    asked = {n: v for n, v in views.items() if not _is_size(v)}
    verdicts = [ask(backend, v, n) for n, v in asked.items()]
    taken = all(verdicts) and not (row.opened and any(v.why is Why.CARRIED for v in verdicts))
    return inside if asked and taken else None


def _is_size(op: OpView) -> bool:
    """Whether an op returns only numbers: the plan computes sizes, not a backend."""
    return bool(op.outs) and all(v.spec is None for v in op.outs)


def _laid_out(made: Any, like: Any) -> Any:
    """Give `made` the strides of `like`, which views of the composite were traced for; primitives may produce others."""
    if isinstance(made, tuple | list):
        return tuple(map(_laid_out, made, like))
    if not isinstance(made, torch.Tensor) or not isinstance(like, torch.Tensor):
        return made
    with disable_proxy_modes_tracing():  # the trace does not know the symbols of `like`
        if _strides(made) == _strides(like):
            return made
        strides = like.stride()
        order = sorted(range(like.dim()), key=lambda d: -strides[d])
    return made.permute(order).contiguous().permute([order.index(d) for d in range(like.dim())])


def _apart(made: Any, like: Any, given: Sequence[Any]) -> Any:
    """Copy `made` if it is a view of an input and `like` is not: some primitives move no data."""
    if isinstance(made, tuple | list):
        return tuple(_apart(m, w, given) for m, w in zip(made, like, strict=True))
    if not _shares(made, given) or _shares(like, given):
        return made
    return made.clone()


def _shares(t: Any, others: Sequence[Any]) -> bool:
    memory = {compat.storage_id(o) for o in others if isinstance(o, torch.Tensor) and o.layout is torch.strided}
    return isinstance(t, torch.Tensor) and t.layout is torch.strided and compat.storage_id(t) in memory


def _strides(x: torch.Tensor) -> list[Any]:
    """Strides of the dims where they matter."""
    return [s for n, s in zip(x.shape, x.stride(), strict=True) if not compat.statically_true(n == 1)]


def _splice(graph: Graph, node: Node, inside: Graph) -> None:
    """Replace `node` by the nodes of `inside`."""
    env: dict[Node, Any] = dict(zip(inside.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    (output,) = inside.find_nodes(op="output")
    with graph.inserting_before(node):
        for n in inside.nodes:
            if n.op in ("call_function", "get_attr"):
                env[n] = graph.node_copy(n, env.__getitem__)
                env[n].meta = dict(n.meta, origin=node.name, stack_trace=node.meta.get("stack_trace"))
                env[n].meta |= {k: v for k, v in node.meta.items() if k == "nn_module_stack"}
    results = torch.fx.node.map_arg(output.args[0], env.__getitem__)
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            if not (is_projection(user) and user.target is operator.getitem):
                raise AssertionError(f"{node.format_node()} has a use that is no projection: {user.format_node()}")
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
