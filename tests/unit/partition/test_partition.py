
"""Claims become convex regions without cycles between them, and all answers of a backend are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, Node

from fusewright import ops
from fusewright.graph.constants import find
from fusewright.graph.parser import parse
from fusewright.graph.view import GraphIndex
from fusewright.interface import YES, Backend, Device, GraphView, OpView, Region, Verdict, Why
from fusewright.partition.partition import convex_groups, partition, wait_for_each_other

X = "%0: f32[2,3] = input('x')\n"


class Toy(Backend):
    """Claims the given ops."""

    name = "toy"
    device_type = "cpu"
    claims: ClassVar[Callable[[OpView], Any]] = lambda op: True
    groups: ClassVar[Callable[[GraphView], Any]] = lambda graph: None
    worth: ClassVar[Verdict] = YES

    @classmethod
    def probe(cls) -> Device:
        return Device("cpu", "any")

    def supports(self, op: OpView) -> Verdict:
        return YES if type(self).claims(op) else Verdict(Why.NO_LOWERING)

    def group(self, graph: GraphView, claimed: frozenset[int]) -> Sequence[frozenset[int]] | None:
        found: Sequence[frozenset[int]] | None = type(self).groups(graph)
        return found

    def profitable(self, region: Region) -> Verdict:
        return type(self).worth


def toy(claims: Iterable[str] | None = None, **members: Any) -> Backend:
    """Make a backend that claims the named ops (None: all)."""
    names = None if claims is None else set(claims)
    return type(
        "Toy", (Toy,), {"claims": staticmethod(lambda op: names is None or op.op in names), **members}
    )()


def index_of(text: str) -> GraphIndex:
    return GraphIndex(parse(text), frozenset(), "infer")


def regions(backend: Backend, text: str, **denied: Verdict) -> list[list[str]]:
    """The op names of each region."""
    return [[op.op for op in r.ops] for r in partition(backend, index_of(text), denied).regions]


DIAMOND = X + (
    "%1: f32[2,3] = exp(%0)\n%2: f32[2,3] = relu(%1)\n%3: f32[2,3] = sin(%1)\n%4: f32[2,3] = add(%2, %3, alpha=1)\nreturn [%4]\n"
)


def test_one_region_where_all_is_claimed() -> None:
    assert regions(toy(), DIAMOND) == [["exp", "relu", "sin", "add"]]


def test_a_region_does_not_wait_for_itself() -> None:
    """exp and add cannot share a region: sin, which is not claimed, lies between them."""
    assert regions(toy(["exp", "relu", "add"]), DIAMOND) == [["exp", "relu"], ["add"]]


AUTOCAST = (
    "%0: f32[3,3] = input('w_a')\n%1: f32[3,3] = input('w_b')\n%2: bf16[2,3] = input('x')\n"
    "%3: bf16[3,3] = cast(%0, dtype=torch.bfloat16)\n%4: bf16[2,3] = mm(%2, %3)\n"
    "%5: bf16[3,3] = cast(%1, dtype=torch.bfloat16)\n%6: bf16[2,3] = mm(%4, %5)\n"
    "%7: bf16[2,3] = relu(%6)\nreturn [%7]\n"
)


def test_casts_of_weights_do_not_split_a_chain() -> None:
    """In a phase without constant weights, casts are ordinary ops: one without claimed producers joins the preceding region."""
    assert regions(toy(), AUTOCAST) == [["cast", "mm", "cast", "mm", "relu"]]


def test_what_is_made_of_weights_alone_has_a_region_of_its_own() -> None:
    graph = parse(AUTOCAST)
    weights = frozenset(n for n in graph.find_nodes(op="placeholder") if str(n.target).startswith("w"))
    index = find(graph, weights, "infer").index(graph, "infer")
    once, rest = partition(toy(), index, {}).regions
    assert [op.op for op in once.ops] == ["cast", "cast"] and [op.op for op in rest.ops] == ["mm", "mm", "relu"]
    assert [bool(v.spec and v.spec.const) for v in rest.inputs] == [False, True, True]


def test_nothing_claimed() -> None:
    found = partition(toy([]), index_of(DIAMOND), {})
    assert found.regions == [] and {v.why for v in found.verdicts.values()} == {Why.NO_LOWERING}


def test_inputs_and_outputs_of_a_region() -> None:
    index = index_of(DIAMOND)
    (first, second) = partition(toy(["exp", "relu", "add"]), index, {}).regions
    assert [v.id for v in first.inputs] == [v.id for v in index.graph_view([]).inputs]
    assert {v.id for v in first.outputs} == {op.out.id for op in first.ops}  # exp feeds sin, relu feeds add
    assert second.outputs == index.graph_view([]).outputs


def test_results_of_many_stay_with_their_op() -> None:
    text = X + (
        "%1: (f32[2], i64[2]) = max_dim(%0, 1, False)\n%2: f32[2] = py.getitem(%1, 0)\n%3: i64[2] = py.getitem(%1, 1)\n"
        "%4: f32[2] = exp(%2)\nreturn [%4, %3]\n"
    )
    name = next(n for n in ops.OPS if ops.OPS[n].qualname == "aten::max.dim")
    (region,) = partition(toy(), index_of(text.replace("max_dim", name)), {}).regions
    assert [op.op for op in region.ops] == [name, "exp"]
    assert len(region.outputs) == 2


WRITE = X + (
    "%1: f32[2,3] = exp(%0)\n%2: f32[2,3] = aten.mul_.Tensor(%0, 2)\n%3: f32[2,3] = exp(%0)\n"
    "%4: f32[2,3] = add(%1, %3, alpha=1)\nreturn [%4]\n"
)  # fmt: skip


def test_a_write_in_place_is_a_border() -> None:
    found = partition(toy(), index_of(WRITE), {})
    assert [[op.op for op in r.ops] for r in found.regions] == [["exp"], ["exp", "add"]]
    assert "writes its input" in str([v for v in found.verdicts.values() if not v])


def test_random_ops_stay_with_eager() -> None:
    text = X + "%1: f32[2,3] = rand_like(%0)\n%2: f32[2,3] = add(%0, %1, alpha=1)\nreturn [%2]\n"
    assert regions(toy(), text) == [["add"]]


def test_views_alone_are_not_worth_a_region() -> None:
    text = (
        X
        + "%1: f32[3,2]{1,3} = t(%0)\n%2: f32[2,3] = t(%1)\n%3: f32[2,3] = aten.cholesky_inverse.default(%2)\nreturn [%3]\n"
    )
    found = partition(toy(["t"]), index_of(text), {})
    assert found.regions == []
    assert {v.why for v in found.verdicts.values()} == {Why.UNPROFITABLE, Why.NO_LOWERING}


def test_views_that_the_caller_sees_stay_views() -> None:
    """A returned view of an input must alias the input, whatever a backend would do with it."""
    text = (
        X
        + "%1: f32[6] = view(%0, [6])\n%2: f32[6] = exp(%1)\n%3: f32[2,3] = view(%2, [2, 3])\nreturn [%1, %3]\n"
    )
    found = partition(toy(), index_of(text), {})
    assert [[op.op for op in r.ops] for r in found.regions] == [["exp", "view"]]


def test_an_unprofitable_region_is_given_back_with_the_reason() -> None:
    found = partition(toy(worth=Verdict(Why.TOO_SMALL, "nothing to gain")), index_of(DIAMOND), {})
    assert found.regions == []
    assert {str(v) for v in found.verdicts.values()} == {"too_small: nothing to gain"}


def test_a_denied_op_is_not_asked_for_again() -> None:
    index = index_of(DIAMOND)
    sin = next(n for n in index.ops if index.ops[n].op == "sin")
    found = partition(toy(), index, {sin.name: Verdict(Why.DECLINED, "not that one")})
    assert [[op.op for op in r.ops] for r in found.regions] == [["exp", "relu"], ["add"]]
    assert str(found.verdicts[index.op_id(sin)]) == "declined: not that one"


def test_a_raise_in_supports_denies_one_op_and_is_a_bug() -> None:
    def claims(op: OpView) -> bool:
        if op.op == "sin":
            raise ZeroDivisionError("oops")
        return True

    found = partition(type("Raises", (Toy,), {"claims": staticmethod(claims)})(), index_of(DIAMOND), {})
    assert [[op.op for op in r.ops] for r in found.regions] == [["exp", "relu"], ["add"]]
    assert found.bugs == ["toy.supports(sin) raised ZeroDivisionError: oops"]


# ---------------------------------------------------------------- groups of the backend


def grouped(text: str, *groups: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Return regions and bugs if the backend requests these groups of op positions."""

    def ask(graph: GraphView) -> list[frozenset[int]]:
        return [frozenset(graph.ops[i].id for i in g) for g in groups]

    found = partition(toy(groups=staticmethod(ask)), index_of(text), {})
    return [[op.op for op in r.ops] for r in found.regions], found.bugs


