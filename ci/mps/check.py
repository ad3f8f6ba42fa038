"""Check and time `apple_mps` on a Mac with one command. `ci/mps.sh` runs it.

    python -m ci.mps.check [--json mps.json] [--models bert,llama] [--entries REGEX]
    python -m ci.mps.check --simulate              the same on CPU tensors, by the shim: everything but the times

Ops of torch's OpInfo database and whole models are computed in eager and by the backend on the device, and judged against fp64 on
the CPU. Kernels of products with low-bit weights, and models, are then timed beside eager MPS and Inductor, rounds interleaved.
The record names the chip, the system, versions and the commit. Exit code 1 when a result is wrong or something failed.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import re
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

import fusewright
from fusewright.accuracy import compare
from fusewright.bench import suite
from fusewright.bench.accuracy import reference
from fusewright_mps import device as metal
from fusewright_mps import target
from fusewright_mps.device import Metal
from fusewright_mps.runtime import host_metal, raise_errors
from fusewright_mps.target import Target

SCHEMA, VERSION = "fusewright.mps", 1
ENTRIES = (
    r"^(add|sub|mul|div\.no_rounding_mode|exp|log1p|tanh|sigmoid|erf|pow|clamp|where|sum|mean|var|amax|argmax|cumsum|softmax|"
    r"log_softmax|nn\.functional\.(layer_norm|rms_norm|gelu|silu|linear|conv2d|embedding|scaled_dot_product_attention|"
    r"cross_entropy|batch_norm)|index_select|gather|scatter_add|sort|topk|matmul|bmm|cat|transpose|tril)$"
)
"""Entries of the OpInfo database that are checked when none are named."""
MODELS = ("bert", "gpt2", "llama", "resnet50", "vit")
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
ROUNDS, CALLS = 7, 10
"""Interleaved rounds of each contender, and calls per round; the best round's median counts."""
DECODE = (4096, 4096)
"""Columns and inner size of the timed products of one row."""


@dataclass(frozen=True)
class Where:
    """The device to check: torch's name of it, the backend's options, and its description."""

    device: str
    options: Mapping[str, Any]
    simulated: bool
    metal: Metal
    target: Target

    def compiled(self, fn: Any) -> Any:
        return torch.compile(fn, backend="apple_mps", options={"strict": True, "fallback": "allow", **self.options})

    def wait(self) -> None:
        raise_errors(self.metal)


def here(simulate: bool) -> Where:
    """Return the device of this machine. Raise SystemExit with what is missing if there is none."""
    if simulate:
        return Where("cpu", {"simulate": True, "cache": False}, True, host_metal(), target.TARGETS["M3 Pro"])
    if (lacks := metal.missing()) is not None:
        raise SystemExit(f"no device to check: {lacks.reason}; {lacks.fix}, or give --simulate")
    return Where(metal.DEVICE, {}, False, metal.torch_mps(), target.of_chip(metal.chip(), metal.cores()))


# ---------------------------------------------------------------- right


def judged(what: str, exact: Any, eager: Any, ours: Any, dtype: str) -> dict[str, Any]:
    """Return one row of the record."""
    verdict = compare(_on_host(exact), _on_host(eager), _on_host(ours), dtype)
    return {
        "what": what,
        "dtype": dtype,
        "passed": verdict.passed,
        "ratio": verdict.ratio_max,
        "reason": verdict.reason,
    }


def _on_host(x: Any) -> list[torch.Tensor]:
    return [t.cpu() for t in tree_flatten(x)[0] if isinstance(t, torch.Tensor)]


