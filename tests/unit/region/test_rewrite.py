"""Patterns and rewrite rows: what they match, and the switches for finding a wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusewright.interface import OpView, RuleLog
from fusewright.toolkit.region.graph import RegionError, RegionGraph
from fusewright.toolkit.region.pattern import ANY, Match, P, RegionReader, chain, find, many, matches, maybe, one, p
from fusewright.toolkit.region.rewrite import Row, by_root, claimed, first, rewrite
from tests.fragments import Sketch
from tests.unit.region.drawn import branches, claim, like


def squares(n: int = 3) -> RegionGraph:
    """relu(x) * relu(x), n times."""
    s = Sketch()
    x = s.input(torch.randn(3))
    for _ in range(n):
        x = s.op("relu", s.op("mul", x, x))
    return RegionGraph(s.region([x]))


def found(pattern: P, op: OpView, g: RegionGraph) -> list[dict[str, object]]:
    return [{k: v for k, v in env.items() if k} for env in matches(pattern, op, {}, RegionReader(g))]


def test_a_tree_captures_arguments_and_ops() -> None:
    s, g = branches()
    relu, _, add, neg = g
    tree = p("neg", p("add", p(("relu", "abs"), "x", capture="left"), p("exp", "x")))
    assert found(tree, neg, g) == [{"x": s.inputs[0], "left": relu}]
    assert found(p("neg", p("add", p("exp", ANY), ANY)), neg, g) == []
    assert found(p("neg", p("add", p("exp", ANY), "other", either=True)), neg, g) == [{"other": relu.out}]
    assert found(p("add", "x", "x"), add, g) == [], "one name is one value"


def test_a_choice_of_order_is_taken_back_where_the_rest_does_not_fit() -> None:
    """x * y + (x + z), where the factors of the product may come in either order."""
    s = Sketch()
    x, y, z = (s.input(torch.randn(3)) for _ in range(3))
    total = s.op("add", s.op("mul", y, x), s.op("add", x, z))
    g = RegionGraph(s.region([total]))
    tree = p("add", p("mul", "x", "y", either=True), p("add", "x", "z"))
    assert found(tree, list(g)[-1], g) == [{"x": x, "y": y, "z": z}]


def test_a_value_that_others_read_is_not_alone() -> None:
    s = Sketch()
    y = s.op("relu", s.input(torch.randn(3)))
    g = RegionGraph(s.region([s.op("neg", y), s.op("exp", y)]))
    neg = list(g)[1]
    assert found(p("neg", p("relu", "x")), neg, g) and not found(p("neg", p("relu", "x", alone=True)), neg, g)


def test_a_chain_goes_through_views_to_what_alone_reads_the_result() -> None:
    s = Sketch()
    y = s.op("relu", s.input(torch.randn(2, 3)))
    z = s.op("exp", s.op("view", s.op("view", y, [6]), [3, 2]))
    g = RegionGraph(s.region([z]))
    through = chain("relu", many("view"), maybe("neg", capture="neg"), one("exp", capture="exp"))
    match = find(through, next(iter(g)), g, None)
    assert match is not None and [op.op for op in match.ops] == ["relu", "view", "view", "exp"]
    assert match.get("neg") is None and match["exp"].out == z == match.out
    assert g.claim(claim(match["exp"]))
    assert find(through, match.anchor, g, None) is None, "what is claimed is no step"


def test_an_output_of_the_region_ends_a_chain() -> None:
    s = Sketch()
    y = s.op("relu", s.input(torch.randn(3)))
    g = RegionGraph(s.region([y, s.op("exp", y)]))
    assert find(chain("relu", one("exp")), next(iter(g)), g, None) is None


def halved(m: Match, g: RegionGraph) -> None:
    """Rewrite x * x as square(x), for which abs stands."""
    g.replace([m.anchor], [like(m.anchor, m.anchor.id + 500, "abs", m["x"], m.out)])


SQUARE = Row("test.square", p("mul", "x", "x"), halved, "a square")


def applied(g: RegionGraph, *rows: Row, log: RuleLog) -> list[str]:
    rewrite(g, rows, g, log)
    return [op.op for op in g]


def test_a_row_replaces_what_it_finds_and_is_counted() -> None:
    log = RuleLog()
    assert applied(squares(), SQUARE, log=log) == ["abs", "relu"] * 3
    assert dict(log.hits) == {"test.square": 3}


def test_a_row_is_switched_off_by_its_id() -> None:
    log = RuleLog(disabled=("test.square",))
    assert applied(squares(), SQUARE, log=log) == ["mul", "relu"] * 3 and not log.hits


@pytest.mark.parametrize("fuel", range(5))
def test_fuel_is_how_many_rewrites_there_may_be(fuel: int) -> None:
    log = RuleLog(fuel=fuel)
    ops = applied(squares(), SQUARE, log=log)
    assert ops.count("abs") == log.hits["test.square"] == min(fuel, 3)
    assert ops.index("abs") == 0 if fuel else "abs" not in ops, "the first ones are applied"


def test_a_row_asks_its_condition_before_its_cost() -> None:
    asked: list[str] = []

    def says(what: str, answer: bool) -> bool:
        asked.append(what)
        return answer

    row = replace(SQUARE, when=lambda m, g: says("when", True), pays=lambda m, g: says("pays", False))
    log = RuleLog()
    assert applied(squares(1), row, SQUARE, log=log) == ["abs", "relu"], "the next row is asked"
    assert asked == ["when", "pays"] and dict(log.hits) == {"test.square": 1}
    assert applied(squares(1), replace(row, when=lambda m, g: says("no", False)), log=RuleLog()) == ["mul", "relu"]
    assert asked == ["when", "pays", "no"]


def test_an_optional_step_is_switched_off_by_itself() -> None:
    _, g = branches()
    row = Row("test.sum", chain("exp", maybe("add", rule="test.add")), lambda m, c: None, "a call")

    def claims(log: RuleLog) -> list[list[str]]:
        graph = RegionGraph(g.region())
        table = by_root([row])
        claimed(graph, log, lambda op: first(table.get(op.op, ()), op, graph, None, log))
        return [[op.op for op in c.ops] for c in graph.claims]

    log = RuleLog()
    assert claims(log) == [["exp", "add"]] and dict(log.hits) == {"test.sum": 1, "test.add": 1} and log.spent == 1
    log = RuleLog(disabled=("test.add",))
    assert claims(log) == [["exp"]] and dict(log.hits) == {"test.sum": 1}


def test_a_claim_that_overlaps_is_left_out_and_not_counted() -> None:
    _, g = branches()
    rows = by_root([
        Row("test.left", chain("relu", one("add")), lambda m, c: None, "left"),
        Row("test.right", p("exp", "x"), lambda m, c: None, "right", extend=lambda m, c: m.with_ops(list(g)[2])),
    ])  # fmt: skip
    log = RuleLog()
    claimed(g, log, lambda op: first(rows.get(op.op, ()), op, g, None, log))
    assert [c.note for c in g.claims] == ["left"] and dict(log.hits) == {"test.left": 1}


def test_the_region_is_verified_after_a_pass() -> None:
    def spoil(m: Match, g: RegionGraph) -> None:
        g._users[m["x"].id].append(m.anchor.id)

    with pytest.raises(RegionError, match=r"region0 is not valid after rewrite:\n  the users of value"):
        rewrite(g := squares(1), [Row("test.spoil", p("mul", "x", "x"), spoil, "")], g, RuleLog())


def test_a_literal_of_another_type_does_not_match() -> None:
    s = Sketch()
    x = s.input(torch.randn(3))
    g = RegionGraph(s.region([s.op("mul", x, 1), s.op("mul", x, 1.0), s.op("mul", x, True)]))
    assert [bool(found(p("mul", ANY, 1), op, g)) for op in g] == [True, False, False]
