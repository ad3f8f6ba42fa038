"""Stage `lower`: claim ops, form regions, let the backend compile each."""

from __future__ import annotations

import logging

from fusewright.errors import BackendCrashError
from fusewright.forms import passes
from fusewright.interface import Compiled, Decline, Fragment, Opaque, Region, Verdict, Why
from fusewright.plan.carried import carried_ops
from fusewright.plan.execute import contract, opaque
from fusewright.stages.compilation import Compilation, Context, Refused, origin

log = logging.getLogger("fusewright")


def lower(c: Compilation) -> Refused:
    """Partition the graph and compile the regions. Collect everything the backend gives back."""
    denied = c.facts.denied(c.graph)
    c.working, found = c.do(passes.EXPAND, c.graph, c.constants, c.backend, denied, c.phase)
    c.index = found.index(c.working, c.phase)
    c.partition = c.do(passes.PARTITION, c.backend, c.index, denied)
    c.report.bugs += [b for b in c.partition.bugs if b not in c.report.bugs]
    c.carried.clear()
    c.compiled, refused = _compile_regions(c)
    return refused


def _compile_regions(c: Compilation) -> tuple[list[tuple[Region, Compiled]], Refused]:
    context = Context(c, c.rules.copy())
    c.report.rules = context.rules.hits
    results: list[tuple[Region, Compiled]] = []
    denied: dict[str, Verdict] = {}
    for region in c.partition.regions:
        ids: tuple[int, ...] = tuple(op.id for op in region.ops)
        try:
            result = _guarded(c, region, c.do(passes.COMPILE, region, c.backend, context, c.index.temporaries))
        except Decline as d:
            verdict, ids = Verdict(d.why, d.detail), tuple(i for i in d.ops if i in ids) or ids
        except Exception as e:
            if c.options.strict:
                raise BackendCrashError(f"backend {c.backend.name!r} crashed on {region.name}: {e}") from e
            verdict = Verdict(Why.CRASHED, f"{type(e).__name__}: {e}")
            c.report.bugs.append(f"{c.backend.name}.compile crashed: {verdict.detail}")
            log.warning(
                "fusewright: backend %s crashed while compiling; eager runs those ops. %s", c.backend.name, verdict
            )
        else:
            results.append((region, result))
            continue
        denied.update({origin(c.index.node_of[i]): verdict for i in ids})
    return results, denied


def _guarded(c: Compilation, region: Region, result: Compiled) -> Compiled:
    """Record the notes of a backend's answer, and wrap the answer in its run-time checks."""
    if isinstance(result, Opaque):
        return Opaque(opaque.guarded(c.backend.name, region, result.fn))
    if not isinstance(result, Fragment):
        raise TypeError(f"compile() returned {type(result).__name__}, not Fragment or Opaque")
    nodes = [c.index.node_of[op.id] for op in region.ops]
    c.carried.update(carried_ops(c.index, nodes, result.instructions))
    if "contract" in c.options.check:
        inputs = [c.index.values(n)[0] for n in c.working.find_nodes(op="placeholder")]
        return contract.checked(c.backend, region, result, c.index.temporaries, inputs)
    return result
