"""Run jobs in child processes, so that a crash costs one job. Used by the command, and by the runner of torch's OpInfo
database. A child sets its environment before it imports torch, so nothing here imports that on loading."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

Job: TypeAlias = Mapping[str, Any]
Result: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Pool:
    """How jobs run. A child iterates over `perform(settings, jobs)` of a module, which yields the result of each job in turn.
    `ended(job, why)` is the result of a job that crashed its child, or that yielded nothing for `limit` seconds."""

    module: str
    settings: Mapping[str, Any]
    ended: Callable[[Job, str], Result]
    env: Mapping[str, str]
    jobs: int = 1
    group: int = 25
    """Jobs per child."""
    limit: float = 300.0

    def run(self, jobs: Sequence[Job], until: float = float("inf")) -> Iterator[Result]:
        """Yield results as they arrive. No job starts after `until` (of `time.monotonic`)."""
        found: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
        children = _Children(self.module, self.settings, self.env)

        def work(part: Sequence[Job]) -> None:
            try:
                with contextlib.closing(self._in_turn(part, children)) as results:
                    for result in results:
                        found.put(result)
                        if time.monotonic() > until:
                            break
            finally:
                found.put(None)

        with ThreadPoolExecutor(self.jobs) as pool:
            parts = [pool.submit(work, jobs[k :: self.jobs]) for k in range(self.jobs)]
            try:
                for _ in parts:
                    yield from iter(found.get, None)
            finally:  # also after Ctrl-C, or if no more results are wanted: the pool waits for threads that wait for children
                children.stop()
            for part in parts:
                part.result()

    def _in_turn(self, jobs: Sequence[Job], children: _Children) -> Generator[Result, None, None]:
        """Yield results in order. After a crash or a timeout, a new child continues the group."""
        todo = list(jobs)
        while todo and not children.stopped:
            done = 0
            with contextlib.closing(self._group(todo[: self.group], children)) as results:
                for result in results:
                    done += 1
                    yield result
            todo = todo[done:]

    def _group(self, group: Sequence[Job], children: _Children) -> Generator[Result, None, None]:
        """Yield results of one child until it ends; the last is that of the job in which it ended."""
        child = children.start(group)
        done, why = 0, ""
        try:
            for result in child.results(self.limit):
                if result is None:
                    why = f"timeout: longer than {self.limit:g} s"
                    break
                done += 1
                yield result
        finally:  # also if no more results are wanted
            code = children.end(child)
        if done < len(group) and not children.stopped:
            yield self.ended(group[done], why or f"crash: the process ended with {code}")


def finishes(module: str, settings: Mapping[str, Any], env: Mapping[str, str], job: Job, limit: float) -> bool:
    """Whether a child with these settings answers at all."""
    child = _Child(module, settings, env, [job])
    try:
        return any(child.results(limit))
    finally:
        child.end()


class _Children:
    """The child processes of a run, which all end with it."""

    def __init__(self, module: str, settings: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self._module, self._settings, self._env = module, settings, env
        self._lock = threading.Lock()
        self._running: set[_Child] = set()
        self.stopped = False

    def start(self, group: Sequence[Job]) -> _Child:
        child = _Child(self._module, self._settings, self._env, group)
        with self._lock:
            self._running.add(child)
            if self.stopped:
                child.kill()
        return child

    def end(self, child: _Child) -> int:
        """End a child that is no longer needed; return its exit code."""
        with self._lock:
            self._running.discard(child)
        return child.end()

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for child in self._running:
                child.kill()


# ---------------------------------------------------------------- one child

PRELOAD = ("fusewright.conformance.jobs.preload",)
"""What children import once, in the process that they are forked from. One that fails to import makes each child slower."""

_BOOKKEEPING = threading.Lock()
"""For calls that may wait for any child: two threads that wait for the same one would lose its exit code."""


def start_method() -> str:
    """Children are forked from a process that has imported what they need, as that takes seven CPU seconds. They are new ones
    outside of Linux, and beside an accelerator, whose driver may be used on one side of a fork only."""
    import torch

    return "forkserver" if sys.platform == "linux" and not torch.accelerator.is_available() else "spawn"


class _Child:
    """A child process, and the processes that it starts."""

    def __init__(
        self, module: str, settings: Mapping[str, Any], env: Mapping[str, str], jobs: Sequence[Job]
    ) -> None:
        context: Any = multiprocessing.get_context(start_method())
        context.set_forkserver_preload(list(PRELOAD))
        self._results, theirs = context.Pipe(duplex=False)
        given = (theirs, module, settings, {**os.environ, **env}, jobs)
        self._process = context.Process(target=_perform, args=given)
        with theirs, _BOOKKEEPING:
            self._process.start()

    def results(self, limit: float) -> Iterator[Result | None]:
        """Yield results until the child ends; None if there was none for `limit` seconds."""
        with contextlib.suppress(EOFError, OSError):  # the pipe's end, maybe within a result
            while self._results.poll(limit):
                yield self._results.recv()
            yield None
        wait([self._process.sentinel], limit)  # until it has its own exit code, as `end` kills it

    def kill(self) -> None:
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):  # it has no group yet, and no processes of its own
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def end(self) -> int:
        """Kill it if it still runs; return its exit code, negative for a signal. Nothing else may be called afterwards."""
        with self._results, _BOOKKEEPING:
            self.kill()
            self._process.join()
            code: int = self._process.exitcode
            self._process.close()
        return code


def _perform(
    results: Connection, module: str, settings: Mapping[str, Any], env: Mapping[str, str], jobs: Sequence[Job]
) -> None:
    if hasattr(os, "setsid"):
        os.setsid()  # the parent handles Ctrl-C, and ends the group
    nowhere = os.open(os.devnull, os.O_WRONLY)  # checked code may print
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    for result in importlib.import_module(module).perform(settings, jobs):
        results.send(result)
