"""Rerun every past GPU failure: one command, some four minutes on an H200. The table comes last.

    python -m ci.gpu.right [--cases beside_graph_trees,parallel_residuals] [--tests] [--opinfo 1-8/64] [--json out.json]

Each case of `cases.py` runs in its own process with a time limit, so that a hang or a GPU error affects only that case; two run at
a time. Cases for two GPUs are skipped if there is only one, and the table says so. `--tests` adds the tests marked for this
hardware (`pytest tests/backends/triton -m hardware`, at most seven minutes), and `--opinfo` a shard of torch's OpInfo database
through `ci/operators/opinfo.py` (at most five minutes; 1-8/64 is an eighth of it).

The record goes to `--json`, or to gpu_right.json in the folder that the variable OUT names. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 2
TESTS_SECONDS, OPINFO_SECONDS = 420.0, 300.0
SAID = 600
"""Characters kept from the end of a failed process's output."""


@dataclass(frozen=True)
class Row:
    """The result of a case: "right", "wrong", "out of time" or "left out"."""

    case: str
    line: str
    outcome: str
    seconds: float
    words: str


def run(name: str, line: str, command: Sequence[str], limit: float) -> Row:
    """Run one process in its own session, with its own caches. The last line of its output is its message."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {n: f"{folder}/{n}" for n in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEWRIGHT_CACHE_DIR")}
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **caches}, start_new_session=True
            )
            try:
                code: int | None = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        text = log.read_text(errors="replace").strip()
    outcome = "out of time" if code is None else "wrong" if code else "right"
    words = text.rpartition("\n")[2][:200] if code == 0 else text[-SAID:]
    return Row(name, line, outcome, round(time.monotonic() - start, 1), words)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in its own session, with everything in that session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has already ended, and so have its children
    process.wait()


def jobs(given: argparse.Namespace, gpus: int) -> tuple[list[tuple[str, str, list[str], float]], list[Row]]:
    """Return what to run (name, line, command, seconds), and what is left out."""
    from ci.gpu.cases import CASES

    names = given.cases.split(",") if given.cases else list(CASES)
    unknown = [n for n in names if n not in CASES]
    if unknown:
        raise SystemExit(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}")
    left = [Row(n, CASES[n].line, "left out", 0.0, f"there are {gpus} GPUs") for n in names if CASES[n].gpus > gpus]
    here = [n for n in names if CASES[n].gpus <= gpus]
    found = [(n, CASES[n].line, [sys.executable, "-m", "ci.gpu.right", "--case", n], CASES[n].seconds) for n in here]
    if given.tests:
        spread = ["-n", "4"] if importlib.util.find_spec("xdist") is not None else []
        how = ["-q", *spread, "-m", "hardware", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *how, "tests/backends/triton"]
        found.append(("tests", "all", command, TESTS_SECONDS))
    if given.opinfo:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
        command = [
            sys.executable, "-m", "ci.operators.opinfo", "--backend", "nvidia_triton", "--device", "cuda", "--samples", "1",
            "--shard", given.opinfo, "--jobs", str(max(1, cores // 2)), "--group", "1000", "--limit", "60",
        ]  # fmt: skip
        found.append(("opinfo", "all", command, OPINFO_SECONDS))
    return found, left


def _device() -> dict[str, Any]:
    """Query the device in a separate process, so that this one does not hold the GPU."""
    text = (
        "import torch, triton, transformers, json; print(json.dumps({'torch': torch.__version__, 'triton': triton.__version__, "
        "'transformers': transformers.__version__, 'cuda': torch.version.cuda, 'device': torch.cuda.get_device_name(), "
        "'gpus': torch.cuda.device_count()}))"
    )
    found: dict[str, Any] = json.loads(subprocess.check_output([sys.executable, "-c", text], text=True))
    return found


def one(name: str) -> int:
    """Run a case, in a process of its own."""
    from ci.gpu.cases import CASES

    words = CASES[name].run()
    print(words, flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="comma-separated; default: all")
    parser.add_argument("--tests", action="store_true", help="also the tests that are marked for this hardware")
    parser.add_argument("--opinfo", default="", metavar="SHARD", help="also a shard of torch's OpInfo database")
    parser.add_argument("--json", type=Path, default=None, help="where the record goes; default: $OUT/gpu_right.json")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.case:
        return one(given.case)
    start, device = time.monotonic(), _device()
    todo, rows = jobs(given, device["gpus"])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for row in pool.map(lambda job: run(*job), todo):
            rows.append(row)
            print(f"{time.monotonic() - start:5.0f} s  {row.case}: {row.outcome}", flush=True)
            if row.outcome not in ("right", "left out"):
                print(row.words, flush=True)  # print now: if the command is stopped, there will be no table
    command = ["python", "-m", "ci.gpu.right", *(sys.argv[1:] if argv is None else argv)]
    record = {"date": datetime.now(UTC).date().isoformat(), "command": command, **device, "rows": [asdict(r) for r in rows]}
    target = given.json or (Path(os.environ["OUT"]) / "gpu_right.json" if os.environ.get("OUT") else None)
    if target is not None:
        target.write_text(json.dumps(record, indent=1))
    print(f"\n{device['device']} x{device['gpus']}, torch {device['torch']}, {time.monotonic() - start:.0f} s")
    for r in rows:
        print(f"{r.line:>4}  {r.case:34} {r.outcome:12} {r.seconds:6.1f} s  {r.words if r.outcome != 'wrong' else ''}".rstrip())
    return 0 if all(r.outcome in ("right", "left out") for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
