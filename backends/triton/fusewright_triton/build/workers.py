"""Build kernels in several processes: Triton's compiler holds Python's lock for most of its time."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fusewright_triton.build import compiler

Request = Mapping[str, Any]
Answer = list[dict[str, Any]]

ALONE = 4
"""Up to this many kernels are built in this process when no worker is running: a worker must first import Triton."""
MOST = 16

AHEAD, FOR_EACH = 8, 2
"""The most workers that are started before it is known what to build, and processors per worker. With four of them on an
H100's 16 cores BERT's first call took 2.98 s instead of 3.54."""

FIRST: Request = {
    "text": "@triton.jit\ndef first(x_ptr):\n    tl.store(x_ptr, tl.load(x_ptr) + 1.0)\n",
    "functions": ["first"],
    "signature": {"x_ptr": "*fp32"},
    "aligned": [],
    "options": {},
}
"""The throwaway kernel that warms up such a worker: with its first kernel, Triton hashes its own files (0.3 s)."""


class BuildError(RuntimeError):
    """Triton could not build a kernel; the text is Triton's."""


class Ended(BuildError):
    """A worker ended before it answered: it was idle for too long, ran out of memory, or Triton crashed."""


class Worker:
    """One process. It lives as long as this process, and builds one kernel at a time."""

    def __init__(self, first: Request | None = None) -> None:
        """`first` is built as a warm-up, before any request."""
        program = Path(compiler.__file__)
        # -P: the folder of compiler.py must not hide top-level modules of the same names
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(program), *([] if first is None else [json.dumps(first)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            close_fds=True,
        )

    def build(self, request: Request) -> Answer:
        if self.process.stdin is None or self.process.stdout is None:
            raise BuildError("a worker without pipes")
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Ended(f"a compiler process ended with code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise BuildError(answer["error"])
        found: Answer = answer["binaries"]
        return found

    def close(self) -> None:
        """End the process at once: an idle worker may still be warming up."""
        self.process.terminate()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended by itself, with a request unread
                self.process.stdin.close()
        self.process.wait()


class Pool:
    """Workers, started when there is work for them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.free: list[Worker] = []
        self.busy = 0
        self.threads = ThreadPoolExecutor(processors(), "fusewright-build")
        atexit.register(self.close)

    def submit(self, request: Request) -> Future[Answer]:
        """Build in the background while this process goes on."""
        return self.threads.submit(self.build, request)

    def build(self, request: Request) -> Answer:
        """Build with a free worker, else with a new one. If the first worker ends during the build, retry with a new one."""
        worker = self._alive()
        if worker is not None:
            with contextlib.suppress(Ended):
                return self._built(worker, request)
        return self._built(Worker(), request)

    def _built(self, worker: Worker, request: Request) -> Answer:
        with self.lock:
            self.busy += 1
        try:
            return worker.build(request)
        finally:
            with self.lock:
                self.busy -= 1
                if worker.process.poll() is None:
                    self.free.append(worker)

    def warm_up(self, target: Sequence[int | str]) -> None:
        """Start a few workers, which prepare Triton for a target while this process does something else."""
        with self.lock:
            more = min(AHEAD, processors() // FOR_EACH - 1) - len(self.free) - self.busy
            self.free += [Worker({**FIRST, "target": target}) for _ in range(more)]

    def _alive(self) -> Worker | None:
        """Return a free worker; drop those that were killed from outside (when memory ran out, say)."""
        with self.lock:
            while self.free:
                worker = self.free.pop()
                if worker.process.poll() is None:
                    return worker
        return None

    def close(self) -> None:
        """End the workers; the next build starts new ones."""
        with self.lock:
            workers, self.free = self.free, []
        for w in workers:
            w.close()


@functools.cache
def pool() -> Pool:
    """Return the pool of this process."""
    return Pool()


def processors() -> int:
    """Return how many processes may build at once: FUSEWRIGHT_TRITON_WORKERS, or the number of usable processors."""
    told = os.environ.get("FUSEWRIGHT_TRITON_WORKERS")
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(int(told) if told else have, MOST))


def build_all(requests: Sequence[Request]) -> list[Answer]:
    """Return answers in the order of the requests. Raise `BuildError` for the first that fails."""
    if not requests or processors() == 1 or (len(requests) <= ALONE and not (pool().free or pool().busy)):
        return [_here(r) for r in requests]
    return [answer.result() for answer in [pool().submit(r) for r in requests]]


def build_each(requests: Sequence[Request]) -> list[Answer | BuildError]:
    """Return answers in the order of the requests, all from workers; a request that fails gives its error."""

    def one(answer: Future[Answer]) -> Answer | BuildError:
        try:
            return answer.result()
        except BuildError as e:
            return e

    return [one(answer) for answer in [pool().submit(r) for r in requests]]


def _here(request: Request) -> Answer:
    try:
        return compiler.build(request)
    except Exception as e:
        raise BuildError(f"{type(e).__name__}: {e}") from e
