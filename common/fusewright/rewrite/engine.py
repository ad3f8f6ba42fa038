"""The rewrite engine: rules as data, each with an id, a hit counter and a switch; fuel for bisecting.

A rule is a pattern over opset rows and a function that builds the replacement, or returns None for "no match after
all". Every rule must be exact: the rewritten graph gives the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph.effects import drop_dead_code, exposed
from fusewright.graph.spec import value_of


class _Any:
    def __repr__(self) -> str:
        return "ANY"


ANY = _Any()
"""Matches every argument."""

Env: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class P:
    """A pattern: the row names that may stand here ("aten.name.overload" for an op in no row), and patterns for the leading
    arguments.

    An argument pattern is a nested `P`, a `str` that captures (the same name twice must match the same thing),
    `ANY`, or a literal that must be equal. Missing trailing patterns match everything.
    """

    op: str | tuple[str, ...]
    args: tuple[Any, ...] = ()
    capture: str = ""

    def names(self) -> tuple[str, ...]:
        return (self.op,) if isinstance(self.op, str) else self.op


def p(op: str | tuple[str, ...], *args: Any, capture: str = "") -> P:
    """Shorthand: `p("mm", "x", p("t", "w"))`."""
    return P(op, args, capture)


def match(pattern: P, node: Any, env: Env) -> bool:
    """Whether `node` matches; captures are written to `env` (which holds rubbish after a failure)."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    if _name(node) not in pattern.names() or len(pattern.args) > len(node.args):
        return False
    if pattern.capture:
        env[pattern.capture] = node
    return all(_match_arg(a, b, env) for a, b in zip(pattern.args, node.args, strict=False))


def _name(node: Node) -> str:
    """What patterns call the op of a node."""
    row = ops.find(node.target)
    return row.name if row is not None else str(node.target)


def _match_arg(pattern: Any, arg: Any, env: Env) -> bool:
    if pattern is ANY:
        return True
    if isinstance(pattern, P):
        return match(pattern, arg, env)
    if isinstance(pattern, str):
        if pattern in env:
            return env[pattern] is arg
        env[pattern] = arg
        return True
    return not isinstance(arg, Node) and type(arg) is type(pattern) and arg == pattern


@dataclass(frozen=True)
class Rule:
    """`doc` states the rule's algebra. `build(rewriter, node, env)` gives the replacement of the matched node."""

    id: str
    pattern: P
    build: Callable[[Rewriter, Node, Env], Node | None]
    doc: str


@dataclass
class Rewriter:
    """Applies rules to one graph until nothing matches. `fuel` limits the number of rewrites (None: no limit)."""

    graph: Graph
    disabled: Collection[str] = ()
    fuel: int | None = None
    hits: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        (output,) = self.graph.find_nodes(op="output")
        self.returned = frozenset(output.all_input_nodes)
        self.exposed = exposed(self.graph)

    def call(
        self, name: str, args: tuple[Any, ...], like: Node | None = None, kwargs: dict[str, Any] | None = None
    ) -> Node:
        """A new node before the current insertion point. `like` gives the metadata when it is known to be the same."""
        row = ops.OPS[name]
        node = self.graph.call_function(row.target, args, kwargs or {})
        source = like or next(iter(node.all_input_nodes), None)
        if source is not None:
            node.meta.update({k: v for k, v in source.meta.items() if k in ("stack_trace", "origin")})
        node.meta["val"] = value_of(like) if like is not None else self._infer(node)
        return node

    def _infer(self, node: Node) -> Any:
        vals = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
        tensors = [value_of(n) for n in node.all_input_nodes if isinstance(value_of(n), torch.Tensor)]
        with compat.fake_mode_of(tensors[0]):
            return node.target(*vals[0], **vals[1])  # type: ignore[operator]

    def run(self, rules: Sequence[Rule]) -> Counter[str]:
        """One pass over the graph in order, repeating on each replacement; returns hits by rule id."""
        by_root: dict[str, list[Rule]] = {}
        for rule in rules:
            if rule.id not in self.disabled:
                for name in rule.pattern.names():
                    by_root.setdefault(name, []).append(rule)
        for node in list(self.graph.nodes):
            while node is not None and node.op == "call_function" and (node.users or node in self.returned):
                node = self._apply_one(node, by_root)
        drop_dead_code(self.graph)
        return self.hits

    def _apply_one(self, node: Node, by_root: dict[str, list[Rule]]) -> Any:
        for rule in by_root.get(_name(node), ()):
            if self.fuel is not None and sum(self.hits.values()) >= self.fuel:
                return None
            env: Env = {}
            if not match(rule.pattern, node, env):
                continue
            with self.graph.inserting_before(node):
                new = rule.build(self, node, env)
            if new is None or new is node:
                continue
            self.hits[rule.id] += 1
            node.replace_all_uses_with(new)
            if node in self.returned:
                self.returned = self.returned - {node} | {new}
            if node in self.exposed:
                self.exposed = self.exposed - {node} | {new}
            self.graph.erase_node(node)
            return new
        return None
