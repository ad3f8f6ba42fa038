"""Linear recurrences, h[t] = a[t] * h[t - 1] + b[t] at each of many steps, become one scan.

Dynamo unrolls the loop of a state-space model into a product and a sum per step. Where a and b of all steps are consecutive pieces
of tensors, or can be computed at once (see `unrolled`), so can the states. The steps of the scan run in order and round as eager's
do; states of half types are carried in fp32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright.graph.effects import drop_dead_code, writes
from fusewright.graph.spec import SizeArgument, arguments, order_in_memory, same_size, value_of
from fusewright.graph.view import is_op
from fusewright.interface import RuleLog
from fusewright.ops.semantics.recurrence import carried
from fusewright.rewrite.engine import READER, Rewriter
from fusewright.rewrite.unrolled import LEAST_STEPS, Loop, alike, has

ID = "loop.recurrence"
"""The rule's id in reports, and for `disable_rules`."""


@dataclass(frozen=True, slots=True)
class Step:
    """`node` = `a` * `before` + `b`, where `product` is the first of the two operations (`node` itself if it is one)."""

    node: Node
    before: Any
    a: Any
    b: Any
    product: Node
    form: int
    """How the step is written, by a number."""


CHAIN = "chain"
"""The key in a scan's metadata for the name of the last node that it replaces."""


def recur(graph: Graph, log: RuleLog, kept: Collection[str] = ()) -> None:
    """Compute the states of linear recurrences at once, in place, in a canonical graph. Chains whose last node is named in `kept`
    stay."""
    chains = [] if ID in log.disabled else [c for c in _chains(graph) if c[-1].node.name not in kept]
    if not chains:
        return
    r, place = Rewriter(graph, log), {n: k for k, n in enumerate(graph.nodes)}
    changed = min((place[n] for n in graph.nodes if writes(n)), default=len(place))
    for chain in sorted(chains, key=lambda chain: place[chain[0].node]):
        # its pieces are read at the first step, which a write before the last one would make a difference to
        if not log.allows(ID) or changed < place[chain[-1].node]:
            continue
        try:
            done = _Recurrence(r, chain, place).replaced()
        except compat.SizesAssumed:
            continue
        if done:
            log.hit(ID)
    drop_dead_code(graph)


# ---- which nodes are steps ----


def _chains(graph: Graph) -> Iterator[list[Step]]:
    """The longest chains of at least `LEAST_STEPS` steps that are written alike and share none."""
    found: dict[tuple[Node, int], tuple[int, Step]] = {}
    for node in graph.nodes:
        for step in _steps(node):
            before = found.get((step.before, step.form), (0,))[0]
            found[node, step.form] = 1 + before, step
    used = set[Node]()
    for (node, form), (length, _) in sorted(found.items(), key=lambda item: -item[1][0]):
        if length < LEAST_STEPS:
            return
        chain: list[Step] = []
        while (node, form) in found and node not in used:
            chain.append(found[node, form][1])
            node = chain[-1].before
        if len(chain) >= LEAST_STEPS:
            used.update(s.node for s in chain)
            yield chain[::-1]


def _steps(node: Node) -> Iterator[Step]:
    """The ways to read a node as a step."""
    name = READER.name(node) if is_op(node) else ""
    if name == "add" and node.kwargs.get("alpha", 1) == 1:
        for k, (m, b) in enumerate((node.args[:2], node.args[1::-1])):
            if isinstance(m, Node) and is_op(m) and READER.name(m) == "mul":
                yield from (Step(node, h, a, b, m, 2 * k + place) for place, h, a in _either(m.args[:2]))
    elif name == "addcmul" and node.kwargs.get("value", 1) == 1:
        yield from (Step(node, h, a, node.args[0], node, 4 + place) for place, h, a in _either(node.args[1:3]))


def _either(pair: Sequence[Any]) -> Iterator[tuple[int, Node, Any]]:
    x, y = pair
    if isinstance(x, Node):
        yield 0, x, y
    if isinstance(y, Node) and y is not x:
        yield 1, y, x


# ---- the scan that replaces them ----


