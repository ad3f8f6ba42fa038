"""Steps of a training loop that no scan says (products or reductions of the state) become one call while gradients are traced.

The graph repeats itself (`coupled`). Calls that have counterparts in all steps, with the same numbers, are one body: a graph of
what a step reads to what others and the next step read. `capture.repeated` has the call, and writes its steps out again once the
gradient of one of them is traced.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright.capture.repeated import Body, repeated_op
from fusewright.graph.effects import draws, may_share, writes
from fusewright.graph.retrace import same_kind
from fusewright.graph.spec import value_of
from fusewright.graph.view import dependents, is_projection
from fusewright.interface import RuleLog
from fusewright.rewrite.loops import coupled

ID = "loop.repeated"
"""The rule's id in reports, and for `disable_rules`."""

LEAST_STEPS = 12
"""Fewer steps are traced one by one."""

MOST_LOOPS = 8
"""Loops of a graph that are looked for."""


def repeat(graph: Graph, log: RuleLog) -> None:
    """Put calls in place of alike steps, in place, in a canonical graph before its gradients are traced."""
    for _ in range(MOST_LOOPS):
        if not log.allows(ID) or not any(_called(graph, steps) for steps in _bodies(graph)):
            return
        log.hit(ID)


def _bodies(graph: Graph) -> list[coupled.Body]:
    """Stretches of the graph that may be steps, the most calls first."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and n.target is not repeated_op and not _of_call(n)]
    found = [b for b in coupled.stretches(nodes) if b.steps >= LEAST_STEPS]
    return sorted(found, key=lambda b: -len(b.calls) * b.steps)


def _of_call(n: Node) -> bool:
    return is_projection(n) and n.args[0].target is repeated_op  # type: ignore[union-attr]


def _called(graph: Graph, steps: coupled.Body) -> bool:
    for skipped in (0, 1):  # what the first step reads may lie otherwise in memory
        body = steps.after(skipped)
        found = _Alike(body)
        if body.steps >= LEAST_STEPS and found.find() and _may_move(found.own):
            _replace(graph, found)
            return True
    return False


@dataclass
class _Alike:
    """The calls of all steps that one body stands for."""

    body: coupled.Body
    calls: dict[int, list[Any]] = field(default_factory=dict)
    """By place in a step: what its counterparts are called with, argument by argument: a number or the like, (place, steps before),
    or a tuple of nodes that are no calls of steps."""
    own: frozenset[Node] = frozenset()
    states: dict[int, Node] = field(default_factory=dict)
    """What there is of a value before the first step."""
    shown: list[int] = field(default_factory=list)
    """The values besides states that others read."""

    def find(self) -> bool:
        places = [p for p, column in enumerate(self.body.calls) if self._may_be(column)]
        while True:
            self.own = frozenset(n for p in places for n in self.body.calls[p])
            self.calls, self.states = {}, {}
            kept = [p for p in places if self._read(p)]
            if kept == places:
                after = dependents(self.own)
                kept = [p for p in places if not any(n in after for a in self.calls[p] if _is_column(a) for n in a)]
            if kept == places:
                break
            places = kept
        return bool(self.states) and self._results()

    @staticmethod
    def _may_be(column: Sequence[Node]) -> bool:
        if not all(same_kind(value_of(n), value_of(column[0])) for n in column):
            return False
        return _static(value_of(column[0])) and not any(writes(n) or draws(n) for n in column[:1])

    def _read(self, p: int) -> bool:
        """Read the arguments of counterparts; whether these are alike."""
        flat = [compat.pytree.tree_flatten((n.args, dict(n.kwargs))) for n in self.body.calls[p]]
        if any(spec != flat[0][1] for _, spec in flat):
            return False
        found: list[Any] = []
        for column in zip(*(leaves for leaves, _ in flat), strict=True):
            argument = self._argument(column)
            if argument is None:
                return False
            found.append(argument)
        self.calls[p] = found
        return True

    def _argument(self, column: tuple[Any, ...]) -> Any:
        if not any(isinstance(x, Node) for x in column):
            same = all(type(x) is type(column[0]) and repr(x) == repr(column[0]) for x in column)
            return _Number(column[0]) if same else None
        if not all(isinstance(x, Node) for x in column):
            return None
        source = self.body.source(column)
        if source is not None and self.body.calls[source[0]][0] in self.own:
            return source if self._carried(source, column[0]) else None
        if not self.own.isdisjoint(column):
            return None
        alike = all(same_kind(value_of(x), value_of(column[0])) for x in column)
        return column if alike and isinstance(value_of(column[0]), torch.Tensor) and _static(value_of(column[0])) else None

    def _carried(self, source: tuple[int, int], first: Node) -> bool:
        """Note a state and what it is at first; whether all who read it agree."""
        p, back = source
        if not back:
            return True
        like = value_of(self.body.calls[p][0])
        if back > 1 or first in self.own or not isinstance(like, torch.Tensor) or not same_kind(value_of(first), like):
            return False
        return self.states.setdefault(p, first) is first

    def _results(self) -> bool:
        """Choose what the steps hand out; whether each has memory of its own."""
        if any(p not in self.calls for p in self.states):
            return False
        todo = [p for p in self.calls if any(u not in self.own for n in self.body.calls[p] for u in n.users)]
        shown = dict[int, None]()
        while todo:
            p = todo.pop()
            if p in shown or p in self.states:
                continue
            if _shares(self.body.calls[p][0]):  # left to its readers
                todo += [a[0] for a in self.calls[p] if _is_place(a) and not a[1]]
            else:
                shown[p] = None
        self.shown = sorted(shown)
        if any(not isinstance(value_of(self.body.calls[p][0]), torch.Tensor) for p in self.results):
            return False
        bases = [self._base(p) for p in self.results]
        return None not in bases and len(set(bases)) == len(bases)

    @property
    def results(self) -> list[int]:
        return [*self.states, *self.shown]

    def _base(self, p: int) -> int | None:
        """The call whose memory a value shows; None if it shows that of an input."""
        while _shares(self.body.calls[p][0]):
            read = self.calls[p][0]
            if not _is_place(read) or read[1]:
                return None
            p = read[0]
        return p


@dataclass(frozen=True)
class _Number:
    """An argument that is the same in all steps, and no node."""

    value: Any


def _shares(node: Node) -> bool:
    """Whether a value shows the memory of another."""
    return _shares(node.args[0]) if is_projection(node) else may_share(node)  # type: ignore[arg-type]


def _is_column(a: Any) -> bool:
    return isinstance(a, tuple) and bool(a) and isinstance(a[0], Node)


def _is_place(a: Any) -> bool:
    return isinstance(a, tuple) and bool(a) and isinstance(a[0], int)


def _static(v: Any) -> bool:
    if isinstance(v, tuple | list):
        return all(map(_static, v))
    if not isinstance(v, torch.Tensor) or v.layout is not torch.strided:
        return False
    return all(isinstance(n, int) for n in (*v.shape, *v.stride()))


def _may_move(own: frozenset[Node]) -> bool:
    """Whether neither writes nor random numbers stand between the steps: what does not depend on them moves ahead."""
    node, last = min(own), max(own)
    while node is not last:
        if writes(node) or draws(node):
            return False
        node = node.next
    return True


def _replace(graph: Graph, found: _Alike) -> None:
    """Put one call in place of the steps."""
    body = found.body
    columns: list[tuple[Node, ...]] = []
    shared: list[Node] = []
    for a in (a for p in sorted(found.calls) for a in found.calls[p] if _is_column(a)):
        if all(n is a[0] for n in a):
            shared += [a[0]] if a[0] not in shared else []
        elif a not in columns:
            columns.append(a)
    step = Body(_one_step(found, columns, shared), len(found.states), len(columns), len(shared), len(found.results), body.steps)
    first, after = min(found.own), dependents(found.own)
    flat = [c[t] for t in range(body.steps) for c in columns]
    with graph.inserting_before(first):
        call = graph.call_function(repeated_op, (list(found.states.values()), flat, shared, step.key))
    call.meta.update({k: v for k, v in first.meta.items() if k in ("stack_trace", "nn_module_stack")})
    call.meta["body"] = step  # held while the graph lives
    call.meta["val"] = [value_of(body.calls[p][t]) for t in range(body.steps) for p in found.results]
    _ahead(call, max(found.own), after)
    _read_results(graph, found, call)
    for node in sorted(found.own, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _ahead(call: Node, last: Node, after: set[Node]) -> None:
    """Move what does not depend on the steps in front of the call."""
    node = call.next
    while True:
        node, this = node.next, node
        if this not in after:
            call.prepend(this)
        if this is last:
            return


def _read_results(graph: Graph, found: _Alike, call: Node) -> None:
    """Let others read results of the call."""
    place = call
    for t in range(found.body.steps):
        for k, p in enumerate(found.results):
            node = found.body.calls[p][t]
            others = [u for u in node.users if u not in found.own or _left(u, found)]
            if not others:
                continue
            with graph.inserting_after(place):
                place = graph.call_function(operator.getitem, (call, t * len(found.results) + k))
            place.meta.update(node.meta)
            for user in others:
                user.replace_input_with(node, place)


def _left(node: Node, found: _Alike) -> bool:
    """Whether a view of a step stays for its readers outside."""
    return node in found.own and _shares(node) and any(u not in found.own or _left(u, found) for u in node.users)


def _one_step(found: _Alike, columns: Sequence[Any], shared: Sequence[Node]) -> Graph:
    """The graph of one step."""
    graph, body = Graph(), found.body
    inputs: dict[Any, Node] = {}
    for name, like in _inputs(found, columns, shared):
        inputs[name] = graph.placeholder(f"x{len(inputs)}")
        inputs[name].meta["val"] = value_of(like)
    made: dict[int, Node] = {}
    for p in sorted(found.calls):
        node = body.calls[p][0]
        leaves = [_in_step(a, inputs, made, columns) for a in found.calls[p]]
        _, spec = compat.pytree.tree_flatten((node.args, dict(node.kwargs)))
        args, kwargs = compat.pytree.tree_unflatten(leaves, spec)
        made[p] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made[p].meta["val"] = value_of(node)
    graph.output([made[p] for p in found.results])
    return graph


def _inputs(found: _Alike, columns: Sequence[Any], shared: Sequence[Node]) -> Iterator[tuple[Any, Node]]:
    yield from ((("state", p), h) for p, h in found.states.items())
    yield from ((("column", k), c[0]) for k, c in enumerate(columns))
    yield from ((("shared", n), n) for n in shared)


def _in_step(a: Any, inputs: dict[Any, Node], made: dict[int, Node], columns: Sequence[Any]) -> Any:
    if isinstance(a, _Number):
        return a.value
    if _is_place(a):
        return inputs["state", a[0]] if a[1] else made[a[0]]
    return inputs["column", columns.index(a)] if a in columns else inputs["shared", a[0]]
