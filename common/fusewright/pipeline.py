"""The path of one graph, stage by stage. This file is the place to learn the order from; each stage lives in its own
module.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright import storage
from fusewright.cache.tune import Tuner
from fusewright.config import Options
from fusewright.errors import BackendContractError, BackendCrashError, FallbackError, counted
from fusewright.forms import passes
from fusewright.forms.spec import Pass
from fusewright.graph import constants, printer, retrace, verify
from fusewright.graph.effects import has_collectives
from fusewright.graph.origin import compiled_at, first_trace
from fusewright.graph.spec import tensor_spec, value_of
from fusewright.graph.view import GraphIndex
from fusewright.interface import (
    YES,
    Backend,
    Compiled,
    Decline,
    Device,
    Fragment,
    KernelCode,
    Opaque,
    OpView,
    Phase,
    Region,
    RuleLog,
    TensorSpec,
    Unavailable,
    Value,
    Verdict,
    Why,
)  # fmt: skip
from fusewright.partition.cost import work
from fusewright.partition.facts import Facts
from fusewright.partition.partition import Partition
from fusewright.plan import build as plan_build
from fusewright.plan import labels
from fusewright.plan.carried import carried_ops
from fusewright.plan.execute import cached, codegen, compared, contract, opaque
from fusewright.plan.execute.firstrun import MetadataMismatch, checked_first
from fusewright.plan.execute.observed import observed_first
from fusewright.plan.execute.replay import replayed
from fusewright.plan.execute.retained import Handover, retained
from fusewright.plan.ir import Call, Launch, Run, reads
from fusewright.plan.verify import PlanError
from fusewright.report import GraphReport, Kept, OpRecord, is_keeping, is_recording, publish, warn_once
from fusewright.strict import strictly

log = logging.getLogger("fusewright")

X = ParamSpec("X")
R = TypeVar("R")

MAX_ROUNDS = 32
"""Rounds of planning, before the graph is left to eager."""

Refused: TypeAlias = Mapping[str, Verdict]
"""What a round of planning cannot have from the backend, by name of a node of the traced graph."""


@dataclass
class Compilation:
    """One graph on its way through the stages. `graph` is the traced graph; `working` the one that was lowered."""

    backend: Backend
    options: Options
    gm: GraphModule
    phase: Phase
    const: frozenset[Node]
    report: GraphReport
    tuner: Tuner
    constants: constants.Constants = field(init=False)
    rules: RuleLog = field(init=False)
    """What the host's rules did; every attempt to lower counts on from there."""
    working: Graph = field(init=False)
    index: GraphIndex = field(init=False)
    partition: Partition = field(init=False)
    compiled: list[tuple[Region, Compiled]] = field(default_factory=list)
    plan: plan_build.Plan = field(init=False)
    run: Run = field(init=False)
    slot: cached.Slot | None = None
    """In the plan cache; None keeps the plan out of it."""
    handover: Handover = field(default_factory=Handover)
    carried: set[int] = field(default_factory=set)
    """Ids of claimed ops that eager's own call computes."""
    facts: Facts = field(default_factory=Facts)
    given: list[Any] = field(default_factory=list)
    """The arguments of the first call, while somebody keeps what is compiled."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Source lines of the traced graph, and where its nodes with them stood before any rewrite."""

    @property
    def graph(self) -> Graph:
        return self.gm.graph

    def do(self, step: Pass[X, R], *args: X.args, **kwargs: X.kwargs) -> R:
        """Run a pass, and verify what it gives if the options say so."""
        return (step if self.options.verify else step.run)(*args, **kwargs)


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


def _lower(c: Compilation) -> Refused:
    """Partition, and compile the regions. All that the backend gives back is collected."""
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
        denied.update({_origin(c.index.node_of[i]): verdict for i in ids})
    return results, denied


def _origin(node: Node) -> str:
    """The name of the node of the unexpanded graph that this node came from."""
    return str(node.meta.get("origin", node.name))


def _guarded(c: Compilation, region: Region, result: Compiled) -> Compiled:
    """Note what a backend's answer carries, and give the answer with what watches over it when it runs."""
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


