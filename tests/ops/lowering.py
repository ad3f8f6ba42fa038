"""Which rows of the opset loop kernels compute: seen, not declared. `python -m tests.ops.lowering` writes the record.

Every sample of a row goes through the host with a backend that has nothing but loop kernels and the LLVM emitter, with
the sizes known and with symbolic ones, and must give what eager gives. docs/ops.md shows the record, `test_lowering`
repeats it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fusewright import ops, pipeline, report
from fusewright.config import Options
from fusewright.conformance.ops.calls import UNDEFINED, arguments, guards, larger, read, traced, valid
from fusewright.conformance.ops.cases import CASES, DTYPES
from fusewright.conformance.ops.samples import BF16, BOOL, F32, FLOATS, I64, Case, NotFinite
from fusewright.interface import Device, Why
from fusewright.ops import Kind, Op, rules
from fusewright.ops.oracle import evaluate, flat
from fusewright.partition.cost import SIZES
from fusewright.toolkit.backend.fused import FusedBackend
from tests.ops.test_kernels_vs_eager import judge

RECORD = Path(__file__).with_name("lowering.json")

KINDS = (Kind.POINTWISE, Kind.REDUCTION, Kind.VIEW, Kind.GATHER, Kind.SCATTER)
COLUMNS = {"fp32": F32, "bf16": BF16, "int64": I64, "bool": BOOL}
ROWS = {op.name: op for op in ops.OPS.values() if op.kind in KINDS}

Seen = dict[str, dict[str, str]]
"""Column -> "static" and "dynamic" -> the outcome of the samples, in `_said`'s words."""


class Kernels(FusedBackend):
    """A backend with loop kernels only."""

    name = "kernels_only"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Device:
        return Device("cpu", "host")


def seen(op: Op) -> Seen:
    """Run the row's samples and return their outcomes by dtype. Raises AssertionError if a result is wrong."""
    return {column: _seen(op, dtype) for column, dtype in COLUMNS.items() if dtype in DTYPES.get(op.name, FLOATS)}


def _seen(op: Op, dtype: torch.dtype) -> dict[str, str]:
    samples = list(_samples(op, dtype))
    return {
        name: _said([_outcome(op, case, dtype, symbolic) for case in samples])
        for name, symbolic in (("static", False), ("dynamic", True))
    }


def _samples(op: Op, dtype: torch.dtype) -> Iterator[Case]:
    for case in CASES[op.name]:
        try:
            args, _ = case.make(dtype)
        except NotFinite:
            continue
        if op.kind is Kind.VIEW or not any(t.is_complex() for t in rules.tensors(args)):  # complex is no column
            yield case


def _said(outcomes: Sequence[str]) -> str:
    """Summarize outcomes as "kernel", "view" (eager's view, which kernels read), "carried" (eager's call inside a region) or
    "eager"; if they differ, count the kernels and views among those that compute anything."""
    real = [o for o in outcomes if o]
    if len(set(real)) == 1:
        return real[0]
    free = real.count("kernel") + real.count("view")
    return "kernel or view" if free == len(real) else f"kernel {free} of {len(real)}"


# ---------------------------------------------------------------- one sample


def _outcome(op: Op, case: Case, dtype: torch.dtype, symbolic: bool) -> str:
    """Compile one sample and compare it with eager, with symbolic sizes also at larger sizes if the same graph fits
    them. Return what computed it, or "" if there is nothing to compute.
    """
    args, kwargs = arguments(op, case, dtype)
    gm = traced(op, args, kwargs, symbolic)
    allowed = guards(gm) if symbolic else None
    with report.recording() as reports:
        options = Options(cache=False, strict=True, fallback="allow")
        run = pipeline.compile_graph(Kernels(), options, gm, "infer", frozenset(), "direct")
    _check(op, run, args, kwargs)
    if allowed is not None:
        more = arguments(op, larger(case), dtype)
        if allowed(list(rules.tensors(more[0]))) and valid(op, *more):
            _check(op, run, *more)
    computes = (r for r in reports[-1].ops if r.op not in SIZES)  # an empty result's fill reads its sizes
    where = {r.where for r in computes if r.verdict.why is not Why.TOO_SMALL}
    return next((w for w in ("eager", "carried", "view") if w in where), "kernel" if where else "")


def _check(op: Op, run: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    eager = [o for o in flat(op.target(*args, **kwargs)) if o is not None]
    got = run([t.clone() if t.is_contiguous() else t for t in rules.tensors(args)])
    exact = [o for o in evaluate(op, args, kwargs) if o is not None]
    if op.kind is Kind.VIEW:
        eager, exact = [read(o) for o in eager], [read(o) for o in exact]
    for k, (g, e, x) in enumerate(zip(got, eager, exact, strict=True)):
        if k not in UNDEFINED.get(op.name, ()):
            judge(g, e, x.to(torch.float64) if x.is_floating_point() else x)


def main() -> int:
    found = {}
    for name, op in ROWS.items():
        found[name] = seen(op)
        print(name, found[name], flush=True)
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
