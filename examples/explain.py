"""Read what runs where: the same record that `fusewright explain examples/explain.py:model` prints.

An op is "lowered" (the backend computes it), "carried" (eager's own call inside a region), a free "view", or "eager" with a
reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusewright import report


class Model(nn.Module):
    """A model with one op, the determinant, that no backend takes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu().softmax(-1)
        return y * torch.linalg.det(y)


def model() -> tuple[Any, ...]:
    """Return a model and its arguments, for the command line."""
    return Model().eval(), (torch.randn(16, 16),)


def main() -> None:
    torch.manual_seed(0)
    module, args = model()
    with torch.no_grad(), report.recording() as reports:
        torch.compile(module, backend="fusewright", options={"fallback": "allow"})(*args)
    for op in reports[0].ops:
        print(f"{op.where:8} {op.op:20} {op.shape:18} {op.note or op.verdict}")
    print(
        f"{reports[0].count('lowered')} lowered, {len(reports[0].fallbacks)} in eager, rules: {dict(reports[0].rules)}"
    )
    assert reports[0].ops


if __name__ == "__main__":
    main()
