"""Activations that model code spells out, such as 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))).

They are recognized by the function that they compute, so that order, powers or products and the notation of constants do not
matter: a formula of a few analytic ops that equals an activation at many points is that activation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

import torch

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.interface import OpView, RuleLog, Value
from fusewright.toolkit.region.graph import RegionGraph, spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row, rewrite

Activation: TypeAlias = tuple[str, tuple[Any, ...]]
"""A row of the opset, and its arguments after the first."""

ACTIVATIONS: tuple[Activation, ...] = (("gelu", ("tanh",)), ("silu", ()))
"""Not the gelu of erf: of infinity, eager's makes NaN in places, which the formula does not."""

CURVES = frozenset({"tanh", "sigmoid", "exp"})
STEPS = CURVES | {"add", "sub", "rsub", "mul", "div", "neg", "reciprocal", "pow_scalar", "cast"}
"""Rows of the opset in such a formula, all of them analytic."""
MOST_STEPS = 16
"""The most ops of a formula; published ones have up to nine."""

RTOL, ATOL = 1e-5, 1e-7
"""Tolerances for constants that are written with seven digits or more, or rounded to fp32."""


def name_activations(graph: RegionGraph, rules: RuleLog) -> None:
    """Replace each formula whose intermediate results nobody else reads by the activation that it computes."""
    rewrite(graph, ROWS, _Formulas(graph), rules)


Steps: TypeAlias = Mapping[int, OpView]
"""Ops by the id of their result, each after those that it reads."""


@dataclass
class _Formulas:
    """A region before any formula is replaced, with the steps from each variable: many curves may read the same one."""

    graph: RegionGraph
    known: dict[int, Steps] = field(default_factory=dict)

    def steps(self, x: Value) -> Steps:
        if x.id not in self.known:
            self.known[x.id] = _steps(x, self.graph)
        return self.known[x.id]


def _spelled_out(m: Match, formulas: _Formulas) -> Match | None:
    """Extend a match of a curve to the whole formula, the longest first."""
    graph = formulas.graph
    with torch.no_grad(), compat.without_modes(), compat.disable_autocast():
        for x in reversed(_variables(m.anchor, graph)):
            steps = formulas.steps(x)
            for last in reversed(_readers(m.anchor, steps, graph)):
                inside = _needed(last, steps)
                if spec_of(last.out).dtype is not spec_of(x).dtype or not _closed(inside, last, graph):
                    continue
                values = _values(inside, x, _points())
                found = next((a for a in ACTIVATIONS if torch.allclose(values[last.out.id], _curve(a), RTOL, ATOL)), None)
                if found is not None and _special_values_agree(inside, x, last, found):
                    return replace(m, ops=inside, at=last, captures={"x": x, "activation": found})
    return None


def _write(m: Match, formulas: _Formulas) -> None:
    name, more = m["activation"]
    row = ops.OPS[name]
    given = row.bind((m["x"], *more))
    op = replace(m.last, op=name, target=row.target.name(), argnames=tuple(given), args=tuple(given.values()))
    formulas.graph.replace(m.ops, [op])


ROWS = (Row("activation", chain(tuple(sorted(CURVES))), _write, "an activation", extend=_spelled_out),)


def _variables(op: OpView, graph: RegionGraph) -> Sequence[Value]:
    """The values that `op` may be in a formula of, the nearest first: those read more than once, and what is cast for it."""
    found: list[Value] = []
    todo = [op]
    while todo and len(found) < MOST_STEPS:
        for value in todo.pop(0).inputs():
            made = graph.producer(value)
            if value not in found:
                found.append(value)
                todo.extend([made] if made is not None and made.op in STEPS else [])

    def read_often(value: Value) -> bool:
        often = len(graph.user_ids(value.id)) > 1 or graph.users(value)[0].op == "cast"
        return often and spec_of(value).dtype.is_floating_point

    return [v for v in found if v.spec is not None and read_often(v)]


