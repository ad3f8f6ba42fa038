"""Inputs that a graph overwrites are changed in place, with right results for reads before and after."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewright import report
from fusewright.interface import TensorSpec
from fusewright.plan.build import Plan, shared_by
from fusewright.plan.inplace import updated_in_place, without_spare_copies
from fusewright.plan.ir import Call, Launch, Ref
from fusewright.plan.memory import roots_of
from tests.growth import work

Tensors = tuple[torch.Tensor, ...]
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
WRITES: dict[str, Step] = {
    "put": lambda x, y, i: x.index_copy_(0, i, y),
    "put back": lambda x, y, i: x.index_copy_(0, i, x[:2] * 2),
    "add to places": lambda x, y, i: x.index_put_((i,), y, accumulate=True),
    "scatter": lambda x, y, i: x.scatter_(0, i[:, None].expand(2, 6), y),
    "row": lambda x, y, i: x[1].copy_(y[0]),
    "count": lambda x, y, i: x.add_(1),
    "shift": lambda x, y, i: x.copy_(x.flip(0)),
}
READS: dict[str, Step] = {
    "read": lambda x, y, i: x.sum(0),
    "read part": lambda x, y, i: x[2:4] * y,
    "read all": lambda x, y, i: (x.float() * 3 + 1).relu(),
    "a copy": lambda x, y, i: x.clone(),
}


def arguments() -> Tensors:
    torch.manual_seed(0)
    return torch.randn(5, 6), torch.randn(2, 6), torch.tensor([3, 1])


def program(steps: tuple[str, ...], x_of: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> Callable[..., Any]:
    def run(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for s in steps:
            result = {**WRITES, **READS}[s](x_of(x), y, i)
            if s in READS:
                found.append(result)
        return found

    return run


def plan_of(run: Callable[..., Any], *args: torch.Tensor) -> str:
    """Call a function compiled and in eager several times; return the plan that ran."""
    torch.compiler.reset()
    ours, theirs = [a.clone() for a in args], [a.clone() for a in args]
    compiled = torch.compile(run, backend="x86_onednn", options={"cache": False, "fallback": "allow"})
    with report.recording() as reports, torch.no_grad():
        for _ in range(3):
            for mine, eager in zip(compiled(*ours), run(*theirs), strict=True):
                torch.testing.assert_close(mine, eager)
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b)
    return reports[0].texts["plan"]


@pytest.mark.parametrize(
    "steps", [("put",), ("read", "put"), ("put", "read all"), ("scatter", "read", "read part"), ("put", "read", "scatter", "put")]
)
def test_a_scatter_writes_only_what_changes(steps: tuple[str, ...]) -> None:
    text = plan_of(program(steps), *arguments())
    made = [
        line for line in text.splitlines() if "float32[5, 6]" in line and ("empty_strided" in line or "frame." in line)
    ]
    assert len(made) == ("read all" in steps)


def test_a_kernel_that_computes_the_new_content_writes_over_the_old() -> None:
    text = plan_of(program(("count", "read")), *arguments())
    assert "empty_strided((5, 6" not in text


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(sorted({**WRITES, **READS})), min_size=1, max_size=5).map(tuple))
def test_any_order_of_reads_and_writes(steps: tuple[str, ...]) -> None:
    plan_of(program(steps), *arguments())


@pytest.mark.parametrize("steps", [("put", "read"), ("count",), ("read part", "put back", "read")])
def test_through_a_view(steps: tuple[str, ...]) -> None:
    x, y, i = arguments()
    plan_of(program(steps, lambda x: x.view(5, 6)[:, :6]), x, y, i)
    plan_of(program(steps, lambda x: x.t()[:, :5].t()), x, y, i)


def test_inputs_that_share_memory() -> None:
    def run(x: torch.Tensor, z: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        before = z * 2
        x.index_copy_(0, i, y)
        return [before, z + 1]

    compiled = torch.compile(run, backend="x86_onednn", options={"cache": False, "fallback": "allow"})
    x, y, i = arguments()
    with torch.no_grad():
        ours, theirs = x.clone(), x.clone()
        for mine, eager in zip(compiled(ours, ours[1:], y, i), run(theirs, theirs[1:], y, i), strict=True):
            torch.testing.assert_close(mine, eager)
    torch.testing.assert_close(ours, theirs)


def test_a_caller_sees_that_its_tensor_changed() -> None:
    x, y, i = arguments()
    compiled = torch.compile(program(("put", "read")), backend="x86_onednn", options={"cache": False})
    with torch.no_grad():
        compiled(x, y, i)
        before = x._version
        compiled(x, y, i)
    assert x._version > before


def test_a_cache_of_keys_and_one_of_values_are_written_by_one_kernel() -> None:
    def step(k: torch.Tensor, v: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        k.index_copy_(0, i, y * 2)
        v.index_copy_(0, i, y)
        return [k.sum(0) + v.sum(0)]

    x, y, i = arguments()
    text = plan_of(step, x, x + 1, y, i)
    assert text.count("if e: fail") == 2, "one for the caches, one for the sums"


class Norms(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.Sequential(*(torch.nn.BatchNorm1d(6) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norms(x)


def test_statistics_of_a_training_step_are_copied_together() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    theirs, x = Norms(), torch.randn(5, 6)
    ours = copy.deepcopy(theirs)
    compiled = torch.compile(ours, backend="x86_onednn", options={"cache": False, "fallback": "allow"})
    with report.recording() as reports:
        for _ in range(3):
            compiled(x).sin().sum().backward()
            theirs(x).sin().sum().backward()
    for a, b in zip((*ours.buffers(), *ours.parameters()), (*theirs.buffers(), *theirs.parameters()), strict=True):
        torch.testing.assert_close(a, b)
    text = next(r for r in reports if r.phase == "forward").texts["plan"]
    assert text.count("_foreach_copy_") == 1


def test_copies_that_touch_each_other_stay_apart() -> None:
    def swapped(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        was = x.clone()
        x.copy_(y)
        y.copy_(was)
        return (x + y,)

    assert "_foreach_copy_" not in plan_of(swapped, torch.randn(5, 6), torch.randn(5, 6))


def _added_onto_a_copy(source: str, *last: Call, strides: tuple[int, ...] = (3, 1), outputs: tuple[Ref, ...] = (Ref(4),)) -> Plan:
    """A plan that copies the result of an op on its input, and adds to the copy in place."""
    spec = TensorSpec((2, 3), (3, 1), torch.float32, "cpu")
    main = [
        Call(source, (Ref(1), *((0,) if "select" in source else ())), (2,)), Call("aten::clone.default", (Ref(2),), (3,)),
        Call("aten::add_.Tensor", (Ref(3), 1), (4,)), *last,
    ]  # fmt: skip
    specs = {1: spec, 2: replace(spec, stride=strides), 4: spec, 5: spec}
    return Plan((1,), outputs, main, [], (), (), specs)


def test_a_copy_that_is_made_to_be_overwritten_is_spared_if_nobody_reads_the_original_later() -> None:
    again = Call("aten::sin.default", (Ref(4),), (5,))
    for plan in (_added_onto_a_copy("aten::relu.default"), _added_onto_a_copy("aten::relu.default", again, outputs=(Ref(5),))):
        found = without_spare_copies(plan)
        assert [i.args[0] for i in found.instructions[:2]] == [Ref(1), Ref(2)]
        assert len(found.instructions) == len(plan.instructions) - 1
    read = Call("aten::sin.default", (Ref(2),), (5,))
    for plan in (
        _added_onto_a_copy("aten::relu.default", read), _added_onto_a_copy("aten::relu.default", outputs=(Ref(4), Ref(2))),
        _added_onto_a_copy("aten::select.int"), _added_onto_a_copy("aten::relu.default", strides=(1, 2)),
        _added_onto_a_copy("aten::relu.default", Call("aten::sin.default", (Ref(3),), (5,))),
    ):  # fmt: skip
        assert without_spare_copies(plan) is plan


def test_a_copy_that_nobody_reads_is_dropped() -> None:
    plan = _added_onto_a_copy("aten::relu.default", Call("aten::clone.default", (Ref(4),), (5,)))
    assert [i.target for i in without_spare_copies(plan).instructions] == ["aten::relu.default", "aten::add_.Tensor"]
    returned = replace(plan, outputs=(Ref(4), Ref(5)))
    assert "aten::clone.default" in [i.target for i in without_spare_copies(returned).instructions]


def test_the_result_of_a_call_that_overwrites_shares_the_memory_of_what_it_overwrites_alone() -> None:
    call = Call("aten::add_.Tensor", (Ref(1), Ref(2)), (3,))
    assert list(shared_by(call)) == [1] and roots_of([call])[3] == {3, 1}
    assert list(shared_by(Call("aten::add.Tensor", (Ref(1), Ref(2)), (3,)))) == []


def _step_of_an_optimizer(count: int, read_again: int = 0) -> Plan:
    """A plan that computes each of its inputs anew and copies it back, the first few of which are read once more in between."""
    spec = TensorSpec((2, 3), (3, 1), torch.float32, "cpu")
    made = [Launch("k", (Ref(k),), (count + k,), inplace=((0, 0),)) for k in range(count)]
    read = [Launch("k", (Ref(k),), (2 * count + k,)) for k in range(read_again)]
    back = [Call("aten::copy_.default", (Ref(k), Ref(count + k)), (3 * count + k,)) for k in range(count)]
    return Plan(tuple(range(count)), (), [*made, *read, *back], [], (), (), dict.fromkeys(range(4 * count), spec))


def test_a_kernel_moves_behind_other_readers_of_what_it_overwrites() -> None:
    found = updated_in_place(_step_of_an_optimizer(4, read_again=2)).instructions
    assert [i.outs[0] for i in found] == [6, 7, 8, 4, 9, 5, 12, 13, 14, 15]
    assert [i.outs[0] for i in found if isinstance(i, Launch) and i.updates == ((0, 0),)] == [6, 7, 4, 5]


def test_updates_of_many_inputs_are_found_in_linear_time() -> None:
    """An optimizer's step over hundreds of parameters took longer here than in the rest of our part of the compilation."""
    few, many = map(_step_of_an_optimizer, (20, 80))
    assert work(lambda: updated_in_place(many)) < 5 * work(lambda: updated_in_place(few))


