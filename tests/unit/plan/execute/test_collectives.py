"""Collectives run once per call of their graph and in its order, whatever a single process measures, corrects or caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fusewright import _torch_compat as compat
from fusewright.graph.cse import merge_common
from fusewright.graph.effects import held_in_order
from fusewright.graph.parser import parse
from fusewright.graph.view import GraphIndex
from fusewright.plan import memory
from fusewright.plan.build import build
from fusewright.plan.execute.replay import obstacle
from fusewright.plan.ir import Call, Ref
from fusewright.plan.vocabulary import overload_of
from fusewright.report import recording
from tests.unit.plan.execute.test_replay import Recorder, compiled
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


class Never(Recorder):
    """A device that must not record or measure anything."""

    def record(self, run: Any, warm: bool, shared: bool = True) -> Any:
        pytest.fail("a graph with a collective is recorded")

    def seconds(self, run: Any) -> float:
        pytest.fail("a graph with a collective is measured")


def through(name: str, namespace: str = "symm_mem") -> Callable[..., torch.Tensor]:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        op = getattr(getattr(torch.ops, namespace), name)
        return op(op((x @ w).relu() @ w).relu() @ w).float().relu() @ w

    return f


@torch.no_grad()
@pytest.mark.parametrize("name", ["counted", "untrue"])
def test_a_graph_runs_once_a_call_and_is_never_recorded(name: str) -> None:
    """This graph has two collectives per call. Wrong metadata is corrected without running anything again."""
    f = through(name)
    fast, x, w = compiled(f, Never()), torch.randn(4, 4), torch.randn(4, 4)
    expected = f(x, w)
    for _ in range(5):
        CALLS.clear()
        torch.testing.assert_close(fast(x, w), expected)
        assert CALLS == [name] * 2


def test_training_is_never_recorded_either() -> None:
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.symm_mem.counted(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.ops.symm_mem.counted(grad)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (Summed.apply((x @ w).relu() @ w).relu() @ w).sum()

    fast, x, w = compiled(f, Never()), torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    for _ in range(4):
        CALLS.clear()
        w.grad = None
        fast(x, w).backward()
        assert CALLS == ["counted"] * 2


@torch.no_grad()
def test_what_nobody_knows_is_a_collective_where_there_are_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    f, x, w = through("reduced", "somebodys"), torch.randn(4, 4), torch.randn(4, 4)
    alone, recorder = torch.zeros(0), Recorder()
    fast = compiled(f, recorder)
    for _ in range(3):
        alone = fast(x, w)
    assert recorder.recorded == 1
    monkeypatch.setattr(compat, "several_processes", lambda: True)
    among = compiled(f, Never())
    with recording() as reports:
        for _ in range(3):
            torch.testing.assert_close(among(x, w), alone)
    assert "other processes" in reports[0].replay


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

    fast, x, y = compiled(f, Recorder()), torch.randn(64), torch.randn(64)
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
    [
        "_c10d_functional::all_reduce.default", "_c10d_functional::wait_tensor.default", "_dtensor::shard_dim_alltoall.default",
        "symm_mem::one_shot_all_reduce.default",
    ],
)  # fmt: skip
def test_no_plan_with_one_of_torchs_is_recorded(target: str) -> None:
    pytest.importorskip("torch.distributed.tensor", reason="this torch has no distributed tensors")
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without distributed processes")
    assert compat.is_overload(overload_of(target)), "a plan may say so"
    plan = planned(TWO)
    plan.instructions[0] = Call(target, (Ref(plan.inputs[0]), "sum", "0"), plan.instructions[0].outs)
    assert obstacle(plan, "cpu") == f"{target} waits for other processes"
    assert obstacle(plan, "cpu", training=True) == f"{target} waits for other processes"
