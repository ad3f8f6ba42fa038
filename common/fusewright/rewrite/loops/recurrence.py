"""Recurrences, h[t] = f(h[t - 1], x[t], ...) with a pointwise f at each of many steps, become one scan.

Dynamo unrolls the loop of a state-space model into a few operations per step. Where what all steps read are consecutive pieces of
tensors, or can be computed at once (see `unrolled`), so can the states. Most are linear, h[t] = a[t] * h[t - 1] + b[t]; running
maxima that decay, sums of exponentials and other states are steps of their own (`steps`). Of several states that each depend on
those before it, each is a scan. The steps run in order and round as eager's do; states of half types are carried in fp32.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright.graph.cse import merge_common
from fusewright.graph.effects import drop_dead_code
from fusewright.graph.spec import same_size, value_of
from fusewright.graph.view import is_op
from fusewright.interface import RuleLog
from fusewright.rewrite.engine import READER, Rewriter
from fusewright.rewrite.loops.coupled import couple
from fusewright.rewrite.loops.scanned import Found, Operands, Scanned, converts, is_like, own
from fusewright.rewrite.loops.steps import Pointwise, Steps, as_step, is_truth
from fusewright.rewrite.loops.unrolled import LEAST_STEPS, private

ID = "loop.recurrence"
"""The rule's id in reports, and for `disable_rules`."""

MISSES = 5
"""Chains are looked for until that often none became a scan: one that did may give others their operands, and one that did not may
hide others."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`node` = `a` * `before` + `b`, where `product` is the first of the two operations (`node` itself if it is one)."""

    node: Node
    before: Any
    a: Any
    b: Any
    product: Node
    form: int
    """How the step is written, by a number."""

    @property
    def inner(self) -> tuple[Node, ...]:
        return (self.product,)


Chain: TypeAlias = "list[Linear] | list[Pointwise]"
Key: TypeAlias = "tuple[Node, int | str]"
"""The last node of a step, and how that is written."""


def recur(graph: Graph, log: RuleLog, kept: Collection[str] = ()) -> None:
    """Compute the states of recurrences at once, in place, in a canonical graph. Chains whose last node is named in `kept` stay."""
    if ID in log.disabled:
        return
    r, hits = Rewriter(graph, log), log.hits[ID]
    couple(r, log, ID, kept)
    _chained(r, kept)
    couple(r, log, ID, kept, alone=True)  # also those whose operands are states that are known now
    if log.hits[ID] > hits:
        drop_dead_code(graph)
        if "cse" not in log.disabled:
            merge_common(graph)  # what two scans read was computed for each


def _chained(r: Rewriter, kept: Collection[str]) -> None:
    """Compute the states at once that depend on themselves and on other values only."""
    graph, log = r.graph, r.log
    found, refused = _steps_of(graph), set[Key]()
    chains = list(_chains(found, kept, refused))
    if not chains:
        return
    forms = defaultdict[Node, list[int | str]](list)  # what turns round in a chain is the same loop from another node
    for node, form in found:
        forms[node].append(form)
    place = {n: k for k, n in enumerate(graph.nodes)}
    misses = 0
    while misses < MISSES:
        before = log.hits[ID]
        inside = private({n for c in chains for n in own(c)}, r)
        for chain in sorted(chains, key=lambda chain: place[chain[0].node]):
            # its pieces are read at the first step, which a write before the last one would make a difference to
            if not r.changes_before(chain[-1].node) and log.allows(ID) and _replaced(r, chain, place, inside):
                log.hit(ID)
            else:
                *steps, _, last = ((s.node, s.form) for s in chain)  # only the last step may read something else
                refused.update((*steps, last))
                refused.update((n, f) for n in {n for s in chain for n in s.inner} - {s.node for s in chain} for f in forms[n])
        drop_dead_code(graph)
        if log.hits[ID] > before:
            refused.clear()
        misses = 0 if log.hits[ID] > before else misses + 1
        left = set(graph.nodes)
        found = {key: item for key, item in found.items() if left.issuperset(own([item[1]]))}
        chains = list(_chains(found, kept, refused))
        if not chains:
            break


def _replaced(r: Rewriter, chain: Chain, place: dict[Node, int], inside: frozenset[Node]) -> bool:
    try:
        kind = _Linear if isinstance(chain[0], Linear) else _Pointwise
        found = kind.of(r, chain, place, inside)
        return found is not None and found.replaced()
    except compat.SizesAssumed:
        return False


# ---- which nodes are steps ----


def _steps_of(graph: Graph) -> dict[Key, tuple[int, Any]]:
    """The steps that nodes can be read as, by how they are written, and the length of the chain that each ends."""
    found: dict[Key, tuple[int, Any]] = {}
    often, reader = Counter(n.target for n in graph.nodes if n.op == "call_function"), Steps()
    for node in graph.nodes:
        if node.op != "call_function" or often[node.target] < LEAST_STEPS:
            continue
        for step in _steps(node):
            found[node, step.form] = 1 + found.get((step.before, step.form), (0,))[0], step
        for s in reader.after_others(node):
            key = s.before, s.form
            if key not in found and (first := as_step(s.before, s.form, len(s.operands))) is not None:
                found[key] = 1, first
            found[node, s.form] = 1 + found.get(key, (0,))[0], s
    return found


