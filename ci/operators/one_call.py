"""Compare one call of an entry with a `name` and an `op`, compiled and in eager: for programs, ONNX nodes, symbolic numbers."""

from __future__ import annotations

from typing import Any

import torch

from fusewright.conformance.ops import opinfo as check


def checked(entry: Any, sample: Any, by: check.Compiler, gradients: bool = False) -> check.Outcome:
    """Return the differences between eager and compiled of `entry.op` on a sample, and its gradients; skip it if eager raises."""
    torch.compiler.reset()
    outcome = check.Outcome(entry.name, "")
    wanted = check.call(entry, sample, None, gradients)
    if wanted.error is not None:
        outcome.skipped = f"eager raises {type(wanted.error).__name__}"
        return outcome

    def found(by: check.Compiler, note: check.Outcome | None = None) -> list[str]:
        got = check.call(entry, sample, by, gradients, note)
        return check.differences(entry, wanted, got, check.Exact(entry, sample, gradients))

    outcome.settle("call", found(by, outcome), lambda: found(by.judge()))
    return outcome
