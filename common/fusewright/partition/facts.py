"""What planning learns about the nodes of a traced graph. Facts are added and never removed, so planning terminates."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from fusewright.graph.view import dependents
from fusewright.interface import Verdict, Why

TRIALS = 3
"""How often a region may be suspected, or a value mended, before eager runs it permanently."""

_UNTRACEABLE = Verdict(Why.DENIED, "the first run found that torch traced another shape than eager makes")


@dataclass
class Facts:
    """Facts by node name of the traced graph. `refused`: the backend declined the node, crashed on it or could not build its
    kernels, or the plan was invalid. `suspected`: how often a region with the node contradicted the trace; while this exceeds
    `acquitted`, eager runs the node, which shows what is at fault. `mended`: how often its metadata was mended. `distrusted`:
    the node contradicts the trace beyond mending; eager runs it and its readers."""

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
        """The nodes of a graph that must not be offered to the backend, and why."""
        doubtful = [n for n in graph.nodes if n.name in self.distrusted]
        items = [u for n in doubtful for u in n.users if u.target is operator.getitem]
        untraceable = {n.name for d in (*doubtful, *items) for n in (d, *d.users)}
        return {**dict.fromkeys(untraceable, _UNTRACEABLE), **self.refused, **self.suspects()}

    def suspects(self) -> dict[str, Verdict]:
        """The nodes suspected now, with the reasons."""
        return {n: self._reasons[n] for n, times in self.suspected.items() if times > self.acquitted[n]}

    def refuse(self, found: Mapping[str, Verdict]) -> None:
        """Add refused nodes. At least one must be new, because refused nodes are never offered again."""
        before = len(self)
        self.refused.update(found)
        assert len(self) > before, f"{sorted(found)} had been refused before"

    def suspect(self, found: Mapping[str, Verdict]) -> None:
        """Suspect the nodes of a region that contradicted the trace; refuse them after too many trials."""
        fresh = {n: v for n, v in found.items() if n not in self.suspects()}
        if any(self.suspected[n] >= TRIALS for n in fresh):
            self.refuse(found)
        else:
            self.suspected.update(fresh.keys())
            self._reasons.update(fresh)

    def mend(self, nodes: Iterable[Node]) -> bool:
        """Return whether to mend the metadata of these nodes once more; otherwise distrust them. Suspects that make or depend
        on one of them were built for wrong metadata, so they are acquitted."""
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
