"""Check every model of the suite with `apple_mps` against the fp64 rule: `python -m ci.mps.models [--models bert] [--train ..]`.

Simulated: the Metal source of every kernel is compiled against a shim of Metal's library and run on the CPU, at the small geometry.
It counts for each model the ops that are lowered, carried and left to eager, and the dispatches of one call. Exit code 1 if an
output or a gradient is further from fp64 than the rule allows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fusewright import report
from fusewright.bench import suite
from fusewright.bench.accuracy import compare
from fusewright_mps.runtime import host_metal
from tests.models.test_suite import gradient_verdict, outputs, wide

TRAINED = ("bert_small", "resnet18")
"""Models of which a training step also runs: in fp32, fp16, and under bf16 autocast."""


@dataclass(frozen=True)
class Ran:
    """The result of one model."""

    model: str
    dtype: str
    phase: str
    passed: bool
    reason: str
    lowered: int
    carried: int
    eager: int
    dispatches: int
    seconds: float


def ran(model: str, dtype: Any, phase: str, options: dict[str, Any]) -> Ran:
    """Run one call of a model, or one training step, beside eager and fp64."""
    torch.compiler.reset()
    metal = host_metal()
    start, before = time.monotonic(), metal.encoded
    with report.recording() as reports:
        if phase == "train":
            verdict = gradient_verdict(model, dtype, "apple_mps", options)
        else:
            got = outputs(model, dtype, "apple_mps", options)
            verdict = compare(wide(model, dtype), outputs(model, dtype, None), got, dtype)
    graphs = {(r.phase, *((o.op, o.source) for o in r.ops)): r for r in reports}.values()  # the last plan of each
    lowered, carried, eager = (sum(r.count(where) for r in graphs) for where in ("lowered", "carried", "eager"))
    passed, took = verdict.passed and lowered > 0, round(time.monotonic() - start, 1)
    return Ran(model, dtype, phase, passed, verdict.reason, lowered, carried, eager, metal.encoded - before, took)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--models", default=",".join(suite.SUITE), help="models that infer")
    p.add_argument("--train", default=",".join(TRAINED), help="models that train")
    p.add_argument("--dtypes", default="fp32,bf16,fp16")
    p.add_argument("--json", help="write the rows to this file")
    a = p.parse_args(argv)
    options = {"simulate": True, "strict": True}
    rows = []
    for dtype in a.dtypes.split(","):
        training = "amp" if dtype == "bf16" else dtype
        todo = [(m, dtype, "infer") for m in a.models.split(",") if m]
        todo += [(m, training, "train") for m in a.train.split(",") if m]
        for model, kind, phase in todo:
            rows.append(r := ran(model, kind, phase, options))
            counts = f"{r.lowered:4} lowered {r.carried:3} carried {r.eager:3} eager {r.dispatches:4} dispatches {r.seconds:6.1f} s"
            print(
                f"{model:14} {kind:4} {phase:5} {counts}  {'passed' if r.passed else 'FAILED: ' + r.reason}", flush=True
            )
    if a.json:
        Path(a.json).write_text(json.dumps([asdict(r) for r in rows], indent=1))
    return 0 if all(r.passed for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