def _plan(c: Compilation) -> Refused:
    """Build the plan and load its kernels. What keeps the plan from being valid or built is given back."""
    try:
        _make_plan(c)
    except PlanError as e:
        if c.options.strict:
            raise
        _report_plan(c, e)
        if c.compiled:  # what fragments made of the plan is not valid, though each of them is
            return dict.fromkeys(_claimed(c), Verdict(Why.CRASHED, str(e)))
    try:
        kernels = c.backend.load(c.plan.kernels) if c.plan.kernels else {}
    except Exception as e:
        if c.options.strict:
            raise BackendCrashError(f"backend {c.backend.name!r} could not build its kernels: {e}") from e
        return _unbuilt(c, _failing(c, e))
    _finish(c, kernels)
    return {}


def _claimed(c: Compilation) -> list[str]:
    return [_origin(n) for nodes in c.partition.members for n in nodes]


def _unbuilt(c: Compilation, failed: Mapping[str, Verdict]) -> Refused:
    """The ops of kernels that could not be built; all ops of the backend where no launch names them."""
    launches = [i for i in (*c.plan.prepare, *c.plan.instructions) if isinstance(i, Launch) and i.kernel in failed]
    nodes = [(c.index.node_of[k], failed[i.kernel]) for i in launches for k in i.op_ids if k in c.index.node_of]
    return {_origin(n): v for n, v in nodes} or dict.fromkeys(_claimed(c), next(iter(failed.values())))


def _finish(c: Compilation, kernels: Mapping[str, KernelCode]) -> None:
    """Make the plan a callable, whose first run is checked where somebody believes metadata: a lowering, or a recording."""
    plain, c.report.texts["plan"] = codegen.load(c.plan, kernels)
    if is_keeping():
        c.report.kept = Kept(c.plan, kernels, plain, c.index, c.given)
    _watch_weights(c, plain)
    c.run = run = _replaying(c, c.plan, kernels, plain)
    if c.compiled or c.facts.suspects() or run is not plain:
        checked, _ = codegen.load(_believed(c, c.plan), kernels, checked=True, prepared=codegen.prepared_of(plain))
        again, passed = (lambda found: _planned_again(c, found)), (lambda: _passed(c))
        if has_collectives(c.graph):
            eager = _believed(c, plan_build.build(c.index, (), ()))
            c.run = observed_first(eager, checked, run, again, passed, c.backend.name)
        else:
            c.run = checked_first(checked, run, again, passed, _written_inputs(c.plan), _devices(c.plan))


def _make_plan(c: Compilation) -> None:
    c.plan = c.do(passes.BUILD, c.index, c.partition.members, c.compiled)
    c.plan.policy = c.backend.policy()
    c.plan.origins = labels.origins(c.index, c.plan.instructions, c.lines)
    c.plan.trace = first_trace(c.graph)
    if c.phase == "infer":
        c.plan = c.do(passes.UPDATE, c.plan)


def _report_plan(c: Compilation, error: PlanError) -> None:
    c.report.bugs.append(str(error))
    log.warning("fusewright: %s\nEager runs this graph. This is a bug of Fusewright.", error)


def _failing(c: Compilation, error: Exception) -> dict[str, Verdict]:
    """Why kernels cannot be built, by hash: those that fail alone too, else all of them."""
    found = {}
    for key, kernel in c.plan.kernels.items():
        try:
            c.backend.load({key: kernel})
        except Exception as e:  # of whatever kind: what cannot be built must not stop the user's model
            found[key] = Verdict(Why.CRASHED, f"{type(e).__name__}: {e}")
    found = found or dict.fromkeys(c.plan.kernels, Verdict(Why.CRASHED, f"{type(error).__name__}: {error}"))
    verdict = next(iter(found.values()))
    c.report.bugs.append(f"{c.backend.name} could not build {len(found)} kernels: {verdict.detail}")
    log.warning(
        "fusewright: backend %s could not build %d of %d kernels; eager runs those ops. %s",
        c.backend.name, len(found), len(c.plan.kernels), str(verdict).partition("\n")[0],
    )  # fmt: skip
    return found


def _replaying(c: Compilation, plan: plan_build.Plan, kernels: Mapping[str, KernelCode], plain: Run) -> Run:
    recorder = c.backend.recorder()
    if recorder is not None and has_collectives(c.graph):
        c.report.tell_replay("not replayed: it may wait for other processes, which decide for themselves")
        return plain
    if c.phase == "infer":
        return replayed(plan, kernels, plain, recorder, c.report.tell_replay)
    return retained(plan, kernels, plain, recorder, c.report.tell_replay, c.handover)


