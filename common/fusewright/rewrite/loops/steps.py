"""Reads nodes of a graph as steps of a recurrence: a pointwise expression of the state before it and of operands.

A step is written as text (`ops.semantics.steps`), so that steps are alike if their texts are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fusewright import ops
from fusewright.graph.spec import value_of
from fusewright.graph.view import is_op
from fusewright.ops.semantics.steps import FUNCTIONS, Expr, parsed, written
from fusewright.rewrite.engine import READER
from fusewright.rewrite.loops.unrolled import has

MOST_CALLS = 24
"""Calls of the longest step."""

NEAREST = 3
"""Earlier nodes that may be the state before a step."""

RESIDUAL = "add(h, x0)"
"""What networks without loops are full of."""


@dataclass(frozen=True, slots=True)
class Pointwise:
    """`node` is `form`, an expression, of the state `before` and of `operands`; `inner` are its calls but `node`."""

    node: Node
    before: Any
    operands: tuple[Any, ...]
    inner: tuple[Node, ...]
    form: str


@dataclass
class Steps:
    """Reads the nodes of one graph, each once."""

    kinds: list[torch.Tensor] = field(default_factory=list)
    """A state of each type, shape and device."""
    kind_of: dict[Node, tuple[int, bool] | None] = field(default_factory=dict)
    """Which of them a call is like, and whether it compares such; None if a step cannot have the call."""

    calls: dict[Node, Expr | None] = field(default_factory=dict)
    """Calls as expressions."""

    def after_others(self, node: Node) -> Iterator[Pointwise]:
        """The ways to read a node as a step that follows an earlier one."""
        found = self._reached(node)
        befores = [n for n in found if n is not node and n.target is node.target]
        for before in befores[:NEAREST]:
            step = _Reading(node, before, found, self.calls).step()
            if step is not None and step.form != RESIDUAL:
                yield step

    def _reached(self, node: Node) -> dict[Node, None]:
        """The node and what it is computed from by calls that steps may have, the nearest first."""
        kind = self.kind(node)
        if kind is None or kind[1]:
            return {}
        found, todo = {node: None}, [node]
        for n in todo:
            for source in n.all_input_nodes:
                if source not in found and len(found) <= MOST_CALLS and (k := self.kind(source)) is not None and k[0] == kind[0]:
                    found[source] = None
                    todo.append(source)
        return found

    def kind(self, node: Node) -> tuple[int, bool] | None:
        if node not in self.kind_of:
            self.kind_of[node] = self._kind(node)
        return self.kind_of[node]

    def _kind(self, node: Node) -> tuple[int, bool] | None:
        v = value_of(node) if is_op(node) else None
        if not isinstance(v, torch.Tensor) or v.layout is not torch.strided:
            return None
        self.calls[node] = call = _call(node)
        if call is None:
            return None
        truth = is_truth(v)
        like = value_of(next((n for n in node.all_input_nodes if not is_truth(value_of(n))), node)) if truth else v
        if not isinstance(like, torch.Tensor) or not like.is_floating_point():
            return None
        for k, x in enumerate(self.kinds):
            if x.dtype == like.dtype and x.device == v.device and has(x, x, v.shape):
                return k, truth
        if truth:
            return None
        self.kinds.append(v)
        return len(self.kinds) - 1, truth


def as_step(node: Any, form: str, count: int) -> Pointwise | None:
    """A node as a step of a form with `count` operands, whatever the state before it is."""
    bound: dict[str, Any] = {}
    inner: list[Node] = []
    if not isinstance(node, Node) or not _bind(parsed(form), node, bound, inner) or not isinstance(bound.get("h"), Node):
        return None
    operands = tuple(bound.get(f"x{k}") for k in range(count))
    own = tuple(n for n in dict.fromkeys(inner) if n is not node)
    return None if None in operands else Pointwise(node, bound["h"], operands, own, form)


def is_truth(v: Any) -> bool:
    return isinstance(v, torch.Tensor) and v.dtype is torch.bool


def _call(node: Node) -> Expr | None:
    """A call as an expression of nodes and numbers; None if a step cannot say it."""
    row = ops.find(node.target)
    if row is None:
        return None
    bound = row.bind(node.args, node.kwargs)
    if row.name == "cast":  # truth as a number
        return ("where", node.args[0], 1.0, 0.0) if is_truth(value_of(node.args[0])) else None  # type: ignore[arg-type]
    if row.name == "clamp":
        low, high = bound["min"], bound["max"]
        return ("clamp", bound["self"], float("-inf") if low is None else low, float("inf") if high is None else high)
    if row.name not in FUNCTIONS or bound.pop("alpha", 1) != 1 or (row.name == "pow_scalar" and bound["exponent"] not in (2, 3)):
        return None
    return (row.name, *bound.values())


@dataclass
class _Reading:
    """Reads `node` as an expression of `before`; `within` are the nodes that its calls may be."""

    node: Node
    before: Node
    within: Mapping[Node, None]
    known_calls: Mapping[Node, Expr | None]
    operands: list[Any] = field(default_factory=list)
    inner: list[Node] = field(default_factory=list)
    known: dict[Node, bool] = field(default_factory=dict)
    calls: int = 0

    def step(self) -> Pointwise | None:
        expr = self.expr(self.node, root=True)
        if expr is None or not self.operands or not isinstance(self.operands[0], Node):
            return None
        inner = tuple(n for n in dict.fromkeys(self.inner) if n is not self.node)
        return Pointwise(self.node, self.before, tuple(self.operands), inner, written(expr))

    def follows(self, n: Any) -> bool:
        """Whether a node is computed from the state before the step."""
        if n is self.before:
            return True
        if not isinstance(n, Node) or n not in self.within:
            return False
        if n not in self.known:
            self.known[n] = any(map(self.follows, n.all_input_nodes))
        return self.known[n]

    def expr(self, n: Any, root: bool = False, truth: bool = False) -> Expr | None:
        if n is self.before:
            return None if truth else "h"
        if isinstance(n, int | float) and not truth:
            return n
        if not self.follows(n):
            return self.operand(n, truth)
        call = self.known_calls[n]
        self.calls += 1
        if not isinstance(call, tuple) or self.calls > MOST_CALLS or (is_truth(value_of(n)) != truth and not root):
            return None
        self.inner.append(n)
        found = [self.expr(x, truth=call[0] == "where" and k == 0) for k, x in enumerate(call[1:])]
        return None if None in found else (call[0], *found)

    def operand(self, n: Any, truth: bool) -> Expr | None:
        if not isinstance(n, Node) or not isinstance(value_of(n), torch.Tensor) or is_truth(value_of(n)) != truth:
            return None
        if n not in self.operands:
            self.operands.append(n)
        name = f"x{self.operands.index(n)}"
        return ("ne_scalar", name, 0) if truth else name


def _bind(expr: Expr, node: Any, bound: dict[str, Any], inner: list[Node]) -> bool:
    """Bind the names of an expression to nodes, and gather its calls; whether it has the node's form."""
    if isinstance(expr, str):
        return isinstance(node, Node) and bound.setdefault(expr, node) is node and not is_truth(value_of(node))
    if not isinstance(expr, tuple):
        return not isinstance(node, Node) and repr(node) == repr(expr)
    if expr[0] == "ne_scalar" and isinstance(node, Node) and is_truth(value_of(node)) and READER.name(node) != "ne_scalar":
        return bound.setdefault(expr[1], node) is node
    call = _call(node) if isinstance(node, Node) and is_op(node) else None
    if not isinstance(call, tuple) or call[0] != expr[0] or len(call) != len(expr):
        return False
    inner.append(node)
    return all(_bind(e, n, bound, inner) for e, n in zip(expr[1:], call[1:], strict=True))

