"""Accuracy along a graph: the values of a plan beside eager's and fp64's, each computed from the graph's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusewright import accuracy
from fusewright.ops import oracle
from fusewright.plan.execute import contract
from fusewright.report import Kept
from fusewright.report_page import observe
from fusewright.report_page.flow import module_of


@dataclass(frozen=True)
class Judged:
    """A value that the plan makes. Errors are root mean squares against fp64, relative to that of the value itself."""

    op: str
    source: str
    module: str
    ours: float
    eager: float
    passed: bool


def judge(kept: Kept) -> list[Judged]:
    """Every floating-point value that a plan makes of its graph, in graph order. Raises what eager raises."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return _judge(kept, observe.values(kept))


def _judge(kept: Kept, ours: Mapping[int, torch.Tensor]) -> list[Judged]:
    eager = _inputs(kept)
    wide: dict[int, Any] = {}
    views = list(kept.index.ops.items())
    last = {v.id: k for k, (_, op) in enumerate(views) for v in (*op.inputs(), *op.outs)}
    dying: dict[int, list[int]] = {}
    for id, k in last.items():
        dying.setdefault(k, []).append(id)
    found = []
    for k, (_, op) in enumerate(views):
        wide.update((v.id, oracle.widen(eager[v.id])) for v in op.inputs() if v.id not in wide)  # not all weights at once
        eager.update(zip((v.id for v in op.outs), contract.called(op, eager), strict=True))
        wide.update(zip((v.id for v in op.outs), contract.evaluated(op, wide), strict=False))
        for v in op.outs:
            given = [env.get(v.id) for env in (wide, eager, ours)]
            if all(isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel() for t in given):
                found.append(_judged(op.op, op.source, module_of(kept, op.id), *given))
        for id in dying.get(k, ()):
            eager.pop(id, None)
            wide.pop(id, None)
    return found


def _inputs(kept: Kept) -> dict[int, Any]:
    """Arguments and tensors held by the graph, by id."""
    given = zip(kept.plan.inputs, observe.arguments(kept), strict=True)
    return dict(given) | {i: t for i, (_, t) in kept.plan.attributes.items()}


def _judged(op: str, source: str, module: str, wide: Any, eager: Any, ours: Any) -> Judged:
    found = accuracy.compare([wide], [eager], [ours], contract.PRECISION.get(eager.dtype, "fp32"))
    scale = float(wide.double().square().mean().sqrt()) or 1.0
    return Judged(op, source, module, found.err_rms / scale, found.eager_err_rms / scale, found.passed)
