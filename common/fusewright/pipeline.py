"""The path of one graph, stage by stage. Read this file first; the larger stages are implemented in `fusewright.stages`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright import storage
from fusewright.cache.tune import Tuner
from fusewright.config import Options
from fusewright.errors import BackendCrashError
from fusewright.forms import passes
from fusewright.graph import constants, printer, verify
from fusewright.interface import Backend, Phase, RuleLog, Verdict, Why
from fusewright.plan import build as plan_build
from fusewright.plan import labels
from fusewright.plan.execute import cached, compared
from fusewright.plan.execute.retained import Handover
from fusewright.plan.ir import Run
from fusewright.report import GraphReport, is_keeping, is_recording, warn_once
from fusewright.stages.account import account
from fusewright.stages.compilation import Compilation, Refused
from fusewright.stages.lowering import lower
from fusewright.stages.planning import plan
from fusewright.stages.running import from_disk
from fusewright.strict import strictly

MAX_ROUNDS = 32
"""Maximum rounds of planning before eager gets the whole graph."""


def _canonicalize(c: Compilation) -> None:
    disagreements = c.do(passes.CANONICALIZE, c.graph)
    if disagreements and c.options.strict:
        raise verify.VerifyError("the opset table disagrees with the traced graph:\n  " + "\n  ".join(disagreements))
    c.report.bugs += [f"the opset table: {d}" for d in disagreements]
    c.lines = labels.lines_of(c.graph)


def _simplify(c: Compilation) -> None:
    c.rules = RuleLog(c.options.disable_rules, c.options.fuel)
    c.do(passes.REWRITE, c.graph, c.rules)
    if "cse" not in c.options.disable_rules:
        c.rules.hits["cse"] += c.do(passes.CSE, c.graph)


def _constants(c: Compilation) -> None:
    c.constants = constants.find(c.graph, c.const, c.phase)


Stage: TypeAlias = Callable[[Compilation], "Refused | None"]

# earlier steps: capture, then "canonicalize" (ATen overloads -> opset rows), whose text is the key of the plan cache
METADATA_STAGES: tuple[tuple[str, Stage], ...] = (
    ("simplify", _simplify),  # exact rewrite rules, CSE, dead code
    ("constants", _constants),  # what depends on weights alone
)
CLAIM_STAGES: tuple[tuple[str, Stage], ...] = (
    ("lower", lower),  # claims, regions, fragments
    ("plan", plan),  # one flat list of instructions, constants apart, as Python; code of its kernels
)
STAGES = METADATA_STAGES + CLAIM_STAGES


def _compile(c: Compilation) -> Run:
    """The planning loop. Each round runs the stages in order until one refuses some ops. Refused ops join the facts, which only
    grow, and the next round claims again with all facts known. When a first run contradicts the metadata, planning resumes here
    with the facts so far (`stages.untrue.plan_again`)."""
    refused = _round(c, STAGES)
    for count in itertools.count(1):
        if not refused:
            break
        c.facts.refuse(refused if count < MAX_ROUNDS else _give_up(c))
        refused = _round(c, CLAIM_STAGES)
    c.tuner.save()
    account(c)
    return c.run


def _round(c: Compilation, stages: Sequence[tuple[str, Stage]]) -> Refused:
    return next((found for name, stage in stages if (found := _timed(c, name, stage))), {})


def _give_up(c: Compilation) -> Refused:
    """Refuse every op of the graph, because the backend still gives some back after `MAX_ROUNDS` rounds."""
    message = f"backend {c.backend.name!r} still gives ops back after {MAX_ROUNDS} rounds of planning"
    if c.options.strict:
        raise BackendCrashError(message)
    c.report.bugs.append(message)
    return {n.name: Verdict(Why.DECLINED, message) for n in c.graph.nodes}


def compile_graph(
    backend: Backend, options: Options, gm: GraphModule, phase: Phase, const: frozenset[Node], mode: str,
    comparison: compared.Comparison | None = None,
) -> Callable[[list[Any]], Any]:  # fmt: skip
    """Run every stage on one ATen graph, or find its plan in the cache. Return a callable that takes (and empties) a list of
    inputs; with a `comparison`, eager may replace it."""
    traced = (compared.text_of(gm.graph), compared.eager_of(gm), compared.classes(gm.graph)) if comparison else None
    run = _found_or_compiled(backend, options, gm, phase, const, mode)
    if comparison is not None and traced is not None:
        text, eager, sizes = traced
        return comparison.add(phase, text, run, eager, sizes)
    return strictly(run) if options.strict else run


def comparison(backend: Backend, options: Options) -> compared.Comparison | None:
    """Return what compares the graphs of one traced graph with eager; None if not requested, or if everything must run
    compiled."""
    if not options.never_slower or options.strict or options.simulate or "contract" in options.check:
        return None
    recorder = backend.recorder()

    def may() -> bool:
        if compat.in_process_group():  # each rank would decide for itself
            return False
        return recorder is None or recorder.stream(backend.device_type) is not None

    scope = f"{backend.fingerprint()}|workers={backend.policy().count_workers()}"
    return compared.Comparison(backend.name, scope, options.cache, may)


def _found_or_compiled(
    backend: Backend, options: Options, gm: GraphModule, phase: Phase, const: frozenset[Node], mode: str
) -> Run:
    report = GraphReport(backend.name, phase, mode)
    tuner = Tuner(backend.fingerprint(), options.cache, backend.policy().count_workers())
    c = Compilation(backend, options, gm, phase, const, report, tuner, lambda c: _compile(c), handover=Handover.of(phase))
    _timed(c, "canonicalize", _canonicalize)
    if options.cache and options.fallback != "error" and not options.dump and not is_recording() and _plainly_traced(gm):
        c.slot = cached.slot(backend, options, gm, phase, const)
        found = cached.find(c.slot, backend, gm, partial(from_disk, c)) if c.slot else None
        if found is not None:
            run, summary = found
            if summary and options.fallback == "warn":
                warn_once(summary)
            return run
    return _giving(c.given, _compile(c)) if is_keeping() else _compile(c)


def _giving(given: list[Any], run: Run) -> Run:
    """Wrap `run` to keep its first arguments."""

    def call(args: list[Any]) -> Any:
        if not given:
            given[:] = args
        return run(args)

    return call


def _plainly_traced(gm: GraphModule) -> bool:
    """Whether the graph's text fully describes the memory that it reads; otherwise its plan must not be shared."""
    held = (plan_build.attribute(gm, str(n.target)) for n in gm.graph.find_nodes(op="get_attr"))
    odd = (isinstance(t, torch.Tensor) and not compat.is_fake(t) and storage.why_not(t) for t in held)
    return storage.UNTRACED not in gm.meta and not any(odd)


def _timed(c: Compilation, name: str, stage: Stage) -> Refused:
    start = time.perf_counter()
    with compat.sizes_settled(c.gm) as assumed:
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