def attempted(what: str, dtype: str, check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a row even when the check raises."""
    torch.compiler.reset()
    try:
        return check()
    except Exception as e:
        text = traceback.format_exception_only(e)[-1].strip().splitlines()[0]
        return {"what": what, "dtype": dtype, "passed": False, "ratio": None, "reason": f"failed: {text}"}


def ops(w: Where, entries: str) -> Iterator[dict[str, Any]]:
    """Check the first sample of each entry, in fp32, bf16 and fp16."""
    for op in op_db:
        if not re.search(entries, op.name) or op.variant_test_name not in ("", "no_rounding_mode"):
            continue
        for dtype, name in DTYPES.items():
            if dtype in op.supported_dtypes("cpu"):
                yield attempted(op.name, name, lambda op=op, dtype=dtype, name=name: _op(w, op, dtype, name))  # type: ignore[misc]


def layouts(w: Where) -> Iterator[dict[str, Any]]:
    """Check weights as torch packs them on the device; nothing in simulation, as torch packs them differently on CPUs."""
    if not w.simulated:
        yield attempted("_weight_int4pack_mm", "bf16", lambda: _packed(w, 1024, 1024))


def _packed(w: Where, n: int, k: int) -> dict[str, Any]:
    fn, x, _, exact = packed(n, k, w.device)
    with torch.no_grad():
        eager, ours = fn(x), w.compiled(fn)(x)
    w.wait()
    return judged("_weight_int4pack_mm", exact, eager, ours, "bf16")


def _op(w: Where, op: Any, dtype: torch.dtype, name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    sample = next(iter(op.sample_inputs("cpu", dtype, requires_grad=False)))
    given = (sample.input, sample.args, sample.kwargs)

    def call(fn: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        x, args, kwargs = tree_map(lambda t: change(t) if isinstance(t, torch.Tensor) else t, given)
        return fn(x, *args, **kwargs)

    exact = call(op.op, lambda t: t.double() if t.is_floating_point() else t)
    eager, ours = (call(fn, lambda t: t.to(w.device)) for fn in (op.op, w.compiled(op.op)))
    w.wait()
    return judged(op.name, exact, eager, ours, name)


def models(w: Where, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for model in names:
        for dtype in ("fp32", "bf16", "fp16"):
            yield attempted(model, dtype, lambda model=model, dtype=dtype: _model(w, model, dtype))  # type: ignore[misc]


def _model(w: Where, model: str, dtype: Any) -> dict[str, Any]:
    built = suite.build(model, "small", dtype)
    exact, there = reference(built), moved(built, w.device)
    with torch.no_grad():
        eager = there.run()
        before = w.metal.encoded
        ours = there.run(w.compiled(there.fn))
    w.wait()
    row = judged(model, exact, suite.flatten_outputs(eager), suite.flatten_outputs(ours), dtype)
    return {**row, "dispatches": w.metal.encoded - before}


def moved(built: suite.Built, device: str) -> suite.Built:
    """Return the same call on another device."""
    args, kwargs = tree_map(
        lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, (built.args, dict(built.kwargs))
    )
    fn = copy.deepcopy(built.module).to(device) if built.module is not None else built.fn
    return replace(built, fn=fn, args=args, kwargs=kwargs)


# ---------------------------------------------------------------- fast


def times(w: Where, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield milliseconds of a call: eager, Inductor, ours. A simulation has no speed: each runs once there, without times."""
    for model in names:
        for dtype in ("fp32", "bf16"):
            built = moved(suite.build(model, "small" if w.simulated else "full", dtype), w.device)
            yield {"what": model, "dtype": dtype, "ms": _timed(w, built.fn, built.run)}
    n, k = (64, 64) if w.simulated else DECODE
    made = {f"{bits}-bit weights": product(n, k, bits, w.device) for bits in (16, 8, 4)}
    if not w.simulated:  # eager has it on no other device
        made["4-bit weights packed by torch"] = packed(n, k, w.device)[:3]
    for what, (fn, x, moves) in made.items():
        ms = _timed(w, fn, lambda run, x=x: run(x))  # type: ignore[misc]
        yield {"what": f"product of one row, {what} {n}x{k}", "dtype": "bf16", "ms": ms, "bytes": moves}


def product(n: int, k: int, bits: int, device: str) -> tuple[Any, torch.Tensor, int]:
    """Return a linear of one row as torchao leaves it for 8- and 4-bit weights, its input, and the bytes of the weights."""
    q = torch.randint(-8, 8, (n, k), dtype=torch.int8, device=device)
    scale = torch.full((n, k // 32), 1 / 64, dtype=torch.bfloat16, device=device)
    x = torch.ones(1, k, dtype=torch.bfloat16, device=device)

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = torch.nn.Buffer(q if bits < 16 else q.bfloat16())
            self.scale = torch.nn.Buffer(scale if bits == 4 else scale[:, 0].contiguous())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bits == 16:
                return torch.nn.functional.linear(x, self.q)
            if bits == 8:
                return torch.mm(x, self.q.t().to(x.dtype)) * self.scale
            w = self.q.view(n, -1, 32).to(x.dtype) * self.scale[..., None]
            return torch.nn.functional.linear(x, w.view(n, k))

    return Product(), x, n * k * bits // 8


def packed(n: int, k: int, device: str, group: int = 32) -> tuple[Any, torch.Tensor, int, torch.Tensor]:
    """Return the same for 4-bit weights of `_weight_int4pack_mm`, and its result in fp64."""
    q = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    factors = torch.rand(k // group, n, 2).bfloat16() / 64
    x = torch.randn(1, k).bfloat16()

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            two = (q[:, ::2] << 4 | q[:, 1::2]).to(device)
            self.w = torch.nn.Buffer(torch.ops.aten._convert_weight_to_int4pack(two, 8))
            self.factors = torch.nn.Buffer(factors.to(device))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten._weight_int4pack_mm(x, self.w, group, self.factors)

    scale, zero = factors.double().transpose(0, 1).unbind(-1)
    wide = ((q.double() - 8).view(n, -1, group) * scale[..., None] + zero[..., None]).view(n, k)
    return Product(), x.to(device), n * k // 2, x.double() @ wide.t()


def _timed(w: Where, fn: Any, run: Callable[[Any], Any]) -> dict[str, float | str | None]:
    contenders = {"eager": lambda: fn, "apple_mps": lambda: w.compiled(fn)}
    if not w.simulated:
        contenders["inductor"] = lambda: torch.compile(fn)
    found: dict[str, float | str | None] = {}
    ready: dict[str, Any] = {}
    with torch.no_grad():
        for name, make in contenders.items():
            torch.compiler.reset()
            try:
                ready[name] = made = make()
                run(made)
                w.metal.synchronize()
            except Exception as e:  # one failing contender does not stop the others
                found[name] = f"failed: {traceback.format_exception_only(e)[-1].strip().splitlines()[0]}"
                ready.pop(name, None)
        if w.simulated:
            return {**dict.fromkeys(ready), **found}
        rounds: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(ROUNDS):
            for name, made in ready.items():
                rounds[name].append(_round(w, lambda made=made: run(made)))  # type: ignore[misc]
    return {**{name: min(seen) for name, seen in rounds.items()}, **found}


def _round(w: Where, call: Callable[[], Any]) -> float:
    """Return median milliseconds of a call that waits for its result."""
    seen = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        w.metal.synchronize()
        seen.append((time.perf_counter() - start) * 1e3)
    return statistics.median(seen)


# ---------------------------------------------------------------- the record


def document(w: Where, command: Sequence[str]) -> dict[str, Any]:
    """Return the part of the record that does not depend on results."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "schema": SCHEMA,
        "schema_version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", "ci.mps.check", *command]),
        "commit": commit,
        "simulated": w.simulated,
        "device": "simulated"
        if w.simulated
        else f"{metal.chip()}, {w.target.cores} GPU cores, macOS {platform.mac_ver()[0]}",
        "target": {k: v for k, v in asdict(w.target).items() if isinstance(v, int | float | str)},
        "versions": {
            "python": platform.python_version(),
            "fusewright": fusewright.__version__,
            "torch": torch.__version__,
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--simulate", action="store_true")
    p.add_argument("--entries", default=ENTRIES, metavar="REGEX")
    p.add_argument("--models", default=",".join(MODELS))
    p.add_argument("--json", default="mps.json")
    a = p.parse_args(given)
    warnings.simplefilter("ignore")
    w, names = here(a.simulate), [m for m in a.models.split(",") if m]
    record = document(w, given)
    for part, rows in (
        ("ops", chain(ops(w, a.entries), layouts(w))),
        ("models", models(w, names)),
        ("times", times(w, names)),
    ):
        record[part] = []
        for row in rows:
            record[part].append(row)
            print(part, json.dumps(row), flush=True)
            Path(a.json).write_text(json.dumps(record, indent=1))  # keep results so far, whatever follows
    wrong = [r for r in (*record["ops"], *record["models"]) if not r["passed"]]
    failed = [r for r in record["times"] if isinstance(r["ms"].get("apple_mps"), str)]
    print(f"{record['device']}: {len(wrong)} wrong, {len(failed)} not timed; the record is {a.json}")
    return 1 if wrong or failed or not record["ops"] else 0


if __name__ == "__main__":
    sys.exit(main())
