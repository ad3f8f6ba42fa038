"""A sample of `ci/operators/random_programs.py`: compiled functions against eager, and how it judges a bad backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from ci.operators.random_programs import Program, checked
from fusewright.conformance.ops.opinfo import Compiler

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("seed", range(10))
def test_a_random_program_does_what_eager_does(seed: int, dynamic: bool) -> None:
    program = Program(seed)
    outcome = checked(program, Compiler("x86_onednn", dynamic))
    assert not outcome.problems, f"{program}\n{outcome.problems}"


def test_programs_are_of_many_kinds_and_follow_from_their_seed() -> None:
    programs = [Program(seed) for seed in range(60)]
    used = Counter(getattr(s.fn, "__name__", "") for p in programs for s in p.steps)
    assert len(used) > 50 and used["written"] and used["matmul"] and used["selected"]
    inputs = [x for p in programs for x in p.inputs]
    assert {x.dtype for x in inputs} >= {torch.float32, torch.bfloat16, torch.int64, torch.bool}
    assert any(x.numel() == 0 for x in inputs) and any(not x.is_contiguous() for x in inputs)
    assert str(Program(7)) == str(programs[7])


def off_by_one(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    return lambda *args: [r + 1 if isinstance(r, torch.Tensor) and r.is_floating_point() else r for r in gm(*args)]


def test_a_wrong_backend_is_found() -> None:
    found = [checked(Program(seed), Compiler(off_by_one)) for seed in range(4)]  # type: ignore[arg-type]
    assert any(outcome.problems for outcome in found)
