"""Collectives run once per call of their graph and in its order, whatever a single process measures, corrects or caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusewright import _torch_compat as compat
from fusewright import machine
from fusewright.graph.cse import merge_common
from fusewright.graph.effects import held_in_order
from fusewright.graph.parser import parse
from fusewright.graph.view import GraphIndex
from fusewright.interface import Dim
from fusewright.plan import memory
from fusewright.plan.build import Plan, build
from fusewright.plan.execute import codegen
from fusewright.plan.inplace import reduced_in_place
from fusewright.plan.ir import Call, Ref, reads
from fusewright.plan.replay import inference as replay_of_inference
from fusewright.plan.replay import training as replay_of_training
from fusewright.plan.replay.copies import flat
from fusewright.plan.replay.obstacles import communicates, obstacle
from fusewright.plan.replay.pieces import _same_tensors, pieces_of
from fusewright.plan.vocabulary import OVERWRITING_ALL_REDUCE, overload_of
from fusewright.report import recording
from tests.unit.plan.replay.test_inference import Recorder, compiled
from tests.unit.plan.replay.test_training import compiled as training
from tests.unit.plan.test_plan import planned

CALLS: list[str] = []
"""The calls of this file's collectives, by name."""


@pytest.fixture(scope="module", autouse=True)
def collectives() -> Iterator[None]:
    """Define three operators, two of them in the namespace of torch's own collectives. The second has wrong metadata (bf16); the
    third is in a user's namespace."""
    library, own = torch.library.Library("symm_mem", "FRAGMENT"), torch.library.Library("somebodys", "DEF")

    def defined(at: torch.library.Library, name: str, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        def run(x: torch.Tensor) -> torch.Tensor:
            CALLS.append(name)
            return x + 1

        at.define(f"{name}(Tensor x) -> Tensor")
        at.impl(name, run, "CPU")
        at.impl(name, fake, "Meta")

    defined(library, "counted", torch.empty_like)
    defined(library, "untrue", lambda x: torch.empty_like(x, dtype=torch.bfloat16))
    defined(own, "reduced", torch.empty_like)
    yield
    library._destroy()
    own._destroy()


@pytest.fixture(autouse=True)
def nothing_called() -> None:
    CALLS.clear()


@pytest.fixture(autouse=True)
def small_plans_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_of_training, "FEWEST", 3)


class Never(Recorder):
    """A device that must not record or measure anything."""

    def record(self, run: Any, warm: bool, shared: Any = True) -> Any:
        pytest.fail("a graph with a collective is recorded")

    def seconds(self, run: Any) -> float:
        pytest.fail("a graph with a collective is measured")


class Device(Recorder):
    """A device that records pieces. As on a real one, results are garbage until the first replay, and no collective may be called
    while it records. `failing` is the number of a recording that fails."""

    def __init__(self, failing: int = -1) -> None:
        super().__init__()
        self.failing, self.pools = failing, 0

    def pool(self) -> object:
        self.pools += 1
        return object()

    def record(self, run: Callable[[], Any], warm: bool, shared: Any = True) -> tuple[Any, Callable[[], None]]:
        assert not warm, "a warm-up would run with garbage"
        self.recorded += 1
        if self.recorded - 1 == self.failing:
            raise RuntimeError("out of memory")
        before = list(CALLS)
        results = run()
        for old, new in zip(results, run(), strict=True):
            if old.data_ptr() != new.data_ptr() and old.is_floating_point():  # else it is a view of an argument
                old.detach().fill_(float("nan"))
        assert CALLS == before, "a collective is called while a piece is recorded"

        def again() -> None:
            self.replays += 1
            for old, new in zip(results, run(), strict=True):
                flat(old.detach()).copy_(flat(new.detach()))

        return results, again

    def seconds(self, run: Any) -> float:
        pytest.fail("a graph with a collective is measured")


def through(name: str, namespace: str = "symm_mem") -> Callable[..., torch.Tensor]:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        op = getattr(getattr(torch.ops, namespace), name)
        x = op((x @ w).relu() @ w)
        return op((x.sin() @ w).relu() @ w).float().relu() @ w @ w

    return f


@torch.no_grad()
@pytest.mark.parametrize("name", ["counted", "untrue"])
@pytest.mark.parametrize("recorder", [Never, Device])
def test_collectives_run_once_a_call_and_are_never_recorded(name: str, recorder: type[Recorder]) -> None:
    """This graph has two collectives per call. Wrong metadata is corrected without running anything again."""
    f = through(name)
    fast, x, w = compiled(f, recorder()), torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(5):
        x = torch.randn(4, 4)
        expected = f(x, w)
        CALLS.clear()
        torch.testing.assert_close(fast(x, w), expected)
        assert CALLS == [name] * 2


