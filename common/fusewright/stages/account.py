"""The report of a compilation: what happened to each op, as records, one log line or an error."""

from __future__ import annotations

import logging

from fusewright.errors import FallbackError, counted
from fusewright.graph.origin import compiled_at, first_trace
from fusewright.interface import YES, Fragment, TensorSpec, Verdict, Why
from fusewright.partition.cost import work
from fusewright.plan.inplace import copies_of_kernels
from fusewright.report import OpRecord, publish, warn_once
from fusewright.stages.compilation import Compilation

log = logging.getLogger("fusewright")


def account(c: Compilation) -> None:
    """Fill the report; log one line on what runs in eager, or raise, as the options say."""
    r, policy = c.report, c.backend.policy()
    notes: dict[int, str] = {}
    for _, result in c.compiled:
        notes.update(result.notes if isinstance(result, Fragment) else {})
    claimed = {op.id for region, _ in c.compiled for op in region.ops}
    claimed |= copies_of_kernels(c.plan) if c.compiled else set()
    for op in c.index.ops.values():
        estimate, note = work(op), notes.get(op.id, "")
        where = "eager" if op.id not in claimed else "carried" if op.id in c.carried else "lowered"
        if where != "lowered" and estimate.kind == "view":
            where = "view"
        shape = str(_shape(op.outs[0].spec)) if op.outs else ""
        verdict = _corrected(c.partition.verdicts[op.id], where, note)
        r.ops.append(OpRecord(op.op, where, verdict, note, op.source, shape, estimate.seconds(policy), op.id))
    r.regions = len(c.compiled)
    _log(c)
    publish(r)
    if r.by_eager and c.options.fallback == "error":
        lines = "\n".join(f"  {f.op} {f.shape} at {f.source or '?'}: {f.verdict}" for f in r.by_eager[:20])
        raise FallbackError(f"{r.summary()}\n{lines}")
    if r.fallbacks and c.options.fallback == "warn":  # no warning if ops are only carried: the backend chose eager's call
        warn_once(r.summary())


def _log(c: Compilation) -> None:
    """Log for `TORCH_LOGS=fusewright` (`+fusewright` adds the plan)."""
    if log.isEnabledFor(logging.INFO):
        counts = ", ".join(f"{c.report.count(where)} {where}" for where in ("lowered", "carried", "eager"))
        stages = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in c.report.stages.items())
        what = compiled_at(first_trace(c.graph)) or "a graph"
        regions = counted(c.report.regions, "region")
        log.info("%s: %s graph of %s: %s, %s; %s", c.backend.name, c.phase, what, counts, regions, stages)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", c.plan_text())


def _corrected(claim: Verdict, where: str, note: str) -> Verdict:
    """Correct the verdict on a claimed op by its fragment, which knows more than the claim."""
    if where == "carried" and claim.why is not Why.CARRIED:
        return Verdict(Why.CARRIED, note if note not in ("", "eager") else "eager's own call, inside a region")
    return YES if where == "lowered" else claim


def _shape(spec: TensorSpec | None) -> str:
    if spec is None:
        return ""
    return f"{str(spec.dtype).removeprefix('torch.')}[{', '.join(map(str, spec.shape))}]"
