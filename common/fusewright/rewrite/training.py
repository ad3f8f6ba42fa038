"""Unrolled loops in training: rewritten before gradients are traced, so that autograd sees one scan and rolled operations.

What remains of a loop has gradients of its own: that of a scan is a scan in the opposite order, and those of operations on all
steps are operations on all steps. A backward graph of single steps is never traced.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright.capture import direct
from fusewright.graph.canonicalize import canonicalize
from fusewright.graph.cse import merge_common
from fusewright.graph.effects import drop_dead_code
from fusewright.graph.view import is_projection
from fusewright.interface import RuleLog
from fusewright.rewrite.engine import READER, Rewriter
from fusewright.rewrite.loops import associative, filled, recurrence, repeated, scanned, unrolled
from fusewright.rewrite.rules import RULES

log = logging.getLogger("fusewright")

_BEFORE = tuple(r for r in RULES if r.id.partition(".")[0] != "sdpa")
"""Rules that show the loops. Attention stays as it was traced."""


def rolled(gm: GraphModule, example_inputs: Sequence[Any], rules: RuleLog) -> GraphModule | None:
    """The Dynamo graph of a training step as an ATen graph whose loops are scans and operations on all steps; None if it has
    none, or is too unusual to be recorded without gradients. Of a graph with checkpoints only what these hold is rewritten."""
    if checkpoints := list(_checkpoints(gm)):
        return _rolled_within(gm, checkpoints, rules)
    return _rolled_alone(gm, example_inputs, rules)


def _checkpoints(gm: GraphModule) -> Iterator[str]:
    """The names of the bodies that are computed again in the backward pass."""
    for node in gm.graph.nodes:
        if compat.is_higher_order(node.target) and getattr(node.target, "__name__", "") == "tag_activation_checkpoint":
            yield str(node.args[0].target)


def _rolled_within(gm: GraphModule, checkpoints: Sequence[str], rules: RuleLog) -> GraphModule | None:
    """Rewrite the loops of bodies. In a region of autocast they stay: casts that are recorded would be cast again."""
    if compat.autocast_enabled() or any(compat.enters_autocast(n.target) for n in gm.graph.nodes):
        return None
    bodies = {name: new for name in dict.fromkeys(checkpoints) if (new := _rolled_body(getattr(gm, name), rules)) is not None}
    if not bodies:
        return None
    made = GraphModule(gm, _copy(gm.graph))
    for name, body in bodies.items():
        setattr(made, name, body)
    made.meta = gm.meta
    compat.keep_sources(made, gm)
    return made


def _rolled_body(body: GraphModule, rules: RuleLog) -> GraphModule | None:
    """A body with its loops rewritten, if nobody chooses by operators what is saved (torch stores that choice in `meta`)."""
    (output,) = body.graph.find_nodes(op="output")
    if body.meta or not isinstance(output.args[0], tuple):
        return None
    inputs = [n.meta.get("example_value") for n in body.graph.find_nodes(op="placeholder")]
    return _rolled_alone(body, inputs, rules, within=True)


def _rolled_alone(gm: GraphModule, example_inputs: Sequence[Any], rules: RuleLog, within: bool = False) -> GraphModule | None:
    """The same for a graph without checkpoints, or a body `within` one."""
    try:
        aten = direct.forward(gm, example_inputs)
    except Exception as e:  # of any kind: the step as it was written can still be traced
        log.info("loops of a training step stay as they are: %s", str(e).partition("\n")[0])
        return None
    graph = _rolled(aten.graph, rules, within)
    if graph is None:
        return None
    for old, new in zip(*(g.find_nodes(op="placeholder") for g in (gm.graph, graph)), strict=True):
        new.meta.update(old.meta)
    made = GraphModule(aten, graph)
    made.meta = gm.meta
    compat.keep_sources(made, gm)
    return made


def _rolled(recorded: Graph, rules: RuleLog, within: bool) -> Graph | None:
    """A recorded forward graph with its loops rewritten; None if there are none. Chains whose states are read one by one stay: each
    such read would have a gradient of the size of all states."""
    canonicalize(recorded)
    Rewriter(recorded, RuleLog(rules.disabled)).run(_BEFORE)
    if "cse" not in rules.disabled:
        merge_common(recorded)
    kept: set[str] = set()
    while True:
        graph, tried = _copy(recorded), rules.copy()
        associative.join(graph, tried)
        recurrence.recur(graph, tried, kept)
        filled.fill(graph, tried)
        unrolled.roll(graph, tried)
        single = {n.meta.get(scanned.CHAIN, "") for n in graph.nodes if _in_pieces(n)}
        if not single:
            break
        if single <= kept:  # a tree, whose rule knows no chains
            return None
        kept |= single
    if not _derivable(graph):
        return None
    if not within:  # what is computed again is marked call by call
        repeated.repeat(graph, tried)
    if not tried.hits:
        return None
    rules.hits, rules.spent = tried.hits, tried.spent
    return graph


_WITHOUT_DERIVATIVE = ("copy", "bernoulli_p", "normal")
"""Rows for writes in place that autograd knows in place only."""


def _derivable(graph: Graph) -> bool:
    """Whether autograd has a derivative of every op, once what is copied into a piece of a tensor is taken as it is."""
    r = Rewriter(graph, RuleLog())
    for node in [n for n in graph.nodes if filled.copies_into_piece(n)]:
        if (source := r.attempt(node, filled.copied, r, node)) is not None:
            r.replace(node, source)
    drop_dead_code(graph)
    return not any(READER.name(n) in _WITHOUT_DERIVATIVE for n in graph.nodes)


def _copy(graph: Graph) -> Graph:
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _in_pieces(node: Node) -> bool:
    """Whether many single states of a scan are read."""
    if not unrolled.is_scan(node):
        return False
    readers = [u for n in node.users for u in (n.users if is_projection(n) else [n])]
    return sum(READER.name(u) == "select" for u in readers) >= unrolled.LEAST_STEPS