class Buffers(torch.nn.Module):
    """What forward passes keep: means by `copy_`, which broadcasts and converts, a count, a codebook that a product reads first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, 6))
        self.register_buffer("narrow", torch.zeros(6, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("book", torch.randn(4, 6))
        self.register_buffer("turned", torch.zeros(6, 3).t())
        self.register_buffer("none", torch.zeros(0, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = x @ self.book.t() + self.book.sum(1)
        self.mean.copy_(x.mean(0))
        self.narrow.copy_(x[0] * 2)
        self.count.copy_(x.isnan().sum())
        self.book.copy_(x[:4] + 1)
        self.turned.copy_(x[:3].sin())
        self.none.copy_(x[:0] * 2)
        return near.softmax(-1) @ x[:4] + self.mean.sum(0)


def _of_buffers(dynamic: bool) -> tuple[str, list[int]]:
    """The plan, and how often torch counts that the last call changed each buffer."""
    torch.manual_seed(0)
    torch.compiler.reset()
    theirs = Buffers()
    ours = copy.deepcopy(theirs)
    options = {"cache": False, "never_slower": False}
    compiled = torch.compile(ours, backend="x86_onednn", dynamic=dynamic, options=options)
    with report.recording() as reports, torch.no_grad():
        for rows in (5, 5, 7) if dynamic else (5, 5, 5):
            x = torch.randn(rows, 6)
            x[1, 2], x[2, 4] = torch.nan, torch.inf
            versions = [b._version for b in ours.buffers()]
            torch.testing.assert_close(compiled(x), theirs(x), equal_nan=True)
            for mine, eager in zip(ours.buffers(), theirs.buffers(), strict=True):
                torch.testing.assert_close(mine, eager, equal_nan=True)
                assert mine.stride() == eager.stride()
    assert not [r for graph in reports for r in graph.fallbacks if "copy_" in r.op and r.shape != "float32[0, 6]"]
    return reports[0].texts["plan"], [b._version - v for b, v in zip(ours.buffers(), versions, strict=True)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_write_buffers_that_they_do_not_read(dynamic: bool) -> None:
    text, changes = _of_buffers(dynamic)
    assert text.count("changed((") == len(changes) - 1, "all but the empty one"
    assert min(changes) > 0


def test_a_buffer_is_written_after_all_that_reads_it() -> None:
    """Also where these are calls, or read a view of it."""

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        found = [x.flip(0).sum(1), x @ x.t(), y.flip(1).cumsum(0)]
        x.copy_(y.flip(0))
        return [*found, x.sum(0), y + x]

    text = plan_of(step, torch.randn(5, 6), torch.randn(5, 6))
    assert "changed((" in text

    def through_a_view(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        part = x[1:3]
        product = part @ part.t()
        x.copy_(y.flip(0))
        return [product, part + 1]

    assert "changed((" in plan_of(through_a_view, torch.randn(5, 6), torch.randn(5, 6))


def _copied_back(*between: Launch | Call) -> Plan:
    """A plan whose kernel makes 3 of the input 2, which is copied to the input 1."""
    spec = TensorSpec((2, 3), (3, 1), torch.float32, "cpu")
    steps = [Launch("k", (Ref(2),), (3,)), *between, Call("aten::copy_.default", (Ref(1), Ref(3)), (9,))]
    return Plan((1, 2), (Ref(4),) if between else (), steps, [], (), (), dict.fromkeys(range(10), spec), kernels={"k": 0})


def test_a_kernel_moves_behind_readers_of_the_tensor_that_it_writes_or_leaves_it() -> None:
    found = updated_in_place(_copied_back()).instructions
    assert isinstance(found[0], Launch) and found[0].into == ((0, Ref(1)),)
    later = updated_in_place(_copied_back(Launch("k", (Ref(1),), (4,)))).instructions
    assert [i.outs for i in later] == [(4,), (3,), (9,)]
    view = Call("aten::alias.default", (Ref(1),), (5,))
    through = updated_in_place(_copied_back(view, Launch("k", (Ref(5),), (4,)))).instructions
    assert [i.outs for i in through] == [(5,), (4,), (3,), (9,)]
    for between in (
        (Launch("k", (Ref(1), Ref(3)), (4,)),),  # both contents at once
        (view, Launch("k", (Ref(5), Ref(3)), (4,))),
        (view, replace(view, args=(Ref(5),), outs=(4,))),  # the result shows the input
        (Call("aten::relu_.default", (Ref(3),), (4,)),),
        (Call("aten::relu_.default", (Ref(1),), (4,)),),
        (view, Call("aten::relu_.default", (Ref(5),), (4,))),
    ):
        plan = _copied_back(*between)
        assert updated_in_place(plan) is plan, between
    twice = _copied_back(Launch("k", (Ref(2),), (4,)), Call("aten::copy_.default", (Ref(2), Ref(3)), (5,)))
    written = [i.into for i in updated_in_place(replace(twice, outputs=())).instructions if isinstance(i, Launch) and i.into]
    assert written in ([((0, Ref(1)),)], [((0, Ref(2)),)]), "in one place alone"


def test_what_a_product_reads_first_is_written_over_by_the_kernel_that_computes_it_anew() -> None:
    """As a codebook that follows its inputs: the product is a call, and reads a transpose."""

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        found = [y @ x.t(), x.t() @ x]
        x.copy_(x * 0.9 + y * 0.1)
        return [*found, x.sum(0)]

    text = plan_of(step, torch.randn(5, 6), torch.randn(5, 6))
    assert "changed((" in text and "empty_strided((5, 6" not in text
