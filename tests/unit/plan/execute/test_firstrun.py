"""The first run of a plan: effects of an abandoned run are undone, and threads agree on one outcome."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
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


def test_a_written_input_may_have_no_memory_yet() -> None:
    x = torch.ones(2)
    x.untyped_storage().resize_(0)  # as the placeholder of a parameter that the graph makes

    def fills(args: list[Any]) -> Any:
        with torch.no_grad():
            args[0].set_(torch.full((2,), 3.0))
        return ()

    checked_first(fills, fills, lambda u: fills, lambda: None, lambda args: [args[0]])([x])
    assert x.tolist() == [3, 3]


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


def test_results_of_functions_that_eager_runs_are_compared_as_those_of_calls() -> None:
    """The trace of a higher-order op claims its inputs' strides; kernels behind it read the wrong elements."""
    module = pytest.importorskip("torch._higher_order_ops.associative_scan", reason="torch 2.10 and later have it")
    scan = module.associative_scan_op

    def difference(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> list[torch.Tensor]:
        return [a * c, c * b - d]

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = scan(difference, [a.movedim(2, 0), b.movedim(2, 0)], ())[1]
        return found.movedim(0, 2) * 1

    a, b, results = torch.rand(2, 3, 8, 4), torch.randn(2, 3, 8, 4), []
    for backend in ("eager", "fusewright"):
        torch._dynamo.reset()
        with torch.no_grad():
            results.append(torch.compile(program, backend=backend, dynamic=False)(a, b))
    assert results[0].stride() == results[1].stride()
    torch.testing.assert_close(results[1], results[0])
