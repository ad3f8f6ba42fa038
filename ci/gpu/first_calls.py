"""Time first calls on a GPU beside Inductor's: one process for each model and compiler, with cores and empty caches of its own.

    python -m ci.gpu.first_calls large:bert:infer large:resnet50:train [--against inductor] [--at-once 4] [--cores 4]
        [--seconds 480] [--json record.json] [--dry]

A first call is everything from `torch.compile` until the result (of a step: the gradients) is there. Before it Dynamo and
AOTAutograd have compiled something small and eager has run the model, so that neither imports nor libraries that start are
counted. "parts" says where our process was, by samples of its stack. Nothing else runs on its cores. `--dry` tries the tool
without a GPU.
Exit code 1 if a case of ours was not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from ci.gpu.profiles import CACHES, split

ROOT = Path(__file__).resolve().parents[2]
BACKEND = "nvidia_triton"
EVERY_SECONDS = 0.005
PARTS = (("/torch/_dynamo/", "dynamo"), ("/torch/_functorch/", "aot"), ("/fusewright_triton/", "triton"))
"""Parts of paths, and what a sample counts for whose innermost such frame is there. The host package counts by folder."""

Found = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    given = _arguments(argv)
    if given.child:
        print(json.dumps(_measured(given.cases[0], given.child, given.dry)))
        return 0
    from fusewright.bench import report

    end = time.monotonic() + given.seconds
    free: SimpleQueue[set[int]] = SimpleQueue()
    cores = sorted(os.sched_getaffinity(0))
    for k in range(given.at_once):
        free.put({cores[(given.cores * k + i) % len(cores)] for i in range(given.cores)})
    with ThreadPoolExecutor(given.at_once) as pool:
        rows = list(pool.map(lambda case: _row(case, given, free, end), given.cases))
    print("\n".join(_table(rows, given.against)))
    if given.json:
        command = " ".join(["python -m ci.gpu.first_calls", *(sys.argv[1:] if argv is None else argv)])
        found = {"command": command, "cores_of_a_case": given.cores, **report.environment("cpu" if given.dry else "cuda")}
        given.json.write_text(json.dumps({**found, "rows": [_flat(row, given.against) for row in rows]}, indent=1) + "\n")
    return 1 if any("s" not in row[BACKEND] for row in rows) else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="MODEL:MODE", help="a model as `fusewright bench` names it, and train or infer")
    parser.add_argument("--against", default="inductor", help="the other compiler; default: inductor")
    parser.add_argument("--at-once", type=int, default=4, help="processes; default: 4")
    parser.add_argument("--cores", type=int, default=4, help="of each process; default: 4")
    parser.add_argument("--seconds", type=float, default=480, help="for everything; default: 480")
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--dry", action="store_true", help="small sizes on the CPU, ours simulated")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _row(case: str, given: argparse.Namespace, free: SimpleQueue[set[int]], end: float) -> Found:
    cores = free.get()
    try:
        return {"case": case, **{name: _in_process(case, name, given.dry, cores, end) for name in (BACKEND, given.against)}}
    finally:
        free.put(cores)


def _in_process(case: str, contender: str, dry: bool, cores: set[int], end: float) -> Found:
    command = [sys.executable, "-m", "ci.gpu.first_calls", case, "--child", contender, *(["--dry"] if dry else [])]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        env = {**os.environ, **{name: f"{folder}/{name}" for name in CACHES}, "TORCHINDUCTOR_COMPILE_THREADS": str(len(cores))}
        for name in CACHES:
            (Path(folder) / name).mkdir(mode=0o700)
        process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        os.sched_setaffinity(process.pid, cores)
        try:
            out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"failed": "time was short"}
    if process.returncode:
        return {"failed": (err.strip().splitlines() or ["no words"])[-1][:200]}
    found: Found = json.loads(out.splitlines()[-1])
    return found


def _flat(row: Found, against: str) -> Found:
    ours, other = row[BACKEND], row[against]
    share = round(ours["s"] / other["s"], 3) if "s" in ours and "s" in other else None
    seconds = {f"{name} s": r.get("s", r.get("failed")) for name, r in (("ours", ours), (against, other))}
    parts = ", ".join(f"{name} {s:.2f}" for name, s in ours.get("parts", {}).items())
    return {"case": row["case"], **seconds, "share": share, "next_five_s": ours.get("next_five_s"), "parts of ours": parts}


def _table(rows: Sequence[Found], against: str) -> list[str]:
    found = [_flat(row, against) for row in rows]
    lines = [f"| {' | '.join(found[0])} |", "|---" * len(found[0]) + "|"]
    lines += [f"| {' | '.join(f'{v:.3g}' if isinstance(v, float) else str(v or '') for v in row.values())} |" for row in found]
    shares = [row["share"] for row in found if row["share"]]
    if shares:
        lines.append(f"\n{len(shares)} cases: geometric mean {statistics.geometric_mean(shares):.3f}, largest {max(shares):.2f}")
    return lines


# ---------------------------------------------------------------- one case and one compiler


def _measured(case: str, name: str, dry: bool) -> Found:
    import torch

    from ci.gpu.profile_case import Case, Job

    model, train = split(case)
    mode, device = "train" if train else "infer", "cpu" if dry else "cuda"
    job = Job(model, mode, BACKEND, (name,) * (name != BACKEND), folder="", until=0.0, device=device, dry=dry)
    ours, eager, *others = job.contenders()
    made = Case(job)
    clock = made.clock
    clock.begin()
    torch.set_grad_enabled(train)
    made.build()
    made.import_compilers()
    made.compile(eager)()
    clock.wait()
    with _sampled() as parts:
        start = time.perf_counter()
        call = made.compile(others[0] if others else ours)
        call()
        clock.wait()
        first = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(5):
        call()
    clock.wait()
    return {"s": first, "next_five_s": time.perf_counter() - start, "parts": parts}


@contextmanager
def _sampled() -> Iterator[dict[str, float]]:
    """Fill a dictionary with the seconds of the calling thread in each part, or of autograd's while it waits for that."""
    thread, end, seconds = threading.get_ident(), threading.Event(), dict[str, float]()

    def sample() -> None:
        last = time.perf_counter()
        while not end.wait(EVERY_SECONDS):
            frames = sys._current_frames()
            now, part = time.perf_counter(), _part(frames.pop(thread, None))
            if part == "bench":  # the step waits for autograd, whose own thread compiles the backward graph
                part = next((p for f in frames.values() if (p := _part(f)) != "else"), part)
            seconds[part] = seconds.get(part, 0.0) + now - last
            last = now

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield seconds
    finally:
        end.set()
        sampler.join()
        ordered = sorted(seconds.items(), key=lambda item: -item[1])
        seconds.clear()
        seconds.update((name, round(s, 3)) for name, s in ordered if s >= 0.02)


def _part(frame: FrameType | None) -> str:
    waits = frame is not None and frame.f_code.co_filename.endswith(("/threading.py", "/_base.py"))
    while frame is not None:
        path = frame.f_code.co_filename
        for mark, name in PARTS:
            if mark in path:
                return f"{name}, waiting" if waits else name
        if "/fusewright/" in path:
            return path.rpartition("/fusewright/")[2].partition("/")[0] + (", waiting" if waits else "")
        frame = frame.f_back
    return "else"


if __name__ == "__main__":
    sys.exit(main())
