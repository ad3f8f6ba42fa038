"""The specification of plans: compiled plans obey it, and deliberate violations are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright.forms import passes
from fusewright.forms.spec import Spec
from fusewright.interface import TensorSpec
from fusewright.plan import verify
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.ir import Call, Instruction, Launch, Ref
from fusewright.plan.memory import place
from fusewright.plan.verify import PlanError, find_problems, placement_problems
from fusewright.stages import lowering, planning

pytestmark = pytest.mark.hardware("x86_onednn")


class Net(nn.Module):
    """Weights to prepack, kernels around products, several results and a long-lived sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.norm(self.a(x)))
        z = self.b(y).softmax(-1) + x
        parts = z.split(32, -1)
        return (z @ z.t()).sin() * 2, torch.exp(parts[0] * parts[1]).cumsum(0)


def updating(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache.index_copy_(0, at, new * 2)
    return cache.sum() + new


def crossing(x: Tensor) -> Tensor:
    """Two kernel results live at the same time, and neither fits into the memory of a dying input."""
    a, b = x.exp(), x.sin()
    return (a @ b.t()) @ (b @ a.t())


@pytest.fixture(scope="module")
def plans() -> Iterator[list[Plan]]:
    """Collect plans as they are when their kernels are loaded."""
    found: list[Plan] = []
    original = planning.finish

    def noting(c: Any, kernels: Any) -> None:
        found.append(c.plan)
        original(c, kernels)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(planning, "finish", noting)
        torch.compiler.reset()
        options = {"cache": False, "prepack": "always"}
        torch.manual_seed(0)
        torch.compile(Net().eval(), backend="x86_onednn", options=options)(torch.randn(8, 64))
        torch.compile(updating, backend="x86_onednn", options=options)(
            torch.zeros(16, 8), torch.tensor([3, 5]), torch.randn(2, 8)
        )
        torch.compile(crossing, backend="x86_onednn", options=options)(torch.randn(8, 16))
        yield found


@pytest.fixture
def net(plans: list[Plan]) -> Plan:
    return plans[0]


@pytest.fixture
def update(plans: list[Plan]) -> Plan:
    return plans[1]


@pytest.fixture
def cross(plans: list[Plan]) -> Plan:
    return plans[2]


def changed(plan: Plan, k: int, new: Instruction) -> Plan:
    return replace(plan, instructions=[*plan.instructions[:k], new, *plan.instructions[k + 1 :]])


def position(plan: Plan, kind: type[Instruction], where: Callable[[Any], bool] = lambda i: True) -> int:
    return next(k for k, i in enumerate(plan.instructions) if isinstance(i, kind) and where(i))


def launch(plan: Plan, where: Callable[[Launch], bool] = lambda i: True) -> tuple[int, Launch]:
    k = position(plan, Launch, where)
    found = plan.instructions[k]
    assert isinstance(found, Launch)
    return k, found


def call(plan: Plan, where: Callable[[Call], bool] = lambda i: True) -> tuple[int, Call]:
    k = position(plan, Call, where)
    found = plan.instructions[k]
    assert isinstance(found, Call)
    return k, found


def test_plans_of_models_are_valid(plans: list[Plan]) -> None:
    assert len(plans) == 3
    for plan in plans:
        assert any(isinstance(i, Launch) for i in plan.instructions)
        assert [*find_problems(plan), *placement_problems(plan, place(plan))] == []


def read_too_early(p: Plan) -> Plan:
    return replace(p, instructions=[p.instructions[-1], *p.instructions[:-1]])


def never_made(p: Plan) -> Plan:
    return replace(p, instructions=p.instructions[1:])


def made_twice(p: Plan) -> Plan:
    return replace(p, instructions=[*p.instructions, p.instructions[0]])


def unknown_result(p: Plan) -> Plan:
    return replace(p, outputs=(*p.outputs, Ref(9999)))


def input_given_twice(p: Plan) -> Plan:
    return replace(p, inputs=(*p.inputs, p.inputs[0]))


def unknown_operator(p: Plan) -> Plan:
    k, i = call(p)
    return changed(p, k, replace(i, target="aten::no_such_op.default"))


def too_many_arguments(p: Plan) -> Plan:
    k, i = call(p)
    return changed(p, k, replace(i, args=(*i.args, *[1] * 40)))


def argument_left_out(p: Plan) -> Plan:
    k, i = call(p)
    return changed(p, k, replace(i, args=(), kwargs=()))


def argument_of_no_name(p: Plan) -> Plan:
    k, i = call(p)
    return changed(p, k, replace(i, kwargs=(*i.kwargs, ("flavour", 1))))


def text_for_a_tensor(p: Plan) -> Plan:
    k, i = call(p)
    return changed(p, k, replace(i, args=("x", *i.args[1:])))


def one_result_taken_apart(p: Plan) -> Plan:
    k, i = call(p, lambda i: not i.packed)
    return changed(p, k, replace(i, packed=True))


def kernel_that_is_not_there(p: Plan) -> Plan:
    k, i = launch(p)
    return changed(p, k, replace(i, kernel="f" * 64))


def tensor_too_few(p: Plan) -> Plan:
    k, i = launch(p)
    return changed(p, k, replace(i, inputs=i.inputs[1:], inplace=()))


def size_too_many(p: Plan) -> Plan:
    k, i = launch(p)
    return changed(p, k, replace(i, sizes=(*i.sizes, 3)))


def scalar_too_many(p: Plan) -> Plan:
    k, i = launch(p)
    return changed(p, k, replace(i, scalars=(*i.scalars, 3.0)))


def size_of_no_dimension(p: Plan) -> Plan:
    k, i = launch(p)
    return changed(p, k, replace(i, sizes=(*i.sizes, ("size", i.inputs[0], 17))))


def another_dtype(p: Plan) -> Plan:
    _, i = launch(p)
    made = {o for j in p.instructions for o in j.outs}
    v = next(r.id for r in (*i.inputs, *map(Ref, i.outs)) if r.id in p.specs and (r.id in made or r.id in p.inputs))
    return replace(p, specs={**p.specs, v: replace(p.specs[v], dtype=torch.int16)})


def result_without_a_spec(p: Plan) -> Plan:
    _, i = launch(p)
    return replace(p, specs={v: s for v, s in p.specs.items() if v not in i.outs})


def inplace_of_nothing(p: Plan) -> Plan:
    k, i = launch(p)
    return changed(p, k, replace(i, inplace=((0, 99),)))


def weight_written(p: Plan) -> Plan:
    weight = p.prepare_inputs[0]
    return replace(p, instructions=[Call("aten::zero_.default", (Ref(weight),), (9999,)), *p.instructions])


def prepared_constant_written(p: Plan) -> Plan:
    constant = Ref(p.prepare_outputs[0])
    return replace(p, instructions=[Call("aten::mul_.Scalar", (constant, 2), (9999,)), *p.instructions])


def prepared_of_an_input(p: Plan) -> Plan:
    given = next(i for i in p.inputs if not p.specs[i].const)
    first = p.prepare[0]
    assert isinstance(first, Call)
    changed = replace(first, args=(Ref(given), *first.args[1:]))
    return replace(p, prepare=[changed, *p.prepare[1:]], prepare_inputs=(*p.prepare_inputs, given))


def prepared_value_never_made(p: Plan) -> Plan:
    return replace(p, prepare_outputs=(*p.prepare_outputs, 9999))


def prepare_draws(p: Plan) -> Plan:
    drawn = Call("aten::rand_like.default", (Ref(p.prepare_inputs[0]),), (9999,))
    return replace(p, prepare=[*p.prepare, drawn])


def prepare_draws_in_an_attention(p: Plan) -> Plan:
    given = Ref(p.prepare_inputs[0])
    call = Call("aten::scaled_dot_product_attention.default", (given, given, given, None, 0.5), (9999,))
    return replace(p, prepare=[*p.prepare, call])


MUTATIONS: dict[Callable[[Plan], Plan], str] = {
    **dict.fromkeys((read_too_early, never_made, made_twice, unknown_result), "defined"),
    **dict.fromkeys((input_given_twice, prepared_of_an_input, prepared_value_never_made), "interface"),
    **dict.fromkeys((unknown_operator, too_many_arguments, argument_left_out, argument_of_no_name), "calls"),
    **dict.fromkeys((text_for_a_tensor, one_result_taken_apart), "calls"),
    **dict.fromkeys((kernel_that_is_not_there, tensor_too_few, size_too_many, scalar_too_many), "launches"),
    **dict.fromkeys((size_of_no_dimension, another_dtype, result_without_a_spec, inplace_of_nothing), "launches"),
    **dict.fromkeys((weight_written, prepared_constant_written), "constants"),
    **dict.fromkeys((prepare_draws, prepare_draws_in_an_attention), "repeatable"),
}
"""Changes -> the id of the rule that forbids them."""


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_change_by_hand_is_found(net: Plan, mutate: Callable[[Plan], Plan]) -> None:
    assert MUTATIONS[mutate] in {v.rule for v in verify.PLAN.violations(mutate(net))}
    with pytest.raises(PlanError, match="the plan is not valid after a change"):
        verify.check(mutate(net), "a change")


def test_an_attention_that_drops_nothing_may_be_prepared(net: Plan) -> None:
    given = Ref(net.prepare_inputs[0])
    call = Call("aten::scaled_dot_product_attention.default", (given, given, given), (9999,))
    assert "repeatable" not in {v.rule for v in verify.PLAN.violations(replace(net, prepare=[*net.prepare, call]))}


OF_A_PLAN = (unknown_result, another_dtype, result_without_a_spec)
"""Changes of a plan's results and specs, which a backend's answer does not have."""
OF_A_LIST = [m for m, rule in MUTATIONS.items() if rule in ("defined", "calls", "launches") and m not in OF_A_PLAN]
"""Changes that are equally wrong in a backend's answer."""


@pytest.fixture(scope="module")
def answer() -> Iterator[verify.Answer]:
    """A region, the backend's answer for it, and the specs of temporaries."""
    found: list[verify.Answer] = []
    guarded = lowering._guarded

    def noting(c: Any, region: Any, result: Any) -> Any:
        found.append((region, result, dict(c.index.temporaries)))
        return guarded(c, region, result)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(lowering, "_guarded", noting)
        torch.compiler.reset()
        torch.manual_seed(0)
        options = {"cache": False, "prepack": "always"}
        torch.compile(Net().eval(), backend="x86_onednn", options=options)(torch.randn(8, 64))
        yield max(found, key=lambda a: len(a[1].instructions))


def test_an_answer_obeys_every_rule(answer: verify.Answer) -> None:
    assert not list(verify.FRAGMENT.violations(answer))
    assert len(OF_A_LIST) >= 10


@pytest.mark.parametrize("mutate", OF_A_LIST)
def test_a_change_of_a_backends_answer_is_found(answer: verify.Answer, mutate: Callable[[Any], Any]) -> None:
    region, fragment, temporaries = answer
    changed = (region, mutate(fragment), temporaries)
    assert MUTATIONS[mutate] in {v.rule for v in verify.FRAGMENT.violations(changed)}


def the_updating_launch(p: Plan) -> tuple[int, Launch]:
    return launch(p, lambda i: bool(i.updates))


def test_what_is_written_over_has_no_later_reader(update: Plan) -> None:
    k, i = the_updating_launch(update)
    (_, r) = i.updates[0]
    late = Call("aten::sin.default", (i.inputs[r],), (9999,))
    broken = replace(update, instructions=[*update.instructions[: k + 1], late, *update.instructions[k + 1 :]])
    assert any("after" in p and "wrote over it" in p for p in find_problems(broken))


def test_nor_has_a_view_of_it(update: Plan) -> None:
    k, i = the_updating_launch(update)
    source = i.inputs[i.updates[0][1]]
    view = Call("aten::view.default", (source, (-1,)), (9998,))
    late = Call("aten::sin.default", (Ref(9998),), (9999,))
    broken = replace(update, instructions=[view, *update.instructions[: k + 1], late, *update.instructions[k + 1 :]])
    assert any("after" in p and "wrote over it" in p for p in find_problems(broken))


def test_a_weight_is_not_written_over(update: Plan) -> None:
    _, i = the_updating_launch(update)
    source = i.inputs[i.updates[0][1]].id
    broken = replace(update, specs={**update.specs, source: replace(update.specs[source], const=True)})
    assert any("writes over the constant" in p for p in find_problems(broken))


def _written_into(*more: Call, into: tuple[tuple[int, Ref], ...] = ((0, Ref(1)),), const: bool = False) -> list[str]:
    """The problems of a plan whose kernel makes 3 of the input 2, in the memory of the input 1."""
    spec = TensorSpec((4,), (1,), torch.float32)
    launch, back = Launch("k", (Ref(2),), (3,), into=into), Call("aten::copy_.default", (Ref(1), Ref(3)), (9,))
    specs = {**dict.fromkeys((2, 3, 4, 9), spec), 1: replace(spec, const=const), 5: replace(spec, shape=(2,))}
    return list(find_problems(Plan((1, 2, 5), (), [launch, *more, back], [], (), (), specs, kernels={"k": 0})))


def test_what_a_kernel_makes_in_the_memory_of_another_tensor() -> None:
    assert not _written_into()
    assert not _written_into(Call("aten::sin.default", (Ref(3),), (4,)))
    assert any("reads %1 after" in p for p in _written_into(Call("aten::sin.default", (Ref(1),), (4,))))
    assert any("the constant %1" in p for p in _written_into(const=True))
    assert any("writes over %2, which it reads" in p for p in _written_into(into=((0, Ref(2)),)))
    assert any("another kind of tensor" in p for p in _written_into(into=((0, Ref(5)),)))
    assert any("does not have" in p for p in _written_into(into=((1, Ref(1)),)))
    assert any("or one twice" in p for p in _written_into(into=((0, Ref(1)), (0, Ref(2)))))


def test_what_lies_in_the_memory_of_an_input_is_not_taken_over() -> None:
    """Neither before the copy back nor after it, when nothing of the plan reads the input any more."""
    spec = TensorSpec((4,), (1,), torch.float32)
    back = Call("aten::copy_.default", (Ref(1), Ref(3)), (9,))
    steps = [Launch("k", (Ref(2),), (3,), into=((0, Ref(1)),)), back, Launch("k", (Ref(3),), (4,), inplace=((0, 0),))]
    plan = Plan((1, 2), (Ref(4),), steps, [], (), (), dict.fromkeys((1, 2, 3, 4, 9), spec), kernels={"k": 0})
    assert place(plan).onto == {3: 1}
    assert not list(placement_problems(plan, place(plan)))


def test_two_values_that_live_at_once_do_not_share_a_slot(cross: Plan) -> None:
    good = place(cross)
    (a, b) = good.offset
    bad = replace(good, offset={a: good.offset[b], b: good.offset[b]})
    assert [p for p in placement_problems(cross, bad) if "still lives" in p]


def test_a_result_does_not_lie_in_the_arena(cross: Plan) -> None:
    (v, _) = place(cross).offset
    (problem,) = placement_problems(replace(cross, outputs=(*cross.outputs, Ref(v))), place(cross))
    assert problem == f"%{v} outlives the call, but lies in the arena"


def test_a_value_that_is_read_later_is_not_taken_over() -> None:
    spec = TensorSpec((4,), (1,), torch.float32)
    launches = [Launch("k", (Ref(1),), (2,)), Launch("k", (Ref(2),), (3,)), Launch("j", (Ref(2), Ref(3)), (4,))]
    plan = Plan((1,), (Ref(4),), list(launches), [], (), (), dict.fromkeys((1, 2, 3, 4), spec), kernels={"k": 0, "j": 0})
    placement = place(plan)
    assert not list(placement_problems(plan, placement))
    bad = replace(placement, onto={3: 2}, offset={2: 0}, arena_bytes=64)
    assert list(placement_problems(plan, bad)) == ["%3 takes over %2, which is read after that"]


def test_a_value_of_which_a_view_is_read_beside_it_is_not_taken_over() -> None:
    spec = TensorSpec((4,), (1,), torch.float32)
    shifted = Call("aten::slice.Tensor", (Ref(2), 0, 1, 4), (3,))
    reader = Launch("j", (Ref(2), Ref(3)), (4,), inplace=((0, 0),))
    steps = [Launch("k", (Ref(1),), (2,)), shifted, reader, Launch("k", (Ref(4),), (5,))]
    specs = {**dict.fromkeys((1, 2, 4, 5), spec), 3: replace(spec, shape=(3,))}
    plan = Plan((1,), (Ref(5),), steps, [], (), (), specs, kernels={"k": 0, "j": 0})
    placement = place(plan)
    assert 4 not in placement.onto
    assert not list(placement_problems(plan, placement))
    bad = replace(placement, onto={4: 2}, offset={2: 0}, arena_bytes=64)
    assert list(placement_problems(plan, bad)) == ["%4 takes over %2, which is read twice while it is made"]


def test_memory_that_is_wrong_is_no_code(cross: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    good = place(cross)
    monkeypatch.setattr(verify.PLACE, "run", lambda plan: replace(good, arena_bytes=0))
    with pytest.raises(PlanError, match="outside of the arena"):
        codegen.load(cross)


@pytest.mark.faulty
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_a_pass_that_breaks_a_plan_costs_the_lowering_and_not_the_model(
    strict: bool, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(plan: Plan) -> Plan:
        lowered = any(isinstance(i, Launch) for i in plan.instructions)
        if in_place and lowered:
            del plan.instructions[0]
            return plan
        return replace(plan, instructions=plan.instructions[1:]) if lowered else plan

    monkeypatch.setattr(passes.UPDATE, "run", breaking)
    x = torch.randn(8, 16)
    compiled = torch.compile(crossing, backend="x86_onednn", options={"cache": False, "strict": strict})
    if strict:
        with pytest.raises(Exception, match="the plan is not valid after updated_in_place"):
            compiled(x)
    else:
        torch.testing.assert_close(compiled(x), crossing(x))


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_a_pass_leaves_as_it_was_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[str] = []
    monkeypatch.setattr(Spec, "check", lambda spec, form, after: verified.extend([after] * (spec is verify.PLAN)))
    torch.compile(crossing, backend="x86_onednn", options={"cache": False})(torch.randn(8, 16))
    assert verified == ["build"]