@torch.no_grad()
def test_the_pieces_between_collectives_are_replayed() -> None:
    f, device = through("counted"), Device()
    fast, w = compiled(f, device), torch.randn(4, 4)
    with recording() as reports:
        for _ in range(5):
            x = torch.randn(4, 4)
            torch.testing.assert_close(fast(x, w), f(x, w))
    assert reports[0].replay.startswith("replayed, ")
    assert (device.recorded, device.replays) == (3, 9), "the first call is eager's, the second checked"


@torch.no_grad()
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_piece_that_cannot_be_recorded_leaves_the_calls_as_they_were(failing: int) -> None:
    f, device = through("counted"), Device(failing)
    fast, x, w = compiled(f, device), torch.randn(4, 4), torch.randn(4, 4)
    expected = f(x, w)
    with recording() as reports:
        for _ in range(5):
            CALLS.clear()
            torch.testing.assert_close(fast(x, w), expected)
            assert CALLS == ["counted"] * 2
    assert reports[0].replay == "not replayed: recording failed: out of memory" and not device.replays


@torch.no_grad()
def test_a_changed_weight_does_not_repeat_a_collective() -> None:
    """Constants are prepared again, and a recording made of the old ones is found out before anything runs."""
    weight = torch.nn.Parameter(torch.randn(4, 4))

    def f(x: torch.Tensor) -> torch.Tensor:
        op = torch.ops.symm_mem.counted
        return op(op((x @ (weight * 2)).relu().exp() @ weight).relu() @ weight).exp().relu() @ weight

    fast = compiled(f, Device())
    for k in range(8):
        x = torch.randn(4, 4)
        expected = f(x)
        CALLS.clear()
        torch.testing.assert_close(fast(x), expected)
        assert CALLS == ["counted"] * 2
        if k in (3, 5):
            weight.mul_(0.5)
        if k == 6:
            weight.data = torch.randn(4, 4)


class Summed(torch.autograd.Function):
    """A collective in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.symm_mem.counted(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.ops.symm_mem.counted(grad)


@pytest.mark.parametrize("recorder", [Never, Device])
def test_training_calls_each_collective_once_too(recorder: type[Recorder]) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (Summed.apply((x @ w).relu() @ w).relu() @ w).sum()

    device = recorder()
    fast, w = training(f, device), torch.randn(4, 4, requires_grad=True)
    for _ in range(6):
        x = torch.randn(4, 4)
        (expected,) = torch.autograd.grad(f(x, w), w)
        CALLS.clear()
        w.grad = None
        fast(x, w).backward()
        assert CALLS == ["counted"] * 2
        torch.testing.assert_close(w.grad, expected)
    assert (device.recorded > 2) == (recorder is Device)


def test_a_recording_does_not_hold_what_forward_saved_for_a_collective_of_backward() -> None:
    """Sequence parallelism gathers saved activations in backward, and short runs between collectives are called as well; forward is
    not replayed while somebody holds what it saved."""

    class Forgetful(Device):
        def record(self, run: Callable[[], Any], warm: bool, shared: Any = True) -> tuple[Any, Callable[[], None]]:
            self.recorded += 1
            return run(), lambda: None

    plan = planned(
        """
        %0: f32[64, 64] = input('saved')
        %1: f32[64, 64] = input('gradient')
        %2: f32[64, 64] = symm_mem.counted.default(%1)
        %3: f32[64, 64] = exp(%0)
        %4: f32[64, 64] = symm_mem.counted.default(%3)
        %5: f32[64, 64] = exp(%4)
        %6: f32[64, 64] = exp(%2)
        %7: f32[64, 64] = add(%5, %6)
        return [%7]
        """
    )
    device, saved = Forgetful(), torch.randn(64, 64)
    call = replay_of_training.retained(plan, {}, codegen.load(plan), device, print, replay_of_training.Handover())
    storage = compat.storage_id(saved)
    before, gradient = compat.storage_uses(storage), torch.randn(64, 64)
    for _ in range(3):
        call([saved.detach(), gradient])
    assert device.recorded == 1 and compat.storage_uses(storage) == before


@torch.no_grad()
def test_what_nobody_knows_is_a_collective_where_there_are_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    f, x, w = through("reduced", "somebodys"), torch.randn(4, 4), torch.randn(4, 4)
    alone, recorder = torch.zeros(0), Recorder()
    fast = compiled(f, recorder)
    for _ in range(3):
        alone = fast(x, w)
    assert recorder.recorded == 1
    monkeypatch.setattr(machine, "several_processes", lambda: True)
    among, pieces = compiled(f, Never()), Device()
    with recording() as reports:
        for _ in range(3):
            torch.testing.assert_close(among(x, w), alone)
    assert "other processes" in reports[0].replay
    among = compiled(f, pieces)
    for _ in range(4):
        CALLS.clear()
        torch.testing.assert_close(among(x, w), alone)
        assert CALLS == ["reduced"] * 2
    assert pieces.recorded == 3


@torch.no_grad()
def test_a_collective_of_weights_is_not_kept() -> None:
    """A gather of sharded weights, for example, runs at every call because the other processes expect it."""
    weight = torch.nn.Parameter(torch.randn(4, 4))
    fast, x = compiled(lambda x: x @ torch.ops.symm_mem.counted(weight * 2), Never()), torch.randn(4, 4)
    for _ in range(3):
        torch.testing.assert_close(fast(x), x @ (weight * 2 + 1))
    assert CALLS == ["counted"] * 3


TWO = """
    %0: f32[4] = input('x')
    %1: f32[4] = symm_mem.counted.default(%0)
    %2: f32[4] = symm_mem.counted.default(%0)
    %3: f32[4] = add(%0, %0)
    %4: f32[4] = add(%0, %0)
    %5: f32[4] = add(%1, %3)
    %6: f32[4] = add(%5, %4)
    return [%6]