def _from_disk(c: Compilation, plan: plan_build.Plan, kernels: Mapping[str, KernelCode], plain: Run) -> Run:
    """As a plan that was just made, but without a check. Its first call is plain too: it loads what a recording of
    training, which does not warm up, must find loaded."""
    _watch_weights(c, plain)
    later, called = _replaying(c, plan, kernels, plain), False

    def run(args: list[Any]) -> Any:
        nonlocal called
        if called:
            return later(args)
        result = plain(args)
        called = True
        return result

    return plain if later is plain else run


def _watch_weights(c: Compilation, plain: Run) -> None:
    """With `check="weights"`, all bytes of what constants are made of are compared at every call."""
    prepared = codegen.prepared_of(plain)
    if prepared is not None and "weights" in c.options.check:
        prepared.whole = True


def _devices(plan: plan_build.Plan) -> set[str]:
    return {s.device for s in plan.specs.values()}


def _written_inputs(plan: plan_build.Plan) -> Callable[[list[Any]], list[torch.Tensor]]:
    """Which tensors a run writes in place, among its arguments and those that the graph holds itself."""
    ids = plan_build.written_values(plan)
    places = [k for k, i in enumerate(plan.inputs) if i in ids]
    held = [value for i, (_, value) in plan.attributes.items() if i in ids]
    return lambda args: [t for t in (*(args[k] for k in places), *held) if isinstance(t, torch.Tensor)]


def _passed(c: Compilation) -> None:
    """The first run found everything true: the plan may be kept, unless noise chose how it computes."""
    if suspects := c.facts.suspects():
        _blame(c, suspects)
    if c.slot and c.tuner.settled:
        cached.save(c.slot, c.backend, c.plan, c.graph, c.report.summary() if c.report.fallbacks else "")


def _believed(c: Compilation, plan: plan_build.Plan) -> plan_build.Plan:
    """A plan without the metadata of what is distrusted: the first run checks the rest."""
    nodes = [n for n in c.working.nodes if n.op != "output" and _origin(n) in c.facts.distrusted]
    doubted = {v.id for n in nodes for v in c.index.values(n)}
    return replace(plan, specs={i: s for i, s in plan.specs.items() if i not in doubted})


def _planned_again(c: Compilation, found: Sequence[MetadataMismatch]) -> Run:
    """Take what a first run found for facts, and compile the graph again."""
    before = len(c.facts)
    for mismatch in found:
        if not _mended(c, mismatch):
            _learn(c, mismatch)
    assert len(c.facts) > before
    c.report.superseded = True
    report = GraphReport(c.backend.name, c.phase, c.report.capture)
    return _compile(replace(c, report=report, compiled=[], carried=set()))


def _mended(c: Compilation, mismatch: MetadataMismatch) -> bool:
    """Whether the metadata of a value has become true, when that of another was mended which it is made of."""
    node = c.index.node_by_value(mismatch.id)
    if node is None or mismatch.actual is None:
        return False
    val, values = value_of(node), [v.id for v in c.index.values(node)]
    val = val[values.index(mismatch.id)] if isinstance(val, tuple | list) else val
    return isinstance(val, torch.Tensor) and not opaque.mismatch(mismatch.actual, tensor_spec(val))


def _learn(c: Compilation, mismatch: MetadataMismatch) -> None:
    """Suspect the region that made a value, or mend the metadata of what eager made, or leave what depends on it to eager."""
    suspects = _suspects(c, mismatch)
    if suspects:
        c.facts.suspect(suspects)
        return
    made = c.index.node_by_value(mismatch.id)
    node = next((n for n in c.graph.nodes if made is not None and n.name == _origin(made)), None)
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
    """The nodes of the region that made a value by anything but eager's own call; none if eager made it.

    Either what was traced is untrue, or the backend broke its contract. The next run tells: eager makes the value then.
    """
    for nodes, (region, result) in zip(c.partition.members, c.compiled, strict=True):
        made = [i for i in result.instructions if mismatch.id in i.outs] if isinstance(result, Fragment) else []
        own = [plan_build.aten_call(c.index, n) for n in nodes]
        if any(isinstance(i, Call) and not any(_same_call(i, o) for o in own) for i in made):
            op = next((op for op in region.ops if mismatch.id in (v.id for v in op.outs)), None)
            what = f"{op.op}{f' at {op.source}' if op.source else ''}" if op else "a temporary"
            verdict = Verdict(Why.CRASHED, f"{region.name} ({region.op_names}): {what} {mismatch.reason}")
            return {_origin(n): verdict for n in nodes}
    return {}


def _same_call(a: Call, b: Call) -> bool:
    return (a.target, a.outs, set(reads(a))) == (b.target, b.outs, set(reads(b)))


