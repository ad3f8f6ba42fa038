"""Which rows of the opset loop kernels compute: seen, not declared. `python -m tests.ops.lowering` writes the record.

Every sample of a row goes through the host with a backend that has nothing but loop kernels and the LLVM emitter, with
the sizes known and with symbolic ones, and must give what eager gives. docs/ops.md shows the record, `test_lowering`
repeats it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright import _torch_compat as compat
from fusewright import ops, pipeline, report
from fusewright.config import Options
from fusewright.interface import Device, Why
from fusewright.ops import Kind, Op, rules
from fusewright.ops.oracle import evaluate, flat
from fusewright.toolkit.backend.fused import FusedBackend
from tests.ops.cases import CASES, DTYPES
from tests.ops.samples import BF16, BOOL, F32, FLOATS, I64, Case, NotFinite, T
from tests.ops.test_kernels_vs_eager import judge
from tests.ops.test_rows import UNDEFINED

RECORD = Path(__file__).with_name("lowering.json")

KINDS = (Kind.POINTWISE, Kind.REDUCTION, Kind.VIEW, Kind.GATHER, Kind.SCATTER)
COLUMNS = {"fp32": F32, "bf16": BF16, "int64": I64, "bool": BOOL}
ROWS = {op.name: op for op in ops.OPS.values() if op.kind in KINDS}

Seen = dict[str, dict[str, str]]
"""Column -> "static" and "dynamic" -> what became of the samples, as `_said` puts it."""


class Kernels(FusedBackend):
    """Nothing but loop kernels."""

    name = "kernels_only"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Device:
        return Device("cpu", "host")


def seen(op: Op) -> Seen:
    """What became of the row's samples, by dtype. AssertionError when a result is wrong."""
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
    """One of "kernel", "view" (of eager, which kernels read), "carried" (eager's own call inside a region) and "eager", or how
    many of those that compute anything are kernels or views."""
    real = [o for o in outcomes if o]
    if len(set(real)) == 1:
        return real[0]
    free = real.count("kernel") + real.count("view")
    return "kernel or view" if free == len(real) else f"kernel {free} of {len(real)}"


# ---------------------------------------------------------------- one sample


def _outcome(op: Op, case: Case, dtype: torch.dtype, symbolic: bool) -> str:
    """Compile one sample and compare it with eager; with symbolic sizes also at larger ones, where that is one call
    of the same graph. What computed it; "" where there is nothing to compute.
    """
    args, kwargs = _call(op, case, dtype)
    gm = _traced(op, args, kwargs, symbolic)
    allowed = _guards(gm) if symbolic else None
    with report.recording() as reports:
        options = Options(cache=False, strict=True, fallback="allow")
        run = pipeline.compile_graph(Kernels(), options, gm, "infer", frozenset(), "direct")
    _check(op, run, args, kwargs)
    if allowed is not None:
        larger = _call(op, _larger(case), dtype)
        if allowed(rules.tensors(larger[0])) and _valid(op, *larger):
            _check(op, run, *larger)
    where = {r.where for r in reports[-1].ops if r.verdict.why is not Why.TOO_SMALL}
    return next((w for w in ("eager", "carried", "view") if w in where), "kernel" if where else "")


def _call(op: Op, case: Case, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    found = ops.canonical(op.target, *case.make(dtype))
    assert found is not None
    return list(found[1]), found[2]


def _traced(op: Op, args: list[Any], kwargs: dict[str, Any], symbolic: bool) -> GraphModule:
    """The call as an ATen graph. Views are read by an op, because alone they are nobody's work."""

    def run(*tensors: torch.Tensor) -> list[Any]:
        outs = [o for o in flat(op.target(*_with(args, iter(tensors)), **kwargs)) if o is not None]
        return [_read(o) for o in outs] if op.kind is Kind.VIEW else outs

    tensors = rules.tensors(args)
    if symbolic:
        mode = compat.symbolic_mode()
        tensors = [mode.from_tensor(t) for t in tensors]
    found: GraphModule = make_fx(run, tracing_mode="symbolic" if symbolic else "fake")(*tensors)
    return found


def _read(o: torch.Tensor) -> torch.Tensor:
    if o.dtype.is_complex:
        return torch.ops.aten.view_as_real(o)
    return torch.ops.aten.logical_not(o) if o.dtype == torch.bool else torch.ops.aten.neg(o)


def _with(args: Any, tensors: Iterator[torch.Tensor]) -> list[Any]:
    if isinstance(args, list | tuple):
        return [_with(a, tensors) for a in args]
    return next(tensors) if isinstance(args, torch.Tensor) else args


def _check(op: Op, run: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    eager = [o for o in flat(op.target(*args, **kwargs)) if o is not None]
    got = run([t.clone() if t.is_contiguous() else t for t in rules.tensors(args)])
    exact = [o for o in evaluate(op, args, kwargs) if o is not None]
    if op.kind is Kind.VIEW:
        eager, exact = [_read(o) for o in eager], [_read(o) for o in exact]
    for k, (g, e, x) in enumerate(zip(got, eager, exact, strict=True)):
        if k not in UNDEFINED.get(op.name, ()):
            judge(g, e, x.to(torch.float64) if x.is_floating_point() else x)


# ---------------------------------------------------------------- other sizes


def _guards(gm: GraphModule) -> Any:
    """Says whether the traced graph holds for other tensors."""
    env = compat.shape_env_of(gm)
    fakes = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    if env is None:
        return None
    return lambda tensors: compat.guards_hold(env, fakes, tensors)


def _larger(case: Case) -> Case:
    """The case with every size above one raised; sizes that were equal stay equal."""

    def raised(x: Any) -> Any:
        if isinstance(x, list):
            return [raised(y) for y in x]
        if not isinstance(x, T) or x.values is not None:
            return x
        return replace(x, shape=tuple(n + 2 if n > 1 else n for n in x.shape))

    return replace(case, args=tuple(map(raised, case.args)), kwargs={k: raised(v) for k, v in case.kwargs.items()})


def _valid(op: Op, args: list[Any], kwargs: dict[str, Any]) -> bool:
    try:
        op.target(*args, **kwargs)
    except (RuntimeError, IndexError):
        return False
    return True


def main() -> int:
    found = {}
    for name, op in ROWS.items():
        found[name] = seen(op)
        print(name, found[name], flush=True)
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
