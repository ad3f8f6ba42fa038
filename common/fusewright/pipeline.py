"""The path of one graph after capture: "canonicalize" (ATen overloads -> opset rows) makes the graph whose text is the key of the
plan cache. If the cache has no plan for it, the stages that `stages.rounds` lists in order make one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright import machine, storage
from fusewright.cache.tune import Tuner
from fusewright.config import Options
from fusewright.graph import verify
from fusewright.graph.canonicalize import CANONICALIZE
from fusewright.interface import Backend, Phase, RuleLog
from fusewright.plan import build as plan_build
from fusewright.plan import labels
from fusewright.plan.execute import cached, compared, shadow
from fusewright.plan.ir import Run
from fusewright.plan.replay.training import Handover
from fusewright.report import GraphReport, is_keeping, is_recording, warn_once
from fusewright.stages.compilation import Compilation
from fusewright.stages.running import from_disk
from fusewright.stages.timing import timed
from fusewright.strict import strictly


def _canonicalize(c: Compilation) -> None:
    disagreements = c.do(CANONICALIZE, c.graph)
    if disagreements and c.options.strict:
        raise verify.VerifyError("the opset table disagrees with the traced graph:\n  " + "\n  ".join(disagreements))
    c.report.bugs += [f"the opset table: {d}" for d in disagreements]
    c.lines = labels.lines_of(c.graph)


def _compile(c: Compilation) -> Run:
    from fusewright.stages import rounds  # imported here: a plan from the cache needs nothing that lowers

    return rounds.compile_graph(c)


def compile_graph(
    backend: Backend, options: Options, gm: GraphModule, phase: Phase, const: frozenset[Node], mode: str,
    comparison: compared.Comparison | None = None, earlier: RuleLog | None = None,
) -> Callable[[list[Any]], Any]:  # fmt: skip
    """Run every stage on one ATen graph, or find its plan in the cache. Return a callable that takes (and empties) a list of
    inputs; with a `comparison`, eager may replace it. `earlier` are rewrites that the graph already shows."""
    half = comparison.half(gm, phase) if comparison is not None else None
    unless = shadow.unless_wrapped(gm, phase)
    complete: Callable[[Run], Run] = strictly if options.strict else _as_it_is
    without = complete
    if comparison is not None and half is not None:
        complete = partial(comparison.add, half)
        without = comparison.without_constants(half, gm) if const else complete
    c, run = _found_or_compiled(backend, options, gm, phase, const, mode, earlier)
    if half is not None:
        half.changes = c.changes
    return unless(_changing(c, complete(run), without, mode) if c.prepared else complete(run))


def _changing(c: Compilation, run: Run, without: Callable[[Run], Run], mode: str) -> Run:
    from fusewright.stages.changing import Changing, may_change  # imported here: only graphs with constants need it

    return Changing(c, run, without) if may_change(c.options, mode) else run


def _as_it_is(run: Run) -> Run:
    return run


def comparison(backend: Backend, options: Options) -> compared.Comparison | None:
    """Return the comparison with eager for the graphs (forward and backward) of one traced graph; None if not requested, if
    everything must run compiled, or in a process group, where each rank would decide for itself."""
    compiled = options.strict or options.fallback == "error" or options.simulate or "contract" in options.check
    if not options.never_slower or compiled or machine.several_processes():
        return None
    capturing = machine.capturing(backend.device_type)

    def may() -> bool:
        return not (machine.several_processes() or compat.profiling() or compat.intercepted() or capturing())

    host = f"native={machine.sources('fusewright_native')[:16]}"  # whose part of a call is measured too
    scope = f"{backend.fingerprint()}|workers={backend.policy().count_workers()}|{host}"
    return compared.Comparison(backend.name, scope, options.cache, may)


def _found_or_compiled(
    backend: Backend, options: Options, gm: GraphModule, phase: Phase, const: frozenset[Node], mode: str, earlier: RuleLog | None
) -> tuple[Compilation, Run]:
    report = GraphReport(backend.name, phase, mode)
    tuner = Tuner(backend.fingerprint(), options.cache, backend.policy().count_workers())
    c = Compilation(backend, options, gm, phase, const, report, tuner, lambda c: _compile(c), earlier, handover=Handover.of(phase))
    timed(c, "canonicalize", _canonicalize)
    if options.cache and options.fallback != "error" and not options.dump and not is_recording() and _plainly_traced(gm):
        c.slot = cached.slot(backend, options, gm, phase, const)
        found = cached.find(c.slot, backend, gm, partial(from_disk, c)) if c.slot else None
        if found is not None:
            run, summary = found
            if summary and options.fallback == "warn":
                warn_once(summary)
            return c, run
    run = _compile(c)
    return c, _keeping_arguments(run, c.given) if is_keeping() else run


def _keeping_arguments(run: Run, given: list[Any]) -> Run:
    """Wrap `run` to put the arguments of its first call into `given`."""

    def call(args: list[Any]) -> Any:
        if not given:
            given[:] = args
        return run(args)

    return call


def _plainly_traced(gm: GraphModule) -> bool:
    """Whether the graph's text fully describes the memory that it reads; otherwise its plan must not be cached."""
    held = (plan_build.attribute(gm, str(n.target)) for n in gm.graph.find_nodes(op="get_attr"))
    odd = (isinstance(t, torch.Tensor) and not compat.is_fake(t) and storage.why_not(t) for t in held)
    return storage.UNTRACED not in gm.meta and not any(odd)
