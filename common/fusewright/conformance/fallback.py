"""C1: with all claims of the backend removed, every result is bitwise equal to that of `aot_eager`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusewright import report
from fusewright.conformance import models
from fusewright.conformance.settings import Settings, compiler
from fusewright.conformance.verdicts import Check, Verdict
from fusewright.interface import Backend, OpView, Why
from fusewright.interface import Verdict as Answer

LEVEL = "C1"
JUDGE = "aot_eager"


def names(settings: Settings) -> list[str]:
    return list(models.MODELS)[:: settings.part]


def check(name: str, settings: Settings) -> Iterator[Check]:
    """One model in inference and one training step, against `aot_eager`."""
    for what, run in (("inference", _inference), ("training", _training)):
        found = _difference(name, settings, run)
        yield Check(LEVEL, f"{name} {what}", Verdict.WRONG if found else Verdict.FALLBACK_OK, found)


def without_claims(cls: type[Backend]) -> type[Backend]:
    """The backend with an empty table, otherwise unchanged."""

    def supports(self: Backend, op: OpView) -> Answer:
        return Answer(Why.NO_LOWERING, "its table is empty for this check")

    return type(f"{cls.__name__}WithoutClaims", (cls,), {"supports": supports})


Run = Callable[[models.Model, Any], list[Tensor]]


def _inference(model: models.Model, backend: Any) -> list[Tensor]:
    return models.outputs(model, torch.compile(model.module, backend=backend))


def _training(model: models.Model, backend: Any) -> list[Tensor]:
    found = models.train_step(model, torch.compile(model.module, backend=backend))
    return [*found, *model.module.buffers()]


def _difference(name: str, settings: Settings, run: Run) -> str:
    """The difference from `aot_eager`, or ""."""
    backend = settings.make(without_claims(settings.plugin()))
    with report.recording() as reports:
        ours = _fresh(name, settings, run, compiler(backend, settings.options()))
    claimed = sum(r.count("lowered") + r.count("carried") for r in reports)
    if claimed:
        return f"{claimed} ops were taken though nothing was claimed"
    if not reports:
        return "no graph came to the backend"
    return _first_difference(ours, _fresh(name, settings, run, JUDGE))


def _fresh(name: str, settings: Settings, run: Run, backend: Any) -> list[Tensor]:
    torch.compiler.reset()
    return run(models.build(name, settings.tensors_on()), backend)


def _first_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors, {JUDGE} gives {len(theirs)}"
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            return f"tensor {i} is {a.dtype} {tuple(a.shape)} {a.stride()}; {JUDGE} gives {b.dtype} {tuple(b.shape)} {b.stride()}"
        if not torch.equal(a, b):
            return f"tensor {i}: {int((a != b).sum())} of {a.numel()} elements differ from {JUDGE}'s bits"
    return ""
