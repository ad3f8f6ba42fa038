"""Run one stage of the pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from fusewright import _torch_compat as compat
from fusewright import machine
from fusewright.graph import printer, verify
from fusewright.report import is_recording
from fusewright.stages.compilation import Compilation, Refused

Stage: TypeAlias = Callable[[Compilation], "Refused | None"]


def timed(c: Compilation, name: str, stage: Stage) -> Refused:
    """Run a stage; record its time, the sizes it assumed, and the resulting graph as text."""
    start = time.perf_counter()
    with compat.sizes_settled(c.gm) as assumed, machine.on_host():
        refused = stage(c) or {}
    if assumed and c.options.strict:
        raise verify.VerifyError(f"{name} assumed of the sizes: {', '.join(assumed)}")
    c.report.bugs += [f"{name} assumed of the sizes: {a}" for a in assumed]
    c.report.spans.append((name, start, time.perf_counter() - start))
    c.report.stages[name] = c.report.stages.get(name, 0.0) + c.report.spans[-1][2]
    if not refused:
        _after(c, name)
    return refused


def _after(c: Compilation, stage: str) -> None:
    graph = c.working if stage in ("lower", "plan") else c.graph
    wanted = stage in c.options.dump or "all" in c.options.dump
    if wanted or is_recording():
        const = c.constants.values if stage == "constants" else ()
        report_text = c.plan_text() if stage == "plan" else printer.to_text(graph, const=const)
        c.report.texts[stage] = report_text
        if wanted:
            print(f"# {c.backend.name}: {c.phase} graph after {stage}\n{report_text}")
    traced = c.plan_text if stage == "plan" else partial(printer.to_text, graph)
    compat.trace_artifact(f"fusewright_{stage}", lambda: c.report.texts.get(stage) or traced())
