"""The region graph: edits keep users and producers up to date, claims do not overlap, and refused edits change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusewright.interface import OpView, Value
from fusewright.toolkit.region.graph import Claim, RegionError, RegionGraph
from fusewright.toolkit.region.verify import problems
from tests.fragments import Sketch
from tests.unit.region.drawn import branches, claim, like


def state(g: RegionGraph) -> Any:
    """Everything that an edit could change."""
    values = {v.id: v for op in g for v in (*op.inputs(), *op.outs)}
    users = {i: [u.id for u in g.users(v)] for i, v in values.items()}
    return g.region(), users, [(c, c.ops) for c in g.claims], {i: g.producer(v) for i, v in values.items()}


def test_a_graph_knows_who_makes_and_who_reads_a_value() -> None:
    s, g = branches()
    relu, _exp, add, neg = g
    (x,) = s.inputs
    assert [op.op for op in g.users(x)] == ["relu", "exp"] and g.only_user(x) is None and g.producer(x) is None
    assert g.only_user(relu.out) is add and g.producer(add.out) is add
    assert g.escapes(neg.out) and g.only_user(neg.out) is None and not g.unused(neg.out)
    assert g.before(relu, add) and g.ordered([neg, relu, relu]) == (relu, neg)


def test_an_op_that_reads_a_value_twice_is_two_users() -> None:
    s = Sketch()
    x = s.op("relu", s.input(torch.randn(3)))
    g = RegionGraph(s.region([s.op("mul", x, x)]))
    assert [u.op for u in g.users(x)] == ["mul", "mul"] and g.only_user(x) is None


def test_replacing_ops_puts_others_in_the_place_of_the_first() -> None:
    _, g = branches()
    relu, _exp, add, _neg = g
    g.replace([relu], [first := like(relu, 90, "abs", next(relu.inputs())), like(relu, 91, "sqrt", first.out, relu.out)])
    assert [op.op for op in g] == ["abs", "sqrt", "exp", "add", "neg"]
    assert g.producer(relu.out) is list(g)[1] and g.only_user(relu.out) is add and relu not in g
    assert not list(problems(g))


def test_an_op_without_a_place_stands_behind_what_it_reads() -> None:
    _, g = branches()
    relu, exp, add, _neg = g
    g.insert(like(relu, 90, "sqrt", exp.out))
    g.insert(like(relu, 91, "abs", relu.out), before=add)
    g.insert(like(relu, 92, "sin", next(relu.inputs())))
    assert [op.op for op in g] == ["sin", "relu", "exp", "sqrt", "abs", "add", "neg"]
    assert not list(problems(g))


def test_what_nobody_reads_is_swept_with_what_only_that_read() -> None:
    _, g = branches()
    relu, _exp, _add, _neg = g
    g.insert(dead := like(relu, 90, "abs", relu.out))
    g.insert(like(relu, 91, "sqrt", dead.out))
    g.insert(like(relu, 92, "sin", relu.out))
    g.sweep({"abs", "sqrt"})
    assert [op.op for op in g] == ["relu", "sin", "exp", "add", "neg"]


def edits(g: RegionGraph) -> dict[str, Any]:
    relu, _exp, add, neg = g
    x = next(relu.inputs())
    foreign = like(relu, 90, "abs", Value(77, relu.out.spec))
    return {
        "is read": lambda: g.erase(relu),
        "nobody would make": lambda: g.replace([relu], [like(relu, 90, "abs", x)]),
        "reads .77., which nobody makes": lambda: g.insert(foreign),
        "makes what is made already": lambda: g.insert(like(relu, add.id, "abs", x)),
        "91 makes what is made already": lambda: g.insert(like(relu, 91, "abs", x, relu.out)),
        "is not in region0": lambda: g.erase(foreign),
        "is claimed: a call": lambda: g.claim(claim(neg)) and g.replace([neg], [like(neg, 90, "abs", add.out, neg.out)]),
    }


@pytest.mark.parametrize("why", edits(branches()[1]))
def test_a_refused_edit_changes_nothing(why: str) -> None:
    _, g = branches()
    edit = edits(g)[why]
    before = state(g)[:2]
    with pytest.raises(RegionError, match=why):
        edit()
    assert state(g)[:2] == before and not list(problems(g))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([(0, 2)], [(1, 2)]),  # both contain the sum
        ([(0, 2)], [(1,), (2, 3)]),  # an `also` claim of the second overlaps
        ([(0,), (2,)], [(1, 2)]),  # overlaps an `also` claim of the first
        ([(0, 2)], [(1, 3), (3,)]),  # overlaps itself
        ([(0, 2)], [(1, 1)]),
    ],
)
def test_a_claim_that_overlaps_is_refused_and_leaves_everything_as_it_was(
    first: list[tuple[int, ...]], second: list[tuple[int, ...]]
) -> None:
    _, g = branches()
    ops = list(g)

    def made(places: list[tuple[int, ...]]) -> Claim:
        main, *also = (tuple(ops[k] for k in p) for p in places)
        return claim(*main, also=tuple(claim(*a) for a in also))

    assert g.claim(made(first))
    before = state(g)
    assert not g.claim(made(second))
    assert state(g) == before and not list(problems(g))


def test_a_claim_that_is_taken_back_leaves_its_ops_free() -> None:
    _, g = branches()
    relu, exp, add, neg = g
    before = state(g)
    whole = claim(relu, add, also=(claim(exp),))
    assert g.claim(whole) and not g.free(exp) and g.free_user(relu.out) is None and g.only_user(relu.out) is add
    g.release(whole)
    assert state(g) == before and g.free(exp) and g.claim(claim(exp, add, neg))


def test_an_op_that_stands_twice_in_a_region_is_refused() -> None:
    _, g = branches()
    with pytest.raises(RegionError, match="two ops"):
        RegionGraph(replace(g.region(), ops=(*g, *g)))


# ---------------------------------------------------------------- users stay true

UNARY = ("relu", "abs", "neg", "exp")


@given(st.lists(st.tuples(st.sampled_from(("insert", "replace", "swap", "erase", "claim", "release", "sweep")),
                          st.integers(0, 99), st.integers(0, 99)), max_size=25))  # fmt: skip
def test_after_any_edits_users_are_those_who_read(steps: list[tuple[str, int, int]]) -> None:
    """After any sequence of edits, accepted or refused, the maps match a scan of all ops, and the region is valid."""
    s, g = branches()
    fresh = 100
    for what, a, b in steps:
        ops: list[OpView] = list(g)
        op, other = ops[a % len(ops)], ops[b % len(ops)]
        values = [*s.inputs, *(o.out for o in ops)]
        fresh += 2
        try:
            if what == "insert":
                g.insert(like(op, fresh, UNARY[b % 4], values[a % len(values)]))
            elif what == "replace":
                first = like(op, fresh, UNARY[b % 4], next(op.inputs()))
                g.replace([op], [first, like(op, op.id, "relu", first.out, op.out)])
            elif what == "swap":
                g.replace([op, other] if op is not other else [op], [like(op, fresh, "abs", s.inputs[0], op.out)])
            elif what == "erase":
                g.erase(op)
            elif what == "claim":
                g.claim(claim(op, other))
            elif what == "release" and g.claims:
                g.release(g.claims[a % len(g.claims)])
            elif what == "sweep":
                g.sweep(UNARY)
        except RegionError:
            pass  # refused; the test checks that nothing changed
        assert not list(problems(g)), f"after {what}"
