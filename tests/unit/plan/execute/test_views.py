"""Views that plans make without torch's dispatcher are what torch's operators give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusewright import _torch_compat as compat
from fusewright.interface import Dim, TensorSpec
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.execute.views import VIEW, with_views
from fusewright.plan.ir import Call, Ref
from fusewright.plan.vocabulary import function_of


def spec(t: Tensor) -> TensorSpec:
    return TensorSpec(tuple(t.shape), t.stride(), t.dtype)


class Chain:
    """A plan of view operators on its input, traced with a tensor, and a sum of each result, so that no view is returned."""

    def __init__(self, x: Tensor) -> None:
        self.values = {1: x}
        self.calls: list[Call] = []

    def then(self, target: str, given: int, *args: Any) -> list[int]:
        results = function_of(target)(self.values[given], *args)
        several = isinstance(results, tuple | list)
        outs = [len(self.values) + 1 + k for k in range(len(results) if several else 1)]
        self.values.update(zip(outs, results if several else [results], strict=True))
        self.calls.append(Call(target, (Ref(given), *args), tuple(outs), packed=several))
        return outs

    def plan(self, read: Sequence[int]) -> Plan:
        results = [self.then("aten::sin.default", v)[0] for v in read]
        specs = {v: spec(t) for v, t in self.values.items()}
        return Plan((1,), tuple(map(Ref, results)), self.calls, [], (), (), specs)

    def check(self, read: Sequence[int]) -> Plan:
        """Compare results, and what the views are made of."""
        plan = self.plan(read)
        results = codegen.load(plan)([self.values[1]])
        for found, want in zip(results, plan.outputs, strict=True):
            assert torch.equal(found, self.values[want.id])
            assert found.stride() == self.values[want.id].stride()
        return plan


def targets(plan: Plan) -> list[str]:
    return [i.target for i in with_views(plan) if isinstance(i, Call)]


def chained(steps: Callable[[Chain], Sequence[int]], x: Tensor | None = None) -> Plan:
    chain = Chain(torch.randn(4, 6, 8) if x is None else x)
    return chain.check(steps(chain))


def test_a_chain_is_one_view_of_its_first_memory() -> None:
    def steps(c: Chain) -> Sequence[int]:
        (v,) = c.then("aten::view.default", 1, [4, 6, 2, 4])
        (v,) = c.then("aten::transpose.int", v, 1, 2)
        (v,) = c.then("aten::select.int", v, 2, -2)
        return c.then("aten::slice.Tensor", v, 1, 1)

    assert targets(chained(steps)) == [VIEW, "aten::sin.default"]


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten::unbind.int", (1,)), ("aten::unbind.int", ()), ("aten::split.Tensor", (3, 1)), ("aten::split.Tensor", (4, -1)),
        ("aten::split_with_sizes.default", ([1, 2, 3], 1)), ("aten::split_with_sizes.default", ([4],)),
        ("aten::slice.Tensor", (1, 2, 5, 2)), ("aten::slice.Tensor", (-1, -3)), ("aten::slice.Tensor", (0, None, 2)),
        ("aten::slice.Tensor", (1, 99)), ("aten::slice.Tensor", (1, -99, 3)), ("aten::slice.Tensor", ()),
        ("aten::select.int", (-1, 7)), ("aten::select.int", (0, -4)), ("aten::expand.default", ([3, 4, 6, 8],)),
        ("aten::permute.default", ([2, 0, 1],)), ("aten::unsqueeze.default", (1,)), ("aten::squeeze.dim", (0,)),
        ("aten::alias.default", ()), ("aten::detach.default", ()), ("aten::transpose.int", (0, -1)),
    ],
)  # fmt: skip
def test_each_operator(target: str, args: Sequence[Any]) -> None:
    plan = chained(lambda c: c.then(target, 1, *args))
    assert set(targets(plan)) == {VIEW, "aten::sin.default"}
    chained(lambda c: c.then(target, c.then("aten::slice.Tensor", 1, 2, 0, 16, 2)[0], *args), torch.randn(4, 6, 16))


@given(st.data())
def test_random_chains(data: st.DataObject) -> None:
    chain = Chain(torch.randn(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))))
    read = []
    v = 1
    for _ in range(data.draw(st.integers(1, 5))):
        rank, shape = chain.values[v].dim(), chain.values[v].shape
        if not chain.values[v].numel() or not rank:
            break
        dim = data.draw(st.integers(-rank, rank - 1))
        at = st.integers(-shape[dim], shape[dim] - 1)
        step: tuple[Any, ...] = data.draw(
            st.one_of(
                st.tuples(st.just("aten::transpose.int"), st.just(dim), st.integers(-rank, rank - 1)),
                st.tuples(st.just("aten::select.int"), st.just(dim), at),
                st.tuples(st.just("aten::slice.Tensor"), st.just(dim), at, at, st.integers(1, 3)),
                st.tuples(st.sampled_from(["aten::unsqueeze.default", "aten::unbind.int"]), st.just(dim)),
                st.tuples(st.just("aten::split.Tensor"), st.integers(1, 3), st.just(dim)),
            )
        )
        results = chain.then(step[0], v, *step[1:])
        read += data.draw(st.lists(st.sampled_from(results), max_size=2, unique=True))
        v = data.draw(st.sampled_from(results))
    chain.check([*dict.fromkeys([*read, v])])


@pytest.mark.parametrize("step", [1, 2])
def test_parts_of_memory_that_the_plan_does_not_describe(step: int) -> None:
    chain = Chain(torch.randn(4, 12))
    (v,) = chain.then("aten::slice.Tensor", 1, 1, 3, 9, step)
    plan = chain.plan(chain.then("aten::unsqueeze.default", v, 0))
    del plan.specs[1]
    assert (VIEW in targets(plan)[:1]) == (step == 1)
    (found,) = codegen.load(plan)([chain.values[1]])
    assert torch.equal(found, chain.values[1][:, 3:9:step].sin()[None])


def test_what_is_written_or_returned_stays_a_view_to_torch() -> None:
    chain = Chain(torch.zeros(4, 6))
    (row,) = chain.then("aten::select.int", 1, 0, 1)
    (part,) = chain.then("aten::slice.Tensor", row, 0, 2)
    chain.then("aten::add_.Scalar", part, 1)
    (returned,) = chain.then("aten::select.int", 1, 1, 0)
    specs = {v: spec(t) for v, t in chain.values.items()}
    plan = Plan((1,), (Ref(returned),), chain.calls, [], (), (), specs)
    assert VIEW not in targets(plan)
    x = torch.zeros(4, 6)
    before = x._version
    (found,) = codegen.load(plan)([x])
    assert x._version > before, "weights that change are noticed by their version"
    assert found._base is x
    assert x.sum() == 4


def test_sizes_that_are_known_late_stay_calls() -> None:
    late = Dim("u0", 3)
    x, some = TensorSpec((6,), (1,), torch.float32), TensorSpec((late,), (1,), torch.float32)
    mask = TensorSpec((6,), (1,), torch.bool)
    calls = [
        Call("aten::masked_select.default", (Ref(1), Ref(2)), (3,)), Call("aten::unsqueeze.default", (Ref(3), 0), (4,)),
        Call("aten::sin.default", (Ref(4),), (5,)),
    ]  # fmt: skip
    row = TensorSpec((1, late), (late, 1), torch.float32)
    plan = Plan((1, 2), (Ref(5),), calls, [], (), (), {1: x, 2: mask, 3: some, 4: row, 5: row})
    assert VIEW not in targets(plan)
    assert codegen.load(plan)([torch.ones(6), torch.arange(6) < 2])[0].shape == (1, 2)


def in_training(steps: Callable[[Chain], Sequence[int]]) -> tuple[list[str], Sequence[Tensor]]:
    """The targets of a plan of training that returns what `steps` gives, and its results."""
    chain = Chain(torch.randn(4, 6))
    outputs = steps(chain)
    specs = {v: spec(t) for v, t in chain.values.items()}
    plan = Plan((1,), tuple(map(Ref, outputs)), chain.calls, [], (), (), specs, trains=True)
    names = codegen.Names()
    launches = codegen._Launches(plan, codegen.PLACE(plan), {}, names)
    lines = codegen._body(plan, with_views(plan), set(outputs), names, launches)
    text = "\n".join(["def run(v1):", *lines, f"    return [{', '.join(f'v{o}' for o in outputs)}]"])
    names.space["view"] = compat.view_of_memory
    exec(text, names.space)
    results = names.space["run"](chain.values[1])
    for found, out in zip(results, outputs, strict=True):
        assert torch.equal(found, chain.values[out]) and found.stride() == chain.values[out].stride()
    return targets(plan), results


def test_a_result_of_training_that_is_all_of_its_memory_is_no_view() -> None:
    """Autograd takes it as it is; a view would be detached, or cost the dispatcher."""

    def twice(c: Chain) -> Sequence[int]:
        (v,) = c.then("aten::sin.default", 1)
        return c.then("aten::t.default", c.then("aten::t.default", v)[0])

    def viewed(c: Chain) -> Sequence[int]:
        return c.then("aten::view.default", c.then("aten::sin.default", 1)[0], [24])

    for steps in (twice, viewed):
        found, (result,) = in_training(steps)
        assert found == ["aten::sin.default", VIEW] and not result._is_view()


def test_results_of_training_that_share_memory_stay_views() -> None:
    def both(c: Chain) -> Sequence[int]:
        (v,) = c.then("aten::sin.default", 1)
        return [v, *c.then("aten::t.default", v)]

    found, (base, view) = in_training(both)
    assert found == ["aten::sin.default", "aten::t.default"] and view._base is base
    found, _ = in_training(lambda c: c.then("aten::t.default", 1))
    assert found == ["aten::t.default"], "of an input"

    def written(c: Chain) -> Sequence[int]:
        (v,) = c.then("aten::sin.default", 1)
        out = c.then("aten::t.default", v)
        c.then("aten::neg_.default", v)
        c.then("aten::neg_.default", v)
        return out

    assert in_training(written)[0].count("aten::t.default") == 1
