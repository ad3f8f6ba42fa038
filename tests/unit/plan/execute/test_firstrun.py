"""The first run of a plan: effects of an abandoned run are undone, and threads agree on one outcome."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fusewright.plan.build import written_values
from fusewright.plan.execute.firstrun import MetadataMismatch, checked_first
from tests.unit.plan.test_plan import planned


def untrue(args: list[Any]) -> Any:
    """A run that writes its first input, draws a random number, and finds wrong metadata."""
    args[0].add_(1)
    torch.rand(3)
    args.clear()
    raise MetadataMismatch(1, torch.zeros(2), "has another dtype")


def writing(args: list[Any]) -> Any:
    args[0].add_(1)
    return (args[0] * 2 + torch.rand(2),)


def test_an_abandoned_run_leaves_no_trace() -> None:
    x = torch.ones(2, requires_grad=True)
    run = checked_first(untrue, writing, lambda u: writing, lambda: None, lambda args: [args[0]])
    torch.manual_seed(0)
    with torch.no_grad():
        (got,) = run([x])
    torch.manual_seed(0)
    assert x.tolist() == [2, 2]
    assert torch.equal(got, 4 + torch.rand(2))


def test_values_that_a_plan_writes_are_known_through_views() -> None:
    plan = planned(
        """
        %0: f32[2,3] = input('x')
        %1: f32[2,3] = input('y')
        %2: f32[3] = select(%0, 0, 1)
        %3: f32[2,3] = exp(%1)
        %4: f32[3] = select(%3, 0, 0)
        %5: f32[3] = aten.copy_.default(%2, %4)
        return [%3]
        """
    )
    written = written_values(plan)
    assert [i in written for i in plan.inputs] == [True, False]


def test_threads_that_meet_in_the_first_run_repair_once() -> None:
    repairs, together = [], threading.Barrier(4)

    def repair(u: MetadataMismatch) -> Any:
        repairs.append(u)
        return lambda args: sum(args)

    def checked(args: list[Any]) -> Any:
        raise MetadataMismatch(1, torch.zeros(2), "has another dtype")

    run = checked_first(checked, checked, repair, lambda: None)

    def call(k: int) -> Any:
        together.wait()
        return run([k, 1])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(4))) == [1, 2, 3, 4]
    assert len(repairs) == 1
