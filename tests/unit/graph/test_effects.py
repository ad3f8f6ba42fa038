"""Assertions are side effects: they are kept and run at every call, before everything that follows them."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fusewright.graph.canonicalize import canonicalize
from fusewright.graph.constants import find
from fusewright.graph.cse import merge_common
from fusewright.graph.effects import asserts, drop_dead_code
from fusewright.graph.parser import parse
from fusewright.graph.verify import find_problems
from fusewright.graph.view import GraphIndex
from fusewright.interface import YES, Backend, Device, Opaque, OpView, Verdict, Why
from fusewright.partition.partition import convex_groups, make_region, partition, wait_for_each_other
from fusewright.plan import build
from fusewright.plan.ir import CallPython

ASSERTED = """
%0: f32[4] = input('x')
%1: f32[4] = exp(%0)
%2: bool[4] = gt(%1, 0)
%3: bool[] = all(%2, None, False)
%4: none = aten._assert_async.msg(%3, 'positive')
%5: none = aten._assert_async.msg(%3, 'positive')
%6: f32[4] = relu(%0)
%7: f32[4] = sin(%1)
return [%6, %7]
"""


class Everything(Backend):
    """Claims every op."""

    name = "everything"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Device:
        return Device("cpu", "any")

    def supports(self, op: OpView) -> Verdict:
        return YES


def index(text: str, const: tuple[str, ...] = ()) -> GraphIndex:
    graph = parse(text)
    held = frozenset(n for n in graph.nodes if n.op == "placeholder" and n.target in const)
    return find(graph, held, "infer").index(graph, "infer")


def names(nodes: tuple[Node, ...]) -> set[str]:
    return {str(n.target).split(".")[1] for n in nodes}


def test_assertions_are_neither_dead_nor_common() -> None:
    graph = parse(ASSERTED)
    drop_dead_code(graph)
    merge_common(graph)
    assert sum(map(asserts, graph.nodes)) == 2


def test_an_assertion_without_words_is_not_dead() -> None:
    """Torch itself treats it as dead."""
    graph = parse("%0: bool[] = input('x')\n%1: none = aten._assert_async.default(%0)\nreturn [%0]")
    drop_dead_code(graph)
    assert sum(map(asserts, graph.nodes)) == 1


def test_no_group_reaches_over_an_assertion_that_waits_for_it() -> None:
    x = index(ASSERTED)
    groups = convex_groups(x, [n for n in x.ops if not asserts(n)])
    assert [names(g) for g in groups] == [{"exp", "gt", "all"}, {"relu", "sin"}]
    assert not wait_for_each_other(x, groups)
    assert wait_for_each_other(x, [groups[0] + groups[1]])


def test_no_backend_gets_an_assertion() -> None:
    x = index(ASSERTED)
    found = partition(Everything(), x, {})
    assert not any(asserts(n) for g in found.members for n in g)
    assert {v.why for n, v in zip(x.ops, found.verdicts.values(), strict=True) if asserts(n)} == {Why.NO_LOWERING}


def test_a_region_runs_behind_the_assertions_that_its_last_op_stands_behind() -> None:
    x = index("""
%0: f32[4] = input('x')
%1: f32[4] = neg(%0)
%2: bool[4] = gt(%0, 0)
%3: bool[] = all(%2, None, False)
%4: none = aten._assert_async.msg(%3, 'positive')
%5: f32[4] = relu(%1)
return [%5]
""")
    (group,) = [tuple(n for n in x.ops if n.target in (torch.ops.aten.neg.default, torch.ops.aten.relu.default))]
    region = make_region(x, group, "both")
    plan = build.build(x, [group], [(region, Opaque(lambda t: (t.neg().relu(),)))])
    order = [i.name if isinstance(i, CallPython) else i.target for i in plan.instructions]  # type: ignore[union-attr]
    assert order[-2:] == ["aten::_assert_async.msg", "both"]


def test_an_assertion_on_constants_runs_at_every_call() -> None:
    plan = build.build(index(ASSERTED, const=("x",)), (), ())
    assert [i.target for i in plan.instructions].count("aten::_assert_async.msg") == 2  # type: ignore[union-attr]
    assert all("_assert" not in i.target for i in plan.prepare)  # type: ignore[union-attr]


def test_a_number_made_of_constants_is_no_constant() -> None:
    """It may be used as a size, which no op reads as a value."""
    text = "%0: f32[] = input('w')\n%1: float = aten._local_scalar_dense.default(%0)\nreturn [%1]"
    x = index(text, const=("w",))
    assert not build.build(x, (), ()).prepare


def test_sizes_that_nobody_can_tell_are_left_to_eager() -> None:
    """The graph's tensors have 2*s0 elements and none has s0, so s0 cannot be read off."""
    text = "%0: f32[2*s0] = input('x')\n%1: f32[2*s0] = exp(%0)\n%2: f32[2*s0] = sin(%1)\nreturn [%2]"
    refused = partition(Everything(), index(text), {})
    assert not refused.regions
    assert {v.detail for v in refused.verdicts.values()} == {"no tensor has the size s0"}
    assert partition(Everything(), index("%9: sym(s0) = input('n')\n" + text), {}).regions


def test_a_number_in_the_place_of_a_tensor_becomes_one() -> None:
    """For example, vmap writes the factor of `x * 2` like this."""
    graph = parse("%0: f32[3] = input('x')\n%1: f32[] = aten._to_copy(2, dtype=torch.float32)\n"
                  "%2: f32[3] = mul(%0, %1)\nreturn [%2]")  # fmt: skip
    assert canonicalize(graph) == []
    assert not list(find_problems(graph))
    torch.testing.assert_close(GraphModule({}, graph)(torch.ones(3))[0], torch.full((3,), 2.0))
