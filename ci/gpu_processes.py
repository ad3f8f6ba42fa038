"""Processes of `ci/gpu_check.py`: workers that answer requests, and jobs side by side as far as memory and cores go."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).resolve().with_name("gpu_worker.py")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEWRIGHT_CACHE_DIR")
"""Variables that say where compilers keep what they made."""


class Failed(RuntimeError):
    """A process gave no answer, or its answer is an error."""


class Worker:
    """One `gpu_worker.py`. It is started at once and imports while others are asked."""

    def __init__(self, folder: Path, name: str, caches: str, **settings: str) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        caches_of = {n: str(folder / caches / n) for n in CACHES}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env={**os.environ, **caches_of, **settings}, start_new_session=True,
            )  # fmt: skip
        self._ready = False
        self._rest = b""

    def ask(self, limit: float, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises `Failed`: after `limit` seconds, for an error, for a process that ended."""
        until = time.monotonic() + limit
        if not self._ready:
            self._answer(until)
            self._ready = True
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._ended()) from None
        answer = self._answer(until)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def _answer(self, until: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(timeout=max(0.0, until - time.monotonic())):
                    self.end()
                    raise Failed("out of time")
                chunk = os.read(self.process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise Failed(self._ended())
                self._rest += chunk
        line, self._rest = self._rest.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def _ended(self) -> str:
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return f"the process ended with {self.process.wait()}: {' '.join(last)[:300]}"

    def end(self) -> None:
        """End the process and the compilers that it started."""
        end_session(self.process)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, with all of that session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended by itself, and so have its children
    process.wait()


@dataclass(frozen=True)
class Job:
    """Something to be done beside others. `gib` and `cores` are what it takes at most; `run` is given its seconds."""

    name: str
    run: Callable[[float], Any]
    gib: float = 4.0
    cores: float = 1.0


def side_by_side(jobs: Sequence[Job], seconds: float, cores: float, gib: float) -> Iterator[tuple[Job, Any]]:
    """Runs jobs as far as memory and cores go, in their order; gives each with its result as it ends: what `run`
    returned, or an exception. A job that had no turn in time gets `Failed`."""
    until = time.monotonic() + seconds
    waiting, running = list(jobs), dict[Job, threading.Thread]()
    done: list[tuple[Job, Any]] = []
    changed = threading.Condition()

    def work(job: Job) -> None:
        try:
            result: Any = job.run(max(1.0, until - time.monotonic()))
        except Exception as e:  # it is a row of the record, and counts as wrong
            result = e
        with changed:
            done.append((job, result))
            del running[job]
            changed.notify()

    while waiting or running or done:
        with changed:
            late = time.monotonic() > until
            for job in list(waiting):
                if late:
                    done.append((job, Failed("out of time")))
                    waiting.remove(job)
                elif not running or (
                    sum(j.gib for j in running) + job.gib <= gib and sum(j.cores for j in running) + job.cores <= cores
                ):
                    waiting.remove(job)
                    running[job] = threading.Thread(target=work, args=(job,), daemon=True)
                    running[job].start()
            if not done:
                changed.wait(timeout=5)
            ended, done[:] = list(done), []
        yield from ended
