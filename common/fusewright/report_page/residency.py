"""Bytes that the results of a plan occupy while it runs, instruction by instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusewright.interface import TensorSpec, hint
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.ir import Instruction, Ref, reads
from fusewright.plan.memory import Placement, roots_of


@dataclass(frozen=True)
class Residency:
    """After each instruction: bytes of separate tensors, and of live values in the arena, whose size is `arena` bytes.
    `largest` are the
    values alive at the peak: (bytes, position of the instruction that made it)."""

    fresh: list[int]
    used: list[int]
    arena: int
    largest: list[tuple[int, int]]

    @property
    def peak(self) -> int:
        return self.arena + max(self.fresh, default=0)


def residency(plan: Plan) -> Residency:
    """Replay the lifetimes of a plan. Views, and results that take over an input's memory, use none of their own."""
    placement: Placement = codegen.PLACE(plan)
    roots = roots_of(plan.instructions)
    born = {
        o: k for k, i in enumerate(plan.instructions) for o in i.outs if roots[o] == {o} and o not in placement.onto
    }
    last = _last_use(plan, plan.instructions, roots, placement)
    size = {o: _bytes(plan.specs.get(o)) for o in born}
    n = len(plan.instructions)
    fresh, used = [0] * n, [0] * n
    for o, k in born.items():
        row = used if o in placement.offset else fresh
        for at in range(k, min(last[o], n - 1) + 1):
            row[at] += size[o]
    peak = max(range(n), key=lambda k: fresh[k] + used[k], default=-1)
    alive = [(size[o], k) for o, k in born.items() if k <= peak <= last[o] and size[o]]
    return Residency(fresh, used, placement.arena_bytes, sorted(alive, reverse=True)[:12])


def _last_use(
    plan: Plan, instructions: Sequence[Instruction], roots: dict[int, set[int]], placement: Placement
) -> dict[int, int]:
    """Value -> the last instruction that needs its memory."""
    last: dict[int, int] = {}

    def use(value: int, k: int) -> None:
        for root in roots.get(value, {value}):
            last[root] = k
            while root in placement.onto:
                root = placement.onto[root]
                last[root] = k

    for k, i in enumerate(instructions):
        for value in (*i.outs, *reads(i)):
            use(value, k)
    for output in plan.outputs:
        if isinstance(output, Ref):
            use(output.id, len(instructions))
    return last


def _bytes(spec: TensorSpec | None) -> int:
    """The size of a dense tensor."""
    if spec is None:
        return 0
    count = 1
    for s in spec.shape:
        count *= hint(s)
    return count * torch.empty((), dtype=spec.dtype).element_size()
