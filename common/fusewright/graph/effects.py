"""What a node does besides computing: write in place, draw random numbers, check, share memory. Total over all nodes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph.view import is_op, is_projection


def writes(node: Node) -> bool:
    """Whether the node writes to one of its arguments."""
    return is_op(node) and ops.is_mutating(node.target)


def draws(node: Node) -> bool:
    """Whether the node draws random numbers; attention or dropout with probability 0 does not."""
    return is_op(node) and ops.call_draws(node.target, node.args, node.kwargs)


def asserts(node: Node) -> bool:
    """Whether the node is there for its effect alone, as assertions are: it gives nothing, or a token of its order.

    It is never dropped, merged or computed ahead, and what stands behind it runs behind it: a size that was asserted is
    believed from there on.
    """
    return is_op(node) and operator_asserts(node.target)


@cache
def operator_asserts(operator: Any) -> bool:
    """Whether an operator is called for its effect alone, which is none on memory."""
    name: str = operator._schema.name.partition("::")[2]
    return not operator._schema.returns or name.startswith(("_functional_assert", "_functional_sym_constrain"))


def names_sizes(node: Node) -> bool:
    """Whether the node gives sizes or numbers which only its data tell: its symbols are its own, so its like is no substitute."""
    return compat.UNBACKED in node.meta


def communicates(node: Node) -> bool:
    """Whether the node may wait for other processes, which wait for it: a collective, or what nobody knows among several
    processes. Such a node runs exactly as often as its graph is called, in the order of the graph, whatever a process finds
    faster or has to repair: the others cannot know of it."""
    if is_op(node):
        return compat.communicates(node.target.namespace)  # type: ignore[union-attr]
    known = getattr(node.target, "__module__", "") in ("_operator", "operator", "math", "builtins")
    return node.op == "call_function" and not known and compat.several_processes()


def has_collectives(graph: Graph) -> bool:
    """Whether anything in the graph may wait for other processes."""
    return any(communicates(n) for n in graph.nodes)


def held_in_order(graph: Graph) -> dict[Node, Node]:
    """Nodes that wait for another of their kind though they read nothing of it: what draws random numbers for what drew
    before, collectives for those that come first."""
    before: dict[Node, Node] = {}
    last: dict[str, Node] = {}
    for node in graph.nodes:
        kind = "draws" if draws(node) else "communicates" if communicates(node) else ""
        if kind:
            if kind in last:
                before[node] = last[kind]
            last[kind] = node
    return before


def drop_dead_code(graph: Graph) -> None:
    """Erase what nobody reads and what has no effect, on other processes neither."""
    compat.drop_dead_code(graph, lambda n: asserts(n) or communicates(n))


def has_writes(graph: Graph) -> bool:
    """Whether anything in the graph is written in place."""
    return any(writes(n) for n in graph.nodes)


def may_share(node: Node) -> bool:
    """Whether a result of the node may share memory with one of its inputs. Unknown kinds of nodes may."""
    return overload_may_share(node.target) if is_op(node) else node.op == "call_function"


def overload_may_share(target: Any) -> bool:
    """Whether a result of an operator may share memory with an input; of the opset, only views do. Of a collective everything
    does: it goes on reading its input until its result has been waited for, which is the same tensor then."""
    if compat.communicates(target.namespace, unknown=False):
        return True
    row = ops.find(target)
    return (row is None or row.kind is ops.Kind.VIEW) and compat.may_return_alias(target)


def exposed(graph: Graph) -> frozenset[Node]:
    """Nodes whose memory is seen from outside or changes: returned, written in place, or the source of such a view.

    A rewrite must not make one of these share memory with anything that it did not share memory with before.
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
    """Views through which the caller sees memory that it also sees another way: as an input or as another output.

    They must really be views of the same memory, so eager makes them.
    """
    chains = [list(_chain(n)) for n in dict.fromkeys(_returned(graph))]
    roots = [chain[-1] for chain in chains]
    found: set[Node] = set()
    for chain, root in zip(chains, roots, strict=True):
        if root.op != "call_function" or roots.count(root) > 1:
            found.update(n for n in chain if may_share(n) and is_op(n))
    return frozenset(found)


def _chain(node: Node) -> Iterator[Node]:
    """`node`, what it is a view of, and so on to the tensor that owns the memory."""
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
