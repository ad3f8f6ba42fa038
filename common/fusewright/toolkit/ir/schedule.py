"""Arranges a recorded dataflow graph in stages: which pass over the row computes a value, and whether later passes recompute
it or keep it.

Pass k over the row can compute everything that only needs reductions of passes < k. Every value goes into the first pass that
can compute it; a later pass that needs it recomputes it or reads it from a row buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusewright.toolkit.ir.ir import Node, Stage, cost

KEEP_COST = 8
"""Values whose recomputation costs at least this many vector instructions are kept: storing and loading the row
buffer is cheaper."""


@dataclass
class _Facts:
    """Per node id: whether it varies along R, and the first pass that can compute it (for P values: the pass before
    which it is computed). `checks` are the checks whose value is not used."""

    rowwise: dict[int, bool] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    checks: set[int] = field(default_factory=set)


def staged(nodes: Sequence[Node], n_p: int) -> tuple[Stage, ...]:
    """Arrange the recorded `nodes` (ids are positions) in stages, with values renumbered in order of execution."""
    facts = _analyse(nodes, n_p)
    return _Scheduler(nodes, facts).run()


def _analyse(nodes: Sequence[Node], n_p: int) -> _Facts:
    f = _Facts()
    _follow(nodes, n_p, f, {})
    groups = coupled(nodes)
    while groups and (later := _later(groups, f)):  # states that read each other are computed in one pass
        _follow(nodes, n_p, f, later)
    scans = {n.args[1]: n.id for n in nodes if n.recurs}
    _mark_live(nodes, f.live, (n.id for n in nodes if n.op == "store"), scans)
    # A check is a side effect: it runs even if no store needs its value (an index along a dim of size 1).
    f.checks.update(n.id for n in nodes if n.op == "bound" and n.id not in f.live)
    _mark_live(nodes, f.live, f.checks, scans)
    return f


def _follow(nodes: Sequence[Node], n_p: int, f: _Facts, later: Mapping[int, int]) -> None:
    """Note which values vary along the row, and in which pass each is ready; `later` are the least for some."""
    stores: dict[int, int] = {}
    for n in nodes:
        uses = list(n.uses())
        f.rowwise[n.id] = n.op in ("scan", "state") or (
            n.op != "reduce"
            and (any(f.rowwise[u] for u in uses) or (n.index is not None and any(a >= n_p for a in n.index.axes())))
        )
        ready = max((f.ready[u] for u in uses), default=0)
        ready = max(ready, later.get(n.id, 0))
        if n.op in ("load", "store") and n.buffer is not None:
            # a load must see earlier stores to its buffer, so accesses keep their order
            ready = max(ready, stores.get(n.buffer, 0))
        if n.op == "store" and n.buffer is not None:
            stores[n.buffer] = ready
        f.ready[n.id] = ready + 1 if n.op == "reduce" else ready


def coupled(nodes: Sequence[Node]) -> list[list[int]]:
    """Recurrences whose steps read each other's states."""
    reads: dict[int, frozenset[int]] = {}
    groups: list[tuple[set[int], list[int]]] = []
    for n in nodes if sum(n.recurs for n in nodes) > 1 else ():
        found = frozenset({n.id}) if n.op == "state" else frozenset().union(*(reads[u] for u in n.uses()))
        reads[n.id] = frozenset() if n.op in ("scan", "reduce") else found
        if n.recurs:
            joined = [g for g in groups if not found.isdisjoint(g[0])]
            groups = [g for g in groups if g not in joined]
            groups.append((set(found).union(*(g[0] for g in joined)), [*(i for g in joined for i in g[1]), n.id]))
    return [scans for _, scans in groups if len(scans) > 1]


def _later(groups: Sequence[Sequence[int]], f: _Facts) -> dict[int, int]:
    """The passes of coupled recurrences, if they differ in one."""
    found = {i: max(f.ready[j] for j in g) for g in groups for i in g}
    return found if any(f.ready[i] != k for i, k in found.items()) else {}


def _mark_live(nodes: Sequence[Node], live: set[int], roots: Iterable[int], scans: Mapping[int, int]) -> None:
    """Mark what roots need; `scans` are the recurrences by their states."""
    todo = list(roots)
    while todo:
        i = todo.pop()
        if i not in live:
            live.add(i)
            todo.extend(nodes[i].uses())
            todo.extend([scans[i]] if i in scans else [])


class _Scheduler:
    def __init__(self, nodes: Sequence[Node], facts: _Facts) -> None:
        self.nodes, self.f = nodes, facts
        self.new_id: dict[int, int] = {}
        self.next = 0
        self.kept: set[int] = set()
        self.first: dict[int, int] = {}

    def run(self) -> tuple[Stage, ...]:
        live = [n for n in self.nodes if n.id in self.f.live]
        last = max((self.f.ready[n.id] for n in live), default=0)
        needs = [self._needed(live, k) for k in range(last + 1)]
        stages: list[Stage] = []
        for k in range(last + 1):
            per_p = [n for n in live if not self.f.rowwise[n.id] and n.op != "reduce" and self.f.ready[n.id] == k]
            self._emit(stages, "P", per_p)
            self._emit(stages, "PR", [self.nodes[i] for i in sorted(needs[k])])
        return tuple(stages)

    def _roots(self, live: list[Node], k: int) -> list[Node]:
        """The nodes that require pass k over the row."""
        f = self.f
        return [
            n
            for n in live
            if (n.op == "reduce" and f.ready[n.id] == k + 1)
            or (f.rowwise[n.id] and (n.op in ("store", "scan") or n.id in f.checks) and f.ready[n.id] == k)
        ]

    def _needed(self, live: list[Node], k: int) -> set[int]:
        """The row values that pass k computes, found from its roots. The search stops at values of an earlier pass
        that are expensive to recompute: those are kept."""
        todo, seen = [n.id for n in self._roots(live, k)], set[int]()
        while todo:
            i = todo.pop()
            if i in seen:
                continue
            if self.first.get(i, k) < k and self._worth_keeping(self.nodes[i]):
                self.kept.add(i)
                continue
            seen.add(i)
            todo.extend(u for u in self.nodes[i].uses() if self.f.rowwise[u])
        for i in seen:
            self.first.setdefault(i, k)
        return seen

    def _worth_keeping(self, n: Node) -> bool:
        return n.op == "scan" or self._price(n.id, set()) >= KEEP_COST

    def _price(self, i: int, seen: set[int]) -> int:
        """The cost of recomputing row value `i` from its loads."""
        if i in seen or not self.f.rowwise[i]:
            return 0
        seen.add(i)
        return cost(self.nodes[i]) + sum(self._price(u, seen) for u in self.nodes[i].uses())

    def _emit(self, stages: list[Stage], over: str, nodes: list[Node]) -> None:
        if not nodes:
            return
        out = []
        for n in nodes:
            index = n.index.with_values(self.new_id) if n.index is not None else None
            args = tuple(self.new_id[a] for a in n.args)
            keep = over == "PR" and n.id in self.kept
            out.append(replace(n, id=self.next, args=args, index=index, keep=keep))
            self.new_id[n.id] = self.next
            self.next += 1
        stages.append(Stage("PR" if over == "PR" else "P", tuple(out)))
