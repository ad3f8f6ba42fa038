"""What is timed is timed alone: processes that prepare other rows of the run stand still meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Collection, Iterator, Mapping

from fusewright.bench.worker import Worker


class Stopped(RuntimeError):
    """The run was interrupted: no process is started any more."""


class Turns:
    """The measuring processes of a run, each with a process group of its own, in which its compilers are too."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._groups: set[int] = set()
        self._stopped = False

    def open(self) -> None:
        """Begin a run."""
        self._stopped = False

    @contextlib.contextmanager
    def worker(self, env: Mapping[str, str], threads: int) -> Iterator[Worker]:
        """A new measuring process, not started beside what is timed. Raises `Stopped`."""
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
        """These processes run, all others of the run stand still."""
        with self._turn:
            others = [group for group in self._groups if group not in pids]
            _signal(others, signal.SIGSTOP)
            _await_stop(others)
            try:
                yield
            finally:
                _signal(others, signal.SIGCONT)

    def stop(self) -> None:
        """End every process of the run, so that whoever waits for one goes on."""
        self._stopped = True
        _signal(list(self._groups), signal.SIGKILL)


def _await_stop(pids: Collection[int]) -> None:
    """Until these children stand still, or have ended. A signal is only on its way when it was sent, and the system ends none of a
    killed run's children that stop later."""
    for pid in pids if hasattr(os, "waitid") else ():
        with contextlib.suppress(ChildProcessError):  # somebody waited for its end
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def _signal(groups: Collection[int], what: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.killpg(group, what)


TURNS = Turns()
"""The machine's: there is one to be timed on."""
