"""Compile every Metal kernel of models and op tests without a warning: `python -m ci.mps.kernels [--shard 1/8]`.

`apple_mps`, simulated, plans the models of the suite (BERT and ResNet also train) and the first sample of every entry of torch's
OpInfo database, forward and backward, in fp32, fp16 and bf16, with the kernels themselves computed by the CPU's emitter.
Each kernel is then printed in every variant that a launch of it may need: buffers aligned or not, offsets of 32 and (for symbolic
sizes) 64 bits, integer division checked as in simulation and unchecked as on a Mac. The shim compiles each distinct one with
`-Wall -Wextra -Werror`. Exit code 1, with names and the compiler's messages, if one does not compile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product, takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.testing._internal.common_methods_invocations import op_db

from ci.mps.models import TRAINED
from ci.mps.operators import compiled, run, samples
from fusewright.bench import suite
from fusewright.interface import KernelCode
from fusewright_cpu import llvm_loader
from fusewright_mps.backend import AppleMps
from fusewright_mps.emit.values import divides
from fusewright_mps.emitter import Source, Variant, emit, library, variant_for
from fusewright_mps.kernels.handwritten import Handwritten
from fusewright_mps.runtime import Launched
from fusewright_mps.simulate.compiler import FLAGS, NotCompiled, compiler
from fusewright_mps.simulate.library import compile_shader
from fusewright_mps.target import TYPICAL

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BATCH = 100
"""Functions of one translation unit."""


@contextlib.contextmanager
def collecting(found: dict[str, Launched]) -> Iterator[None]:
    """Collect by hash the kernels that are loaded in this context; the CPU's emitter computes those in the kernel IR."""
    own = AppleMps.load

    def load(self: AppleMps, kernels: Mapping[str, Any]) -> Mapping[str, KernelCode]:
        found.update(kernels)
        by_hand = {h: k for h, k in kernels.items() if isinstance(k, Handwritten)}
        rest = {h: k for h, k in kernels.items() if h not in by_hand}
        return {**llvm_loader(rest), **(own(self, by_hand) if by_hand else {})}

    with mock.patch.object(AppleMps, "load", load), mock.patch.object(AppleMps, "store", lambda *_: None):
        yield


def programs(dtype: str, models: Sequence[str], trained: Sequence[str]) -> list[Callable[[], None]]:
    """Return calls that make the kernels: inference, training steps, and entries of the database."""
    entries = [op for op in op_db if DTYPES[dtype] in op.supported_dtypes("cpu")]
    return [
        *(partial(_inferred, m, dtype) for m in models),
        *(partial(_trained, m, "amp" if dtype == "bf16" else dtype) for m in trained),
        *(partial(_entry, op, DTYPES[dtype]) for op in entries),
    ]


def _entry(op: Any, dtype: torch.dtype) -> None:
    gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    for sample in samples(op, dtype, gradients):
        run(compiled(op), sample, gradients)


def _backend(fn: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(fn, backend="apple_mps", options={"simulate": True, "cache": False, "fallback": "allow"})


def _inferred(model: str, dtype: Any) -> None:
    built = suite.build(model, "small", dtype)
    with torch.no_grad():
        built.run(_backend(built.fn))


def _trained(model: str, dtype: Any) -> None:
    step = suite.train_step(model, "small", dtype)
    step.compiled = _backend(step.module)
    step.backward()


def sources(kernel: Launched) -> Iterator[Source]:
    """Yield a kernel in every variant that a launch may need."""
    if isinstance(kernel, Handwritten):
        yield from (kernel.source(Variant(aligned)) for aligned in (True, False))
        return
    expected = variant_for(kernel, kernel.hints)
    wide = {expected.wide, expected.wide or bool(kernel.symbols)}
    for w, check in product(sorted(wide), (False, True) if divides(kernel) else (False,)):
        source = emit(kernel, Variant(True, w, check), TYPICAL)
        yield source
        if max(source.alignment, default=1) > 1:
            yield emit(kernel, Variant(False, w, check), TYPICAL)


def warned(found: Sequence[Source]) -> Iterator[tuple[str, str]]:
    """Yield the functions that do not compile without a warning, and the compiler's message."""
    for batch in (found[k : k + BATCH] for k in range(0, len(found), BATCH)):
        if _said(batch):
            yield from ((s.dispatches[0].entry, said) for s in batch if (said := _said([s])))


def _said(batch: Sequence[Source]) -> str:
    try:
        compile_shader(library(batch), checked=False)
    except NotCompiled as e:
        return str(e)
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--shard", default="1/1", metavar="I/N")
    p.add_argument("--dtypes", default=",".join(DTYPES))
    p.add_argument("--models", default=",".join(suite.SUITE), help="models that infer")
    p.add_argument("--train", default=",".join(TRAINED), help="models that train")
    p.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no program after that; what is left out is said"
    )
    p.add_argument("--json", help="write the names of all functions to this file")
    a = p.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    first, parts = map(int, a.shard.split("/"))
    models, trained = ([m for m in names.split(",") if m] for names in (a.models, a.train))
    until, texts, failed, left = time.monotonic() + a.seconds, dict[str, Source](), 0, 0
    for dtype in a.dtypes.split(","):
        found: dict[str, Launched] = {}
        todo = programs(dtype, models, trained)[first - 1 :: parts]
        with collecting(found):
            done = sum(1 for program in takewhile(lambda _: time.monotonic() < until, todo) if program() is None)
        fresh = {s.text: s for k in found.values() for s in sources(k) if s.text not in texts}
        wrong = list(warned(list(fresh.values())))
        texts |= fresh
        failed, left = failed + len(wrong), left + len(todo) - done
        counts = f"{len(found)} kernels, {len(fresh)} new functions, {len(wrong)} with a warning"
        print(f"{dtype}: {done} programs, {counts}", flush=True)
        for name, why in wrong:
            print(f"  {name}: {why}")
    if left:
        print(f"left out for want of time: {left} programs")
    print(f"{len(texts)} functions: {compiler()} {' '.join(f for f in FLAGS if f.startswith('-W'))}")
    if a.json:
        Path(a.json).write_text(json.dumps(sorted(d.entry for s in texts.values() for d in s.dispatches), indent=1))
    return 1 if failed or not texts else 0


if __name__ == "__main__":
    sys.exit(main())
