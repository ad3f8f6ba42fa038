"""Load plans from the disk cache and save them. A plan is saved after its first run has confirmed all the metadata that it
relies on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright.cache import place, seal, store
from fusewright.cache.key import key_of
from fusewright.cache.store import Key
from fusewright.config import Options, env_or_default
from fusewright.errors import counted, printable
from fusewright.graph.origin import first_trace, origin
from fusewright.graph.view import is_op, qualified_name
from fusewright.interface import Backend, KernelCode, Phase
from fusewright.ops.states import stated
from fusewright.plan import serial, verify, vocabulary
from fusewright.plan.build import Plan, attribute
from fusewright.plan.execute import codegen
from fusewright.plan.ir import Run
from fusewright.plan.labels import plan_name, with_lines

log = logging.getLogger("fusewright")


@dataclass(frozen=True)
class Slot:
    """The cache key of a graph's plan, and the vocabulary that such a plan may use: both from the traced graph, before any
    pass."""

    key: Key
    words: vocabulary.Words
    attributes: frozenset[str]
    takes: int
    gives: int

    def problems(self, plan: Plan) -> Iterator[str]:
        """Why a plan must not become code, or does not belong to this graph."""
        yield from vocabulary.find_problems(plan, self.words)
        yield from (f"the graph holds no {n!r}" for n, _ in plan.attributes.values() if n not in self.attributes)
        if (len(plan.inputs), len(plan.outputs)) != (self.takes, self.gives):
            found = f"{len(plan.inputs)} values and returns {len(plan.outputs)}"
            yield f"it takes {found}, the graph {self.takes} and {self.gives}"


def slot(backend: Backend, options: Options, gm: GraphModule, phase: Phase, const: frozenset[Node]) -> Slot | None:
    """The slot of a traced graph; None if its plan cannot be cached."""
    if place.cache() is None or not seal.usable():
        return None
    graph = gm.graph
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    return Slot(
        key_of(backend, options, gm, phase, const, serial.FORMAT),
        vocabulary.Words(frozenset(_operators(graph)), backend.namespaces),
        frozenset(str(n.target) for n in graph.find_nodes(op="get_attr")),
        len(graph.find_nodes(op="placeholder")),
        len(returned) if isinstance(returned, tuple | list) else 1,
    )


def _operators(graph: Graph) -> Iterator[str]:
    """The operators that a graph calls."""
    for n in graph.nodes:
        if is_op(n):
            yield qualified_name(n.target)
        elif (found := stated(n)) is not None:
            yield qualified_name(found.operator)


Finish = Callable[[Plan, Mapping[str, KernelCode], Run], Run]
"""From a plan, its kernels and its plain callable to the final callable."""


def find(slot: Slot, backend: Backend, gm: GraphModule, finish: Finish) -> tuple[Run, str] | None:
    """Load a cached plan as a callable, with the line to log about its fallbacks ("" for none). None if no plan fits."""
    found = store.read(slot.key)
    if found is None:
        return None
    try:
        plan = serial.from_data(found.data["plan"], lambda name: _held(slot, gm, name))
        plan.policy = backend.policy()
        plan.origins, plan.trace = with_lines(plan.origins, gm.graph), first_trace(gm.graph)
        for problem in slot.problems(plan):
            raise vocabulary.Foreign(problem)
        kernels = backend.restore(found.code, list(plan.kernels)) if found.code else {}
        verify.check(plan, "reading it", {h: code.kernel for h, code in kernels.items()})
        run = codegen.load(plan, kernels)
        compat.trace_artifact("fusewright_plan", lambda: codegen.to_text(plan, kernels))
        if log.isEnabledFor(logging.INFO):
            size = counted(len(plan.instructions), "instruction")
            log.info("%s: plan of %s from the cache, %s", backend.name, plan_name(plan), size)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", codegen.to_text(plan, kernels))
        return finish(plan, kernels, run), str(found.data["summary"])
    except Exception as e:  # whatever prevents loading, the model is compiled instead
        store.reject(slot.key.name, e)
        return None


def _held(slot: Slot, gm: GraphModule, name: str) -> Any:
    """A tensor that the graph itself names; no other part of the module can be reached."""
    if name not in slot.attributes:
        raise vocabulary.Foreign(f"the graph holds no {name!r}")
    return attribute(gm, name)


def save(slot: Slot, backend: Backend, plan: Plan, graph: Graph, summary: str) -> None:
    """Save a plan that consists of data only; others stay in memory."""
    code = backend.store(list(plan.kernels))
    if code is None:
        if plan.kernels:
            return
        code = b""  # no code to store beside the plan
    try:
        data = {"plan": serial.to_data(plan), "summary": summary}
    except serial.NotSerializable as e:
        log.debug("a plan is not cached: %s", e)
        return
    for problem in slot.problems(plan):
        log.debug("a plan is not cached, for it could not be read: %s", printable(problem))
        return
    facts = {"model": origin(graph), "ops": sum(map(is_op, graph.nodes)), "backend": backend.name}
    store.write(slot.key, facts, data, code, max(0, env_or_default("CACHE_MB")) * 1_000_000)
