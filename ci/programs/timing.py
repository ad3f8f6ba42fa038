"""Time suites of small programs: eager, Inductor and one of our backends, in turns.

    python -m ci.programs.timing [--suite kernelbench_1,kernelbench_2] [--match PATTERN] [--dtype float32|bfloat16]
        [--mode inference|training] [--contenders eager,inductor,ours] [--backend nvidia_triton] [--jobs 10] [--gigabytes 4]
        [--seconds 540] [--json record.json]
    python -m ci.programs.timing --check --small --backend x86_onednn --group 20

Each program is a process of its own (or several are, with `--group`) with a time limit and empty caches. `--jobs` processes compile
side by side, and are suspended while one is timed: queued calls between events on a device, calls by the clock on a CPU, the median
over rounds. In training a call is forward and backward for a fixed cotangent, with fp32 weights; bfloat16 is autocast's there, and
in inference the type of weights and inputs. `--gigabytes` cuts batches whose input is larger. `--check` judges results and
gradients by fp64 and times nothing, `--small` caps sizes. Programs that `--seconds` leave no time for are named at the end.
Exit code 1 if a program failed or is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ci.gpu.turns import own_caches
from ci.programs import measure
from ci.programs.measure import MARK, Found, Job

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("kernelbench_1", "kernelbench_2")
LOST = 0.97
"""Below this share of the better one's speed a program counts as slower."""
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
RIGHT = ("timed", "right", "no gradient")
NOT_REACHED = "not reached"


class Processes:
    """Processes in sessions of their own, so that their compilers are suspended and ended with them."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._running: set[int] = set()

    @contextlib.contextmanager
    def started(self, command: Sequence[str], env: dict[str, str], log: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
        """A process that is killed after so many seconds, and does not start while another is timed."""
        with self._turn, log.open("wb") as err:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True,
                start_new_session=True,
            )  # fmt: skip
            self._running.add(process.pid)
        timer = threading.Timer(seconds, _signal, [process.pid, signal.SIGKILL])
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            self._running.discard(process.pid)
            _signal(process.pid, signal.SIGKILL)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            process.wait()

    @contextlib.contextmanager
    def alone(self, pid: int) -> Iterator[None]:
        """Suspend all processes but one."""
        with self._turn:
            others = self._running - {pid}
            for other in others:
                _signal(other, signal.SIGSTOP)
            try:
                yield
            finally:
                for other in others:
                    _signal(other, signal.SIGCONT)

    def end(self) -> None:
        for pid in set(self._running):
            _signal(pid, signal.SIGKILL)


def _signal(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # already ended
        os.killpg(pid, what)


def main(argv: Sequence[str] | None = None) -> int:
    given = _arguments(argv)
    if given.job is not None:
        return measure.main(given.job)
    jobs = _jobs(given)
    command = " ".join(["python -m ci.programs.timing", *(sys.argv[1:] if argv is None else argv)])
    record = {"command": command, "commit": _commit(), **_environment(jobs[0].device)}
    rows: list[Found] = []
    for row in _rows(jobs, given):
        rows.append(row)
        print(f"{len(rows)}/{len(jobs)} {_line(row)}", file=sys.stderr, flush=True)
        if given.json:  # at once, for a run that is cut short
            given.json.write_text(json.dumps(record | {"rows": sorted(rows, key=_name)}, indent=1) + "\n")
    print("\n".join([*map(_line, sorted(rows, key=_order)), *_summary(rows)]))
    return int(any(row["outcome"] not in (*RIGHT, NOT_REACHED) for row in rows))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default=",".join(SUITES))
    parser.add_argument("--match", default="", help="a regular expression for names of programs")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--mode", choices=("inference", "training"), default="inference")
    parser.add_argument("--contenders", default="", help="default: eager,inductor,ours; with --check eager,ours")
    parser.add_argument("--backend", default="nvidia_triton", help="ours")
    parser.add_argument("--options", type=json.loads, default={}, help="of our backend, as JSON")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--group", type=int, default=1, help="programs of a process: several are quicker to check")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a program")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for everything")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=float, default=1.0, help="seconds before a contender is timed, at most")
    parser.add_argument("--gigabytes", type=float, default=0.0, help="batches are cut to inputs of so many; default: as they are")
    parser.add_argument("--check", action="store_true", help="judge results instead of timing")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _jobs(given: argparse.Namespace) -> list[Job]:
    from fusewright.bench.device import default_device

    device = default_device(given.backend, given.options)
    contenders = given.contenders or ("eager,ours" if given.check else "eager,inductor,ours")
    same: dict[str, Any] = {
        "dtype": given.dtype, "mode": given.mode, "contenders": contenders.split(","), "backend": given.backend,
        "options": given.options, "device": device, "small": given.small, "gigabytes": given.gigabytes, "rounds": given.rounds,
        "warm_s": given.warm, "check": given.check,
    }  # fmt: skip
    names = [(suite, name) for suite in given.suite.split(",") for name in importlib.import_module(f"ci.programs.{suite}").PROGRAMS]
    found = [Job(suite, name, **same) for suite, name in names if re.search(given.match, name)]
    if not found:
        raise SystemExit(f"no program matches {given.match!r}")
    return found


def _rows(jobs: Sequence[Job], given: argparse.Namespace) -> Iterator[Found]:
    """Yield rows as they are done."""
    processes, end = Processes(), time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(given.jobs) as pool:
        try:
            of = range(0, len(jobs), given.group)
            groups = [pool.submit(_group, jobs[k : k + given.group], given, processes, Path(folder), end) for k in of]
            for done in as_completed(groups):
                yield from done.result()
        finally:  # nothing runs any more, unless this ends early
            pool.shutdown(wait=False, cancel_futures=True)
            processes.end()


def _group(jobs: Sequence[Job], given: argparse.Namespace, processes: Processes, folder: Path, end: float) -> list[Found]:
    """The rows of some programs, from one process; from another one those behind a program that ended it."""
    rows: list[Found] = []
    while len(rows) < len(jobs):
        rows += _some(jobs[len(rows) :], given, processes, folder, end)
    return rows


def _some(jobs: Sequence[Job], given: argparse.Namespace, processes: Processes, folder: Path, end: float) -> list[Found]:
    named: list[Found] = [{"program": job.program, "suite": job.suite} for job in jobs]
    limit = given.limit * len(jobs)
    left, start = min(limit, end - time.monotonic()), time.monotonic()
    if left <= 1:
        return [row | {"outcome": NOT_REACHED} for row in named]
    name = f"{jobs[0].suite}.{jobs[0].program}"
    threads = max(1, (os.cpu_count() or 1) // given.jobs)
    env = {**os.environ, **own_caches(str(folder), name), "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    command = [sys.executable, "-m", "ci.programs.timing", "--job", json.dumps([asdict(job) for job in jobs])]
    log, rows = folder / f"{name}.log", list[Found]()
    with processes.started(command, env, log, left) as process:
        for row in named:
            found = _answer(process)
            if found == "ready":
                with processes.alone(process.pid), contextlib.suppress(BrokenPipeError):
                    assert process.stdin is not None
                    process.stdin.write("go\n")
                    process.stdin.flush()
                    found = _answer(process)
            if not isinstance(found, dict):
                break
            rows.append(row | found)
    if len(rows) == len(named):
        return rows
    if time.monotonic() - start < left - 0.5:
        return [*rows, named[len(rows)] | {"outcome": "failed", "words": _cause(log.read_text(errors="replace"))}]
    outcome = f"not done in {limit:.0f} s" if left == limit else NOT_REACHED
    return [*rows, named[len(rows)] | {"outcome": outcome}]


def _cause(log: str) -> str:
    """The last exception of a log: what torch raises for a backend has hints behind it."""
    lines = log.strip().splitlines() or ["no words"]
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])[:200]


def _answer(process: subprocess.Popen[str]) -> Any:
    """The next marked line of a process, "ready" or a row; None if it ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            return "ready" if line.strip() == f"{MARK}ready" else json.loads(line[len(MARK) :])
    return None