@dataclass
class _Operands(Loop):
    """What the steps read, as values with the steps as their first dimension. Nothing is stacked: what a step computes might depend
    on the state before it."""

    inside: frozenset[Node] = frozenset()
    """Nodes that only the steps read."""
    states: frozenset[Node] = frozenset()

    def _computed(self, steps: tuple[Node, ...], readers: frozenset[Node], depth: int) -> Node | None:
        return None if self.states.intersection(steps) else super()._computed(steps, self.inside, depth)

    def _joined(self, steps: tuple[Node, ...]) -> Node | None:
        return None


@dataclass
class _Recurrence:
    r: Rewriter
    chain: list[Step]
    place: dict[Node, int]
    """Where nodes stood in the graph at first."""
    inside: frozenset[Node] = field(init=False)

    def __post_init__(self) -> None:
        own = {n for s in self.chain for n in (s.node, s.product)}
        for k, old in enumerate(self.chain):  # rewrites of earlier chains may have changed what they read
            self.chain[k] = next(s for s in _steps(old.node) if s.form == old.form)
        self.last = self.chain[-1].node
        self.like: torch.Tensor = value_of(self.last)
        self.shown = [s.node for s in self.chain if s.node in self.r.exposed]
        self.inside = frozenset(_private(own, self.r))

    def replaced(self) -> bool:
        """Replace the steps by pieces of a scan; whether that was possible."""
        with self.r.graph.inserting_before(self.chain[0].node):
            found = next(self._operands(), None) if self._worth_it() else None
            if found is None:
                return False
            if self._stacked(*found):
                return True
            states = self._ordered(*found)
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

    def _stacked(self, a: Node, b: Node, before: Node | None) -> bool:
        """Let a stack of all states, if nobody else but the caller reads one, be the scan itself; whether it is."""
        stack = next(iter(self.chain[0].node.users.keys() - {self.chain[1].product}), None)
        if stack is None or not is_op(stack) or READER.name(stack) != "stack":
            return False
        args: Any = stack.args
        nodes, (given, dim) = [s.node for s in self.chain], (*args, 0)[:2]
        begun = [self.chain[0].before] if before is None else []
        readers = {stack, *(s.product for s in self.chain)}
        others = {u for n in nodes for u in n.users} - readers
        if list(given) != [*begun, *nodes] or any(u.op != "output" for u in others) or others - self.last.users.keys():
            return False
        dim %= self.like.dim() + 1
        order, call = [*range(1, dim + 1), 0, *range(dim + 1, self.like.dim() + 1)], self.r.call
        states = self._scan(call("permute", (a, order)), call("permute", (b, order)), before, dim)
        if not alike(value_of(states), value_of(stack)):
            return False
        if others:
            self._replace(self.last, call("select", (states, dim, -1)))
        self.r.replace(stack, states)
        return True

    def _replace(self, node: Node, piece: Node) -> None:
        """Let the readers of a state read a piece of all states, or a copy of it if they show its memory to others."""
        if node in self.shown:
            copy = self.r.call("clone", (piece,), kwargs={"memory_format": torch.preserve_format})
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

    def _alike(self) -> bool:
        """Whether all steps compute in one floating type and shape, and only types that convert to it exactly take part."""
        x = self.like
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.layout is not torch.strided:
            return False
        for s in self.chain:
            if any(not _is_like(value_of(n), x) for n in (s.node, s.product)):
                return False
            operands = [value_of(v) for v in (s.a, s.b, s.before) if isinstance(v, Node)]
            if not all(_converts(v, x) for v in operands):
                return False
        return True

    def _worth_it(self) -> bool:
        """Whether few states are results, each of which is copied. Training saves all, and would be slower."""
        return len(self.shown) <= 1 + len(self.chain) // 4

    def _operands(self) -> Iterator[tuple[Node, Node, Node | None]]:
        """Factors and summands with the steps as their first dimension, and the state before the first, for each way to read the
        first step: either factor might be that state. If it is none, it is the first summand."""
        for first in list(_steps(self.chain[0].node)):
            self.chain[0] = first
            loop, before, column = self._loop(0), self.chain[0].before, tuple(s.b for s in self.chain)
            a = self._factors(loop) if self._alike() else None
            if a is None:
                continue
            b = self._summands(self._loop(1), (before, *column)) if self._starts_with_b() else None
            if b is not None:
                yield (a if same_size(value_of(a).shape[0], 1) else self._with_one_before(a)), b, None
            elif (b := self._summands(loop, column)) is not None:
                yield a, b, before

    def _loop(self, more: int) -> _Operands:
        """The operands of all steps, and of `more` before them."""
        states = frozenset(s.node for s in self.chain)
        return _Operands(self.r, len(self.chain) + more, inside=self.inside, states=states)

    def _starts_with_b(self) -> bool:
        """Whether the first state may be a first summand."""
        before = self.chain[0].before
        return isinstance(self.chain[0].b, Node) and _is_like(value_of(before), self.like)

    def _factors(self, loop: _Operands) -> Node | None:
        """The factors of all steps, [steps or 1, ...], of as many dims as a state and one more."""
        column = tuple(s.a for s in self.chain)
        if (same := self._same(column)) is not None:
            return same
        if not all(isinstance(n, Node) for n in column):
            return None
        found = loop.roll(column, self.inside)
        return None if found is None else self._aligned(found)

    def _summands(self, loop: _Operands, column: tuple[Any, ...]) -> Node | None:
        """The summands of all steps, [steps, ...] in the shape of a state."""
        found = self._same(column)
        if found is None and all(isinstance(n, Node) for n in column):
            rolled = loop.roll(column, self.inside)
            found = None if rolled is None else self._aligned(rolled)
        if found is None:
            return None
        if value_of(found).dtype != self.like.dtype:
            found = self.r.call("cast", (found,), kwargs={"dtype": self.like.dtype})
        return self.r.call("expand", (found, [loop.count, *self._shape()]))

    def _with_one_before(self, a: Node) -> Node:
        """Factors with one before, which is not used."""
        if all(isinstance(n, int) for n in value_of(a).shape):
            return self.r.call("constant_pad_nd", (a, [0, 0] * self.like.dim() + [1, 0], 0))
        return self.r.call("cat", ([self.r.call("slice", (a, 0, 0, 1, 1)), a], 0))  # torch pads no symbols

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

    def _ordered(self, a: Node, b: Node, before: Node | None) -> Node:
        """The scan, laid out as states are."""
        order, call = self._order(), self.r.call
        if order != sorted(order):
            dims = [0, *(d + 1 for d in order)]
            a, b = call("permute", (a, dims)), call("permute", (b, dims))
            if before is not None:
                before = call("permute", (call("expand", (before, self._shape())), order))
        return self._scan(a, b, before, 0)

    def _scan(self, *operands: Any) -> Node:
        states = self.r.call("linear_scan", operands)
        states.meta[CHAIN] = self.last.name
        return states

    def _piece(self, states: Node, at: int, like: Node | None = None) -> Node:
        order = self._order()
        if order == sorted(order):
            return self.r.call("select", (states, 0, at), like)
        piece = self.r.call("select", (states, 0, at))
        return self.r.call("permute", (piece, [order.index(d) for d in range(len(order))]), like)


def _private(own: set[Node], r: Rewriter) -> set[Node]:
    """`own`, and the nodes that nobody but these reads, directly or not."""
    found, todo = set(own), list(own)
    while todo:
        for n in todo.pop().all_input_nodes:
            if n not in found and n.op == "call_function" and n not in r.returned and found.issuperset(n.users):
                found.add(n)
                todo.append(n)
    return found


def _is_like(v: Any, x: torch.Tensor) -> bool:
    return isinstance(v, torch.Tensor) and has(v, x, tuple(x.shape))


def _converts(v: Any, x: torch.Tensor) -> bool:
    """Whether an operand is on the same device, and exact in the type of `x`."""
    if not isinstance(v, torch.Tensor) or v.device != x.device or v.dim() > x.dim():
        return False
    return v.dtype == x.dtype or (v.is_floating_point() and v.dim() > 0)