def _blame(c: Compilation, suspects: Mapping[str, Verdict]) -> None:
    """Eager made what was traced, so the backend that did not has broken its contract."""
    message = f"backend {c.backend.name!r}, {next(iter(suspects.values())).detail}. This is a bug of the backend."
    c.report.bugs.append(message)
    if c.options.strict:
        raise BackendContractError(message)
    log.warning("fusewright: %s Eager runs those ops.", message)


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


Stage: TypeAlias = Callable[[Compilation], "Refused | None"]

# before these: capture, and "canonicalize" (ATen overloads -> opset rows), whose text is the key of the plan cache
METADATA_STAGES: tuple[tuple[str, Stage], ...] = (
    ("simplify", _simplify),  # exact rewrite rules, CSE, dead code
    ("constants", _constants),  # what depends on weights alone
)
CLAIM_STAGES: tuple[tuple[str, Stage], ...] = (
    ("lower", _lower),  # claims, regions, fragments
    ("plan", _plan),  # one flat list of instructions, constants apart, as Python; code of its kernels
)
STAGES = METADATA_STAGES + CLAIM_STAGES


def _compile(c: Compilation) -> Run:
    """The one loop of planning. A round runs the stages in order, and collects what the first that refuses something refuses. That
    is added to the facts, which never shrink, and a round over claims starts from all of them; what a first run finds untrue comes
    back here with the facts so far (`_planned_again`)."""
    refused = _round(c, STAGES)
    for count in itertools.count(1):
        if not refused:
            break
        c.facts.refuse(refused if count < MAX_ROUNDS else _give_up(c))
        refused = _round(c, CLAIM_STAGES)
    c.tuner.save()
    _account(c)
    return c.run


def _round(c: Compilation, stages: Sequence[tuple[str, Stage]]) -> Refused:
    return next((found for name, stage in stages if (found := _timed(c, name, stage))), {})


def _give_up(c: Compilation) -> Refused:
    """Every op of the graph: a backend that still refuses some after so many rounds gets none."""
    message = f"backend {c.backend.name!r} still gives ops back after {MAX_ROUNDS} rounds of planning"
    if c.options.strict:
        raise BackendCrashError(message)
    c.report.bugs.append(message)
    return {n.name: Verdict(Why.DECLINED, message) for n in c.graph.nodes}


def compile_graph(
    backend: Backend, options: Options, gm: GraphModule, phase: Phase, const: frozenset[Node], mode: str,
    comparison: compared.Comparison | None = None,
) -> Callable[[list[Any]], Any]:  # fmt: skip
    """Run every stage on one ATen graph, or find its plan in the cache. Returns a callable that takes (and empties) a list
    of inputs; with a `comparison`, eager may take over."""
    traced = (compared.text_of(gm.graph), compared.eager_of(gm), compared.classes(gm.graph)) if comparison else None
    run = _found_or_compiled(backend, options, gm, phase, const, mode)
    if comparison is not None and traced is not None:
        text, eager, sizes = traced
        return comparison.add(phase, text, run, eager, sizes)
    return strictly(run) if options.strict else run


def comparison(backend: Backend, options: Options) -> compared.Comparison | None:
    """What compares the graphs of one traced graph with eager; None where that is not asked for, or all must run as compiled."""
    if not options.never_slower or options.strict or options.simulate or "contract" in options.check:
        return None
    recorder = backend.recorder()

    def may() -> bool:
        if compat.in_process_group():  # each rank would decide for itself
            return False
        return recorder is None or recorder.lane(backend.device_type) is not None

    scope = f"{backend.fingerprint()}|workers={backend.policy().count_workers()}"
    return compared.Comparison(backend.name, scope, options.cache, may)


def _found_or_compiled(
    backend: Backend, options: Options, gm: GraphModule, phase: Phase, const: frozenset[Node], mode: str
) -> Run:
    report = GraphReport(backend.name, phase, mode)
    tuner = Tuner(backend.fingerprint(), options.cache, backend.policy().count_workers())
    c = Compilation(backend, options, gm, phase, const, report, tuner, handover=Handover.of(phase))
    _timed(c, "canonicalize", _canonicalize)
    if options.cache and options.fallback != "error" and not options.dump and not is_recording() and _plainly_traced(gm):
        c.slot = cached.slot(backend, options, gm, phase, const)
        found = cached.find(c.slot, backend, gm, partial(_from_disk, c)) if c.slot else None
        if found is not None:
            run, summary = found
            if summary and options.fallback == "warn":
                warn_once(summary)
            return run
    return _giving(c.given, _compile(c)) if is_keeping() else _compile(c)


