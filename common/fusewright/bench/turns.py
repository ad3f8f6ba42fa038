"""Timing in isolation: processes that prepare other rows of the run are suspended while one is timed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Collection, Iterator, Mapping

from fusewright.bench.worker import Worker


class Stopped(RuntimeError):
    """The run was interrupted; no more processes are started."""


class Turns:
    """The measuring processes of a run, each in a process group of its own, which includes its compilers."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._groups: set[int] = set()
        self._stopped = False

    def open(self) -> None:
        """Let processes start again, once the threads of a stopped run have ended."""
        self._stopped = False

    @contextlib.contextmanager
    def worker(self, env: Mapping[str, str], threads: int) -> Iterator[Worker]:
        """Start a new measuring process, but not while something is timed. Raises `Stopped`."""
        with self._turn:
            if self._stopped:
                raise Stopped("the run was interrupted")
            worker = Worker(env, threads)
            self._groups.add(worker.pid)
        try:
            with worker:
                yield worker
        finally:
            self._groups.discard(worker.pid)

    @contextlib.contextmanager
    def alone(self, pids: Collection[int]) -> Iterator[None]:
        """Let these processes run, and suspend all others of the run."""
        with self._turn:
            others = [group for group in self._groups if group not in pids]
            _signal(others, signal.SIGSTOP)
            _await_stop(others)
            try:
                yield
            finally:
                _signal(others, signal.SIGCONT)

    def stop(self) -> None:
        """End every process of the run, so that threads waiting for one continue."""
        self._stopped = True
        _signal(list(self._groups), signal.SIGKILL)


def _await_stop(pids: Collection[int]) -> None:
    """Wait until these children are stopped or have ended. A signal takes effect only some time after it was sent, and the
    system does not end children of a killed run that stop later."""
    for pid in pids if hasattr(os, "waitid") else ():
        with contextlib.suppress(ChildProcessError):  # already waited for
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def _signal(groups: Collection[int], what: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):  # already ended
            os.killpg(group, what)


TURNS = Turns()
"""One per machine, since only one process is timed at a time."""
