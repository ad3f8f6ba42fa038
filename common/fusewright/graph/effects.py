"""Effects of a node besides its result: writes in place, random numbers, assertions, shared memory. Defined for all nodes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import machine, ops
from fusewright.graph.view import is_op, is_projection
from fusewright.ops import namespaces
from fusewright.ops.states import stated


def writes(node: Node) -> bool:
    """Whether the node writes to one of its arguments."""
    return is_op(node) and ops.is_mutating(node.target)


def draws(node: Node) -> bool:
    """Whether the node draws random numbers; attention or dropout with probability 0 does not."""
    return stated(node) is not None or (is_op(node) and ops.call_draws(node.target, node.args, node.kwargs))


def asserts(node: Node) -> bool:
    """Whether the node exists only for its effect, as an assertion does: it returns nothing, or an ordering token.

    It is never dropped, merged or computed ahead, and later nodes run after it: they rely on an asserted size.
    """
    return is_op(node) and operator_asserts(node.target)


@cache
def operator_asserts(operator: Any) -> bool:
    """Whether an operator is called only for its effect, which does not touch memory."""
    name: str = operator._schema.name.partition("::")[2]
    return not operator._schema.returns or name.startswith(("_functional_assert", "_functional_sym_constrain"))


def names_sizes(node: Node) -> bool:
    """Whether the node returns sizes or numbers that depend on data. It defines its own symbols, so an equal node cannot
    replace it."""
    return compat.UNBACKED in node.meta


def transforms(node: Node) -> bool:
    """Whether the node of a Dynamo graph is part of a transform of `torch.func`, inside of which no function of autograd may be
    inserted: it differentiates its own functions."""
    return "functorch" in str(getattr(node.target, "__module__", ""))


def communicates(node: Node) -> bool:
    """Whether the node may wait for other processes, which wait for it: a collective or, among several processes, an unknown
    op. Such a node runs exactly once per call of its graph, in graph order, whatever a process finds faster or has to repeat:
    the other processes cannot know."""
    if is_op(node):
        return namespaces.communicates(node.target.namespace)  # type: ignore[union-attr]
    if (found := stated(node)) is not None:
        return namespaces.communicates(found.operator.namespace)
    known = getattr(node.target, "__module__", "") in ("_operator", "operator", "math", "builtins")
    return node.op == "call_function" and not known and machine.several_processes()


def unknown(node: Node) -> bool:
    """Whether the node calls code of others, which may have effects that nothing declares: it may count, or draw random numbers."""
    return is_op(node) and namespaces.may_keep(node.target.namespace)  # type: ignore[union-attr]


def has_collectives(graph: Graph) -> bool:
    """Whether any node of the graph may wait for other processes."""
    return any(communicates(n) for n in graph.nodes)


def held_in_order(graph: Graph) -> dict[Node, Node]:
    """Map nodes to the previous node of their kind that they must follow without reading it: ops that draw random numbers from one
    generator, and collectives."""
    before: dict[Node, Node] = {}
    last: dict[object, Node] = {}
    for node in graph.nodes:
        own = stated(node)
        kind = own.generator if own is not None else "draws" if draws(node) else "communicates" if communicates(node) else ""
        if kind:
            if kind in last:
                before[node] = last[kind]
            last[kind] = node
    return before


def drop_dead_code(graph: Graph) -> None:
    """Erase nodes that nobody reads and that have no effect, including on other processes, and on generators: forward's and
    backward's have to advance alike."""
    compat.drop_dead_code(graph, lambda n: asserts(n) or communicates(n) or stated(n) is not None)


def has_writes(graph: Graph) -> bool:
    """Whether the graph writes anything in place."""
    return first_write(graph) is not None


def first_write(graph: Graph) -> Node | None:
    """The first node that writes in place; inputs are written last, once all else is computed."""
    return next((n for n in graph.nodes if writes(n)), None)


def may_share(node: Node) -> bool:
    """Whether a result of the node may share memory with one of its inputs. Unknown kinds of nodes may."""
    return overload_may_share(node.target) if is_op(node) else node.op == "call_function"


def overload_may_share(target: Any) -> bool:
    """Whether a result of an operator may share memory with an input. In the opset, only views do. All collectives do: they
    read their inputs until their results are waited for, and the wait returns the same tensor."""
    if namespaces.communicates(target.namespace, unknown=False):
        return True
    row = ops.find(target)
    return (row is None or row.kind is ops.Kind.VIEW) and compat.may_return_alias(target)


def exposed(graph: Graph) -> frozenset[Node]:
    """Nodes whose memory is visible outside or changes: returned, written in place, or the source of such a view.

    A rewrite must not make one of them share memory that it did not share before.
    """
    found: set[Node] = set()
    todo = list(_returned(graph))
    for node in graph.nodes:
        if writes(node):
            todo.extend(written(node))
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            if may_share(node) or is_projection(node):
                todo.extend(node.all_input_nodes)
    return frozenset(found)


def shared_views(graph: Graph) -> frozenset[Node]:
    """Views through which the caller sees memory that it also sees in another way: as an input or as another output.

    They must be real views of the same memory, so eager makes them.
    """
    chains = [list(_chain(n)) for n in dict.fromkeys(_returned(graph))]
    roots = [chain[-1] for chain in chains]
    found: set[Node] = set()
    for chain, root in zip(chains, roots, strict=True):
        if root.op != "call_function" or roots.count(root) > 1:
            found.update(n for n in chain if may_share(n) and is_op(n))
    return frozenset(found)


def _chain(node: Node) -> Iterator[Node]:
    """Yield `node`, its view source, and so on to the tensor that owns the memory."""
    yield node
    while (may_share(node) or is_projection(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
        yield node


def _returned(graph: Graph) -> list[Node]:
    (output,) = graph.find_nodes(op="output")
    return list(output.all_input_nodes)


def written(node: Node) -> Iterator[Node]:
    """The arguments that a mutating node writes."""
    formals = node.target._schema.arguments  # type: ignore[union-attr]
    for i, formal in enumerate(formals):
        if formal.alias_info is None or not formal.alias_info.is_write:
            continue
        given = node.args[i] if i < len(node.args) else node.kwargs.get(formal.name)
        yield from (n for n in (given if isinstance(given, tuple | list) else (given,)) if isinstance(n, Node))
