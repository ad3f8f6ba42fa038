"""The specification of graphs, as rules: definitions before uses, metadata that agrees with the opset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.forms.spec import FormError, Identities, Rule, Spec
from fusewright.graph.spec import value_of
from fusewright.graph.view import is_op, is_projection

UNTRUSTED = "fusewright_untrusted"
"""Key in `node.meta` of an op whose trace disagrees with the table, or that eager refuses: eager runs it and nothing checks it.
The value says why."""

RIGHT = "fusewright_right"
"""Key in `node.meta` of an op that obeyed its rules: the inputs and results checked. Passes leave most ops unchanged."""


class VerifyError(FormError, AssertionError):
    """A pass produced a graph that violates the specification: a bug of Fusewright."""


@dataclass(frozen=True)
class TypedNode:
    """An op node and the results that its row predicts; `wrong` says why the row predicts nothing."""

    node: Node
    row: ops.Op
    dtypes: Sequence[torch.dtype | None] = ()
    shapes: Sequence[Any] = ()
    wrong: str = ""

    @cached_property
    def results(self) -> list[tuple[int, torch.Tensor]]:
        found = enumerate(_flat(self.node.meta["val"])) if "val" in self.node.meta else ()
        return [(k, r) for k, r in found if isinstance(r, torch.Tensor)]


def typed_node(node: Node) -> TypedNode | None:
    """None for nodes outside the opset."""
    row = ops.find(node.target)
    if row is None:
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    try:
        return TypedNode(node, row, *row.types(args, kwargs))
    except TypeError as e:
        return TypedNode(node, row, wrong=str(e))


class Facts:
    """A graph as seen by its rules."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = list(graph.nodes)

    @cached_property
    def wrong(self) -> list[TypedNode]:
        """Ops that violate one of `OP_RULES`."""
        trusted = (n for n in self.nodes if is_op(n) and UNTRUSTED not in n.meta)
        return [d for n in trusted if (d := _wrong(n)) is not None]


def _frame(f: Facts) -> Iterator[str]:
    if not f.nodes or f.nodes[-1].op != "output":
        yield "the last node is no output"
    for k, n in enumerate(f.nodes):
        if n.op == "output" and k < len(f.nodes) - 1:
            yield f"{n.name} is an output before the end"
        if n.op not in ("placeholder", "get_attr", "call_function", "output"):
            yield f"{n.name} is a {n.op}"


def _order(f: Facts) -> Iterator[str]:
    seen: set[Node] = set()
    for node in f.nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                yield f"{node.name} uses {used.name} before it is defined"
        seen.add(node)


def _users(f: Facts) -> Iterator[str]:
    for node in f.nodes:
        for used in node.all_input_nodes:
            if node not in used.users:
                yield f"{node.name} is no user of {used.name}, which it reads"
        for user in node.users:
            if node not in user.all_input_nodes:
                yield f"{node.name} has the user {user.name}, which does not read it"


def _projections(f: Facts) -> Iterator[str]:
    for node in filter(is_projection, f.nodes):
        source, k = node.args[0], node.args[1]
        val = value_of(source) if isinstance(source, Node) else None
        if isinstance(val, tuple | list) and isinstance(k, int) and not -len(val) <= k < len(val):
            yield f"{node.name} takes result {k} of {len(val)}"


def _metadata(ops: Sequence[TypedNode]) -> Iterator[str]:
    for d in ops:
        if "val" not in d.node.meta:
            yield f"{d.node.name}: {d.row.name} has no metadata"


def _arguments(ops: Sequence[TypedNode]) -> Iterator[str]:
    for d in ops:
        if d.wrong:
            yield f"{d.node.name}: {d.row.name}: {d.wrong}"


def _dtypes(ops: Sequence[TypedNode]) -> Iterator[str]:
    for d in ops:
        for k, r in d.results:
            dtype = d.dtypes[k] if k < len(d.dtypes) else None
            if dtype is not None and r.dtype != dtype and k not in d.row.fake_differs:
                yield f"{d.node.name}: {d.row.name} result {k} is {r.dtype}; the table says {dtype}"


def _shapes(ops: Sequence[TypedNode]) -> Iterator[str]:
    for d in ops:
        for k, r in d.results:
            shape = d.shapes[k] if k < len(d.shapes) else None
            if shape is not None and not _could_be(r.shape, shape):
                yield f"{d.node.name}: {d.row.name} result {k} has shape {tuple(r.shape)}; the table says {tuple(shape)}"


OP_RULES: tuple[Rule[Sequence[TypedNode]], ...] = (
    Rule("metadata", "torch traced what an op of the table gives", _metadata),
    Rule("arguments", "an op of the table has the arguments of its row", _arguments),
    Rule("dtypes", "results have the dtypes that the table says", _dtypes),
    Rule("shapes", "results have the shapes that the table says", _shapes),
)
"""The rules for each op."""


def _of_ops(rule: Rule[Sequence[TypedNode]]) -> Rule[Facts]:
    return Rule(rule.id, rule.says, lambda f: rule.check(f.wrong))


RULES: tuple[Rule[Facts], ...] = (
    Rule("frame", "a graph has inputs, attributes and calls, and one output at its end", _frame),
    Rule("order", "each node is defined before it is used", _order),
    Rule("users", "the users of a node are those that read it", _users),
    Rule("projections", "what is taken of several results is there", _projections),
    *map(_of_ops, OP_RULES),
)


def _content(graph: Graph) -> Identities:
    meta = [x for n in graph.nodes for x in (n.meta.get("val"), n.meta.get(UNTRUSTED))]
    return Identities([x for n in graph.nodes for x in (n, n.target, n.args, n.kwargs, len(n.users))] + meta)


GRAPH: Spec[Graph] = Spec("graph", VerifyError, RULES, Facts, _content)


def check(graph: Graph, after: str) -> None:
    """Raise `VerifyError` with every problem found after a pass."""
    GRAPH.check(graph, after)


def find_problems(graph: Graph) -> Iterator[str]:
    """One line per violation."""
    return (v.text for v in GRAPH.violations(graph))


def _wrong(node: Node) -> TypedNode | None:
    """None for an op that obeys its rules, or that is outside the opset."""
    known = (node.target, node.args, node.kwargs, value_of(node), *map(value_of, node.all_input_nodes))
    if node.meta.get(RIGHT) == (now := Identities(known)):
        return None
    found = typed_node(node)
    if found is not None and any(_op_problems(found)):
        return found
    node.meta[RIGHT] = now
    return None


def _op_problems(found: TypedNode) -> Iterator[str]:
    return (text for rule in OP_RULES for text in rule.check([found]))


def op_problems(node: Node) -> Iterator[str]:
    """One line per disagreement between an op's metadata and the table."""
    return iter(()) if (found := _wrong(node)) is None else _op_problems(found)


def _flat(val: Any) -> Iterator[Any]:
    if isinstance(val, tuple | list):
        for v in val:
            yield from _flat(v)
    else:
        yield val


def _could_be(actual: Any, expected: Any) -> bool:
    """Whether two shapes may be equal. Symbolic sizes that only a guard could compare count as equal."""
    if len(actual) != len(expected):
        return False
    return not any(compat.statically_true(a != b) for a, b in zip(actual, expected, strict=True))
