"""Read-only views of the graph for backends: nodes become `OpView`s, their results `Value`s with stable ids."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph import spec
from fusewright.interface import Dim, GraphView, OpView, Phase, TensorSpec, Value

_LOCAL = re.compile(r"^L\['\w+'\]\.?")
"""Dynamo's spelling of the local variable that holds the model."""


def is_op(node: Node) -> bool:
    """Whether the node computes tensors by a torch operator, so that backends may claim it."""
    return node.op == "call_function" and compat.is_overload(node.target)


def is_projection(node: Node) -> bool:
    """Whether the node is a getitem that selects one result of a multi-output op."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[0], Node)
        and isinstance(spec.value_of(node.args[0]), tuple | list)
    )


def dependents(nodes: Iterable[Node]) -> set[Node]:
    """These nodes and all nodes that depend on them."""
    found: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.users)
    return found


class GraphIndex:
    """Ids for every value of one graph, and the views made from them. Built once per graph, which must not change afterwards."""

    def __init__(
        self, graph: Graph, const: frozenset[Node], phase: Phase, creations: frozenset[Node] = frozenset()
    ) -> None:
        """`const` and `creations` are the `values` and `creations` of `graph.constants`."""
        self.graph = graph
        self.phase: Phase = phase
        self.const = const
        self._creations = creations
        self._values: dict[Node, tuple[Value, ...]] = {}
        self._by_id: dict[int, Node] = {}
        self._next = 0
        self.temporaries: dict[int, TensorSpec] = {}
        for node in graph.nodes:
            if node.op != "output":
                self._values[node] = self._number(node)

    def _number(self, node: Node) -> tuple[Value, ...]:
        if is_projection(node):
            source, index = node.args
            return (self._values[source][index],)  # type: ignore[index]
        val = spec.value_of(node)
        vals = tuple(val) if isinstance(val, tuple | list) else (val,)
        return tuple(self._fresh(v, node) for v in vals)

    def _fresh(self, val: Any, node: Node) -> Value:
        self._next += 1
        self._by_id[self._next] = node
        if isinstance(val, torch.Tensor):
            return Value(self._next, spec.tensor_spec(val, node in self.const))
        if isinstance(val, torch.SymInt):
            s = spec.size(val)
            return Value(self._next, None, s if isinstance(s, Dim) else None)
        return Value(self._next, None)

    def new_id(self) -> int:
        self._next += 1
        return self._next

    def temporary(self, spec: TensorSpec | None) -> Value:
        """Return a fresh value that exists only inside a fragment."""
        value = Value(self.new_id(), spec)
        if spec is not None:
            self.temporaries[value.id] = spec
        return value

    def node_by_value(self, id: int) -> Node | None:
        """The node that makes a value; None for a fragment's temporary."""
        return self._by_id.get(id)

    def values(self, node: Node) -> tuple[Value, ...]:
        """The results of `node`: one, or one per output of a multi-output op."""
        return self._values[node]

    def id(self, node: Node) -> int:
        """The id of a single-result node."""
        return self._values[node][0].id

    def op_id(self, node: Node) -> int:
        """The id of an op: that of its first result (ops without results get their own)."""
        values = self._values[node]
        return values[0].id if values else self._no_result[node]

    @cached_property
    def _no_result(self) -> dict[Node, int]:
        return {n: self.new_id() for n, values in self._values.items() if not values}

    def arg(self, a: Any) -> Any:
        """Convert an FX argument to the interface's form."""
        if isinstance(a, Node):
            return self._values[a][0]
        if isinstance(a, tuple | list):
            return tuple(self.arg(x) for x in a)
        return a

    @cached_property
    def constants(self) -> frozenset[int]:
        """Ids of values that need computing only once per set of weights."""
        nodes = self.const | self._creations if self.phase == "infer" else ()
        return frozenset(v.id for n in nodes for v in self._values[n])

    @cached_property
    def ops(self) -> dict[Node, OpView]:
        """The view of every op, in topological order."""
        return {n: self._view(n) for n in self.graph.nodes if is_op(n)}

    @cached_property
    def node_of(self) -> dict[int, Node]:
        """Op id -> node."""
        return {view.id: node for node, view in self.ops.items()}

    def _view(self, node: Node) -> OpView:
        target: Any = node.target
        row = ops.find(target)
        names, args = _all_arguments(target, node)
        return OpView(
            id=self.op_id(node),
            op=row.name if row else f"aten.{target.__name__}" if target.namespace == "aten" else str(target),
            target=qualified_name(target),
            argnames=names,
            args=tuple(self.arg(a) for a in args),
            outs=self.values(node),
            users=tuple(self.op_id(u) for u in real_users(node) if is_op(u)),
            source=source_line(node) or _named(module_path(node)),
        )

    @cached_property
    def symbolic(self) -> frozenset[int]:
        """Ids of tensors with a size or stride that is unknown before the call."""
        return frozenset(v.id for values in self._values.values() for v in values if v.spec is not None and not v.spec.static)

    @cached_property
    def devices(self) -> frozenset[str]:
        """The devices of all tensors."""
        return frozenset(v.spec.device for values in self._values.values() for v in values if v.spec is not None)

    @cached_property
    def bound(self) -> frozenset[str]:
        """Symbols available to a plan: sizes and strides of inputs, data-dependent sizes of eager's results, and numbers among
        these."""
        tellers = (n for n in self.graph.nodes if not is_op(n) or compat.UNBACKED in n.meta)
        sizes = (s for n in tellers for v in self._values.get(n, ()) for s in (*(v.spec.shape if v.spec else ()), v.dim))
        inputs = (v.spec for n in self.graph.find_nodes(op="placeholder") for v in self._values[n])
        strides = (s for spec in inputs if spec is not None for s in spec.stride)
        found = {s.expr.name for s in (*sizes, *strides) if isinstance(s, Dim)}
        return frozenset(name for name in found if name is not None and name.isidentifier())

    @cached_property
    def numbers(self) -> Mapping[str, Value]:
        """The inputs that are numbers, by their symbols."""
        given = (v for n in self.graph.find_nodes(op="placeholder") for v in self._values[n])
        return {v.dim.expr.name: v for v in given if v.dim is not None and v.dim.expr.name is not None}

    def graph_view(self, nodes: Iterable[Node]) -> GraphView:
        """Return a view of the given op nodes (in order) as a whole graph."""
        inputs = tuple(v for n in self.graph.nodes if n.op == "placeholder" for v in self.values(n))
        return GraphView(tuple(self.ops[n] for n in nodes), inputs, tuple(self.output_values()), self.phase)

    def output_values(self) -> list[Value]:
        """The values that the graph returns, without None."""
        (output,) = self.graph.find_nodes(op="output")
        return [self._values[n][0] for n in output.all_input_nodes]


