"""Judge the zoo: every model in every mode, each pair in a process of its own with a time limit.

    python -m tests.zoo [--backend x86_onednn] [--modes inference,training] [--models 'transformers/b*'] [--shard 1/4]
                        [--device cuda] [--jobs 2] [--limit 120] [--json zoo.json] [--chart zoo.svg]

Prints a line for what is not right, and counts last. Exit code 1 when anything is wrong, crashed or hung that `aot_eager`
runs. A record that exists is resumed: pairs that it holds are not run again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusewright.report_page import chart
from tests.zoo import catalog
from tests.zoo.check import MODES, Verdict, check

BAD = ("wrong", "crashed", "out of time", "died")
Pair = tuple[str, str]


@dataclass
class Job:
    """A forked process that judges one pair, and the pipe that its verdict comes through."""

    pair: Pair
    pid: int
    pipe: int
    until: float
    data: bytes = b""


def judged(pairs: Sequence[Pair], backend: str, jobs: int, limit: float, device: str = "cpu") -> Iterator[Verdict]:
    """Verdicts as they come. Processes are forked from this one, which has imported everything and computed nothing."""
    waiting, running = list(pairs), list[Job]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_started(waiting.pop(0), backend, limit, device))
        ready, _, _ = select.select([j.pipe for j in running], [], [], 0.5)
        for job in [*running]:
            if (verdict := _ended(job, job.pipe in ready)) is not None:
                running.remove(job)
                yield verdict


def _started(pair: Pair, backend: str, limit: float, device: str) -> Job:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return Job(pair, pid, read, time.monotonic() + limit)
    os.setsid()
    os.close(read)
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    verdict = check(*pair, backend, device)
    os.write(write, json.dumps(verdict.as_json()).encode())
    os._exit(0)


def _ended(job: Job, ready: bool) -> Verdict | None:
    """The verdict of a process that ended or is out of time."""
    if ready:
        chunk = os.read(job.pipe, 1 << 16)
        job.data += chunk
        if chunk:
            return None
    elif time.monotonic() < job.until:
        return None
    else:
        os.killpg(job.pid, signal.SIGKILL)
    os.close(job.pipe)
    _, status = os.waitpid(job.pid, 0)
    if job.data:
        return Verdict(**json.loads(job.data))
    code = os.waitstatus_to_exitcode(status)
    return Verdict(*job.pair, "died" if ready else "out of time", f"exit code {code}")


def table(verdicts: Sequence[Verdict]) -> str:
    """Counts of what was found, by mode."""
    kinds = list(dict.fromkeys(["right", *sorted({v.status for v in verdicts})]))
    width = max(map(len, kinds)) + 2
    modes = [m for m in MODES if any(v.mode == m for v in verdicts)]
    counts = Counter((v.status, v.mode) for v in verdicts)
    lines = ["".ljust(width) + "".join(f"{m:>12}" for m in modes)]
    return "\n".join([*lines, *(k.ljust(width) + "".join(f"{counts[k, m]:12}" for m in modes) for k in kinds)])


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    part, parts = map(int, given.shard.split("/"))
    names = [n for n in catalog.names() if any(fnmatch.fnmatch(n, p) for p in given.models.split(","))]
    wanted = [(n, m) for n in names[part - 1 :: parts] for m in given.modes.split(",")]
    found = _resumed(given.json)
    done = {(v.model, v.mode) for v in found}
    for verdict in judged([p for p in wanted if p not in done], given.backend, given.jobs, given.limit, given.device):
        found.append(verdict)
        if verdict.status not in ("right", "not built", "not run") or verdict.bugs:
            print(f"{verdict.model} {verdict.mode}: {verdict.status}: {verdict.reason} {verdict.bugs or ''}", flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps({"backend": given.backend, "zoo": [v.as_json() for v in found]}, indent=0))
    print(table(found))
    if given.chart is not None:
        given.chart.write_text(chart.of_verdicts("Models of the zoo", given.backend, [(v.mode, v.status) for v in found]))
    return 1 if any(v.status in BAD or v.bugs for v in found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="x86_onednn")
    parser.add_argument("--device", default="cpu", help="where models and inputs are: cpu, cuda, cuda:1")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--models", default="*", help="patterns of names, comma-separated")
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one model in one mode")
    parser.add_argument("--chart", type=Path, help="draw how many models are right here, as SVG")
    parser.add_argument("--json", type=Path, default=None)
    return parser


def _resumed(path: Path | None) -> list[Verdict]:
    if path is None or not path.exists():
        return []
    record: dict[str, Any] = json.loads(path.read_text())
    return [Verdict(**v) for v in record["zoo"]]


if __name__ == "__main__":
    import importlib
    import logging
    import warnings

    import torch
    import transformers

    from fusewright._torch_compat import DYNAMO

    importlib.import_module(DYNAMO)  # seconds that no forked process spends again
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    sys.exit(main())
