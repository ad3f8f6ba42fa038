"""The specification of region graphs: generated graphs obey it, and deliberate violations are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusewright.interface import Region, TensorSpec, Value
from fusewright.toolkit.region.graph import RegionError, RegionGraph
from fusewright.toolkit.region.verify import REGION, RULES, problems, verify
from tests.unit.region.drawn import branches, claim

OTHER = TensorSpec((2, 3), (3, 1), torch.float64)


def edited(change: Callable[[Region], Region]) -> RegionGraph:
    return RegionGraph(change(branches()[1].region()))


def op_changed(k: int, **changes: Any) -> RegionGraph:
    def change(r: Region) -> Region:
        return replace(r, ops=tuple(replace(op, **changes) if n == k else op for n, op in enumerate(r.ops)))

    return edited(change)


def spoiled(change: Callable[[RegionGraph, list[Any]], object]) -> RegionGraph:
    _, g = branches()
    change(g, list(g))
    return g


X, RELU = branches()[0].inputs[0], branches()[0].ops[0]
BROKEN: dict[str, tuple[Callable[[], RegionGraph], str]] = {
    "two ops make one value": (lambda: op_changed(1, outs=RELU.outs), "is made again"),
    "an op makes an input": (lambda: op_changed(1, outs=(X,)), "is made again"),
    "an op makes nothing": (lambda: op_changed(1, outs=()), "makes nothing"),
    "ops are out of order": (lambda: edited(lambda r: replace(r, ops=r.ops[::-1])), "not made before it"),
    "a value comes from nowhere": (lambda: op_changed(3, args=(Value(77, RELU.out.spec),)), "which nobody makes"),
    "an op is missing": (lambda: edited(lambda r: replace(r, ops=r.ops[1:])), "which nobody makes"),
    "an output is made by nobody": (
        lambda: edited(lambda r: replace(r, outputs=(Value(77, None),))), "output 77 is made by nobody",
    ),
    "a reader takes a value for another type": (lambda: op_changed(3, args=(Value(4, OTHER),)), "takes 4 for"),
    "an argument is missing": (lambda: op_changed(2, args=branches()[0].ops[2].args[:2]), "other arguments"),
    "an argument has another name": (lambda: op_changed(3, argnames=("other",)), "other arguments"),
    "a user is forgotten": (lambda: spoiled(lambda g, ops: g._users[ops[0].out.id].clear()), "users of value"),
    "a user that reads no more": (lambda: spoiled(lambda g, ops: g._users[X.id].append(ops[3].id)), "users of value"),
    "a maker that is another": (
        lambda: spoiled(lambda g, ops: g._producer.update({ops[0].out.id: ops[1].id})), "producer of value",
    ),
    "a claim of an op that is gone": (
        lambda: spoiled(lambda g, ops: g.claim(claim(replace(ops[3])))), "claims what is not there",
    ),
    "two claims of one op": (
        lambda: spoiled(lambda g, ops: g.claim(claim(ops[0], ops[2])) and g._claims.update({ops[2].id: claim(ops[2])})),
        "another claim has",
    ),
    "a claim that is written nowhere": (
        lambda: spoiled(lambda g, ops: g._claims.update({ops[0].id: replace(claim(ops[0]), at=ops[1])})), "is written nowhere",
    ),
}  # fmt: skip


FOUND_BY = {
    **dict.fromkeys(("is made again", "makes nothing"), "makers"),
    "not made before it": "order",
    "which nobody makes": "closed",
    "output 77 is made by nobody": "outputs",
    "takes 4 for": "types",
    "other arguments": "arguments",
    "users of value": "users",
    "producer of value": "producers",
    **dict.fromkeys(("claims what is not there", "another claim has", "is written nowhere"), "claims"),
}
"""The rules that find each violation."""


def test_every_rule_has_a_change_that_it_finds() -> None:
    assert {FOUND_BY[found] for _, found in BROKEN.values()} == {r.id for r in RULES}


def test_a_region_as_it_is_drawn_obeys_every_rule() -> None:
    _, g = branches()
    assert g.claim(claim(*list(g)[:2]))
    verify(g, "nothing")
    verify(g.region(), "nothing")


@pytest.mark.parametrize("mutation", BROKEN)
def test_every_mutation_is_found(mutation: str) -> None:
    broken, found = BROKEN[mutation]
    g = broken()
    assert any(found in problem for problem in problems(g)), list(problems(g))
    assert FOUND_BY[found] in {v.rule for v in REGION.violations(g)}
    with pytest.raises(RegionError, match="the region region0 is not valid after a test"):
        verify(g, "a test")


def test_where_order_does_not_count_it_is_not_looked_at() -> None:
    verify(BROKEN["ops are out of order"][0](), "nothing", ordered=False)
