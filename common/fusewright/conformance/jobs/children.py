"""Run jobs in child processes, so that a crash costs one job. Used by the command, and by the runner of torch's OpInfo
database."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from fusewright.conformance.jobs import warm

Job: TypeAlias = Mapping[str, Any]
Result: TypeAlias = dict[str, Any]
Child: TypeAlias = subprocess.Popen[bytes] | warm.Forked


@dataclass(frozen=True)
class Pool:
    """How jobs run. A child runs `main(arguments)` of a module: it reads a JSON list of jobs and prints a line of JSON for each.
    `ended(job, why)` is the result of a job that crashed its child, or that printed nothing for `limit` seconds."""

    module: str
    arguments: Sequence[str]
    ended: Callable[[Job, str], Result]
    env: Mapping[str, str]
    jobs: int = 1
    group: int = 25
    """Jobs per child."""
    limit: float = 300.0

    def run(self, jobs: Sequence[Job], until: float = float("inf")) -> Iterator[Result]:
        """Yield results as they arrive. No job starts after `until` (of `time.monotonic`)."""
        found: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
        children = _Children(self.module, self.arguments, self.env)

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
            for line in _lines(child, self.limit):
                if line is None:
                    why = f"timeout: longer than {self.limit:g} s"
                    break
                if line.startswith("{"):
                    done += 1
                    yield json.loads(line)
        finally:  # also if no more results are wanted
            code = children.end(child)
        if done < len(group) and not children.stopped:
            yield self.ended(group[done], why or f"crash: the process ended with {code}")


class _Children:
    """The child processes of a run, which all end with it."""

    def __init__(self, module: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self._module, self._arguments, self._env = module, arguments, env
        self._lock = threading.Lock()
        self._running: set[Child] = set()
        self.stopped = False

    def start(self, group: Sequence[Job]) -> Child:
        child = _start(self._module, self._arguments, self._env, group)
        with self._lock:
            self._running.add(child)
            if self.stopped:
                _kill(child)
        return child

    def end(self, child: Child) -> int:
        """End a child that is no longer needed; return its exit code."""
        with self._lock:
            self._running.discard(child)
        _kill(child)
        return child.wait()

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for child in self._running:
                _kill(child)


def _kill(child: Child) -> None:
    """End a running child and the processes that it has started, which are in its process group."""
    if isinstance(child, subprocess.Popen) and hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()


def finishes(module: str, arguments: Sequence[str], env: Mapping[str, str], job: Job, limit: float) -> bool:
    """Whether a child with these arguments answers at all."""
    child = _start(module, arguments, env, [job])
    finished = any(line is not None and line.startswith("{") for line in _lines(child, limit))
    child.kill()
    child.wait()
    return finished


def _start(module: str, arguments: Sequence[str], env: Mapping[str, str], group: Sequence[Job]) -> Child:
    env = {**os.environ, **env}
    child = warm.Forked(module, arguments, env) if warm.possible() else _new(module, arguments, env)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has already ended; its exit code tells why
        child.stdin.write(json.dumps([dict(j) for j in group]).encode())
        child.stdin.close()
    return child


def _new(module: str, arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, module, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**env, "PYTHONPATH": os.pathsep.join(warm.search_path(env))},
        start_new_session=True,  # the parent handles Ctrl-C
    )  # fmt: skip


RUN = "import importlib, sys; sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))"


def _lines(child: Child, limit: float) -> Iterator[str | None]:
    """Yield lines of the child's output; None if there was none for `limit` seconds."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        rest = b""
        while True:
            if not selector.select(timeout=limit):
                yield None
                return
            chunk = os.read(child.stdout.fileno(), 1 << 16)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
