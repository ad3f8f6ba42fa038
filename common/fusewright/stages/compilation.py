"""State shared by the stages: one graph being compiled, and the context that its backend sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from torch.fx import Graph, GraphModule, Node

from fusewright.cache.tune import Tuner
from fusewright.config import Options
from fusewright.forms.spec import Pass
from fusewright.graph import constants
from fusewright.graph.view import GraphIndex
from fusewright.interface import (
    Backend,
    Compiled,
    Decline,
    Device,
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
from fusewright.partition.facts import Facts
from fusewright.plan import build as plan_build
from fusewright.plan.execute import cached
from fusewright.plan.ir import Run
from fusewright.plan.replay.training import Handover
from fusewright.report import GraphReport

if TYPE_CHECKING:
    from fusewright.partition.partition import Partition
    from fusewright.plan.execute.prepare import PreparedCache

X = ParamSpec("X")
R = TypeVar("R")

Refused: TypeAlias = Mapping[str, Verdict]
"""Ops refused in a round of planning, by node name of the traced graph."""


@dataclass
class Compilation:
    """One graph being compiled. `graph` is the traced graph; `working` is the one that was lowered."""

    backend: Backend
    options: Options
    gm: GraphModule
    phase: Phase
    const: frozenset[Node]
    report: GraphReport
    tuner: Tuner
    again: Callable[[Compilation], Run]
    """Compile once more, starting from the facts so far."""
    constants: constants.Constants = field(init=False)
    earlier: RuleLog | None = None
    """The host's rewrites before gradients were traced."""
    rules: RuleLog = field(init=False)
    """The host's rewrites; every attempt to lower continues counting from here."""
    working: Graph = field(init=False)
    index: GraphIndex = field(init=False)
    partition: Partition = field(init=False)
    compiled: list[tuple[Region, Compiled]] = field(default_factory=list)
    plan: plan_build.Plan = field(init=False)
    run: Run = field(init=False)
    plan_text: Callable[[], str] = lambda: ""
    """Format the plan for display; lazy, because it is rarely shown."""
    slot: cached.Slot | None = None
    """The entry in the plan cache; None keeps the plan out of it."""
    handover: Handover = field(default_factory=Handover)
    carried: set[int] = field(default_factory=set)
    """Ids of claimed ops that run as eager's own call."""
    facts: Facts = field(default_factory=Facts)
    prepared: list[tuple[PreparedCache, Sequence[int]]] = field(default_factory=list)
    """The constants of the latest plan, if it has any, and the positions of the inputs that they are made of."""
    given: list[Any] = field(default_factory=list)
    """The arguments of the first call, kept only while someone records with `keep`."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Source lines of the traced graph, and the position of the first node of each before any rewrite."""

    @property
    def graph(self) -> Graph:
        return self.gm.graph

    def changes(self) -> int:
        """How often constants of the latest plan were prepared again, because a weight had changed."""
        return sum(cache.changes for cache, _ in self.prepared)

    def do(self, step: Pass[X, R], *args: X.args, **kwargs: X.kwargs) -> R:
        """Run a pass, and verify its result if the option `verify` is set."""
        return (step if self.options.verify else step.run)(*args, **kwargs)


def origin(node: Node) -> str:
    """The name of the traced-graph node that this node came from."""
    return str(node.meta.get("origin", node.name))


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