def real_users(node: Node) -> list[Node]:
    """Users of a node, seen through projections, in graph order and without repeats."""
    found: dict[Node, None] = {}
    for user in node.users:
        if is_projection(user):
            found.update(dict.fromkeys(user.users))
        else:
            found[user] = None
    return list(found)


def qualified_name(target: Any) -> str:
    """ "aten::add.Tensor" of an OpOverload."""
    name = target.name()
    return name if "." in name.split("::", 1)[1] else f"{name}.default"


def _all_arguments(target: Any, node: Node) -> tuple[tuple[str, ...], list[Any]]:
    names, args = [], []
    for i, formal in enumerate(target._schema.arguments):
        names.append(formal.name)
        if i < len(node.args):
            args.append(node.args[i])
        elif formal.name in node.kwargs:
            args.append(node.kwargs[formal.name])
        else:
            args.append(formal.default_value)
    return tuple(names), args


def source_line(node: Node) -> str:
    """The last line of user code that made this node, as "file.py:12", or ""."""
    return last_line(node.meta.get("stack_trace") or "")


def module_path(node: Node) -> str:
    """The path of the innermost module that this node came from, as "encoder.layer.3.attention"; "" if unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [str(entry[0]) for entry in stack.values() if isinstance(entry, tuple) and entry]
    return _LOCAL.sub("", names[-1]) if names else ""


def _named(path: str) -> str:
    """Where an op is if no user code line made it: a `torch.nn.Sequential` has none of its own."""
    return f"module {path}" if path else ""


def last_line(trace: str) -> str:
    """The last location in a stack trace, as "file.py:12", or ""."""
    end = len(trace)
    while (at := trace.rfind('File "', 0, end)) >= 0:
        if not trace[trace.rfind("\n", 0, at) + 1 : at].strip():  # else it belongs to a source line
            path, _, rest = trace[at + 6 :].partition("\n")[0].partition('"')
            number = rest.split("line ")[-1].split(",")[0].strip()
            return f"{path.rsplit('/', 1)[-1]}:{number}"
        end = at
    return ""
