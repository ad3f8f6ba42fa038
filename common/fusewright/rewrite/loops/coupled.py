"""Loops whose states depend on each other in one step become one scan of several states (`coupled_scan`).

Dynamo writes the body of a loop once per step, so that the graph repeats itself: a node has counterparts at equal distances, the
same function of counterparts of the same nodes. What depends on itself a step earlier, through pointwise calls only, is the step
of a scan; what else it reads becomes the scan's operands.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright.graph.spec import value_of
from fusewright.interface import RuleLog
from fusewright.ops.semantics.coupled import MOST_RESULTS
from fusewright.ops.semantics.recurrence import carried
from fusewright.ops.semantics.steps import written
from fusewright.rewrite.engine import Rewriter
from fusewright.rewrite.loops.scanned import Found, Operands, Scanned, converts, is_like, own
from fusewright.rewrite.loops.steps import Steps, is_truth
from fusewright.rewrite.loops.unrolled import LEAST_STEPS, alike, private

LONGEST = 512
"""Calls of the longest step."""

PERIODS = 8
"""Distances that are tried."""

PHASES = 4
"""Places where steps may begin that are tried."""

MOST_OPERANDS = 24
"""Operands of a scan."""


@dataclass
class Body:
    """Counterparts of the calls of one step: `calls[p][t]` is call p in step t."""

    calls: list[list[Node]]
    place: dict[Node, tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.place = {n: (p, t) for p, column in enumerate(self.calls) for t, n in enumerate(column)}

    @property
    def steps(self) -> int:
        return len(self.calls[0])

    def after(self, skipped: int) -> Body:
        """The body without its first steps."""
        return Body([column[skipped:] for column in self.calls]) if skipped else self

    def cores(self) -> list[list[int]]:
        """The calls that depend on themselves a step earlier, each with those on the way."""
        reads: dict[int, set[int]] = {}
        readers: dict[int, set[int]] = {}
        carried = dict[int, None]()
        for p, column in enumerate(self.calls):
            for source, back in _sources(column[-1], self):
                reads.setdefault(p, set()).add(source)
                readers.setdefault(source, set()).add(p)
                if back:
                    carried[source] = None
        found: list[list[int]] = []
        for p in carried:
            if not any(p in core for core in found):
                core = _reached(p, reads) & _reached(p, readers)
                found.extend([sorted(core)] if core else [])
        return sorted(found)

    def source(self, column: Sequence[Any]) -> tuple[int, int] | None:
        """The call whose counterparts a column of arguments holds, and how many steps earlier; None if there is none. The first
        step may read something else."""
        found = {(p, t - at) for t, n in enumerate(column) if t for p, at in (self.place.get(n, (-1, 0)),)}
        if len(found) != 1:
            return None
        ((p, back),) = found
        return (p, back) if p >= 0 and (back or self.place.get(column[0]) == (p, 0)) else None


@dataclass(frozen=True, slots=True)
class Step:
    """One state after a step, and all other calls of that step."""

    node: Node
    before: Any
    inner: tuple[Node, ...]


def couple(r: Rewriter, log: RuleLog, rule: str, kept: Collection[str] = (), alone: bool = False) -> None:
    """Compute at once, in place, states that depend on each other; with `alone` also one that other values of its step depend on.
    Loops that compute what is named in `kept` stay."""
    for body in list(bodies(r.graph)):
        cores = body.cores()
        while found := next((core for core in cores if _coupled(r, log, rule, body, core, kept, alone)), None):
            cores.remove(found)  # what it computed may be what the others read


def _coupled(r: Rewriter, log: RuleLog, rule: str, body: Body, core: Sequence[int], kept: Collection[str], alone: bool) -> bool:
    for skipped in (0, 1):  # the first step may read constants that were folded into it
        found = _Reading.of(body.after(skipped), core)
        if found is not None and log.allows(rule) and _worth_it(r, found, kept, alone) and _replaced(r, found):
            log.hit(rule)
            return True
    return False


def bodies(graph: Graph) -> Iterator[Body]:
    """Stretches of pointwise calls that may be steps."""
    steps = Steps()
    return stretches([n for n in graph.nodes if n.op == "call_function" and steps.kind(n) is not None])


def stretches(nodes: Sequence[Node]) -> Iterator[Body]:
    """The longest stretches of calls that steps may have which repeat themselves, the shortest steps first."""
    taken = -1
    for period in _periods(nodes):
        for start, end in _stretches(nodes, period):
            if start > taken or period > LONGEST:
                yield from _cuts(nodes[start:end], period)


def _periods(nodes: Sequence[Node]) -> list[int]:
    """Distances at which functions recur most often."""
    places: dict[Any, list[int]] = {}
    for k, n in enumerate(nodes):
        places.setdefault(n.target, []).append(k)
    found: Counter[int] = Counter()
    for at in places.values():
        for ahead in range(1, min(len(at) // LEAST_STEPS, LEAST_STEPS) + 1):
            found.update(b - a for a, b in zip(at, at[ahead:], strict=False) if b - a <= LONGEST)
    return sorted(d for d, _ in found.most_common(PERIODS) if d > 1)


def _stretches(nodes: Sequence[Node], period: int) -> Iterator[tuple[int, int]]:
    """Where nodes have the functions of those `period` later, for `LEAST_STEPS` steps at least."""
    start = 0
    for k in range(len(nodes) - period + 1):
        if k + period == len(nodes) or nodes[k].target is not nodes[k + period].target:
            if k - start + period >= LEAST_STEPS * period:
                yield start, k + period
            start = k + 1


def _cuts(nodes: Sequence[Node], period: int) -> Iterator[Body]:
    """The steps of a stretch, begun where the fewest values are handed from one step to the next."""
    place = {n: k for k, n in enumerate(nodes)}
    spans = [(k, max((at for u in n.users if (at := place.get(u, 0)) <= k + 2 * period), default=k)) for n, k in place.items()]
    spans = [(k, last) for k, last in spans if period <= k < 2 * period]

    def cost(first: int) -> tuple[bool, int, int]:
        crossed = [(last - first) // period - (k - first) // period for k, last in spans]
        return max(crossed) > 1, sum(crossed), (len(nodes) - first) % period  # the last steps are whole more often than the first

    costs = sorted((cost(k), k) for k in range(period))
    for (far, handed, _), first in costs[:PHASES]:
        if (far, handed) != costs[0][0][:2]:  # more would be states than need be
            break
        steps = (len(nodes) - first) // period
        yield Body([[nodes[first + p + t * period] for t in range(steps)] for p in range(period)])


def _reached(p: int, edges: Mapping[int, Collection[int]]) -> set[int]:
    """What is reached from a call by at least one edge."""
    found, todo = set[int](), [p]
    while todo:
        for q in edges.get(todo.pop(), ()):
            if q not in found:
                found.add(q)
                todo.append(q)
    return found


def _sources(node: Node, within: Body) -> Iterator[tuple[int, int]]:
    """The calls that a node reads, and how many steps earlier."""
    t = within.place[node][1]
    for n in node.all_input_nodes:
        if n in within.place:
            p, at = within.place[n]
            yield p, t - at


@dataclass
class _Reading:
    """The calls of a step that depend on each other, as text."""

    body: Body
    core: list[int]
    states: list[int] = field(default_factory=list)
    initial: list[Node] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    """The calls whose values others read, behind the states."""
    operands: list[tuple[Any, ...]] = field(default_factory=list)
    step: str = ""
    steps: Steps = field(default_factory=Steps)
    own: frozenset[Node] = frozenset()
    exprs: dict[int, list[Any]] = field(default_factory=dict)
    """The calls: a function, then numbers, (call, steps before) and operands."""

    @classmethod
    def of(cls, body: Body, core: Sequence[int]) -> _Reading | None:
        """The calls `core` of a body read as a step of a scan; None if they are none."""
        if body.steps < LEAST_STEPS:
            return None
        found = cls(body, sorted(core))
        found.own = frozenset(found.nodes)
        return found if found._read() else None

    @property
    def nodes(self) -> list[Node]:
        return [n for p in self.core for n in self.body.calls[p]]

    def _read(self) -> bool:
        steps = self.steps
        kinds = {k[0] if (k := steps.kind(n)) is not None else -1 for n in self.nodes}
        if len(kinds) != 1 or -1 in kinds:
            return False
        found: list[tuple[int, list[Any]]] = []
        for p in self.core:
            expr = self._call([steps.calls[n] for n in self.body.calls[p]])
            if expr is None:
                return False
            found.append((p, expr))
        self.exprs = dict(found)
        while self._one_earlier():
            pass
        read = {p for p in self.core if any(u not in self.own for n in self.body.calls[p] for u in n.users)}
        shown = [p for p in self.core if p in read and p not in self.states]
        self.results = [*self.states, *shown]
        self.step = ";".join(f"{self._name(p)}={written(tuple(map(self._argument, expr)))}" for p, expr in self.exprs.items())
        truths = any(is_truth(value_of(self.body.calls[p][0])) for p in self.results)
        return bool(self.states) and len(self.results) <= MOST_RESULTS and len(self.operands) <= MOST_OPERANDS and not truths

    def _call(self, calls: Sequence[Any]) -> list[Any] | None:
        """One call of all steps: its function, then numbers, (call, steps before) and operands by position."""
        if any(not isinstance(c, tuple) or c[0] != calls[0][0] or len(c) != len(calls[0]) for c in calls):
            return None
        out: list[Any] = [calls[0][0]]
        for column in list(zip(*calls, strict=True))[1:]:
            source = self.body.source(column)
            if source is not None and source[0] in self.core:
                if not self._carried(source, column):
                    return None
                out.append(source)
            elif all(isinstance(x, Node) for x in column):
                if not self.own.isdisjoint(column):
                    return None  # of some steps only
                if column not in self.operands:
                    self.operands.append(column)
                out.append(column)
            elif any(isinstance(x, Node) for x in column):
                return None
            elif any(repr(x) != repr(column[0]) for x in column):
                self.operands.append(column)
                out.append(column)
            else:
                out.append(column[0])
        return out

    def _carried(self, source: tuple[int, int], column: Sequence[Any]) -> bool:
        """Note a state and what it is at first; whether all who read it agree."""
        p, back = source
        if not back:
            return True
        if back > 1 or not isinstance(column[0], Node):
            return False
        if p not in self.states:
            self.states.append(p)
            self.initial.append(column[0])
        return self.initial[self.states.index(p)] is column[0]

    def _one_earlier(self) -> bool:
        """Take in the step before the first, whose equal calls may be one node each, if there is one."""
        calls, states = dict[int, Node](), dict[int, Node]()
        columns: list[Any] = [None] * len(self.operands)

        def bind(p: int, node: Any) -> bool:
            expr = self.exprs[p]
            known = isinstance(node, Node) and self.steps.kind(node) == self.steps.kind(self.body.calls[p][0])
            call = self.steps.calls.get(node) if known else None
            if calls.setdefault(p, node) is not node or not isinstance(call, tuple) or call[0] != expr[0] or len(call) != len(expr):
                return False
            return all(argument(a, n) for a, n in zip(expr[1:], call[1:], strict=True))

        def argument(a: Any, n: Any) -> bool:
            if not isinstance(a, tuple):
                return repr(a) == repr(n)
            if a in self.operands:
                k = self.operands.index(a)
                columns[k] = n if columns[k] is None else columns[k]
                return columns[k] is n and _same_kind(a[0], n)
            p, back = a
            if not isinstance(n, Node):
                return False
            return states.setdefault(p, n) is n if back else calls.get(p) is n or bind(p, n)

        if not all(bind(p, n) for p, n in zip(self.states, self.initial, strict=True)) or set(calls) != set(self.core):
            return False
        self.body = Body([[calls.get(p, column[0]), *column] for p, column in enumerate(self.body.calls)])
        renamed = {a: (n, *a) for a, n in zip(self.operands, columns, strict=True)}
        self.operands = list(renamed.values())
        self.exprs = {p: [renamed.get(a, a) if isinstance(a, tuple) else a for a in e] for p, e in self.exprs.items()}
        self.initial = [states[p] for p in self.states]
        self.own = frozenset(self.nodes)
        return True

    def _name(self, p: int) -> str:
        return f"n{self.results.index(p)}" if p in self.results else f"t{p}"

    def _argument(self, a: Any) -> Any:
        if not isinstance(a, tuple):
            return a
        if a not in self.operands:
            p, back = a
            return f"h{self.states.index(p)}" if back else self._name(p)
        name = f"x{self.operands.index(a)}"
        return ("ne_scalar", name, 0) if isinstance(a[0], Node) and is_truth(value_of(a[0])) else name


def _same_kind(a: Any, b: Any) -> bool:
    """Whether both are numbers, or both are tensors of truth values, or of others."""
    nodes = isinstance(a, Node), isinstance(b, Node)
    return nodes[0] == nodes[1] and (not nodes[0] or is_truth(value_of(a)) == is_truth(value_of(b)))


def _worth_it(r: Rewriter, found: _Reading, kept: Collection[str], alone: bool) -> bool:
    """Whether there are several states or values, and none of what they read may be written meanwhile."""
    several = len(found.results if alone else found.states) > 1
    here = several and set(r.graph.nodes).issuperset(found.nodes)  # not in a scan by now
    return here and not r.changes_before(max(found.nodes)) and not any(n.name in kept for n in found.nodes)


def _replaced(r: Rewriter, found: _Reading) -> bool:
    steps = []
    for t in range(found.body.steps):
        calls = [found.body.calls[p][t] for p in found.core]
        node = found.body.calls[found.states[0]][t]
        steps.append(Step(node, found.initial[0], tuple(n for n in calls if n is not node)))
    place = {n: k for k, n in enumerate(r.graph.nodes)}
    try:
        return _Coupled(r, steps, place, private(own(steps), r), found).replaced()
    except compat.SizesAssumed:
        return False


@dataclass
class _Coupled(Scanned):
    """The steps of several states."""

    found: _Reading

    def replaced(self) -> bool:
        """Replace the values that others read by pieces of a scan; whether that was possible."""
        values = (n for p in self.found.results for n in self.found.body.calls[p])
        first = min(u for n in values for u in n.users if u not in self.found.own)
        start, done = first.prev, False
        try:
            with self.r.graph.inserting_before(first):
                operands = next(self.operands(), None) if self._worth_it() and self._alike() else None
                done = operands is not None and self._known(start, first) and self._pieces(operands[0])
        finally:
            if not done:
                self._drop(start, first)
        if not done:
            return False
        self._hoist(start, first)
        for node in sorted(set(self.found.nodes), reverse=True):
            if not node.users:
                self.r.graph.erase_node(node)
        return True

    def _alike(self) -> bool:
        """Whether all states are of one type and shape, and only types that convert to it exactly take part."""
        x = self.like
        begun = all(is_like(value_of(h), x) for h in self.found.initial)  # another type rounds what is computed from it
        operands = (value_of(n) for column in self.found.operands for n in column if isinstance(n, Node))
        return begun and x.is_floating_point() and all(is_truth(v) or converts(v, x) for v in operands)

    def operands(self) -> Iterator[Found]:
        loop, found = self._loop(), list[Node]()
        for column in self.found.operands:
            operand = self._column(loop, column) if isinstance(column[0], Node) else self._numbers(column)
            if operand is None:
                return
            found.append(operand)
        if not found:  # a step that reads its states only
            kind = {"dtype": self.like.dtype, "device": self.like.device, "pin_memory": False}
            found.append(self.r.call("full", ([1] * (self.like.dim() + 1), 0.0), kwargs=kind))
        found[0] = self.r.call("expand", (found[0], [loop.count, *self._shape()]))
        yield tuple(found), None

    def _numbers(self, column: Sequence[float]) -> Node:
        """Numbers that differ from step to step, such as corrections by powers."""
        kind = {"dtype": carried(self.like.dtype), "device": self.like.device, "pin_memory": False}
        shape = [1] * (self.like.dim() + 1)
        return self.r.call("cat", ([self.r.call("full", (shape, float(x)), kwargs=kind) for x in column], 0))

    def _loop(self, more: int = 0) -> Operands:
        return Operands(self.r, len(self.chain) + more, inside=self.inside, states=frozenset(self.found.nodes))

    def scan(self, operands: tuple[Node, ...], before: Node | None, dim: int) -> Node:
        x, *others = operands
        return self.r.call("coupled_scan", (x, others, self._begun(), dim, self.found.step))

    def _begun(self) -> list[Node]:
        order, call, begun = self._order(), self.r.call, list[Node]()
        for h in self.found.initial:
            if order != sorted(order):
                h = call("permute", (call("expand", (h, self._shape())), order))
            begun.append(h)
        return begun

    def _pieces(self, operands: tuple[Node, ...]) -> bool:
        """Let the readers of each value read a piece of all of them."""
        scan, own = self._ordered(operands, None), set(self.found.nodes)
        new: dict[Node, Node] = {}
        for k, p in enumerate(self.found.results):
            whole = self.r.graph.call_function(operator.getitem, (scan, k))
            whole.meta["val"] = value_of(scan)[k]
            for t, node in enumerate(self.found.body.calls[p]):
                if any(u not in own for u in node.users):
                    new[node] = self._piece(whole, t)
        if not all(alike(value_of(piece), value_of(node)) for node, piece in new.items()):
            return False
        self.shown = [n for n in own if n in self.r.exposed]
        for node, piece in new.items():
            self._replace(node, piece)
        return True
