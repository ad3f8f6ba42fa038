"""Rewrite rows of a backend's regions: each has an id, a pattern, a condition, a cost and a function that writes the result.

First the rows claim ops, in the order of the region; then the claims are written, in the same order. Like the host's rules,
rows are counted, switched off by id and limited by fuel (`RuleLog`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from fusewright.forms.spec import Pass
from fusewright.interface import OpView, RuleLog
from fusewright.toolkit.region.graph import Claim, RegionGraph
from fusewright.toolkit.region.pattern import RULES, Chain, Match, P, find
from fusewright.toolkit.region.verify import REGION

log = logging.getLogger(__name__)

Context: TypeAlias = Any
"""The argument that a backend passes to the functions of its rows; any type."""


def _as_found(match: Match, context: Context) -> Match:
    return match


def _yes(match: Match, context: Context) -> bool:
    return True


def _nothing_else(match: Match, ops: tuple[OpView, ...], context: Context) -> tuple[Claim, ...]:
    return ()


@dataclass(frozen=True)
class Row:
    """One rewrite. `when` is the condition, `pays` the cost: a formula or a short measurement. `write` writes the replacement.

    `extend` checks what a pattern cannot express and returns the match with more ops and captures, or None to reject it;
    `also` are claims that must be granted with this one. `note` says in reports how the ops were lowered.
    """

    id: str
    pattern: P | Chain
    write: Callable[[Match, Context], None]
    note: str | Callable[[Match], str]
    when: Callable[[Match, Context], bool] = _yes
    extend: Callable[[Match, Context], Match | None] = _as_found
    pays: Callable[[Match, Context], bool] = _yes
    also: Callable[[Match, tuple[OpView, ...], Context], tuple[Claim, ...]] = _nothing_else

    def __post_init__(self) -> None:
        RULES.add(self.id)

    def roots(self) -> tuple[str, ...]:
        """The names of ops at which the pattern may match."""
        return (self.pattern.anchor if isinstance(self.pattern, Chain) else self.pattern).names()

    def match(self, op: OpView, graph: RegionGraph, context: Context, rules: RuleLog) -> Match | None:
        """Return the row's match at an op, if its conditions hold and it pays off."""
        if not rules.allows(self.id):
            return None
        found = find(self.pattern, op, graph, context, rules.allows)
        if found is None or not self.when(found, context):
            return None
        found = self.extend(found, context)
        return found if found is not None and self.pays(found, context) else None

    def claim(self, match: Match, graph: RegionGraph, context: Context) -> Claim:
        """Make the claim for a match."""
        ops = graph.ordered(match.ops)
        note = self.note if isinstance(self.note, str) else self.note(match)
        also = self.also(match, ops, context)
        return Claim(ops, match.last, partial(self.write, match), note, also, (self.id, *match.rules))


def by_root(rows: Iterable[Row]) -> Mapping[str, Sequence[Row]]:
    """Rows by the name of their root op, in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        for name in row.roots():
            found.setdefault(name, []).append(row)
    return found


def first(
    rows: Iterable[Row], op: OpView, graph: RegionGraph, context: Context, rules: RuleLog
) -> Claim | None:
    """Return the claim of the first row that matches at an op."""
    for row in rows:
        if (match := row.match(op, graph, context, rules)) is not None:
            return row.claim(match, graph, context)
    return None


def _claimed(graph: RegionGraph, rules: RuleLog, ask: Callable[[OpView], Claim | None]) -> None:
    for op in graph:
        claim = ask(op) if graph.free(op) else None
        if claim is None:
            continue
        if graph.claim(claim):
            rules.hit(*(id for part in (claim, *claim.also) for id in part.rules))
        else:
            log.debug("%s of %s is left out: another call has taken a part of it", claim.note, op.op)


def _rewritten(graph: RegionGraph, rows: Sequence[Row], context: Context, rules: RuleLog) -> bool:
    table = by_root(rows)
    _claimed(graph, rules, lambda op: first(table.get(op.op, ()), op, graph, context, rules))
    found = graph.claims
    for claim in found:
        graph.release(claim)
        claim.write(context)
    return bool(found)


claimed = Pass("claims", "region", REGION, _claimed, lambda args, _: args[:1] if args[0].claims else ())
"""The claiming pass: ask for a claim at each op that is still free, in order. Claims that overlap an earlier one are
dropped."""

rewrite = Pass("rewrite", "region", REGION, _rewritten, lambda args, changed: args[:1] if changed else ())
"""One pass of rows that replace ops by ops; returns whether anything changed. All matches are found before the first is
written."""
