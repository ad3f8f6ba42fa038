"""Stage `plan`: build one list of instructions and load its kernels."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fusewright.errors import BackendCrashError
from fusewright.forms import passes
from fusewright.graph.origin import first_trace
from fusewright.interface import Verdict, Why
from fusewright.partition.cost import work
from fusewright.plan import labels
from fusewright.plan.execute.shadow import Eager
from fusewright.plan.ir import Launch
from fusewright.plan.verify import PlanError
from fusewright.plan.vocabulary import is_size
from fusewright.sizes.expr import SizeExpr
from fusewright.stages.compilation import Compilation, Refused, origin
from fusewright.stages.running import finish

log = logging.getLogger("fusewright")


def plan(c: Compilation) -> Refused:
    """Build the plan and load its kernels. Return the ops that make the plan invalid or cannot be built."""
    try:
        _make_plan(c)
    except PlanError as e:
        if c.options.strict:
            raise
        _report_plan(c, e)
        if c.compiled:  # each fragment is valid, but the plan made of them is not
            return dict.fromkeys(_claimed(c), Verdict(Why.CRASHED, str(e)))
        c.run = Eager(c.gm).run
        return {}
    if refused := _with_long_sizes(c):
        return refused
    try:
        kernels = c.backend.load(c.plan.kernels) if c.plan.kernels else {}
    except Exception as e:
        if c.options.strict:
            raise BackendCrashError(f"backend {c.backend.name!r} could not build its kernels: {e}") from e
        return _unbuilt(c, _failing(c, e))
    finish(c, kernels)
    return {}


def _make_plan(c: Compilation) -> None:
    c.plan = c.do(passes.BUILD, c.index, c.partition.members, c.compiled)
    c.plan.policy = c.backend.policy()
    c.plan.alone = _alone(c)
    c.plan.origins = labels.origins(c.index, c.plan.instructions, c.lines)
    c.plan.trace = first_trace(c.graph)
    if c.phase != "backward":  # whose inputs may share memory
        c.plan = c.do(passes.UPDATE, c.plan)
        c.plan = c.do(passes.SPARE, c.plan)
        c.plan = c.do(passes.REDUCE, c.plan)
        c.plan = c.do(passes.JOIN, c.plan)


def _alone(c: Compilation) -> bool:
    """Whether the plan should run on one thread: all sizes are static and every op is too short to share."""
    known = all(isinstance(n, int) for spec in c.plan.specs.values() for n in spec.shape)
    ops, policy = c.index.ops.values(), c.plan.policy
    return known and all(work(op).seconds(policy) - policy.call_seconds < policy.worth_waking for op in ops)


def _with_long_sizes(c: Compilation) -> Refused:
    """Ops whose launches have sizes too long for a plan's text: nested formulas grow with the depth of a model."""
    launches = [i for i in (*c.plan.prepare, *c.plan.instructions) if isinstance(i, Launch)]
    found = [i for i in launches if not all(map(is_size, _sizes(c, i)))]
    verdict = Verdict(Why.DYNAMIC_SHAPE, "the formula of a size is too long")
    return {origin(c.index.node_of[k]): verdict for i in found for k in i.op_ids if k in c.index.node_of}


def _sizes(c: Compilation, i: Launch) -> list[SizeExpr]:
    """Every formula in the text of a launch."""
    dims = [d.expr for o in i.outs for d in (*c.plan.specs[o].shape, *c.plan.specs[o].stride) if not isinstance(d, int)]
    return [x for x in (*i.sizes, *i.scalars, *dims) if isinstance(x, SizeExpr)]


def _claimed(c: Compilation) -> list[str]:
    return [origin(n) for nodes in c.partition.members for n in nodes]


def _unbuilt(c: Compilation, failed: Mapping[str, Verdict]) -> Refused:
    """The ops of kernels that could not be built; all ops of the backend if no launch names these kernels."""
    launches = [i for i in (*c.plan.prepare, *c.plan.instructions) if isinstance(i, Launch) and i.kernel in failed]
    nodes = [(c.index.node_of[k], failed[i.kernel]) for i in launches for k in i.op_ids if k in c.index.node_of]
    return {origin(n): v for n, v in nodes} or dict.fromkeys(_claimed(c), next(iter(failed.values())))


def _failing(c: Compilation, error: Exception) -> dict[str, Verdict]:
    """Why kernels cannot be built, by hash: those that also fail on their own, else all of them."""
    found = {}
    for key, kernel in c.plan.kernels.items():
        try:
            c.backend.load({key: kernel})
        except Exception as e:  # of any kind: a kernel that fails to build must not stop the user's model
            found[key] = Verdict(Why.CRASHED, f"{type(e).__name__}: {e}")
    found = found or dict.fromkeys(c.plan.kernels, Verdict(Why.CRASHED, f"{type(error).__name__}: {error}"))
    verdict = next(iter(found.values()))
    c.report.bugs.append(f"{c.backend.name} could not build {len(found)} kernels: {verdict.detail}")
    log.warning(
        "fusewright: backend %s could not build %d of %d kernels; eager runs those ops. %s",
        c.backend.name, len(found), len(c.plan.kernels), str(verdict).partition("\n")[0],
    )  # fmt: skip
    return found


def _report_plan(c: Compilation, error: PlanError) -> None:
    c.report.bugs.append(str(error))
    log.warning("fusewright: %s\nEager runs this graph. This is a bug of Fusewright.", error)
