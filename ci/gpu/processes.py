"""Processes of `ci/gpu/check.py`: workers that answer requests, and jobs side by side as far as memory and cores go.

Workers are forked from one process that has imported what they all need (multiprocessing's fork server): torch, Dynamo and
transformers are seconds of a core for each of some fifty processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ci.gpu.worker import serve
from fusewright._torch_compat import DYNAMO

IMPORTED = (DYNAMO, "transformers", "fusewright.bench.accuracy", "fusewright.report")
"""What the fork server imports; none of it asks for a GPU, which no process forked later could use."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEWRIGHT_CACHE_DIR")
"""Variables that say where compilers keep what they made."""


class Failed(RuntimeError):
    """A process gave no answer, or its answer is an error."""


def caches_in(folder: Path) -> dict[str, str]:
    """The environment of a process that keeps what it compiles in a folder."""
    return {name: str(folder / name) for name in CACHES}


def _begin(work: Callable[[Connection, int], None], connection: Connection, log: str, env: Mapping[str, str], jobs: int) -> None:
    """In a new worker: a session of its own, its own log and environment."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.update(env)
    work(connection, jobs)


class Worker:
    """One process of `worker.py`, which says what `jobs` limits. It is started at once and loads libraries while others
    are asked."""

    WORK: Callable[[Connection, int], None] = staticmethod(serve)

    def __init__(self, folder: Path, name: str, caches: str, jobs: int = 0) -> None:
        self.log = folder / f"{name}.log"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        self.connection, theirs = context.Pipe()
        given = (self.WORK, theirs, str(self.log), caches_in(folder / caches), jobs)
        self.process = context.Process(target=_begin, args=given, name=name)
        self.process.start()
        theirs.close()
        self._ready = False

    def ask(self, limit: float, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises `Failed`: after `limit` seconds, for an error, for a process that ended."""
        until = time.monotonic() + limit
        if not self._ready:
            self._answer(until)
            self._ready = True
        try:
            self.connection.send(request)
        except BrokenPipeError:
            raise Failed(self._ended()) from None
        answer = self._answer(until)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def _answer(self, until: float) -> dict[str, Any]:
        try:
            if not self.connection.poll(max(0.0, until - time.monotonic())):
                self.end()
                raise Failed("out of time")
            found: dict[str, Any] = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise Failed(self._ended()) from None
        return found

    def _ended(self) -> str:
        self.process.join()
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:] if self.log.exists() else []
        return f"the process ended with {self.process.exitcode}: {' '.join(last)[:300]}"

    def end(self) -> None:
        """End the process and the compilers that it started."""
        if self.process.pid is not None:
            _kill_session(self.process.pid)
        self.process.kill()  # it may not have a session of its own yet
        self.process.join()


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, with all of that session."""
    _kill_session(process.pid)
    process.wait()


def _kill_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended by itself, and so have its children


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
