"""Judge the zoo: every model in every mode, each pair in a process of its own with a time limit.

    python -m tests.zoo [--backend x86_onednn] [--modes inference,training] [--models 'transformers/b*'] [--shard 1/4]
                        [--new] [--device cuda] [--jobs 2] [--limit 120] [--seconds 540] [--json zoo.json] [--chart zoo.svg]

Prints a line for what is not right, and counts last. Exit code 1 when anything is wrong, crashed or hung that `aot_eager`
runs. A record that exists is resumed: pairs that it holds are not run again. With `--seconds` the command ends in time; the same
command goes on where it ended.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusewright.report_page import chart
from tests.zoo import catalog
from tests.zoo.check import MODES, Verdict, check, said
from tests.zoo.page import SILENT, newest, records

BAD = ("wrong", "crashed", "out of time", "died")
Pair = tuple[str, str]


@dataclass
class Job:
    """A forked process that judges one pair, and the pipe for its verdict."""

    pair: Pair
    pid: int
    pipe: int
    until: float
    data: bytes = b""


def judged(
    pairs: Sequence[Pair], backend: str, jobs: int, limit: float, device: str = "cpu", until: float = math.inf
) -> Iterator[Verdict]:
    """Yield verdicts as they arrive. Processes are forked from this one, which has imported everything and computed nothing.
    Those still running at `until` (of `time.monotonic`) end without a verdict."""
    waiting, running, unbuilt = list(pairs), list[Job](), dict[str, Verdict]()
    while waiting or running:
        if time.monotonic() > until:
            for job in running:
                os.killpg(job.pid, signal.SIGKILL)
            return
        while waiting and len(running) < jobs:
            model, mode = waiting.pop(0)
            if model in unbuilt:
                yield replace(unbuilt[model], mode=mode)
            else:
                running.append(_started((model, mode), backend, limit, device))
        ready, _, _ = select.select([j.pipe for j in running], [], [], 0.5)
        for job in [*running]:
            if (verdict := _ended(job, job.pipe in ready)) is not None:
                running.remove(job)
                if verdict.status == "not built":
                    unbuilt[verdict.model] = verdict
                yield verdict


def _started(pair: Pair, backend: str, limit: float, device: str) -> Job:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)  # a group of its own; both processes set it, in either order
        os.close(write)
        return Job(pair, pid, read, time.monotonic() + limit)
    os.setpgid(0, 0)
    os.close(read)
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    try:
        verdict = check(*pair, backend, device)
    except BaseException as error:  # a failure of the judge or the example, which nothing else would report
        verdict = Verdict(*pair, "died", said(error))
    os.write(write, json.dumps(verdict.as_json()).encode())
    os._exit(0)


def _ended(job: Job, ready: bool) -> Verdict | None:
    """Return the verdict of a process that ended or ran out of time."""
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
    """Format counts of verdicts by mode."""
    kinds = list(dict.fromkeys(["right", *sorted({v.status for v in verdicts})]))
    width = max(map(len, kinds)) + 2
    modes = [m for m in MODES if any(v.mode == m for v in verdicts)]
    counts = Counter((v.status, v.mode) for v in verdicts)
    lines = ["".ljust(width) + "".join(f"{m:>12}" for m in modes)]
    return "\n".join([*lines, *(k.ljust(width) + "".join(f"{counts[k, m]:12}" for m in modes) for k in kinds)])


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    part, parts = map(int, given.shard.split("/"))
    known = catalog.names()
    names = list(dict.fromkeys(n for p in given.models.split(",") for n in fnmatch.filter(known, p)))[part - 1 :: parts]
    blocks = [names[k : k + given.jobs] for k in range(0, len(names), given.jobs)]
    wanted = [(n, m) for block in blocks for m in given.modes.split(",") for n in block]
    found = _resumed(given.json)
    kept = [r for r in records() if given.new and r["backend"] == given.backend]
    done = {(v.model, v.mode) for v in [*found, *newest(kept)] if v.status not in SILENT}
    left = [p for p in wanted if p not in done]
    until = time.monotonic() + given.seconds
    for verdict in judged(left, given.backend, given.jobs, given.limit, given.device, until):
        found.append(verdict)
        if verdict.status not in ("right", "not built", "not run") or verdict.bugs:
            print(f"{verdict.model} {verdict.mode}: {verdict.status}: {verdict.reason} {verdict.bugs or ''}", flush=True)
        if given.json is not None:
            _written(given.json, {"backend": given.backend, "zoo": [v.as_json() for v in found]})
    print(table(found))
    if given.chart is not None:
        given.chart.write_text(chart.of_verdicts("Models of the zoo", given.backend, [(v.mode, v.status) for v in found]))
    return 1 if any(v.status in BAD or v.bugs for v in found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="x86_onednn")
    parser.add_argument("--device", default="cpu", help="where models and inputs are: cpu, cuda, cuda:1")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--new", action="store_true", help="leave out pairs whose verdict is in docs/results/zoo")
    parser.add_argument("--models", default="*", help="patterns of names, comma-separated, in the order to run them in")
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one model in one mode")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all of it: what is left is for the next run")
    parser.add_argument("--chart", type=Path, help="draw how many models are right here, as SVG")
    parser.add_argument("--json", type=Path, default=None)
    return parser


def _written(path: Path, record: dict[str, Any]) -> None:
    """Write a record atomically, since this process may be killed at any time."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(record, indent=0))
    beside.replace(path)


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

    importlib.import_module(DYNAMO)  # takes seconds, which forked processes then save
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    sys.exit(main())
