"""Check and time `nvidia_triton` on a GPU: every suite model against fp64, eager and Inductor. Prints a table last.

    python ci/gpu_check.py [--models bert,vit] [--batch 8] [--dtype bf16] [--no-inductor] [--json out.json]

Models run one after the other in this process; a model that fails is shown with its reason and the rest goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fusewright import report
from fusewright.bench import accuracy, suite
from fusewright.bench.stats import geomean

BACKEND = "nvidia_triton"


def on_gpu(built: suite.Built, batch: int) -> suite.Built:
    """The model on the GPU, its example inputs repeated along the batch."""

    def move(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.repeat(batch, *[1] * (x.dim() - 1)).cuda() if x.dim() else x.cuda()

    assert built.module is not None
    args = tuple(map(move, built.args))
    return dataclasses.replace(
        built, fn=built.module.cuda(), args=args, kwargs={k: move(v) for k, v in built.kwargs.items()}
    )


def median_ms(call: Callable[[], Any], runs: int = 20) -> float:
    """Median time of a call in ms, by events on the stream."""
    for _ in range(3):
        call()
    times = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def first_call(call: Callable[[], Any]) -> float:
    """Seconds of a call that compiles."""
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def check(name: str, dtype: suite.DType, batch: int, inductor: bool) -> dict[str, Any]:
    """One model: accuracy by the fp64 rule, times of eager, ours and Inductor."""
    torch.compiler.reset()
    built = on_gpu(suite.build(name, "full", dtype), batch)
    eager = suite.flatten_outputs(built.run())
    row: dict[str, Any] = {"model": name, "dtype": dtype, "batch": batch}
    with report.recording() as reports:
        ours = torch.compile(built.fn, backend=BACKEND, options={"cache": False, "fallback": "allow"})
        row["first_s"] = first_call(built.bind(ours))
    got = suite.flatten_outputs(built.run(ours))
    verdict = accuracy.compare(accuracy.reference(built), eager, got, dtype)
    row.update(right=verdict.passed, ratio=verdict.ratio_max, reason=verdict.reason)
    row.update(lowered=sum(r.count("backend") for r in reports), eager_ops=sum(r.count("eager") for r in reports))
    row["bugs"] = [b for r in reports for b in r.bugs]
    row["eager_ms"], row["ours_ms"] = median_ms(built.bind(built.fn)), median_ms(built.bind(ours))
    if inductor:
        torch.compiler.reset()
        other = torch.compile(built.fn)
        row["inductor_first_s"] = first_call(built.bind(other))
        row["inductor_ms"] = median_ms(built.bind(other))
    return row


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['model']:14} {row['dtype']:5} FAILED {row['error']}"
    mark = "right" if row["right"] else f"WRONG {row['reason']}"
    inductor = f"{row['inductor_ms']:9.2f} {row['inductor_first_s']:7.1f}" if "inductor_ms" in row else ""
    return (
        f"{row['model']:14} {row['dtype']:5} {row['eager_ms']:9.2f} {row['ours_ms']:9.2f} {row['first_s']:7.1f} {inductor}"
        f"  {row['eager_ms'] / row['ours_ms']:5.2f}x  {row['ratio']:5.2f}  {row['lowered']}/{row['eager_ops']}  {mark}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(suite.MODELS))
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for name in given.models.split(","):
        for dtype in given.dtype.split(","):
            try:
                rows.append(check(name, dtype, given.batch, not given.no_inductor))
            except Exception as e:  # one model must not end the run; the table says so
                rows.append({"model": name, "dtype": dtype, "error": f"{type(e).__name__}: {str(e)[:300]}"})
            print(line(rows[-1]), flush=True)
    _summary(rows)
    if given.json:
        versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        given.json.write_text(json.dumps({"version": 1, **versions, "rows": rows}, indent=1))


def _summary(rows: list[dict[str, Any]]) -> None:
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(
        f"{'model':14} {'dtype':5} {'eager ms':>9} {'ours ms':>9} {'first s':>7} {'induct.':>9} {'first s':>7}  over eager"
    )
    for row in rows:
        print(line(row))
    good = [r for r in rows if "error" not in r]
    if good:
        print(f"geomean over eager {geomean([r['eager_ms'] / r['ours_ms'] for r in good]):.2f}x", end="")
    timed = [r for r in good if "inductor_ms" in r]
    if timed:
        print(f", over Inductor default {geomean([r['inductor_ms'] / r['ours_ms'] for r in timed]):.2f}x", end="")
    print(f"; {sum(r['right'] for r in good)} of {len(rows)} right")


if __name__ == "__main__":
    main()