def _chains(found: dict[Key, tuple[int, Any]], kept: Collection[str], refused: Collection[Key]) -> Iterator[Chain]:
    """The longest chains of at least `LEAST_STEPS` steps that are written alike and share none; linear ones first."""
    nodes, inner = set[Node](), set[Node]()  # of chains that were found
    for (node, form), (length, _) in sorted(found.items(), key=lambda item: (-item[1][0], isinstance(item[0][1], str))):
        if length < LEAST_STEPS:
            return
        if node.name in kept or (node, form) in refused:
            continue
        chain: list[Any] = []
        while (node, form) in found and node not in nodes | inner and nodes.isdisjoint((step := found[node, form][1]).inner):
            chain.append(step)
            node = step.before
        if len(chain) >= LEAST_STEPS:
            nodes.update(s.node for s in chain)
            inner.update(n for s in chain for n in s.inner)
            yield chain[::-1]


def _steps(node: Node) -> Iterator[Linear]:
    """The ways to read a node as a linear step."""
    name = READER.name(node) if is_op(node) else ""
    if name == "add" and node.kwargs.get("alpha", 1) == 1:
        for k, (m, b) in enumerate((node.args[:2], node.args[1::-1])):
            if isinstance(m, Node) and is_op(m) and READER.name(m) == "mul":
                yield from (Linear(node, h, a, b, m, 2 * k + place) for place, h, a in _either(m.args[:2]))
    elif name == "addcmul" and node.kwargs.get("value", 1) == 1:
        yield from (Linear(node, h, a, node.args[0], node, 4 + place) for place, h, a in _either(node.args[1:3]))


def _either(pair: Sequence[Any]) -> Iterator[tuple[int, Node, Any]]:
    x, y = pair
    if isinstance(x, Node):
        yield 0, x, y
    if isinstance(y, Node) and y is not x:
        yield 1, y, x


# ---- the scans that replace them ----


@dataclass
class _Linear(Scanned):
    """A chain of linear steps."""

    chain: list[Linear]

    @classmethod
    def of(cls, r: Rewriter, chain: Sequence[Any], place: dict[Node, int], inside: frozenset[Node]) -> _Linear | None:
        """The chain in the graph as it is now: rewrites of earlier chains may have changed what it reads."""
        found = [s for old in chain for s in _steps(old.node) if s.form == old.form]
        return cls(r, found, place, inside) if len(found) == len(chain) else None

    def scan(self, operands: tuple[Node, ...], before: Node | None, dim: int) -> Node:
        return self.r.call("linear_scan", (*operands, before, dim))

    def _alike(self) -> bool:
        """Whether all steps compute in one floating type and shape, and only types that convert to it exactly take part."""
        x = self.like
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.layout is not torch.strided:
            return False
        for s in self.chain:
            if any(not is_like(value_of(n), x) for n in (s.node, s.product)):
                return False
            operands = [value_of(v) for v in (s.a, s.b, s.before) if isinstance(v, Node)]
            if not all(converts(v, x) for v in operands):
                return False
        return True

    def operands(self) -> Iterator[Found]:
        """Factors and summands with the steps as their first dimension, and the state before the first, for each way to read the
        first step: either factor might be that state. If it is none, it is the first summand."""
        for first in list(_steps(self.chain[0].node)):
            self.chain[0] = first
            loop, before, column = self._loop(), self.chain[0].before, tuple(s.b for s in self.chain)
            a = self._column(loop, tuple(s.a for s in self.chain)) if self._alike() else None
            if a is None:
                continue
            b = self._summands(self._loop(1), (before, *column)) if self._starts_with_b() else None
            if b is not None:
                yield ((a if same_size(value_of(a).shape[0], 1) else self._with_one_before(a)), b), None
            elif (b := self._summands(loop, column)) is not None:
                yield (a, b), before

    def _starts_with_b(self) -> bool:
        """Whether the first state may be a first summand."""
        before = self.chain[0].before
        return isinstance(self.chain[0].b, Node) and is_like(value_of(before), self.like)

    def _summands(self, loop: Operands, column: tuple[Any, ...]) -> Node | None:
        """The summands of all steps, [steps, ...] in the shape of a state."""
        found = self._column(loop, column)
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

@dataclass
class _Pointwise(Scanned):
    """A chain of steps of any pointwise form."""

    chain: list[Pointwise]

    @classmethod
    def of(cls, r: Rewriter, chain: Sequence[Any], place: dict[Node, int], inside: frozenset[Node]) -> _Pointwise | None:
        """The chain in the graph as it is now."""
        read = (as_step(old.node, old.form, len(old.operands)) for old in chain)
        found = [s for s in read if s is not None]
        return cls(r, found, place, inside) if len(found) == len(chain) else None

    def _alike(self) -> bool:
        """Whether all steps compute in the type and shape of the states, and only types that convert to it exactly take part."""
        begun, x = self.chain[0].before, self.like
        if not x.is_floating_point() or not converts(value_of(begun), x):
            return False
        nodes, operands = own(self.chain), {v for s in self.chain for v in s.operands}
        same = all(is_truth(v) or is_like(v, x) for v in map(value_of, nodes))
        return same and all(is_truth(v) or converts(v, x) for v in map(value_of, operands))

    def operands(self) -> Iterator[Found]:
        loop, begun = self._loop(), self.chain[0].before
        columns = zip(*(s.operands for s in self.chain), strict=True) if self._alike() else ()
        found: list[Node] = []
        for column in columns:
            operand = self._column(loop, column)
            if operand is None:
                return
            found.append(operand)
        if not found:
            return
        found[0] = self.r.call("expand", (found[0], [loop.count, *self._shape()]))
        if value_of(begun).dtype != self.like.dtype:
            begun = self.r.call("cast", (begun,), kwargs={"dtype": self.like.dtype})
        yield tuple(found), begun

    def scan(self, operands: tuple[Node, ...], before: Node | None, dim: int) -> Node:
        x, *others = operands
        return self.r.call("pointwise_scan", (x, others, before, dim, self.chain[0].form))
