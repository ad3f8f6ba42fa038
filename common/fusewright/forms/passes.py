"""Every pass from a traced graph to code, in the order of the stages of `pipeline`, with its input and output forms. The result
of a pass is verified by the spec of its form:

    graph      ATen calls as nodes of torch.fx          graph/verify.py
    region     the ops that a backend claims            toolkit/region/verify.py
    fragment   a backend's instructions for a region    plan/verify.py
    kernel     loops over elements                      toolkit/ir/verify.py
    plan       one list of instructions for a graph     plan/verify.py

`pipeline` runs the passes from graph to plan, and verifies them as the option `verify` says; those over regions, kernels and
memory always verify their results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph

from fusewright import _torch_compat as compat
from fusewright.forms.spec import Pass, in_place
from fusewright.graph.canonicalize import CANONICALIZE
from fusewright.graph.cse import merge_common
from fusewright.graph.verify import GRAPH
from fusewright.interface import Backend, CompileContext, Compiled, Fragment, Region, RuleLog, TensorSpec
from fusewright.partition.partition import partition
from fusewright.plan.build import build
from fusewright.plan.inplace import copied_together, reduced_in_place, updated_in_place, without_spare_copies
from fusewright.plan.replay.inference import DIVIDE
from fusewright.plan.replay.pieces import PIECES
from fusewright.plan.verify import FRAGMENT, PLACE, PLAN, Answer
from fusewright.rewrite import batches, branches, contractions, expand, grouped, pairs, picked, widen, written
from fusewright.rewrite.engine import Rewriter
from fusewright.rewrite.loops import associative, filled, recurrence, unrolled
from fusewright.rewrite.rules import RULES
from fusewright.toolkit.fuse.build import with_buffers
from fusewright.toolkit.ir.builder import scheduled
from fusewright.toolkit.ir.simplify import in_order, simplify_axes
from fusewright.toolkit.ir.symbols import close
from fusewright.toolkit.region.rewrite import claimed, rewrite
from fusewright.toolkit.region.verify import REGION
from fusewright.toolkit.transform.moments import without_moments
from fusewright.toolkit.transform.scans import split_scan
from fusewright.toolkit.transform.split import split_rows
from fusewright.toolkit.transform.split_columns import split_columns


def _rules(graph: Graph, log: RuleLog) -> None:
    Rewriter(graph, log).run(RULES)


def _compiled(
    region: Region, backend: Backend, context: CompileContext, temporaries: Mapping[int, TensorSpec]
) -> Compiled:
    with compat.without_modes():  # AOTAutograd compiles inside a FakeTensorMode, the direct capture does not
        return backend.compile(region, context)


def _answers(args: tuple[Any, ...], result: Compiled) -> list[Answer]:
    return [(args[0], result, args[3])] if isinstance(result, Fragment) else []


REWRITE = Pass("rules", "graph", GRAPH, _rules, in_place)
BRANCHES = Pass("branches", "graph", GRAPH, branches.merge, in_place)
GATHER = Pass("grouped", "graph", GRAPH, grouped.gather, in_place)
PICK = Pass("picked", "graph", GRAPH, picked.pick, in_place)
CONTRACT = Pass("contractions", "graph", GRAPH, contractions.contract, in_place)
WIDEN = Pass("widen", "graph", GRAPH, widen.widen, in_place)
PAIRS = Pass("pairs", "graph", GRAPH, pairs.split, in_place)
CSE = Pass("cse", "graph", GRAPH, merge_common, in_place)
JOIN_SCANS = Pass("joined_scans", "graph", GRAPH, associative.join, in_place)
RECUR = Pass("recurrences", "graph", GRAPH, recurrence.recur, in_place)
FILL = Pass("filled", "graph", GRAPH, filled.fill, in_place)
ROLL = Pass("rolled", "graph", GRAPH, unrolled.roll, in_place)
WRITE = Pass("written", "graph", GRAPH, written.write, in_place)
BATCHES = Pass("batches", "graph", GRAPH, batches.lay_out, in_place)
EXPAND = Pass("expand", "graph", GRAPH, expand.on_claim, lambda args, expanded: expanded[:1])
PARTITION = Pass("partition", "graph", REGION, partition, lambda args, found: found.regions)
COMPILE = Pass("compile", "region", FRAGMENT, _compiled, _answers)
BUILD = Pass("build", "fragment", PLAN, build)
UPDATE = Pass("updated_in_place", "plan", PLAN, updated_in_place)
SPARE = Pass("without_spare_copies", "plan", PLAN, without_spare_copies)
REDUCE = Pass("reduced_in_place", "plan", PLAN, reduced_in_place)
JOIN = Pass("copied_together", "plan", PLAN, copied_together)

PASSES: tuple[tuple[str, str, tuple[Pass[Any, Any], ...]], ...] = (
    # ATen overloads become rows of the opset; exact rules; branches of convolutions; picks of classes; sums as products; wider
    # products; complex numbers as pairs; common subexpressions; scans, recurrences and loops; matrices of batched products;
    # composites opened on claim
    ("graph", "graph", (
        CANONICALIZE, REWRITE, BRANCHES, GATHER, PICK, CONTRACT, WIDEN, PAIRS, CSE, JOIN_SCANS, RECUR, FILL, ROLL, WRITE,
        BATCHES, EXPAND,
    )),
    # claimed ops in convex groups; the backend's rewrite rows over a region; its calls and kernels for a region
    ("graph", "region", (PARTITION,)),
    ("region", "region", (claimed, rewrite)),
    ("region", "fragment", (COMPILE,)),
    ("values", "kernel", (scheduled,)),
    ("kernel", "kernel", (simplify_axes, in_order, close, with_buffers, without_moments, split_rows, split_columns, split_scan)),
    # one flat list; in-place updates, spared and merged copies; the recorded part and its pieces; placement of temporaries
    ("fragment", "plan", (BUILD,)),
    ("plan", "plan", (UPDATE, SPARE, REDUCE, JOIN, DIVIDE, PIECES)),
    ("plan", "memory of a plan", (PLACE,)),
)
