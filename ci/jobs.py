"""The vendor matrix: list the jobs that this machine can run, and run them.

    python -m ci.jobs list [--json]      every job, and whether this machine meets its needs
    python -m ci.jobs run [NAME...]      the named jobs, or all that fit; exit code 1 when one fails
        --require                        a job whose needs are not met fails too
        --results FOLDER                 write a record of each job there, and pytest's
    python -m ci.jobs table              the matrix as a table for the docs
    python -m ci.jobs cells              one JSON object per job, torch version and Python, for a CI service

It uses only the standard library, so that it runs before anything is installed; torch is queried if present.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MATRIX = ROOT / "ci" / "matrix.toml"


@dataclass(frozen=True)
class Job:
    """One row of the matrix. `minutes` is the time limit of the job."""

    name: str
    backend: str
    kind: str
    hardware: str
    script: str
    runs_on: tuple[str, ...]
    needs: tuple[str, ...]
    minutes: int

    @property
    def own_hardware(self) -> bool:
        """Whether the job needs our own runner, because the hosting service has none."""
        return "self-hosted" in self.runs_on

    def missing(self) -> list[str]:
        """Return the needs that this machine does not meet."""
        return [n for n in self.needs if not FACTS[n]()]


def _torch_says(question: Callable[[Any], object]) -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(question(torch))


@functools.cache
def _cpu_flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


FACTS: dict[str, Callable[[], bool]] = {
    "linux": lambda: sys.platform == "linux",
    "darwin": lambda: sys.platform == "darwin",
    "x86_64": lambda: platform.machine().lower() in ("x86_64", "amd64"),
    "aarch64": lambda: platform.machine().lower() in ("aarch64", "arm64"),
    "avx2": lambda: "avx2" in _cpu_flags(),
    "vnni": lambda: bool({"avx512_vnni", "avx_vnni"} & _cpu_flags()),
    "triton": lambda: importlib.util.find_spec("triton") is not None,
    "aarch64_emulator": lambda: all(map(shutil.which, ("apt-get", "dpkg-deb"))),  # they fetch the emulator and what it runs
    "cuda": lambda: _torch_says(lambda t: t.version.cuda and t.cuda.is_available()),
    "hip": lambda: _torch_says(lambda t: t.version.hip and t.cuda.is_available()),
}


def read(path: Path = MATRIX) -> tuple[list[Job], dict[str, list[str]]]:
    """Return the jobs and versions of the matrix file. Raise ValueError for an invalid row."""
    data = tomllib.loads(path.read_text())
    jobs = []
    for row in data["job"]:
        job = Job(**{**row, "needs": tuple(row["needs"]), "runs_on": tuple(row["runs_on"])})
        unknown = set(job.needs) - set(FACTS)
        if unknown:
            raise ValueError(f"{job.name}: nobody knows how to ask for {', '.join(sorted(unknown))}")
        if job.kind not in ("real", "simulated"):
            raise ValueError(f"{job.name}: kind is {job.kind!r}, not real or simulated")
        if not (ROOT / job.script).is_file():
            raise ValueError(f"{job.name}: there is no {job.script}")
        jobs.append(job)
    return jobs, data["torch"]


def run(job: Job, require: bool = False, results: Path | None = None) -> bool:
    """Run one job with its output passed through. Return True if it passed, or was skipped and not required."""
    missing = job.missing()
    if missing:
        print(
            f"-- {job.name}: {'FAILED' if require else 'skipped'}, this machine lacks: {', '.join(missing)}", flush=True
        )
        return not require
    print(f"-- {job.name} ({job.kind}: {job.hardware})", flush=True)
    start = time.monotonic()
    env = {
        **os.environ,
        "PYTHON": os.environ.get("PYTHON", sys.executable),
        **(_kept_in(results.resolve(), job) if results else {}),
    }
    code = None
    try:
        command = ["bash", job.script, job.backend]
        code = subprocess.run(command, cwd=ROOT, env=env, timeout=job.minutes * 60, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"-- {job.name}: not done after {job.minutes} minutes", flush=True)
    seconds = round(time.monotonic() - start)
    if code is not None:
        print(f"-- {job.name}: {'passed' if code == 0 else f'FAILED ({code})'} in {seconds} s", flush=True)
    if results:
        facts = {
            "job": asdict(job),
            "code": code,
            "seconds": seconds,
            "python": platform.python_version(),
            "torch": _torch(),
        }
        (results / f"{job.name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    return code == 0


def _kept_in(folder: Path, job: Job) -> dict[str, str]:
    """Return environment variables that direct output to a folder: records to $OUT, pytest's results as JUnit XML."""
    folder.mkdir(parents=True, exist_ok=True)
    given = os.environ.get("PYTEST_ADDOPTS", "")
    return {"OUT": str(folder), "PYTEST_ADDOPTS": f"{given} --junitxml={folder / job.name}.xml".strip()}


def _torch() -> str:
    return metadata.version("torch") if importlib.util.find_spec("torch") else ""


def table(jobs: list[Job]) -> str:
    """Return the matrix in Markdown."""
    rows = [f"| `{j.name}` | {j.kind} | {j.hardware} | `{j.script} {j.backend}` |" for j in jobs]
    return "\n".join(["| job | kind | hardware | script |", "|---|---|---|---|", *rows])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list").add_argument("--json", action="store_true")
    running = commands.add_parser("run")
    running.add_argument("names", nargs="*")
    running.add_argument("--require", action="store_true", help="fail where a job's needs are not met")
    running.add_argument("--results", type=Path, help="keep records in this folder")
    commands.add_parser("table")
    commands.add_parser("cells")
    args = parser.parse_args(argv)
    jobs, versions = read()
    if args.command == "list":
        if args.json:
            print(json.dumps([{**asdict(j), "missing": j.missing()} for j in jobs], indent=2))
        else:
            for j in jobs:
                lacks = j.missing()
                print(f"{j.name:23} {j.kind:10} {'can run here' if not lacks else 'lacks ' + ', '.join(lacks)}")
    elif args.command == "table":
        print(table(jobs))
    elif args.command == "cells":
        for j, torch_version, python in itertools.product(jobs, versions["versions"], versions["python"]):
            print(json.dumps({"job": j.name, "kind": j.kind, "torch": torch_version, "python": python}))
    else:
        unknown = set(args.names) - {j.name for j in jobs}
        if unknown:
            parser.error(f"no job is called {', '.join(sorted(unknown))}; jobs: {', '.join(j.name for j in jobs)}")
        results = [run(j, args.require, args.results) for j in jobs if not args.names or j.name in args.names]
        return 0 if all(results) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