def test_groups_of_the_backend_are_taken() -> None:
    assert grouped(DIAMOND, [0, 1], [2, 3]) == ([["exp", "relu"], ["sin", "add"]], [])


@pytest.mark.parametrize(
    ("groups", "left", "why"),
    [
        pytest.param([[0, 1, 3]], [], "not convex", id="not convex"),
        pytest.param([[0, 1], [1, 3]], [["exp", "relu"]], "overlaps", id="overlap"),
    ],
)
def test_bad_groups_are_refused(groups: list[list[int]], left: list[list[str]], why: str) -> None:
    found, bugs = grouped(DIAMOND, *groups)
    assert found == left
    assert len(bugs) == 1 and why in bugs[0]


CROSSED = X + (
    "%1: f32[2,3] = exp(%0)\n%2: f32[2,3] = sin(%0)\n%3: f32[2,3] = relu(%2)\n%4: f32[2,3] = cos(%1)\nreturn [%3, %4]\n"
)  # fmt: skip


def test_groups_that_wait_for_each_other_are_refused() -> None:
    """{exp, relu} and {sin, cos} are both convex, but each needs a result of the other."""
    found, bugs = grouped(CROSSED, [0, 2], [1, 3])
    assert found == [["exp", "relu"]]
    assert len(bugs) == 1 and "waits for" in bugs[0]


