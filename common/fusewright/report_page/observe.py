"""Run a compiled graph once more and observe it: the time of each instruction, and the values made."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from fusewright.bench.device import Clock
from fusewright.interface import HOST
from fusewright.plan import build
from fusewright.plan.execute import codegen
from fusewright.report import Kept


def seconds(kept: Kept, rounds: int) -> list[float]:
    """The median seconds of each instruction; empty if the graph was never called."""
    if not kept.args:
        return []
    marks: list[Callable[[], Any]] = []
    run, clock = _observed(kept, lambda k, results: marks[-1]()), Clock(device_of(kept))

    def marked(mark: Callable[[], Any]) -> None:
        marks.append(mark)
        _call(run, kept)

    steps = [clock.between(marked, len(kept.plan.instructions)) for _ in range(rounds)]
    return [statistics.median(s) for s in zip(*steps, strict=True)]


def values(kept: Kept) -> dict[int, torch.Tensor]:
    """Copies of the tensors that the plan makes, by id, taken when they are made."""
    found: dict[int, torch.Tensor] = {}

    def observe(k: int, results: tuple[Any, ...]) -> None:
        for id, value in zip(kept.plan.instructions[k].outs if k >= 0 else (), results, strict=True):
            if isinstance(value, torch.Tensor):
                found[id] = value.detach().clone()

    if kept.args:
        _call(_observed(kept, observe), kept)
    return found


def arguments(kept: Kept) -> list[Any]:
    """The arguments of the first call, with copies of those that the plan writes in place."""
    written = build.written_values(kept.plan)
    pairs = zip(kept.plan.inputs, kept.args, strict=True)
    return [a.detach().clone() if i in written and isinstance(a, torch.Tensor) else a for i, a in pairs]


def _observed(kept: Kept, observe: Any) -> Any:
    return codegen.load(kept.plan, kept.kernels, prepared=codegen.prepared_of(kept.run), observe=observe)


def _call(run: Any, kept: Kept) -> None:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        run(arguments(kept))


def device_of(*graphs: Kept) -> str:
    """The device that plans use besides the host; the host if none."""
    found = sorted({s.device for kept in graphs for s in kept.plan.specs.values()} - {HOST})
    return found[0] if found else HOST
