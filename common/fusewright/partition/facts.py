"""What planning finds out about the nodes of a traced graph. Facts are added and never taken back, so planning ends."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from fusewright.graph.view import dependents
from fusewright.interface import Verdict, Why

TRIALS = 3
"""How often a region may be suspected, or a value mended, before eager runs it for good."""

_UNTRACEABLE = Verdict(Why.DENIED, "the first run found that torch traced another shape than eager makes")


@dataclass
class Facts:
    """By name of a node of the traced graph. `refused`: the backend declined it, crashed on it or could not build its kernels,
    or its plan was not valid. `suspected`: how often a region of it made something else than was traced; while that is more often
    than it was `acquitted`, eager runs it, which shows who is to blame. `mended`: how often its metadata was mended.
    `distrusted`: it makes something else than was traced, beyond mending; eager runs it and what reads it."""

    refused: dict[str, Verdict] = field(default_factory=dict)
    suspected: Counter[str] = field(default_factory=Counter)
    acquitted: Counter[str] = field(default_factory=Counter)
    mended: Counter[str] = field(default_factory=Counter)
    distrusted: set[str] = field(default_factory=set)
    _reasons: dict[str, Verdict] = field(default_factory=dict)

    def __len__(self) -> int:
        counted = (self.suspected, self.acquitted, self.mended)
        return len(self.refused) + len(self.distrusted) + sum(c.total() for c in counted)

    def denied(self, graph: Graph) -> dict[str, Verdict]:
        """The nodes of a graph that the backend is not asked for, and why."""
        doubtful = [n for n in graph.nodes if n.name in self.distrusted]
        items = [u for n in doubtful for u in n.users if u.target is operator.getitem]
        untraceable = {n.name for d in (*doubtful, *items) for n in (d, *d.users)}
        return {**dict.fromkeys(untraceable, _UNTRACEABLE), **self.refused, **self.suspects()}

    def suspects(self) -> dict[str, Verdict]:
        """Those that are suspected now, and of what."""
        return {n: self._reasons[n] for n, times in self.suspected.items() if times > self.acquitted[n]}

    def refuse(self, found: Mapping[str, Verdict]) -> None:
        """Nodes that were given back. At least one of them was not known: nobody asks twice for what was refused."""
        before = len(self)
        self.refused.update(found)
        assert len(self) > before, f"{sorted(found)} had been refused before"

    def suspect(self, found: Mapping[str, Verdict]) -> None:
        """The nodes of a region that made something else than was traced; too often, and they are refused."""
        fresh = {n: v for n, v in found.items() if n not in self.suspects()}
        if any(self.suspected[n] >= TRIALS for n in fresh):
            self.refuse(found)
        else:
            self.suspected.update(fresh.keys())
            self._reasons.update(fresh)

    def mend(self, nodes: Iterable[Node]) -> bool:
        """Whether the metadata of these nodes is to be mended once more; if not, they are distrusted. Suspects that make one of
        them or read what depends on one were built for metadata that was not true."""
        nodes = list(nodes)
        live, behind = self.suspects(), {n.name for n in dependents(nodes)}
        guiltless = {str(live[n]) for n in live if n in behind}
        self.acquitted.update(n for n, reason in live.items() if str(reason) in guiltless)
        names = [n.name for n in nodes]
        if max(self.mended[n] for n in names) >= TRIALS:
            self.distrusted.update(names)
            return False
        self.mended.update(names)
        return True
