"""Turn a plan into a callable: the first run is checked, later ones may be replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusewright.graph.effects import has_collectives
from fusewright.interface import KernelCode
from fusewright.plan import build as plan_build
from fusewright.plan.execute import cached, codegen
from fusewright.plan.execute.firstrun import checked_first
from fusewright.plan.execute.observed import observed_first
from fusewright.plan.ir import Run
from fusewright.plan.replay.inference import replayed
from fusewright.plan.replay.training import retained
from fusewright.report import Kept, is_keeping
from fusewright.stages.compilation import Compilation, origin
from fusewright.stages.untrue import blame, plan_again


def finish(c: Compilation, kernels: Mapping[str, KernelCode]) -> None:
    """Make the plan a callable. Its first run is checked if anything relies on metadata: a lowering, or a recording."""
    c.plan.doubted = _doubted(c)
    plain = codegen.load(c.plan, kernels)
    c.plan_text = partial(codegen.to_text, c.plan, kernels)
    if is_keeping():
        c.report.kept = Kept(c.plan, kernels, plain, c.index, c.given)
    _note_constants(c, c.plan, plain)
    c.run = run = _replaying(c, c.plan, kernels, plain)
    if c.compiled or c.facts.suspects() or run is not plain:
        checked = codegen.load(_without(c.plan, c.plan.doubted), kernels, checked=True, prepared=codegen.prepared_of(plain))
        again, passed = (lambda found: plan_again(c, found)), (lambda: _passed(c))
        if has_collectives(c.graph):
            eager = _without(plan_build.build(c.index, (), ()), c.plan.doubted)
            c.run = observed_first(eager, checked, run, again, passed, c.backend.name)
        else:
            check, written = codegen.check_of(checked), _written_inputs(c.plan)
            c.run = checked_first(checked, run, again, passed, written, _devices(c.plan), lambda: check.complete)


def from_disk(c: Compilation, plan: plan_build.Plan, kernels: Mapping[str, KernelCode], plain: Run) -> Run:
    """Make a cached plan a callable, without checks. Its first call is plain, to load everything that a recording of training,
    which does not warm up, must find loaded."""
    _note_constants(c, plan, plain)
    later, called = _replaying(c, plan, kernels, plain), False

    def run(args: list[Any]) -> Any:
        nonlocal called
        if called:
            return later(args)
        result = plain(args)
        called = True
        return result

    return plain if later is plain else run


def _replaying(c: Compilation, plan: plan_build.Plan, kernels: Mapping[str, KernelCode], plain: Run) -> Run:
    recorder = c.backend.recorder()
    if c.phase == "infer":
        return replayed(plan, kernels, plain, recorder, c.report.tell_replay)
    return retained(plan, kernels, plain, recorder, c.report.tell_replay, c.handover)


def _note_constants(c: Compilation, plan: plan_build.Plan, plain: Run) -> None:
    """Note the plan's constants. With `check="weights"`, they compare every byte of their weights at each call."""
    prepared = codegen.prepared_of(plain)
    c.prepared.clear()
    if prepared is not None and plan.prepare_inputs:
        prepared.whole = "weights" in c.options.check
        c.prepared.append((prepared, [plan.inputs.index(i) for i in plan.prepare_inputs]))


def _doubted(c: Compilation) -> frozenset[int]:
    nodes = [n for n in c.working.nodes if n.op != "output" and origin(n) in c.facts.distrusted]
    return frozenset(v.id for n in nodes for v in c.index.values(n))


def _without(plan: plan_build.Plan, doubted: frozenset[int]) -> plan_build.Plan:
    """Return the plan without the metadata of these values, so that the first run checks only the rest."""
    return replace(plan, specs={i: s for i, s in plan.specs.items() if i not in doubted})


def _passed(c: Compilation) -> None:
    """Accept the plan after a first run without mismatches: save it, unless a noisy measurement chose its kernels."""
    if suspects := c.facts.suspects():
        blame(c, suspects)
    if c.slot and c.tuner.settled and not c.plan.doubted:
        cached.save(c.slot, c.backend, c.plan, c.graph, c.report.summary() if c.report.fallbacks else "")


def _written_inputs(plan: plan_build.Plan) -> Callable[[list[Any]], list[torch.Tensor]]:
    """The tensors that a run writes in place, among its arguments and those held by the graph."""
    ids = plan_build.written_values(plan)
    places = [k for k, i in enumerate(plan.inputs) if i in ids]
    held = [value for i, (_, value) in plan.attributes.items() if i in ids]
    return lambda args: [t for t in (*(args[k] for k in places), *held) if isinstance(t, torch.Tensor)]


def _devices(plan: plan_build.Plan) -> set[str]:
    return {s.device for s in plan.specs.values()}
