"""Check `xla_cpu` on BERT and ResNet (the suite's small geometry, random weights) by the fp64 rule: `python -m ci.xla_models`."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch

from fusewright import report
from fusewright.accuracy import Accuracy
from fusewright.bench import suite
from fusewright.bench.accuracy import compare, reference, train_reference

BACKEND = "xla_cpu"
OPTIONS: dict[str, Any] = {"strict": True, "fallback": "allow"}


def inference(model: str, dtype: suite.DType) -> Accuracy:
    """Judge the model's outputs."""
    call = suite.build(model, "small", dtype)
    with torch.no_grad():
        eager = suite.flatten_outputs(call.run(None))
        ours = suite.flatten_outputs(call.run(torch.compile(call.fn, backend=BACKEND, options=OPTIONS)))
    return compare(reference(call), eager, ours, dtype)


def training(model: str, dtype: suite.DType) -> Accuracy:
    """Judge loss and gradients of one step. Gradients that are pure rounding error (the bias of a key) are left out."""
    eager = suite.train_step(model, "small", dtype)
    ours = copy.deepcopy(eager)
    ours.compiled = torch.compile(ours.module, backend=BACKEND, options=OPTIONS)
    exact = train_reference(eager)
    wanted, got = eager.loss_and_grads(), ours.loss_and_grads()
    scale = max(float(e.abs().max()) for e in exact[1:])
    real = [k for k, e in enumerate(exact) if k == 0 or float(e.abs().max()) > 1e-6 * scale]
    return compare([exact[k] for k in real], [wanted[k] for k in real], [got[k] for k in real], dtype)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--models", default="bert,bert_small,resnet18,resnet50")
    p.add_argument("--dtypes", default="fp32,bf16")
    p.add_argument("--train", action=argparse.BooleanOptionalAction, default=True, help="a training step in fp32 too")
    a = p.parse_args(argv)
    right = True
    for model in a.models.split(","):
        runs = [(f"{d} inference", inference, d) for d in a.dtypes.split(",")]
        trained = model in suite.TRAINABLE and a.train
        for what, check, dtype in [*runs, *([("fp32 training", training, "fp32")] if trained else [])]:
            torch.compiler.reset()
            with report.recording() as seen:
                verdict = check(model, dtype)
            ops = [o for r in seen for o in r.ops]
            lowered = sum(o.where != "eager" for o in ops)
            told = "right" if verdict.passed else f"WRONG, {verdict.reason}"
            counted = f"error {verdict.ratio_max:.2f}x eager's; {lowered} of {len(ops)} ops lowered"
            print(f"{model} {what}: {told}; {counted}", flush=True)
            right &= verdict.passed
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
