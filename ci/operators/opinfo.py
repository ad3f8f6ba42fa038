"""Run torch's OpInfo database through a backend, against eager: `python -m ci.operators.opinfo --backend x86_onednn --shard 1/4`.

Values (judged against fp64), dtypes, shapes, strides, aliasing, mutation, gradients, non-contiguous samples and
errors are compared. Entries run in child processes, so that a crash costs one entry. Entries that `aot_eager` gets wrong too
are listed separately. Exit code 0 when no entry is wrong, has crashed or ran out of time.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fusewright.conformance.jobs.children import Pool, finishes
from fusewright.conformance.ops import opinfo

MODULE = "ci.operators.opinfo"
"""This module, also where it is `__main__`."""


@dataclass(frozen=True)
class Job:
    """One entry at one dtype."""

    entry: str
    dtype: str


@dataclass(frozen=True)
class Settings:
    """How a child runs its entries."""

    backend: str
    dynamic: bool
    device: str
    samples: int
    gradients: bool
    threads: int


def main(argv: Sequence[str] | None = None) -> int:
    a = _arguments(argv)
    jobs = _shard(_jobs(a), a.shard)
    if not jobs:
        print("no entry of the database matches", file=sys.stderr)
        return 2
    start = time.monotonic()
    results: list[dict[str, Any]] = []
    for result in _run(jobs, a, start + a.seconds):
        results.append(result)
        if result["problems"] or a.verbose:
            print(_line(result), flush=True)
    if len(results) < len(jobs):
        print(f"left out for want of time: {len(jobs) - len(results)} of {len(jobs)} entries")
    _summary(results, time.monotonic() - start, a)
    if a.json:
        found = {"backend": a.backend, "results": results, "left_out": len(jobs) - len(results)}
        Path(a.json).write_text(json.dumps(found, indent=1))
    return 1 if any(r["problems"] for r in results) else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    p.add_argument("--backend", required=True, help="a name for torch.compile(backend=...)")
    p.add_argument("--simulate", action="store_true", help="on a simulated device of the backend, on the CPU")
    p.add_argument("--device", default="cpu", help="where the samples are: cpu, cuda")
    p.add_argument("--shard", default="1/1", metavar="I/N", help="the I-th of N equal parts, from 1; I-J/N: the parts I to J")
    p.add_argument("--ops", default="", metavar="REGEX", help="only entries whose name it finds")
    p.add_argument("--dtypes", default="float32", help="comma-separated, e.g. float32,bfloat16,int64,bool")
    p.add_argument("--gradients", action=argparse.BooleanOptionalAction, default=True, help="check gradients too")
    p.add_argument("--dynamic", action="store_true", help="sizes are symbols; graphs serve every sample that they fit")
    p.add_argument("--samples", type=int, default=4, help="samples per entry, spread over all; 0: every one")
    p.add_argument("--jobs", type=int, default=1, help="child processes side by side")
    p.add_argument("--group", type=int, default=25, help="entries per child process")
    p.add_argument("--limit", type=float, default=120, help="seconds that one entry may take")
    p.add_argument("--seconds", type=float, default=math.inf, help="begin no entry after that; what is left out is said")
    p.add_argument("--threads", type=int, default=1, help="torch threads of a child")
    p.add_argument("--json", help="write every result to this file")
    p.add_argument("--verbose", action="store_true", help="print entries that are right too")
    return p.parse_args(argv)


def _jobs(a: argparse.Namespace) -> list[Job]:
    import torch

    wanted = re.compile(a.ops)
    return [
        Job(name, dtype)
        for dtype in a.dtypes.split(",")
        for name in opinfo.entries(getattr(torch, dtype), a.device)
        if wanted.search(name)
    ]


def _shard(jobs: list[Job], shard: str) -> list[Job]:
    parts, n = shard.split("/")[0].split("-"), int(shard.split("/")[1])
    first, last = int(parts[0]), int(parts[-1])
    if not 1 <= first <= last <= n:
        raise SystemExit(f"--shard {shard}: parts go from 1 to {n}")
    return [job for k, job in enumerate(jobs) if first <= k % n + 1 <= last]


# ---------------------------------------------------------------- parent


def _run(jobs: Sequence[Job], a: argparse.Namespace, until: float) -> Iterator[dict[str, Any]]:
    """Yield results as they come from `--jobs` parallel children. No entry is begun after `until`."""
    env = {"FUSEWRIGHT_FALLBACK": "allow", "FUSEWRIGHT_SIMULATE": str(int(a.simulate))}
    how = Settings(a.backend, a.dynamic, a.device, a.samples, a.gradients, a.threads)

    def ended(job: Mapping[str, Any], why: str) -> dict[str, Any]:
        shared = not finishes(MODULE, asdict(replace(how, backend=opinfo.JUDGE)), env, job, a.limit)
        return asdict(
            opinfo.Outcome(job["entry"], job["dtype"], problems=[] if shared else [why], shared=[why] if shared else [])
        )

    pool = Pool(MODULE, asdict(how), ended, env, jobs=a.jobs, group=a.group, limit=a.limit)
    yield from pool.run([asdict(j) for j in jobs], until)


# ---------------------------------------------------------------- child


def perform(settings: Mapping[str, Any], jobs: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each job."""
    import logging
    import warnings

    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    how = Settings(**settings)
    torch.set_num_threads(how.threads)
    for job in jobs:
        dtype = getattr(torch, job["dtype"])
        try:
            by = opinfo.Compiler(how.backend, how.dynamic, how.device)
            outcome = opinfo.check(job["entry"], dtype, by, how.samples, how.gradients)
        except Exception as e:  # a failure of the harness itself must not look like a pass
            outcome = opinfo.Outcome(job["entry"], job["dtype"], problems=[f"harness: {type(e).__name__}: {e}"])
        yield asdict(outcome)


# ---------------------------------------------------------------- text


def _line(r: dict[str, Any]) -> str:
    what = "; ".join(r["problems"][:3]) or "right"
    return f"{r['entry']} {r['dtype']}: {what}"


def _summary(results: Sequence[dict[str, Any]], seconds: float, a: argparse.Namespace) -> None:
    wrong = [r for r in results if r["problems"]]
    torchs = [r for r in results if r["shared"] and not r["problems"]]
    crashed = sum(1 for r in wrong for p in r["problems"] if p.startswith(("crash", "timeout")))
    compared = [r for r in results if r["checks"]]
    lowered, carried, eager = (sum(r[where] for r in results) for where in ("lowered", "carried", "eager"))
    rows = {
        "entries": len(results),
        "without a sample": sum(1 for r in results if r["skipped"]),
        "right": len(results) - len(wrong) - len(torchs),
        "wrong where aot_eager is wrong too": len(torchs),
        "wrong": len(wrong),
        "of these crashed or out of time": crashed,
        "comparisons": sum(r["checks"] for r in results),
        "comparisons that Dynamo made no graph for": sum(r["uncaptured"] for r in results),
        "entries with an op lowered by the backend": f"{sum(1 for r in compared if r['lowered'])} of {len(compared)}",
        "ops lowered by the backend": f"{lowered} of {lowered + carried + eager}",
        "ops carried: eager's own calls inside of regions": carried,
    }
    sizes = "symbolic sizes, " if a.dynamic else ""
    print(f"\n{a.backend}{' simulated' if a.simulate else ''}, shard {a.shard}, {a.dtypes}, {sizes}{seconds:.0f} s")
    for name, value in rows.items():
        print(f"  {name:<45}{value}")


if __name__ == "__main__":
    sys.exit(main())