"""


def test_equal_collectives_stay_two_and_a_dead_one_stays() -> None:
    graph = parse(TWO)
    assert merge_common(graph) == 1, "the additions are one"
    plan = planned(TWO)
    assert [i.target for i in plan.instructions if isinstance(i, Call)].count("symm_mem::counted.default") == 2
    run = compiled(lambda x: (torch.ops.symm_mem.counted(x), (x @ x).relu() * 1)[1], Never())
    with torch.no_grad():
        run(torch.randn(4, 4))
    assert CALLS == ["counted"]


def test_what_is_held_in_order_waits_for_its_like() -> None:
    graph = parse(TWO)
    first, second = (n for n in graph.nodes if "counted" in str(n.target))
    assert held_in_order(graph) == {second: first}


def test_regions_do_not_change_the_order() -> None:
    """By data dependencies alone, the ops before the first collective and after the second would form one region."""

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.ops.symm_mem.counted(x.exp() * 2)
        second = torch.ops.symm_mem.untrue(y)
        return first.exp(), second.float().exp() + 1

    fast, x, y = compiled(f, Never()), torch.randn(4), torch.randn(4)
    with torch.no_grad():
        for _ in range(4):
            CALLS.clear()
            for ours, eager in zip(fast(x, y), f(x, y), strict=True):
                torch.testing.assert_close(ours, eager)
            assert CALLS == ["counted", "untrue"] * 2


def test_random_numbers_between_regions_keep_their_order_too() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.nn.functional.dropout(x.exp() * 2)
        return first, torch.nn.functional.dropout(y).exp() + 1

    recorder, x, y = Recorder(), torch.randn(64), torch.randn(64)
    recorder.draws = True
    fast = compiled(f, recorder)
    with torch.no_grad():
        for _ in range(3):
            torch.manual_seed(1)
            expected = f(x, y)
            torch.manual_seed(1)
            for ours, eager in zip(fast(x, y), expected, strict=True):
                torch.testing.assert_close(ours, eager)


def test_memory_that_a_collective_reads_is_left_alone_until_it_was_waited_for() -> None:
    """A gather keeps reading its input while later ops run; the wait returns the same tensor."""
    graph = parse(
        """
        %0: f32[4] = input('x')
        %1: f32[4] = exp(%0)
        %2: f32[4] = symm_mem.counted.default(%1)
        %3: f32[4] = symm_mem.counted.default(%2)
        %4: f32[4] = add(%3, %3)
        return [%4]
        """
    )
    plan = build(GraphIndex(graph, frozenset(), "infer"), (), ())
    made = {i.target: i.outs[0] for i in plan.instructions if isinstance(i, Call)}
    roots = memory.roots_of(plan.instructions)
    waited = next(i for i in reversed(plan.instructions) if "counted" in str(getattr(i, "target", "")))
    assert made["aten::exp.default"] in roots[waited.outs[0]]


@pytest.mark.parametrize(
    "target",
    ["_c10d_functional::all_reduce.default", "_dtensor::shard_dim_alltoall.default", "symm_mem::one_shot_all_reduce.default"],
)
def test_torchs_collectives_are_known(target: str) -> None:
    pytest.importorskip("torch.distributed.tensor", reason="this torch has no distributed tensors")
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without distributed processes")
    assert compat.is_overload(overload_of(target)), "a plan may say so"
    assert communicates(Call(target, (Ref(0), "sum", "0"), (1,)))


REDUCED = """
    %0: f32[4, 4] = input('x')
    %1: f32[4, 4] = exp(%0)
    %2: f32[4, 4] = relu(%1)
    %3: f32[4, 4] = exp(%2)
    %4: f32[4, 4] = _c10d_functional.all_reduce.default(%3, 'sum', '0')
    %5: f32[4, 4] = {wait}
    %6: f32[4, 4] = exp(%5)
    %7: f32[4, 4] = relu(%6)
    %8: f32[4, 4] = exp(%7)
    return [%8{more}]
