"""Where weights change from call to call, a plan without constants runs until they rest."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright.config import Options
from fusewright.plan.execute import prepare
from fusewright.stages.changing import AT_REST, CHANGED, RESTLESS, may_change

X = torch.arange(6.0).view(2, 3)

FEW = RESTLESS // CHANGED
"""Calls after changes that are enough."""


class Scaled(nn.Module):
    """`weight * 2 + 1` depends on the weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * 2 + 1).t()


class Program:
    """A compiled module. `runs` counts how often its constants were prepared."""

    def __init__(self) -> None:
        self.runs = 0
        self.model = Scaled()
        # Calls are counted: which of them eager takes, being compared or faster, is the clock's to say.
        options = {"never_slower": False}
        self.fn: Callable[[Tensor], Tensor] = torch.compile(self.model, backend="fusewright_null", options=options)

    def call(self, change: bool) -> int:
        """Call once, after a change of the weights if asked for. Return how often constants were prepared in the call."""
        before = self.runs
        with torch.no_grad():
            if change:
                self.model.weight.mul_(0.99)
            torch.testing.assert_close(self.fn(X), self.model(X), rtol=0, atol=0)
        return self.runs - before


@pytest.fixture
def program(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> Program:
    made = Program()
    monkeypatch.setattr(prepare.PreparedCache, "_run", _counting(made, prepare.PreparedCache._run))
    return made


def _counting(program: Program, run: Callable[..., Any]) -> Callable[..., Any]:
    def counted(self: prepare.PreparedCache, *args: Any) -> Any:
        program.runs += 1
        return run(self, *args)

    return counted


def test_constants_are_no_longer_prepared_after_a_few_changes_in_a_row(program: Program) -> None:
    assert sum(program.call(change=True) for _ in range(FEW + 20)) == FEW + 1


def test_constants_return_when_the_weights_rest(program: Program) -> None:
    for _ in range(FEW + 20):
        program.call(change=True)
    assert sum(program.call(change=False) for _ in range(AT_REST + 20)) == 1
    assert sum(program.call(change=True) for _ in range(FEW + 20)) == FEW, "and leave again, without being compiled"


@pytest.mark.parametrize("every", [3, 8])
def test_rare_changes_keep_constants(program: Program, every: int) -> None:
    assert sum(program.call(change=k % every == 0) for k in range(20 * every)) == 20


def test_sets_of_weights_that_share_a_plan_change_one_by_one(program: Program) -> None:
    still = Program()
    program.call(change=False)
    still.call(change=False)
    before = program.runs
    for _ in range(FEW + 20):
        program.call(change=True)
        still.call(change=False)
    assert program.runs == before + FEW


def test_copies_of_changing_weights_are_freed(program: Program) -> None:
    for _ in range(FEW + 5):
        program.call(change=True)
    gc.collect()
    assert not any(cache._entries for cache in prepare._CACHES if cache.changes)


def test_a_teacher_follows_its_student(program: Program) -> None:
    """Uncounted writes too: a plan without constants reads the weights themselves."""
    for k in range(FEW + 20):
        program.model.weight.data = program.model.weight.data * 0.5 + k
        program.call(change=False)
    program.model.weight.data.numpy()[:] = 7.0
    program.call(change=False)


@pytest.mark.parametrize("options", [{"check": "weights"}, {"fallback": "error"}])
def test_plans_that_are_checked_stay(options: dict[str, Any]) -> None:
    assert may_change(Options.parse({}, None), "direct") and not may_change(Options.parse({}, None), "export")
    assert not may_change(Options.parse(options, None), "direct")
