"""A compiled graph, run once more and looked at: how long each instruction of its plan takes, and what it gives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from fusewright.interface import HOST
from fusewright.plan import build
from fusewright.plan.execute import codegen
from fusewright.report import Kept


def seconds(kept: Kept, rounds: int) -> list[float]:
    """The median seconds of each instruction; empty where the graph was never called."""
    samples: list[list[float]] = [[] for _ in kept.plan.instructions]
    last, wait = 0.0, _waiting(kept)

    def observe(k: int, _: tuple[Any, ...]) -> None:
        nonlocal last
        wait()
        now = time.perf_counter()
        if k >= 0:
            samples[k].append(now - last)
        last = time.perf_counter()

    run = _observed(kept, observe)
    for _ in range(rounds if kept.args else 0):
        _call(run, kept)
    return [statistics.median(s) for s in samples] if kept.args else []


def values(kept: Kept) -> dict[int, torch.Tensor]:
    """Copies of the tensors that the plan makes, by id, as they are when they are made."""
    found: dict[int, torch.Tensor] = {}

    def observe(k: int, results: tuple[Any, ...]) -> None:
        for id, value in zip(kept.plan.instructions[k].outs if k >= 0 else (), results, strict=True):
            if isinstance(value, torch.Tensor):
                found[id] = value.detach().clone()

    if kept.args:
        _call(_observed(kept, observe), kept)
    return found


def arguments(kept: Kept) -> list[Any]:
    """The arguments of the first call, copies of what the plan writes in place among them."""
    written = build.written_values(kept.plan)
    pairs = zip(kept.plan.inputs, kept.args, strict=True)
    return [a.detach().clone() if i in written and isinstance(a, torch.Tensor) else a for i, a in pairs]


def _observed(kept: Kept, observe: Any) -> Any:
    return codegen.load(kept.plan, kept.kernels, prepared=codegen.prepared_of(kept.run), observe=observe)[0]


def _call(run: Any, kept: Kept) -> None:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        run(arguments(kept))


def _waiting(kept: Kept) -> Any:
    """What waits for the devices of a plan; nothing where all of it is on the host."""
    types = {torch.device(s.device).type for s in kept.plan.specs.values()} - {HOST}
    modules: Mapping[str, Any] = {t: getattr(torch, t, None) for t in sorted(types)}
    waits = [m.synchronize for m in modules.values() if hasattr(m, "synchronize")]
    return lambda: [w() for w in waits]
