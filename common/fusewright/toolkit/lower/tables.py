"""All rules, and whether kernels can compute a given op by them."""

from __future__ import annotations

from fusewright.interface import OpView, TensorSpec, Value, Verdict, Why
from fusewright.toolkit.ir.types import from_torch
from fusewright.toolkit.lower import (
    activation,
    movement,
    pointwise,
    pooling,
    quantized,
    resize,
    rows,
    rows_backward,
    scatter,
    short,
    views,
)
from fusewright.toolkit.rules.kinds import Rule, Rules, View, merge
from fusewright.toolkit.rules.space import ShapeMismatch, factor_groups, shape_of

RULES: dict[str, Rules] = merge(
    (
        pointwise.TABLE, activation.TABLE, views.TABLE, movement.TABLE, resize.TABLE,
        short.with_short_rows(rows.TABLE), rows_backward.TABLE, scatter.TABLE, pooling.TABLE, quantized.TABLE,
        {name: rows.loss_rules for name in rows.LOSSES},
    )
)  # fmt: skip
"""Row of the opset -> rules by which kernels compute it."""

for _name in ("any", "all"):
    RULES[_name] = rows.with_no_dims(RULES[_name])


def rules_of(op: OpView) -> tuple[Rule, ...]:
    """The rules for one call; () if there are none."""
    found = RULES.get(op.op, ())
    return found if isinstance(found, tuple) else found(op)


def verdict(op: OpView) -> Verdict:
    """Whether kernels can compute `op`: a rule accepts this call, kernels have its types, and no tensor is empty."""
    rules = rules_of(op)
    if not rules:
        return Verdict(Why.NO_LOWERING, f"no kernel rule for {op.op}")
    specs = [v.spec for v in (*op.inputs(), *op.outs) if v.spec is not None]
    for refused in (_types(specs), _sizes(op)):
        if refused is not None:  # not `or`: a refusal is falsy
            return refused
    if any(v.spec is None and v.dim is None for v in op.inputs()):
        return Verdict(Why.ATTR, "an argument is a number that is only known at run time")
    if unread := _symbols(op) - {n for rule in rules for n in rule.symbols}:
        return Verdict(Why.ATTR, f"{min(unread)} is a symbol")
    if isinstance(rules[0], View) and not _same_count(op):
        return Verdict(Why.DYNAMIC_SHAPE, "sizes that are not known to fit together")
    for rule in rules:
        why = rule.check(op)
        if why is not None:
            return Verdict(Why.ATTR, why)
    return Verdict(Why.OK)


def _types(specs: list[TensorSpec]) -> Verdict | None:
    for s in specs:
        try:
            from_torch(s.dtype)
        except KeyError:
            return Verdict(Why.DTYPE, f"kernels have no {str(s.dtype).removeprefix('torch.')}")
    return None


def _symbols(op: OpView) -> set[str]:
    """Symbolic number arguments. Those in lists are sizes, which the results' shapes show."""
    return {n for n, a in zip(op.argnames, op.args, strict=True) if isinstance(a, Value) and a.spec is None}


def _sizes(op: OpView) -> Verdict | None:
    inputs = [v.spec for v in op.inputs() if v.spec is not None and op.op != "cat"]
    made = [v.spec for v in op.outs if v.spec is not None]
    if any(0 in shape_of(s) for s in inputs) or all(0 in shape_of(s) for s in made):
        return Verdict(Why.TOO_SMALL, "an empty tensor: there is nothing to compute")
    return None


def _same_count(op: OpView) -> bool:
    """Whether both shapes of a reshape have equally many elements, as polynomials of the symbols."""
    if op.op not in ("view", "reshape", "squeeze", "unsqueeze") or op.out.spec is None:
        return True
    try:
        factor_groups(shape_of(op.arg("self").spec), shape_of(op.out.spec))
    except ShapeMismatch:
        return False
    return True