def _giving(given: list[Any], run: Run) -> Run:
    """`run`, whose first arguments are kept."""

    def call(args: list[Any]) -> Any:
        if not given:
            given[:] = args
        return run(args)

    return call


def _plainly_traced(gm: GraphModule) -> bool:
    """Whether the text of a graph tells all there is to know of the memory that it reads. No plan may be shared otherwise."""
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
        report_text = c.report.texts.get("plan", "") if stage == "plan" else printer.to_text(graph, const=const)
        c.report.texts[stage] = report_text
        if wanted:
            print(f"# {c.backend.name}: {c.phase} graph after {stage}\n{report_text}")
    compat.trace_artifact(f"fusewright_{stage}", lambda: c.report.texts.get(stage) or printer.to_text(graph))


def _account(c: Compilation) -> None:
    """Fill the report; say in one line what runs in eager, or raise, as the options ask."""
    r, policy = c.report, c.backend.policy()
    notes: dict[int, str] = {}
    for _, result in c.compiled:
        notes.update(result.notes if isinstance(result, Fragment) else {})
    claimed = {op.id for region, _ in c.compiled for op in region.ops}
    for op in c.index.ops.values():
        estimate, note = work(op), notes.get(op.id, "")
        where = "eager" if op.id not in claimed else "carried" if op.id in c.carried else "lowered"
        if where != "lowered" and estimate.kind == "view":
            where = "view"
        shape = str(_shape(op.outs[0].spec)) if op.outs else ""
        verdict = _as_it_came(c.partition.verdicts[op.id], where, note)
        r.ops.append(OpRecord(op.op, where, verdict, note, op.source, shape, estimate.seconds(policy), op.id))
    r.regions = len(c.compiled)
    _log(c)
    publish(r)
    if r.by_eager and c.options.fallback == "error":
        lines = "\n".join(f"  {f.op} {f.shape} at {f.source or '?'}: {f.verdict}" for f in r.by_eager[:20])
        raise FallbackError(f"{r.summary()}\n{lines}")
    if r.fallbacks and c.options.fallback == "warn":  # what is carried alone is worth no line: the backend put it there
        warn_once(r.summary())


def _log(c: Compilation) -> None:
    """For `TORCH_LOGS=fusewright` (and `+fusewright`: the plan too)."""
    if log.isEnabledFor(logging.INFO):
        counts = ", ".join(f"{c.report.count(where)} {where}" for where in ("lowered", "carried", "eager"))
        stages = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in c.report.stages.items())
        what = compiled_at(first_trace(c.graph)) or "a graph"
        regions = counted(c.report.regions, "region")
        log.info("%s: %s graph of %s: %s, %s; %s", c.backend.name, c.phase, what, counts, regions, stages)
        log.debug("%s", c.report.texts.get("plan", ""))


def _as_it_came(claim: Verdict, where: str, note: str) -> Verdict:
    """The verdict on a claimed op as its fragment bears it out: it says more than the claim did."""
    if where == "carried" and claim.why is not Why.CARRIED:
        return Verdict(Why.CARRIED, note if note not in ("", "eager") else "eager's own call, inside a region")
    return YES if where == "lowered" else claim


def _shape(spec: TensorSpec | None) -> str:
    if spec is None:
        return ""
    return f"{str(spec.dtype).removeprefix('torch.')}[{', '.join(map(str, spec.shape))}]"


class Context:
    """The `CompileContext` of one compilation."""

    def __init__(self, c: Compilation, rules: RuleLog) -> None:
        self._c = c
        self._rules = rules

    @property
    def rules(self) -> RuleLog:
        return self._rules

    @property
    def options(self) -> Mapping[str, Any]:
        return self._c.options.backend

    @property
    def device(self) -> Device:
        device = self._c.backend.device
        if device is None:
            found = type(self._c.backend).probe()
            if isinstance(found, Unavailable):
                raise Decline(found.reason, Why.DEVICE)
            device = found
        return device

    def value(self, spec: TensorSpec | None) -> Value:
        return self._c.index.temporary(spec)

    def aten(self, op: OpView) -> Any:
        return plan_build.call_of(op)

    def choose(self, key: str, candidates: Mapping[str, Callable[[], Any]]) -> str:
        return self._c.tuner.choose(key, candidates)

    def provisional(self) -> None:
        self._c.tuner.settled = False