def test_a_group_across_a_write_is_refused() -> None:
    found, bugs = grouped(WRITE, [0, 2, 3])
    assert found == []
    assert len(bugs) == 1 and "written in place" in bugs[0]


def test_an_id_that_does_not_exist_is_a_bug_of_the_backend() -> None:
    backend = toy(groups=staticmethod(lambda graph: [frozenset({10_000})]))
    found = partition(backend, index_of(DIAMOND), {})
    assert found.regions == [] and len(found.bugs) == 1


def test_a_raise_in_group_leaves_the_hosts_own_groups() -> None:
    def ask(graph: GraphView) -> None:
        raise RuntimeError("oops")

    found = partition(toy(groups=staticmethod(ask)), index_of(DIAMOND), {})
    assert [[op.op for op in r.ops] for r in found.regions] == [["exp", "relu", "sin", "add"]]
    assert found.bugs == ["toy.group() raised RuntimeError: oops"]


# ---------------------------------------------------------------- random graphs


@st.composite
def dags(draw: Any) -> tuple[Graph, list[bool]]:
    """Draw a graph of two-input ops with random edges, some of them in-place, and which are claimed."""
    n = draw(st.integers(1, 24))
    lines = ["%0: f32[2] = input('x')", "%1: f32[2] = input('y')"]
    for i in range(2, n + 2):
        a, b = draw(st.integers(max(0, i - 6), i - 1)), draw(st.integers(0, i - 1))
        write = draw(st.integers(0, 9)) == 0
        lines.append(f"%{i}: f32[2] = {'aten.add_.Tensor' if write else 'add'}(%{a}, %{b}, alpha=1)")
    text = "\n".join(lines) + f"\nreturn [%{n + 1}]\n"
    return parse(text), draw(st.lists(st.booleans(), min_size=n, max_size=n))


