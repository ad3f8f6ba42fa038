"""Time and profile models of `fusewright bench` beside other compilers, on a GPU or a CPU. The table comes last.

    python -m ci.gpu.profiles large:resnet50:train large:deberta_v2:infer [--against inductor,reduce-overhead] [--seconds 480]
        [--at-once 8] [--no-profile] [--out FOLDER] [--json record.json] [--dry]
    python -m ci.gpu.profiles --device cpu tests/zoo/published.py:clip:infer

Cases (MODEL:train under bf16 autocast, MODEL:infer in bf16, on a CPU in fp32) compile concurrently, each in its own process; while
one is timed and profiled, the others are suspended. At most `--at-once` exist at a time, because they share the device's memory.
When time is short, contenders that are not compiled yet are left out (`--no-profile` leaves more time for them). A row has the wall
time of a call, the host's time until it returns, the sum of its kernels, and how far results are from eager's. `--out` keeps for
each case a text (kernels, instructions, graphs, what eager's kernels compute) and the plans and the code of all contenders. `--dry`
tries the tool without a GPU: small sizes, ours simulated.

Exit code 1 if our backend was not timed in some case.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from ci.gpu.profile_case import Job, Row
from fusewright.bench import report
from fusewright.bench.cases import check_case
from fusewright.bench.contenders import EAGER, from_backend
from fusewright.bench.device import check_device
from fusewright.errors import FusewrightError
from fusewright.interface import HOST

ROOT = Path(__file__).resolve().parents[2]
ALONE_SECONDS, RESERVED_SECONDS = 40.0, 10.0
"""The most time that one case may take to be timed and profiled, and what is kept for it before the end."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEWRIGHT_CACHE_DIR", "FUSEWRIGHT_STATE_DIR")
KEPT = ('"inductor_output_code"', '"fusewright_plan"', '"fusewright_simplify"')
"""Entries of a compiler's trace that `--out` keeps."""


