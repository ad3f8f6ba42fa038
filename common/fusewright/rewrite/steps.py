"""Reads nodes of a graph as steps of a recurrence: a pointwise expression of the state before it and of operands.

A step is written as text (`ops.semantics.steps`), so that steps are alike if their texts are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fusewright import ops
from fusewright.graph.spec import value_of
from fusewright.graph.view import is_op
from fusewright.ops.semantics.steps import FUNCTIONS, Expr, parsed, written
from fusewright.rewrite.engine import READER
from fusewright.rewrite.unrolled import has

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


def pointwise_steps(node: Node) -> Iterator[Pointwise]:
    """The ways to read a node as a step that follows an earlier one."""
    if not callable_by_step(node, value_of(node)) or is_truth(value_of(node)):
        return
    found = _reached(node)
    befores = [n for n in found if n is not node and n.target is node.target and not is_truth(value_of(n))]
    for before in befores[:NEAREST]:
        step = _Reading(node, before, set(found)).step()
        if step is not None and step.form != RESIDUAL:
            yield step


def as_step(node: Any, form: str, count: int) -> Pointwise | None:
    """A node as a step of a form with `count` operands, whatever the state before it is."""
    bound: dict[str, Any] = {}
    inner: list[Node] = []
    if not isinstance(node, Node) or not _bind(parsed(form), node, bound, inner) or not isinstance(bound.get("h"), Node):
        return None
    operands = tuple(bound.get(f"x{k}") for k in range(count))
    own = tuple(n for n in dict.fromkeys(inner) if n is not node)
    return None if None in operands else Pointwise(node, bound["h"], operands, own, form)


def callable_by_step(node: Any, like: Any) -> bool:
    """Whether a step may call a node: the row has a function, and the result is like the state or compares such."""
    if not isinstance(node, Node) or not is_op(node) or not isinstance(like, torch.Tensor):
        return False
    v = value_of(node)
    if not isinstance(v, torch.Tensor) or not has(v, v, like.shape) or v.device != like.device or v.layout is not torch.strided:
        return False
    return ((v.dtype == like.dtype and v.is_floating_point()) or is_truth(v)) and _call(node) is not None


def is_truth(v: Any) -> bool:
    return isinstance(v, torch.Tensor) and v.dtype is torch.bool


def _reached(node: Node) -> list[Node]:
    """The node and what it is computed from by calls that steps may have, the nearest first."""
    found, like = [node], value_of(node)
    for n in found:
        for source in n.all_input_nodes:
            if source not in found and callable_by_step(source, like) and len(found) <= MOST_CALLS:
                found.append(source)
    return found


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
    within: set[Node]
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
        call = _call(n)
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