def _contracted_has_cycle(index: GraphIndex, groups: Sequence[Sequence[Node]]) -> bool:
    owner: dict[Node, Any] = {n: k for k, g in enumerate(groups) for n in g}
    edges: dict[Any, set[Any]] = {}
    for n in index.graph.nodes:
        for i in n.all_input_nodes:
            a, b = owner.get(i, i), owner.get(n, n)
            if a != b:
                edges.setdefault(a, set()).add(b)
    state: dict[Any, int] = {}

    def visit(v: Any) -> bool:
        state[v] = 1
        for w in edges.get(v, ()):
            if state.get(w) == 1 or (w not in state and visit(w)):
                return True
        state[v] = 2
        return False

    return any(v not in state and visit(v) for v in list(edges))


@given(dags())
def test_groups_are_convex_complete_and_never_wait_for_each_other(made: tuple[Graph, list[bool]]) -> None:
    graph, wanted = made
    index = GraphIndex(graph, frozenset(), "infer")
    pure = [n for n in index.ops if n.target is torch.ops.aten.add.Tensor]
    claimed = [n for n, yes in zip(pure, wanted, strict=False) if yes]
    groups = convex_groups(index, claimed)
    assert sorted(n.name for g in groups for n in g) == sorted(n.name for n in claimed)
    assert not any(wait_for_each_other(index, [g]) for g in groups)
    assert not _contracted_has_cycle(index, groups)
    assert not wait_for_each_other(index, groups)
    order = {n: i for i, n in enumerate(graph.nodes)}
    borders = [order[n] for n in index.ops if n not in pure]
    for g in groups:
        assert not any(order[g[0]] < b < order[g[-1]] for b in borders), "a region crosses a write in place"


@given(dags(), st.lists(st.integers(0, 3), min_size=24, max_size=24))
def test_groups_that_wait_are_found(made: tuple[Graph, list[bool]], colors: list[int]) -> None:
    """On random groups, the check of a backend's groups agrees with a search for cycles."""
    index = GraphIndex(made[0], frozenset(), "infer")
    groups = [[n for n, c in zip(index.ops, colors, strict=False) if c == k] for k in range(3)]
    assert wait_for_each_other(index, groups) == _contracted_has_cycle(index, groups)


@given(dags())
def test_a_straight_line_of_claims_is_one_region(made: tuple[Graph, list[bool]]) -> None:
    """If everything is claimed and nothing written, every op is in the group of the ops it reads."""
    graph, _ = made
    index = GraphIndex(graph, frozenset(), "infer")
    if any(n.target is not torch.ops.aten.add.Tensor for n in index.ops):
        return
    groups = convex_groups(index, list(index.ops))
    owner = {n: k for k, g in enumerate(groups) for n in g}
    for n in index.ops:
        sources = [i for i in n.all_input_nodes if i in owner]
        assert not sources or owner[n] in {owner[i] for i in sources}


@given(dags(), st.integers(0, 3))
def test_constants_that_join_their_readers_make_no_group_wait(made: tuple[Graph, list[bool]], weights: int) -> None:
    graph, wanted = made
    held = frozenset(graph.find_nodes(op="placeholder")[:weights])
    index = find(graph, held, "infer").index(graph, "infer")
    pure = [n for n in index.ops if n.target is torch.ops.aten.add.Tensor]
    claimed = [n for n, yes in zip(pure, wanted, strict=False) if yes]
    groups = convex_groups(index, claimed, apart=False)
    assert sorted(n.name for g in groups for n in g) == sorted(n.name for n in claimed)
    assert not wait_for_each_other(index, groups)
    assert not _contracted_has_cycle(index, groups)


def test_what_is_made_of_a_weight_joins_its_reader_where_a_backend_asks_for_it() -> None:
    text = (
        "%0: f32[3,4] = input('x')\n%1: f32[4,4] = input('w')\n%2: f32[4,4] = neg(%1)\n%3: f32[3,4] = mm(%0, %2)\nreturn [%3]\n"
    )
    graph = parse(text)
    index = find(graph, frozenset(graph.find_nodes(op="placeholder")[1:]), "infer").index(graph, "infer")
    assert [len(g) for g in convex_groups(index, list(index.ops))] == [1, 1]
    assert [len(g) for g in convex_groups(index, list(index.ops), apart=False)] == [2]