def main(argv: Sequence[str] | None = None) -> int:
    given = _arguments(argv)
    start, rows = time.time(), list[Row]()
    command = " ".join(["python -m ci.gpu.profiles", *(sys.argv[1:] if argv is None else argv)])
    how = {} if given.device != HOST else {"dtype": given.dtype, "cores_of_a_case": given.cores}
    record = {"command": command, **how, **report.environment(given.device)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        jobs = _jobs(given, Path(folder), start + given.seconds)
        try:
            for found in _each(given, jobs, start + given.seconds):
                rows += found
                print("\n".join(table(found)[1:]), flush=True)  # print now: if the command is stopped, there will be no table
        finally:
            if given.json:
                given.json.write_text(json.dumps({**record, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
            if given.out:
                _keep(jobs, given.out)
    print(f"\n{record.get('device', 'simulated')}, {time.time() - start:.0f} s")
    print("\n".join([*table(rows), *summary(rows)]))
    return int(any(r.outcome != "timed" for r in rows if r.contender == given.backend))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="MODEL:MODE", help="a model as `fusewright bench` names it, and train or infer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--backend", help="ours; default: nvidia_triton, on a CPU x86_onednn")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="of inference; default: bf16, on a CPU fp32")
    parser.add_argument("--against", help="comma-separated, besides eager; default: inductor, with --dry aot_eager")
    parser.add_argument("--seconds", type=float, default=480, help="for everything; default: 480")
    parser.add_argument("--cores", type=int, default=4, help="of each process, and threads on a CPU; default: 4")
    parser.add_argument("--at-once", type=int, default=8, help="cases in memory; default: 8")
    parser.add_argument("--no-profile", action="store_true", help="only times and distances, no kernels")
    parser.add_argument("--out", type=Path, help="a folder for texts, plans and code")
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--dry", action="store_true", help="without a GPU")
    given = parser.parse_args(argv)
    on_host = given.device == HOST and not given.dry
    given.device = HOST if given.dry else given.device
    given.backend = given.backend or ("x86_onednn" if on_host else "nvidia_triton")
    given.dtype = given.dtype or ("fp32" if on_host else "bf16")
    given.against = given.against or ("aot_eager" if given.dry else "inductor")
    given.against = tuple(name for name in given.against.split(",") if name not in (EAGER.name, given.backend))
    try:
        for case in given.cases:
            check_case(split(case)[0], train=split(case)[1])
        bound = [name for name in given.against if from_backend(name).env]
        check_device(given.device)
    except (FusewrightError, ValueError) as error:
        parser.error(str(error))
    if bound and len(given.against) > 1:
        parser.error(f"{', '.join(bound)}: sets the environment of the process, give no other contender with it")
    return given


def split(case: str) -> tuple[str, bool]:
    """Return the model of a case, and whether it is trained."""
    model, _, mode = case.rpartition(":")
    if mode not in ("train", "infer"):
        raise ValueError(f"{case!r} is no case; write MODEL:train or MODEL:infer")
    return model, mode == "train"


def _jobs(given: argparse.Namespace, folder: Path, end: float) -> list[Job]:
    until = end - max(ALONE_SECONDS, RESERVED_SECONDS * min(len(given.cases), given.at_once))
    found = []
    for k, case in enumerate(given.cases):
        model, train = split(case)
        own = folder / str(k)
        own.mkdir()
        mode = "train" if train else "infer"
        where = {"device": given.device, "dtype": given.dtype, "dry": given.dry, "profiled": not given.no_profile}
        found.append(Job(model, mode, given.backend, given.against, str(own), until, **where))
    return found


def _each(given: argparse.Namespace, jobs: Sequence[Job], end: float) -> Iterator[list[Row]]:
    """Yield the rows of each case. When the consumer stops, everything ends."""
    alone = given.seconds if given.dry else ALONE_SECONDS
    run = Run(end, trace=given.out is not None, alone_seconds=alone, cores=given.cores)
    with ThreadPoolExecutor(given.at_once) as pool:
        try:
            yield from pool.map(run.case, range(len(jobs)), jobs)
        finally:
            run.end = 0.0


class Run:
    """Processes of cases, one of which runs alone while it is timed."""

    def __init__(self, end: float, trace: bool, alone_seconds: float, cores: int = 4) -> None:
        self.end, self.trace, self.alone_seconds, self.cores = end, trace, alone_seconds, cores
        self._turn = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    def case(self, number: int, job: Job) -> list[Row]:
        """Run a case and return its rows."""
        folder = Path(job.folder)
        with self._turn:  # nothing starts while a case is timed
            if time.time() > min(job.until, self.end):
                return _rows(job, "time was short")
            process = self._start(number, job)
        try:
            self._wait(process, folder / "ready", lambda: self.end)
            with self._turn:
                if process.poll() is None and time.time() < self.end:
                    self._alone(process, folder)
            failed = process.poll() is not None and not (folder / "done").exists()
        finally:
            self._signal([process], signal.SIGKILL)
            process.wait()
            self._running.discard(process)
        return _rows(job, _last_line(folder / "log") if failed else "", failed)

    def _start(self, number: int, job: Job) -> subprocess.Popen[bytes]:
        folder = Path(job.folder)
        cores = sorted(os.sched_getaffinity(0))
        own = {cores[(self.cores * number + k) % len(cores)] for k in range(self.cores)}
        env = {**os.environ, **{name: f"{folder}/{name}" for name in CACHES}, "TOKENIZERS_PARALLELISM": "false"}
        for contender in job.contenders():
            env.update(contender.env)
        if job.device == HOST:
            env["OMP_NUM_THREADS"] = str(len(own))
        for name in CACHES:
            (folder / name).mkdir(mode=0o700)
        if self.trace:
            env["TORCH_TRACE"] = f"{folder}/trace"
        command = [sys.executable, "-m", "ci.gpu.profile_case", json.dumps(asdict(job))]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
        os.sched_setaffinity(process.pid, own)  # it has compilers of its own: as many as it has cores
        self._running.add(process)
        return process

    def _alone(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        """Let a case be timed while the others are suspended."""
        others = self._running - {process}
        self._signal(others, signal.SIGSTOP)
        try:
            limit = time.time() + self.alone_seconds
            (folder / "go").touch()
            self._wait(process, folder / "done", lambda: min(self.end, limit))
        finally:
            self._signal(others, signal.SIGCONT)

    @staticmethod
    def _wait(process: subprocess.Popen[bytes], file: Path, end: Callable[[], float]) -> None:
        """Wait until the process has made a file or ended, or the time is over."""
        while not file.exists() and process.poll() is None and time.time() < end():
            time.sleep(0.02)

    @staticmethod
    def _signal(processes: Collection[subprocess.Popen[bytes]], what: signal.Signals) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # the whole group has ended
                os.killpg(process.pid, what)


def _rows(job: Job, words: str, failed: bool = False) -> list[Row]:
    """Return the rows that a case has saved; those without a time say why."""
    saved = Path(job.folder) / "rows.json"
    rows = [Row(**r) for r in json.loads(saved.read_text())] if saved.exists() else []
    rows = rows or [Row(job.name, c.name) for c in job.contenders()]
    for row in rows:
        if row.outcome in ("not ready in time", "compiled, not timed"):
            row.outcome, row.words = "failed" if failed else row.outcome, words
    return rows


def _last_line(log: Path) -> str:
    return log.read_text(errors="replace").strip().rpartition("\n")[2][:200]


def table(rows: Sequence[Row]) -> list[str]:
    """Return a line for each row."""
    wide, names = (max([12, *(len(getattr(r, key)) for r in rows)]) for key in ("case", "contender"))
    head = f"{'case':{wide}} {'contender':{names}} {'ms':>9} {'kernels':>9} {'host':>9} {'ours over it':>12} {'off eager':>10}"
    return [head, *(f"{r.case:{wide}} {r.contender:{names}} {_figures(r)}" for r in rows)]


def _figures(r: Row) -> str:
    if r.outcome != "timed":
        return f"{r.outcome}: {r.words}" if r.words else r.outcome
    ratio = f"{r.ours_over_it:.2f}x" if r.ours_over_it else ""
    kernels = "" if r.kernels_ms is None else f"{r.kernels_ms:.2f}"
    off = "" if r.off_median is None else f"{r.off_median:.1e}"
    return f"{r.ms:9.2f} {kernels:>9} {r.host_ms:9.2f} {ratio:>12} {off:>10}  {r.words}".rstrip()


def summary(rows: Sequence[Row]) -> list[str]:
    """Return a line for each mode and contender: how much faster ours is, as a geometric mean and where it is least."""
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for r in rows:
        if r.ours_over_it:
            found.setdefault((r.case.rpartition(":")[2], r.contender), []).append((r.ours_over_it, r.case))
    lines = []
    for (mode, name), each in sorted(found.items()):
        (least, case), mean = min(each), statistics.geometric_mean(x for x, _ in each)
        lines.append(f"{mode}: {mean:.2f}x over {name} ({len(each)} cases, least {least:.2f}x: {case})")
    return lines


def _keep(jobs: Sequence[Job], out: Path) -> None:
    """Write the text of each case, its log if it is not done, and the plans and code of all of them in one file."""
    out.mkdir(parents=True, exist_ok=True)
    with gzip.open(out / "plans.txt.gz", "wt", encoding="utf-8") as plans:
        for job in jobs:
            folder, name = Path(job.folder), "".join(c if c.isalnum() else "_" for c in job.name)
            files = ["profile.txt", *([] if (folder / "done").exists() else ["log"])]
            found = [folder / f for f in files if (folder / f).exists()]
            (out / f"{name}.txt").write_text("\n".join(f.read_text(errors="replace") for f in found))
            plans.write(f"######## {job.name}\n")
            plans.writelines(_traced(folder / "trace"))


def _traced(folder: Path) -> Iterator[str]:
    """Yield the plans and code in a case's traces. An entry starts with its metadata as JSON; its text follows."""
    for log in sorted(folder.glob("*")):
        kept = False
        with log.open(errors="replace") as lines:
            for line in lines:
                if line[:1] in "VIW" and "{" in line[:120]:
                    kept = any(entry in line for entry in KEPT)
                if kept:
                    yield line


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes of cases end as well
    sys.exit(main())
