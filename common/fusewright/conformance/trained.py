"""C4: ten small models in inference, with other batches and changed weights, and in training, by the fp64 rule."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusewright import report
from fusewright.accuracy import compare
from fusewright.conformance import models
from fusewright.conformance.ops.opset import lowered
from fusewright.conformance.settings import Settings, compiler
from fusewright.conformance.verdicts import Check, Figure, Verdict
from fusewright.interface import HOST

LEVEL = "C4"
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
NEIGHBOURS = 3
"""Models one rounding step away, on which eager is measured too if a result is too far off: where terms cancel, as in gradients
of one batch norm before another, a single call tells little about eager's error."""


def names(settings: Settings) -> list[str]:
    return [f"{m} {d}" for m in models.MODELS for d in DTYPES if d in settings.dtypes][:: settings.part]


def check(name: str, settings: Settings) -> Iterator[Check]:
    """One model at one dtype: inference, and a training step in fp32."""
    model, _, dtype = name.partition(" ")
    yield Check(LEVEL, f"{name} inference", *_judged(model, dtype, settings, _inference))
    if dtype == "float32":
        yield Check(LEVEL, f"{name} training", *_judged(model, dtype, settings, _training))


def _inference(model: models.Model, fn: Any) -> list[Tensor]:
    """Results of a call, of another batch, and of the first batch after in-place changes of the weights."""
    found = models.outputs(model, fn)
    more = torch.cat([model.inputs[0], model.inputs[0].flip(0)])[:5]
    found += models.outputs(model, fn, more)
    with torch.no_grad():
        for p in model.module.parameters():
            p.mul_(1.25).add_(0.0625)
    return found + models.outputs(model, fn)


def _training(model: models.Model, fn: Any) -> list[Tensor]:
    return [*models.train_step(model, fn), *(b.clone() for b in model.module.buffers() if b.is_floating_point())]


def _judged(name: str, dtype: str, settings: Settings, run: Any) -> tuple[Verdict, str, Figure | None]:
    torch.compiler.reset()
    backend = compiler(settings.make(), settings.options())
    wide, eager, ours = (_built(name, dtype, settings) for _ in range(3))
    with report.recording() as reports:
        got = run(ours, torch.compile(ours.module, backend=backend))
    if bugs := [b for r in reports for b in r.bugs]:
        return Verdict.ERROR, "; ".join(bugs)[:300], None
    of_eager = _pair(run, wide, eager)
    accuracy = compare(*of_eager, _home(got), DTYPES[dtype])
    if not accuracy.passed:
        near = [
            _pair(run, *(_nudged(_built(name, dtype, settings), seed) for _ in range(2))) for seed in range(NEIGHBOURS)
        ]
        accuracy = compare(*of_eager, _home(got), DTYPES[dtype], near)
    return _verdict(reports) if accuracy.passed else (Verdict.WRONG, accuracy.reason, None)


def _pair(run: Any, wide: models.Model, eager: models.Model) -> tuple[list[Tensor], list[Tensor]]:
    """A model's results in fp64 and in eager."""
    wide = models.Model(copy.deepcopy(wide.module).to(HOST).double(), tuple(_wide(x.to(HOST)) for x in wide.inputs))
    return _home(run(wide, wide.module)), _home(run(eager, eager.module))


def _nudged(model: models.Model, seed: int) -> models.Model:
    """The model with every input and weight changed by up to one rounding step."""
    g = torch.Generator().manual_seed(seed)

    def nudge(x: Tensor) -> Tensor:
        step = torch.randint(-1, 2, x.shape, generator=g).to(x)
        return x.detach() * (1 + step * torch.finfo(x.dtype).eps) if x.is_floating_point() else x

    for p in model.module.parameters():
        p.data = nudge(p)
    return models.Model(model.module, tuple(map(nudge, model.inputs)))


def _built(name: str, dtype: str, settings: Settings) -> models.Model:
    return models.build(name, settings.tensors_on(), getattr(torch, dtype))


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _home(xs: Sequence[Tensor]) -> list[Tensor]:
    """Move to the host, which has fp64 even if the device does not."""
    return [x.to(HOST) for x in xs]


def _verdict(reports: Sequence[report.GraphReport]) -> tuple[Verdict, str, Figure | None]:
    """Lowered if all graphs are; else the share of lowered ops."""
    if not reports:
        return Verdict.ERROR, "no graph came to the backend", None
    found = [lowered(r)[0] for r in reports]
    taken, others = (sum(r.count(w) for r in reports for w in ws) for ws in (("lowered",), ("carried", "eager")))
    ops = Figure(taken, taken + others)
    if Verdict.DECLINED_LATE in found:
        return Verdict.DECLINED_LATE, next(d for v, d in map(lowered, reports) if v is Verdict.DECLINED_LATE), ops
    if all(v is Verdict.LOWERED_OK for v in found):
        return Verdict.LOWERED_OK, "", ops
    return Verdict.FALLBACK_OK, f"{ops} ops lowered", ops