"""
WAITED = "_c10d_functional.wait_tensor.default(%4)"


def reduced(wait: str = WAITED, more: str = "") -> Plan:
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without distributed processes")
    return build(GraphIndex(parse(REDUCED.format(wait=wait, more=more)), frozenset(), "infer"), (), ())


def test_an_all_reduce_overwrites_what_nobody_reads_later() -> None:
    plan = reduced_in_place(reduced())
    (target,) = (i.target for i in plan.instructions if isinstance(i, Call) and "all_reduce" in i.target)
    assert target == OVERWRITING_ALL_REDUCE
    read_later = reduced(more=", %3")
    assert reduced_in_place(read_later) is read_later
    returned = reduced(more=", %5")
    assert reduced_in_place(returned) is not returned


@pytest.mark.parametrize("along", [True, False], ids=["contiguous", "transposed"])
def test_an_all_reduce_of_symbolic_sizes_overwrites_what_is_contiguous(along: bool) -> None:
    plan, n = reduced(), Dim("n", 4)
    stride = (4, 1) if along else (1, n)
    specs = {v: replace(s, shape=(n, 4), stride=stride) for v, s in plan.specs.items()}
    assert (reduced_in_place(replace(plan, specs=specs)).instructions != plan.instructions) == along



def test_a_result_that_nobody_waited_for_keeps_a_plan_from_being_recorded() -> None:
    assert obstacle(reduced(), "cpu") is None
    assert "before anybody waits" in str(obstacle(reduced(wait="exp(%4)"), "cpu"))


def test_what_reads_an_overwritten_operand_is_not_moved_behind_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large results are made late; here that would be after the all-reduce wrote over what they are made of."""
    monkeypatch.setattr(replay_of_inference, "LARGE", 64)
    plan = reduced_in_place(build(GraphIndex(parse(LATE), frozenset(), "infer"), (), ()))
    assert OVERWRITING_ALL_REDUCE in [i.target for i in plan.instructions if isinstance(i, Call)]
    late = replay_of_inference._late(plan)
    assert not late.intersection({k for k, i in enumerate(plan.instructions) if 2 in reads(i)})


LATE = """
    %0: f32[4, 4] = input('x')
    %1: f32[4, 4] = exp(%0)
    %2: f32[4, 4] = relu(%1)
    %3: f32[4, 4] = exp(%1)
    %4: f32[4, 4] = _c10d_functional.all_reduce.default(%1, 'sum', '0')
    %5: f32[4, 4] = _c10d_functional.wait_tensor.default(%4)
    %6: f32[4, 4] = exp(%5)
    return [%2, %3, %6]
"""


def test_a_plan_that_waits_for_its_input_is_not_recorded() -> None:
    """A recording has a copy of the input, for which nobody waits."""
    lines = ["%0: f32[4] = input('x')", "%1: f32[4] = _c10d_functional.wait_tensor.default(%0)", "%2: f32[4] = exp(%1)"]
    text = "\n".join([*lines, "%3: f32[4] = relu(%2)", "return [%3]"])
    plan = build(GraphIndex(parse(text), frozenset(), "infer"), (), ())
    assert obstacle(plan, "cpu") == "it waits for a collective that was started elsewhere"


def test_an_overwritten_operand_is_the_result() -> None:
    """The piece behind the all-reduce reads the memory that the piece in front of it wrote: no buffer, and no copy."""
    pieces = pieces_of(reduced_in_place(reduced()))
    assert [p.recorded for p in pieces] == [True, False, True]
    called = pieces[1].plan
    assert _same_tensors(called.instructions)[called.outputs[0].id] == called.inputs[0]


def test_short_runs_between_collectives_are_called() -> None:
    plan = planned(TWO)
    first, second, *rest = plan.instructions
    plan.instructions = [first, rest[0], second, *rest[1:]]
    assert [(p.recorded, len(p.plan.instructions)) for p in pieces_of(plan)] == [(False, 3), (True, 3)]
