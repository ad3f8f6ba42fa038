"""The rewrite engine: rules as data, each with an id, a hit counter and a switch; fuel for bisecting.

A rule is a pattern over opset rows and a function that builds the replacement, or returns None to reject the match. The rules
of `rules` are exact: the rewritten graph gives the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph.effects import drop_dead_code, exposed, first_write
from fusewright.graph.spec import value_of
from fusewright.interface import RuleLog
from fusewright.toolkit.region.pattern import ANY, Env, P, matches, p

__all__ = ["ANY", "READER", "Env", "P", "Rewriter", "Rule", "is_call", "match", "p"]


def match(pattern: P, node: Any, env: dict[str, Any]) -> bool:
    """Whether `node` matches; captures are stored in `env`."""
    found = next(matches(pattern, _call(node), env, READER), None)
    env.update(found or {})
    return found is not None


def _call(node: Any) -> Node | None:
    return node if isinstance(node, Node) and node.op == "call_function" else None


class _Nodes:
    """Reads the nodes of a traced graph for patterns."""

    def name(self, op: Node) -> str:
        row = ops.find(op.target)
        return row.name if row is not None else str(op.target)

    def args(self, op: Node) -> Sequence[Any]:
        return op.args

    def producer(self, arg: Any) -> Node | None:
        return _call(arg)

    def same(self, a: Any, b: Any) -> bool:
        return a is b

    def alone(self, arg: Any) -> bool:
        return isinstance(arg, Node) and len(arg.users) == 1


READER = _Nodes()


def is_call(x: Any, *names: str) -> TypeGuard[Node]:
    """Whether `x` calls one of these rows. An input may be called like a row."""
    return isinstance(x, Node) and x.op == "call_function" and READER.name(x) in names


@dataclass(frozen=True)
class Rule:
    """`doc` states the rule's algebra. `build(rewriter, node, env)` returns the replacement of the matched node. It changes no
    other node before its last `rewriter.call`, which may raise `SizesAssumed`."""

    id: str
    pattern: P
    build: Callable[[Rewriter, Node, Env], Node | None]
    doc: str


@dataclass
class Rewriter:
    """Applies rules to one graph until nothing matches, as far as the log allows."""

    graph: Graph
    log: RuleLog = field(default_factory=RuleLog)

    def __post_init__(self) -> None:
        (output,) = self.graph.find_nodes(op="output")
        self.returned = frozenset(output.all_input_nodes)
        self.exposed = exposed(self.graph)
        self.first_write = first_write(self.graph)  # asked once: no rule adds a write, and each copy asks
        self.has_writes = self.first_write is not None

    def changes_before(self, node: Node) -> bool:
        """Whether something is written before a node, so that what earlier nodes read might not be what it would read."""
        return self.first_write is not None and self.first_write < node

    def call(
        self, name: str, args: tuple[Any, ...], like: Node | None = None, kwargs: dict[str, Any] | None = None
    ) -> Node:
        """Make a node before the current insertion point. `like` supplies the metadata if it is known to be the same."""
        row = ops.OPS[name]
        node = self.graph.call_function(row.target, args, kwargs or {})
        source = like or next(iter(node.all_input_nodes), None)
        if source is not None:
            node.meta.update({k: v for k, v in source.meta.items() if k in ("stack_trace", "nn_module_stack", "origin")})
        node.meta["val"] = value_of(like) if like is not None else self._infer(node)
        return node

    def _infer(self, node: Node) -> Any:
        vals = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
        sources = chain(node.all_input_nodes, self.graph.nodes)  # a node may have no tensors as inputs
        fake = next(val for n in sources if isinstance(val := value_of(n), torch.Tensor))
        with compat.fake_mode_of(fake), compat.assuming_nothing(fake):
            return node.target(*vals[0], **vals[1])  # type: ignore[operator]

    def run(self, rules: Sequence[Rule]) -> Counter[str]:
        """Make one pass over the graph in order, repeating on each replacement; return hits by rule id."""
        by_root: dict[str, list[Rule]] = {}
        for rule in rules:
            if rule.id not in self.log.disabled:
                for name in rule.pattern.names():
                    by_root.setdefault(name, []).append(rule)
        for node in list(self.graph.nodes):
            while node is not None and node.op == "call_function" and (node.users or node in self.returned):
                node = self._apply_one(node, by_root)
        drop_dead_code(self.graph)
        return self.log.hits

    def _apply_one(self, node: Node, by_root: dict[str, list[Rule]]) -> Any:
        for rule in by_root.get(READER.name(node), ()):
            if not self.log.allows(rule.id):
                return None
            env: dict[str, Any] = {}
            if not match(rule.pattern, node, env):
                continue
            if (new := self.substitute(rule.id, node, rule.build, self, node, env)) is not None:
                return new
        return None

    def substitute(self, id: str, node: Node, build: Callable[..., Node | None], *args: Any) -> Node | None:
        """Build a replacement of a node, count it under a rule's id, and put it in the node's place; None if there is none."""
        new = self.attempt(node, build, *args)
        if new is None or new is node:
            return None
        self.log.hit(id)
        self.replace(node, new)
        self.graph.erase_node(node)
        return new

    def attempt(self, before: Node, build: Callable[..., Node | None], *args: Any) -> Node | None:
        """Build a replacement in front of a node. None where there is none, or where it is right for some sizes only: what was
        made is then dead code."""
        try:
            with self.graph.inserting_before(before):
                return build(*args)
        except compat.SizesAssumed:
            return None

    def replace(self, node: Node, new: Node) -> None:
        """Let all readers of `node` read `new`."""
        node.replace_all_uses_with(new)
        if node in self.returned:
            self.returned = self.returned - {node} | {new}
        if node in self.exposed:
            self.exposed = self.exposed - {node} | {new}