def _name(row: Found) -> tuple[str, str]:
    return row["suite"], row["program"]


def _order(row: Found) -> tuple[float, str]:
    """The fastest beside others first; what was not timed last."""
    return -row.get("ratio", 0.0), row["program"]


def _line(row: Found) -> str:
    name, ratio = f"{row['program']:56}", row.get("ratio")
    figures = [f"{key} {row[key]:.4g}" for key in ("eager", "inductor", "ours") if key in row]
    if figures:
        first = row.get("ours first call s")
        words = [*(f"{f:18}" for f in figures), f"{ratio:.3f}x" if ratio else "", f"first {first:.1f} s" if first else ""]
        return f"{name} {' '.join(words)}".rstrip()
    error = f"{row['error ratio']:8.2f} of eager's error" if "error ratio" in row else ""
    return f"{name} {row['outcome']} {error} {row.get('words', '')}".rstrip()


def _summary(rows: Sequence[Found]) -> list[str]:
    lines = []
    for other in ("inductor", "eager"):
        found = [row[other] / row["ours"] for row in rows if other in row and "ours" in row]
        if found:
            lines.append(f"over {other}: {statistics.geometric_mean(found):.3f}x of {len(found)} programs, least {min(found):.2f}x")
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if ratios:
        lines.append(f"below {LOST}x of the better: {sum(r < LOST for r in ratios)} of {len(ratios)}")
    outcomes = [row["outcome"] for row in rows]
    lines.append(", ".join(f"{outcomes.count(o)} {o}" for o in dict.fromkeys(outcomes)))
    left = [row["program"] for row in rows if row["outcome"] == NOT_REACHED]
    return [*lines, *([f"not reached: {' '.join(left)}"] if left else [])]


def _environment(device: str) -> Found:
    from fusewright.bench import report

    return report.environment(device)


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
