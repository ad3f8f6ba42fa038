"""Chains of steps that become one scan: how their operands are joined, and how what reads a state reads a piece of all of them.

`recurrence` says which steps there are.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch.fx import Node

from fusewright.graph.spec import SizeArgument, arguments, order_in_memory, value_of
from fusewright.graph.view import is_op
from fusewright.ops.semantics.recurrence import carried
from fusewright.rewrite.engine import READER, Rewriter
from fusewright.rewrite.loops.unrolled import Loop, alike, has

CHAIN = "chain"
"""The key in a scan's metadata for the name of the last node that it replaces."""

Found: TypeAlias = "tuple[tuple[Node, ...], Node | None]"
"""The operands of a scan, with the steps as their first dimension, and the state before the first step."""


class Step(Protocol):
    """`node` is computed from the state `before` and from operands; `inner` are the calls on the way."""

    @property
    def node(self) -> Node: ...
    @property
    def before(self) -> Any: ...
    @property
    def inner(self) -> tuple[Node, ...]: ...


def own(chain: Sequence[Step]) -> set[Node]:
    """The calls of all steps."""
    return {n for s in chain for n in (s.node, *s.inner)}


@dataclass
class Operands(Loop):
    """What the steps read, as values with the steps as their first dimension. Nothing is stacked: what a step computes might depend
    on the state before it."""

    states: frozenset[Node] = frozenset()

    def _computed(self, steps: tuple[Node, ...], readers: frozenset[Node], depth: int) -> Node | None:
        return None if self.states.intersection(steps) else super()._computed(steps, readers, depth)

    def _joined(self, steps: tuple[Node, ...]) -> Node | None:
        return None


