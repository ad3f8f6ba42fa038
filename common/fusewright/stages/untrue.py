"""Turn mismatches of a first run into facts: mend metadata or suspect a region, then compile again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from fusewright.errors import BackendContractError
from fusewright.graph import retrace
from fusewright.graph.spec import tensor_spec, value_of
from fusewright.interface import Fragment, Verdict, Why
from fusewright.plan import build as plan_build
from fusewright.plan.execute import opaque
from fusewright.plan.execute.firstrun import MetadataMismatch
from fusewright.plan.ir import Call, Run, reads
from fusewright.report import GraphReport
from fusewright.stages.compilation import Compilation, origin

log = logging.getLogger("fusewright")


def plan_again(c: Compilation, found: Sequence[MetadataMismatch]) -> Run:
    """Record what a first run found as facts, and compile the graph again."""
    before = len(c.facts)
    for mismatch in found:
        if not _mended(c, mismatch):
            _learn(c, mismatch)
    assert len(c.facts) > before
    c.report.superseded = True
    report = GraphReport(c.backend.name, c.phase, c.report.capture)
    return c.again(replace(c, report=report, compiled=[], carried=set()))


def _mended(c: Compilation, mismatch: MetadataMismatch) -> bool:
    """Whether the metadata of a value is true by now, because an input's metadata was mended."""
    node = c.index.node_by_value(mismatch.id)
    if node is None or mismatch.actual is None:
        return False
    val, values = value_of(node), [v.id for v in c.index.values(node)]
    val = val[values.index(mismatch.id)] if isinstance(val, tuple | list) else val
    if not isinstance(val, torch.Tensor):
        return False
    spec = tensor_spec(val)
    return not opaque.mismatch(mismatch.actual, spec, mismatch.sizes) and not opaque.another_format(mismatch.actual, spec)


def _learn(c: Compilation, mismatch: MetadataMismatch) -> None:
    """Suspect the region that made a value, or mend the metadata of one made by eager, or leave its readers to eager."""
    suspects = _suspects(c, mismatch)
    if suspects:
        c.facts.suspect(suspects)
        return
    made = c.index.node_by_value(mismatch.id)
    node = next((n for n in c.graph.nodes if made is not None and n.name == origin(made)), None)
    if node is None or made is None or node.name in c.facts.distrusted:
        raise BackendContractError(
            f"backend {c.backend.name!r}: {mismatch}; no traced value stands behind it"
        ) from mismatch
    log.info("traced metadata of %s was untrue (%s); compiling again", node.name, mismatch)
    same = retrace.alike(c.graph, node)
    if c.facts.mend(same):
        try:
            _mend(c, made, same, mismatch)
        except ValueError:
            c.facts.distrusted.update(n.name for n in same)


def _suspects(c: Compilation, mismatch: MetadataMismatch) -> dict[str, Verdict]:
    """The nodes of the region that made a value, except by eager's own call; none if eager made it.

    Either the traced metadata is wrong or the backend broke its contract. In the next run eager makes the value, which tells.
    """
    for nodes, (region, result) in zip(c.partition.members, c.compiled, strict=True):
        made = [i for i in result.instructions if mismatch.id in i.outs] if isinstance(result, Fragment) else []
        own = [plan_build.aten_call(c.index, n) for n in nodes]
        if any(isinstance(i, Call) and not any(_same_call(i, o) for o in own) for i in made):
            op = next((op for op in region.ops if mismatch.id in (v.id for v in op.outs)), None)
            what = f"{op.op}{f' at {op.source}' if op.source else ''}" if op else "a temporary"
            verdict = Verdict(Why.CRASHED, f"{region.name} ({region.op_names}): {what} {mismatch.reason}")
            return {origin(n): verdict for n in nodes}
    return {}


def _same_call(a: Call, b: Call) -> bool:
    return (a.target, a.outs, set(reads(a))) == (b.target, b.outs, set(reads(b)))


def _mend(c: Compilation, made: Node, same: Sequence[Node], mismatch: MetadataMismatch) -> None:
    """ValueError where the metadata cannot be mended."""
    if mismatch.actual is None:
        raise ValueError("no metadata says what its memory holds")
    if not isinstance(same[0].meta.get("val"), tuple | list):
        for n in same:
            retrace.mend(c.graph, n, mismatch.actual)
        return
    if "origin" in made.meta:
        raise ValueError("one of several results of an op that was expanded")
    position = [v.id for v in c.index.values(made)].index(mismatch.id)
    for n in same:
        retrace.mend_item(c.graph, n, position, mismatch.actual)


def blame(c: Compilation, suspects: Mapping[str, Verdict]) -> None:
    """Report a contract violation: eager made what was traced, and the backend did not."""
    message = f"backend {c.backend.name!r}, {next(iter(suspects.values())).detail}. This is a bug of the backend."
    c.report.bugs.append(message)
    if c.options.strict:
        raise BackendContractError(message)
    log.warning("fusewright: %s Eager runs those ops.", message)