def _steps(x: Value, graph: RegionGraph) -> Steps:
    """The ops that compute something of `x` alone, element by element.

    A cast to a type of fewer digits is none of them: it rounds, as kernels do there, which an activation does not.
    """
    found, todo = dict[int, OpView](), [x]
    digits = torch.finfo(spec_of(x).dtype).eps
    while todo and len(found) < MOST_STEPS:
        for op in graph.users(todo.pop(0)):
            if op.op not in STEPS or op.out.id in found or not all(v.id == x.id or v.id in found for v in op.inputs()):
                continue
            spec = spec_of(op.out)
            alike = spec.shape == spec_of(x).shape and spec.device == spec_of(x).device
            if alike and spec.dtype.is_floating_point and torch.finfo(spec.dtype).eps <= digits:
                found[op.out.id] = op
                todo.append(op.out)
    return found


def _readers(op: OpView, steps: Steps, graph: RegionGraph) -> Sequence[OpView]:
    """`op` and those of the steps that need it, in order."""
    found: dict[int, OpView] = {}
    todo = [op.out] if op.out.id in steps else []
    while todo:
        made = todo.pop()
        found[made.id] = steps[made.id]
        todo += [u.out for u in graph.users(made) if u.out.id in steps and u.out.id not in found]
    return list(found.values()) if len(found) < 2 else [s for i, s in steps.items() if i in found]


def _needed(last: OpView, steps: Steps) -> tuple[OpView, ...]:
    """`last` and those of the steps that it needs, in order."""
    needed, todo = {last.out.id}, [last]
    while todo:
        more = {v.id for v in todo.pop().inputs() if v.id in steps} - needed
        needed |= more
        todo += [steps[i] for i in more]
    return (last,) if len(needed) < 2 else tuple(s for i, s in steps.items() if i in needed)


def _closed(inside: Sequence[OpView], last: OpView, graph: RegionGraph) -> bool:
    """Whether nobody else reads what the ops before the last compute."""
    return all(
        op is last or (not graph.escapes(op.out) and all(user in inside for user in graph.users(op.out))) for op in inside
    )


def _values(steps: Sequence[OpView], x: Value, points: torch.Tensor) -> dict[int, torch.Tensor]:
    """What eager computes at points. In fp64 nothing is rounded to another type in between."""
    values = {x.id: points}
    for op in steps:
        given: dict[str, Any] = {k: values[a.id] if isinstance(a, Value) else a for k, a in zip(op.argnames, op.args, strict=True)}
        if op.op == "cast" and points.dtype is torch.float64:
            values[op.out.id] = given["self"]
        else:
            row = ops.OPS[op.op]
            named = {p.name: given.pop(p.name) for p in row.params if p.kwonly}
            values[op.out.id] = row.target(*given.values(), **named)
    return values


@cache
def _points() -> torch.Tensor:
    return torch.linspace(-7, 7, 101, dtype=torch.float64)


@cache
def _curve(activation: Activation) -> torch.Tensor:
    return _computed(activation, _points())


def _computed(activation: Activation, points: torch.Tensor) -> torch.Tensor:
    name, more = activation
    row = ops.OPS[name]
    made: torch.Tensor = row.target(points, **dict(zip(row.argnames[1:], more, strict=True)))
    return made


def _special_values_agree(inside: Sequence[OpView], x: Value, last: OpView, activation: Activation) -> bool:
    """Whether NaN comes from the same values, and infinity where it does in eager, also where a power overflows."""
    most, inf = torch.finfo(spec_of(x).dtype).max, float("inf")
    sizes = [0.0, most**0.25, most**0.5, most**0.75, most / 16, most, inf, float("nan")]
    points = torch.tensor([*sizes, *(-s for s in sizes)], dtype=spec_of(x).dtype)
    ours, eager = _computed(activation, points), _values(inside, x, points)[last.out.id]
    return torch.equal(ours.isnan(), eager.isnan()) and torch.equal(ours[ours.isinf()], eager[ours.isinf()])
