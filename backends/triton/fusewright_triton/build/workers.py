"""Build kernels in several processes: Triton's compiler holds Python's lock for most of its time."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import socket
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
"""Up to this many kernels are built in this process when no compiler process is running: it must first import Triton."""
MOST = 16

FIRST: Request = {
    "text": "@triton.jit\ndef first(x_ptr):\n    tl.store(x_ptr, tl.load(x_ptr) + 1.0)\n",
    "functions": ["first"],
    "signature": {"x_ptr": "*fp32"},
    "aligned": [],
    "options": {},
}
"""The throwaway kernel that warms up the parent of all workers: with its first kernel, Triton hashes its own files (0.3 s)."""


class BuildError(RuntimeError):
    """Triton could not build a kernel; the text is Triton's."""


class Ended(BuildError):
    """A worker ended before it answered: it was idle for too long, ran out of memory, or Triton crashed."""


class Worker:
    """One process. It lives as long as this process, and builds one kernel at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.stream = connection.makefile("rw", encoding="utf-8")

    def alive(self) -> bool:
        """Whether an idle worker is still there: of one that has ended, the end of its answers can be read."""
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def build(self, request: Request) -> Answer:
        try:
            self.stream.write(json.dumps(request) + "\n")
            self.stream.flush()
            line = self.stream.readline()
        except OSError:  # its end of the connection is closed
            line = ""
        if not line:
            raise Ended("a compiler process ended: out of memory, or Triton crashed")
        answer = json.loads(line)
        if "error" in answer:
            raise BuildError(answer["error"])
        found: Answer = answer["binaries"]
        return found

    def close(self) -> None:
        """End the process, after the kernel that it builds."""
        with contextlib.suppress(BrokenPipeError):  # it ended by itself, with a request unread
            self.stream.close()
        self.connection.close()


class Parent:
    """The process that workers are forked from, once it has imported Triton and built a throwaway kernel for a target."""

    def __init__(self, target: Sequence[int | str]) -> None:
        program = Path(compiler.__file__)
        self.control, its = socket.socketpair()
        with its:
            # -P: the folder of compiler.py must not hide top-level modules of the same names
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(program), str(its.fileno()), json.dumps({**FIRST, "target": target})],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )

    def worker(self) -> Worker:
        """Return a worker, which starts as soon as this process is warm."""
        connection, its = socket.socketpair()
        with its, contextlib.suppress(OSError):  # this process has ended: so has the worker
            socket.send_fds(self.control, [b"w"], [its.fileno()])
        return Worker(connection)

    def close(self) -> None:
        """End the process at once: it may still be warming up."""
        self.process.terminate()
        self.process.wait()
        self.control.close()


class Pool:
    """Workers, started when there is work for them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.free: list[Worker] = []
        self.parent: Parent | None = None
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
        return self._built(self._new(request["target"]), request)

    def _built(self, worker: Worker, request: Request) -> Answer:
        try:
            return worker.build(request)
        finally:
            with self.lock:
                self.free.append(worker)

    def warm_up(self, target: Sequence[int | str]) -> None:
        """Start the parent of all workers, which prepares Triton for a target while this process does something else."""
        with self.lock:
            self._parent(target)

    def _parent(self, target: Sequence[int | str]) -> Parent:
        if self.parent is None or self.parent.process.poll() is not None:  # it ends when no worker is wanted for long
            self.parent = Parent(target)
        return self.parent

    def _new(self, target: Sequence[int | str]) -> Worker:
        with self.lock:
            return self._parent(target).worker()

    def _alive(self) -> Worker | None:
        """Return a free worker; drop those that ended (when memory ran out, say)."""
        with self.lock:
            while self.free:
                worker = self.free.pop()
                if worker.alive():
                    return worker
                worker.close()
        return None

    def close(self) -> None:
        """End the processes; the next build starts new ones."""
        with self.lock:
            ending: list[Worker | Parent] = [*self.free, *([self.parent] if self.parent else [])]
            self.free, self.parent = [], None
        for process in ending:
            process.close()


@functools.cache
def pool() -> Pool:
    """Return the pool of this process."""
    return Pool()


def processors() -> int:
    """Return how many processes may build at once: FUSEWRIGHT_TRITON_WORKERS, or the number of usable processors."""
    told = os.environ.get("FUSEWRIGHT_TRITON_WORKERS")
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(int(told) if told else have, MOST))


def submitted(requests: Sequence[Request]) -> list[Future[Answer]]:
    """Build in the background, those with the longest text first, so that no long one is left at the end. Few kernels without
    a compiler process are built here."""
    if processors() == 1 or (len(requests) <= ALONE and pool().parent is None):
        return [_here(r) for r in requests]
    return _in_background(requests)


def _in_background(requests: Sequence[Request]) -> list[Future[Answer]]:
    order = sorted(range(len(requests)), key=lambda k: -len(requests[k].get("text", "")))
    answers = {k: pool().submit(requests[k]) for k in order}
    return [answers[k] for k in range(len(requests))]


def build_each(requests: Sequence[Request]) -> list[Answer | BuildError]:
    """Return answers in the order of the requests, all from workers; a request that fails gives its error."""

    def one(answer: Future[Answer]) -> Answer | BuildError:
        try:
            return answer.result()
        except BuildError as e:
            return e

    return [one(answer) for answer in _in_background(requests)]


def _here(request: Request) -> Future[Answer]:
    answer: Future[Answer] = Future()
    try:
        answer.set_result(compiler.build(request))
    except Exception as e:  # of any kind, as a compiler process answers it
        answer.set_exception(BuildError(f"{type(e).__name__}: {e}"))
    return answer
