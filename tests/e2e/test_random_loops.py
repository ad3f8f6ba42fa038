"""A sample of `ci/operators/random_loops.py`: loops over time steps against eager, and how it judges a bad backend.

`FUSEWRIGHT_EVERY_SAMPLE=1 python -m pytest tests/e2e/test_random_loops.py` runs many more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from ci.operators.random_loops import Program, checked

SAMPLE = range(500) if os.environ.get("FUSEWRIGHT_EVERY_SAMPLE") else (5, 371, 1062, 1110)
"""The last three were wrong: a value copied over a tensor, the gradients of two kinds of steps, results without gradients."""


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_random_loop_does_what_eager_does(seed: int) -> None:
    program = Program(seed)
    outcome = checked(program, "x86_onednn")
    assert not outcome.problems, f"{program}\n{outcome.problems}"


def test_programs_are_of_many_kinds_and_follow_from_their_seed() -> None:
    programs = [Program(seed) for seed in range(400)]
    text = "\n".join(p.source for p in programs)
    parts = "reversed(range(T)) unbind torch.empty detach @ softmax torch.where(k -1] training=False %"
    assert [part for part in parts.split() if part not in text] == []
    assert 120 < sum(p.training for p in programs) < 280 and sum(p.dynamic for p in programs) > 20
    assert {p.dtype for p in programs} == {torch.float32, torch.float64, torch.bfloat16, torch.float16}
    assert any(not x.is_contiguous() for p in programs for x in p.inputs)
    assert str(Program(7)) == str(programs[7])


def scaled_gradients(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Right results, and gradients that are twice as large."""
    return lambda *args: [r * 2 - r.detach() if isinstance(r, torch.Tensor) and r.requires_grad else r for r in gm(*args)]


def test_wrong_gradients_are_found() -> None:
    found = [checked(p, scaled_gradients) for p in map(Program, (1062, 1082))]
    assert any("gradient" in text for outcome in found for text in outcome.problems)