@dataclass
class Scanned(abc.ABC):
    """A chain, and how it is replaced."""

    r: Rewriter
    chain: list[Any]
    place: dict[Node, int]
    """Where nodes stood in the graph at first."""
    inside: frozenset[Node]
    """Nodes that only steps of chains read."""
    last: Node = field(init=False)
    like: torch.Tensor = field(init=False)
    shown: list[Node] = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.chain[-1].node
        self.like = value_of(self.last)
        self.shown = [s.node for s in self.chain if s.node in self.r.exposed]

    @abc.abstractmethod
    def operands(self) -> Iterator[Found]:
        """What the scan might be called with."""

    @abc.abstractmethod
    def scan(self, operands: tuple[Node, ...], before: Node | None, dim: int) -> Node:
        """Call the scan."""

    def replaced(self) -> bool:
        """Replace the steps by pieces of a scan; whether that was possible."""
        first = self.chain[0].node
        start, done = first.prev, False
        try:
            done = self._replaced(start, first)
        finally:
            if not done:
                self._drop(start, first)
        if not done:
            return False
        self._hoist(start, first)
        for node in sorted(own(self.chain), key=self.place.__getitem__, reverse=True):
            if not node.users:
                self.r.graph.erase_node(node)
        return True

    def _replaced(self, start: Node, first: Node) -> bool:
        with self.r.graph.inserting_before(first):
            found = next(self.operands(), None) if self._worth_it() else None
            return found is not None and self._known(start, first) and (self._stacked(*found) or self._in_pieces(*found))

    def _drop(self, start: Node, first: Node) -> None:
        """Erase what was made in vain: it may read what is computed after the first step."""
        for made in reversed([*self._made(start, first)]):
            if not made.users:
                self.r.graph.erase_node(made)

    @staticmethod
    def _made(start: Node, first: Node) -> Iterator[Node]:
        """The nodes that were made between two."""
        node = start.next
        while node is not first:
            node, this = node.next, node
            yield this

    def _known(self, start: Node, first: Node) -> bool:
        """Whether what was made before the first step reads nothing that is computed after it."""
        return all(n < first for made in self._made(start, first) for n in made.all_input_nodes)

    def _hoist(self, start: Node, first: Node) -> None:
        """Move what was made to where all that it reads is known: other chains may read states before the first step of this."""
        begin, inputs = next(iter(self.r.graph.nodes)), self.r.graph.find_nodes(op="placeholder")  # there may be no inputs
        for made in self._made(start, first):
            if known := made.all_input_nodes or inputs[-1:]:
                max(known).append(made)
            elif made is not begin:
                begin.prepend(made)

    def _in_pieces(self, operands: tuple[Node, ...], before: Node | None) -> bool:
        """Let the readers of each state read a piece of the scan."""
        states = self._ordered(operands, before)
        ahead = value_of(states).shape[0] - len(self.chain)
        piece = self._piece(states, ahead)
        pieces = [self._piece(states, k + ahead, piece) for k in range(len(self.chain))]
        if not all(alike(value_of(new), value_of(s.node)) for new, s in zip(pieces, self.chain, strict=True)):
            return False
        if ahead:
            self._replace_first(states)
        for new, step in zip(pieces, self.chain, strict=True):
            self._replace(step.node, new)
        return True

    def _stacked(self, operands: tuple[Node, ...], before: Node | None) -> bool:
        """Let a stack of all states, if nobody else but the caller reads one, be the scan itself; whether it is."""
        calls = own(self.chain)
        stack = next(iter(self.chain[0].node.users.keys() - calls), None)
        if stack is None or not is_op(stack) or READER.name(stack) != "stack":
            return False
        args: Any = stack.args
        nodes, (given, dim) = [s.node for s in self.chain], (*args, 0)[:2]
        begun = [self.chain[0].before] if before is None else []
        others = {u for n in nodes for u in n.users} - calls - {stack}
        if list(given) != [*begun, *nodes] or any(u.op != "output" for u in others) or others - self.last.users.keys():
            return False
        dim %= self.like.dim() + 1
        order, call = [*range(1, dim + 1), 0, *range(dim + 1, self.like.dim() + 1)], self.r.call
        states = self._marked(self.scan(tuple(call("permute", (x, order)) for x in operands), before, dim))
        if not alike(value_of(states), value_of(stack)):
            return False
        if others:
            piece = call("select", (states, dim, -1))
            if not alike(value_of(self._copy(piece)), value_of(self.last)):  # eager's operands lie otherwise in memory
                return False
            self._replace(self.last, piece)
        self.r.replace(stack, states)
        return True

    def _copy(self, piece: Node) -> Node:
        return self.r.call("clone", (piece,), kwargs={"memory_format": torch.preserve_format})

    def _replace(self, node: Node, piece: Node) -> None:
        """Let the readers of a state read a piece of all states, or a copy of it if they show its memory to others."""
        if node in self.shown:
            copy = self._copy(piece)
            for user in [u for u in node.users if u.op == "output" or u in self.r.exposed]:
                user.replace_input_with(node, copy)
            self.r.exposed = self.r.exposed - {node} | {copy}
            self.r.returned = frozenset(copy if n is node else n for n in self.r.returned)
            node.replace_all_uses_with(piece)
        else:
            self.r.replace(node, piece)

    def _replace_first(self, states: Node) -> None:
        """Let later readers of the state before the first step, which is the first summand, read it beside the others."""
        before, first = self.chain[0].before, self.place[self.chain[0].node]
        later = [u for u in before.users if self.place.get(u, 0) > first]
        if later and before not in self.r.exposed:
            with self.r.graph.inserting_before(self.chain[0].node):
                new = self._piece(states, 0)
            if alike(value_of(new), value_of(before)):
                for user in later:
                    user.replace_input_with(before, new)

    def _worth_it(self) -> bool:
        """Whether few states are results, each of which is copied. Training saves all, and would be slower."""
        return sum(n in self.r.exposed for n in own(self.chain)) <= 1 + len(self.chain) // 4

    def _column(self, loop: Operands, column: tuple[Any, ...]) -> Node | None:
        """One operand of all steps, [steps or 1, ...], of as many dims as a state and one more."""
        if (same := self._same(column)) is not None:
            return same
        if not all(isinstance(n, Node) for n in column):
            return None
        found = loop.roll(column, self.inside)
        return None if found is None else self._aligned(found)

    def _loop(self, more: int = 0) -> Operands:
        """The operands of all steps, and of `more` before them."""
        states = frozenset(s.node for s in self.chain)
        return Operands(self.r, len(self.chain) + more, inside=self.inside, states=states)

    def _same(self, column: tuple[Any, ...]) -> Node | None:
        """One operand that all steps share, [1, ...]; None if they differ."""
        first = column[0]
        if any(type(x) is not type(first) or repr(x) != repr(first) for x in column):
            return None
        if not isinstance(first, Node):
            kind = {"dtype": carried(self.like.dtype), "device": self.like.device, "pin_memory": False}
            return self.r.call("full", ([1] * (self.like.dim() + 1), float(first)), kwargs=kind)
        return self._aligned(self.r.call("unsqueeze", (first, 0)))

    def _aligned(self, operand: Node) -> Node:
        """Insert dims behind the first, so that the operand broadcasts to all states."""
        while value_of(operand).dim() <= self.like.dim():
            operand = self.r.call("unsqueeze", (operand, 1))
        return operand

    def _shape(self) -> list[SizeArgument]:
        return arguments(self.r.graph, self.like.shape)

    def _order(self) -> list[int]:
        """The dims of a state, the outermost in memory first."""
        return order_in_memory(self.like)

    def _ordered(self, operands: tuple[Node, ...], before: Node | None) -> Node:
        """The scan, laid out as states are."""
        order, call = self._order(), self.r.call
        if order != sorted(order):
            operands = tuple(call("permute", (x, [0, *(d + 1 for d in order)])) for x in operands)
            if before is not None:
                before = call("permute", (call("expand", (before, self._shape())), order))
        return self._marked(self.scan(operands, before, 0))

    def _marked(self, states: Node) -> Node:
        states.meta[CHAIN] = self.last.name
        return states

    def _piece(self, states: Node, at: int, like: Node | None = None) -> Node:
        order = self._order()
        if order == sorted(order):
            return self.r.call("select", (states, 0, at), like)
        piece = self.r.call("select", (states, 0, at))
        return self.r.call("permute", (piece, [order.index(d) for d in range(len(order))]), like)


def is_like(v: Any, x: torch.Tensor) -> bool:
    return isinstance(v, torch.Tensor) and has(v, x, tuple(x.shape))


def converts(v: Any, x: torch.Tensor) -> bool:
    """Whether an operand is on the same device, and exact in the type of `x`."""
    if not isinstance(v, torch.Tensor) or v.device != x.device or v.dim() > x.dim():
        return False
    return v.dtype == x.dtype or (v.is_floating_point() and v.dim() > 0)
