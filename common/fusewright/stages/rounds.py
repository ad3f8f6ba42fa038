"""The planning loop, with the stages after capture and "canonicalize" in order. The larger ones are modules beside this one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fusewright.errors import BackendCrashError
from fusewright.forms import passes
from fusewright.graph import constants
from fusewright.interface import Backend, RuleLog, Verdict, Why
from fusewright.plan.ir import Run
from fusewright.stages.account import account
from fusewright.stages.compilation import Compilation, Refused
from fusewright.stages.lowering import lower
from fusewright.stages.planning import plan
from fusewright.stages.timing import Stage, timed

MAX_ROUNDS = 32
"""Maximum rounds of planning before eager gets the whole graph."""


def _simplify(c: Compilation) -> None:
    c.rules = c.earlier.copy() if c.earlier is not None else RuleLog(c.options.disable_rules, c.options.fuel)
    c.do(passes.REWRITE, c.graph, c.rules)
    if c.phase == "infer":
        c.do(passes.BRANCHES, c.graph, c.const, c.backend.policy().branches, c.rules)
        c.do(passes.GATHER, c.graph, c.backend.policy().gathers, c.rules)
    claims = type(c.backend).supports is not Backend.supports  # one that claims nothing gives eager's bits
    if claims:
        c.do(passes.PICK, c.graph, c.rules)
        c.do(passes.CONTRACT, c.graph, c.backend.policy().contracts, c.rules)
    c.do(passes.WIDEN, c.graph, c.backend.policy().wider, c.rules)
    if claims:
        c.do(passes.PAIRS, c.graph, c.rules)
    if "cse" not in c.options.disable_rules:
        c.rules.hits["cse"] += c.do(passes.CSE, c.graph)
    if claims:
        c.do(passes.JOIN_SCANS, c.graph, c.rules)
        c.do(passes.RECUR, c.graph, c.rules)
        c.do(passes.FILL, c.graph, c.rules)
        c.do(passes.ROLL, c.graph, c.rules)
        c.do(passes.WRITE, c.graph, c.rules)
        c.do(passes.BATCHES, c.graph, c.backend.policy().batches, c.rules)


def _constants(c: Compilation) -> None:
    c.constants = constants.find(c.graph, c.const, c.phase, c.backend.widened)


METADATA_STAGES: tuple[tuple[str, Stage], ...] = (
    # exact rewrite rules, branches of convolutions, grouped products, sums as products, wider products, CSE, dead code
    ("simplify", _simplify),
    ("constants", _constants),  # what depends on weights alone
)
CLAIM_STAGES: tuple[tuple[str, Stage], ...] = (
    ("lower", lower),  # claims, regions, fragments
    ("plan", plan),  # one flat list of instructions, constants apart, as Python; code of its kernels
)
STAGES = METADATA_STAGES + CLAIM_STAGES


def compile_graph(c: Compilation) -> Run:
    """The planning loop. Each round runs the stages in order until one refuses some ops. Refused ops join the facts, which only
    grow, and the next round claims again with all facts known. When a first run contradicts the metadata, planning resumes here
    with the facts so far (`untrue.plan_again`)."""
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
    return next((found for name, stage in stages if (found := timed(c, name, stage))), {})


def _give_up(c: Compilation) -> Refused:
    """Refuse every op of the graph, because the backend still gives some back after `MAX_ROUNDS` rounds."""
    message = f"backend {c.backend.name!r} still gives ops back after {MAX_ROUNDS} rounds of planning"
    if c.options.strict:
        raise BackendCrashError(message)
    c.report.bugs.append(message)
    return {n.name: Verdict(Why.DECLINED, message) for n in c.graph.nodes}
