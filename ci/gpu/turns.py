"""Groups of processes that a parent asks, one group at a time: for timing what disturbs others while it runs.

A process waits in `serve` for requests, in a read that costs nothing. A group fails when one of its processes ends, and hangs when
one does not answer in time; its processes are then killed, and the other groups go on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PIPE = "TURNS_PIPE"
END = "end"
POLL = 0.5
"""Seconds between two looks for processes that ended: their pipes stay open while children of theirs hold them."""
DYING = 10.0
"""Seconds for a killed process to go."""
TOLD = 1500
"""Characters of a log that are kept."""


@dataclass(frozen=True)
class Command:
    """The arguments and the environment of a process."""

    args: Sequence[str]
    env: Mapping[str, str]


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    pipe: Connection[Any, Any]
    log: Path


class Group:
    """Processes that work together, one for each rank. `outcome` is "" while all is well, then "hung" or "failed"; `words` is then
    the end of a log."""

    def __init__(self, name: str, commands: Sequence[Command], folder: Path) -> None:
        self.name, self.outcome, self.words = name, "", ""
        self.children = [_start(c, folder / f"{name}.{rank}.log") for rank, c in enumerate(commands)]

    def send(self, what: str) -> None:
        try:
            for child in self.children:
                child.pipe.send(what)
        except OSError:
            self.stop("failed", self.ended())

    def running(self) -> list[int]:
        """The ranks of processes that run."""
        return [rank for rank, child in enumerate(self.children) if child.process.poll() is None]

    def ended(self) -> int:
        """The rank of a process that ended by itself, first those with an error; -1 if all run."""
        codes = [child.process.poll() for child in self.children]
        return next((r for r, code in enumerate(codes) if code), codes.index(0) if 0 in codes else -1)

    def stop(self, outcome: str, rank: int) -> None:
        """Kill all processes, because the one of `rank` hung or failed."""
        log, running = self.children[rank].log, [self.children[r].process for r in self.running()]
        before = log.stat().st_size
        if outcome == "hung":
            for process in running:
                process.send_signal(signal.SIGUSR1)  # it writes where it is
            time.sleep(POLL)
        for process in running:
            process.kill()
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may keep it
                child.process.wait(DYING)
            child.pipe.close()
        self.outcome = outcome
        text = log.read_bytes()
        where = text[before:][:TOLD]  # innermost first
        self.words = f"rank {rank}: " + (where or text[-TOLD:]).decode(errors="replace")


CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEWRIGHT_CACHE_DIR")


def own_caches(folder: str, name: str) -> dict[str, str]:
    """Make cache folders for one process; return them as environment variables."""
    caches = {variable: f"{folder}/{name}.{variable}" for variable in CACHES}
    for cache in caches.values():
        Path(cache).mkdir(mode=0o700)
    return caches


def ratio(other: Sequence[float], ours: Sequence[float]) -> float:
    """The median of the ratios round by round: the speed of a shared machine changes between rounds."""
    return statistics.median(a / b for a, b in zip(other, ours, strict=True))


def _start(command: Command, log: Path) -> _Child:
    mine, its = Pipe()
    with its, log.open("wb") as out:
        env = {**command.env, PIPE: str(its.fileno())}
        process = subprocess.Popen(command.args, env=env, stdout=out, stderr=subprocess.STDOUT, pass_fds=[its.fileno()])
    return _Child(process, mine, log)


def hear(groups: Sequence[Group], seconds: float) -> dict[str, list[Any]]:
    """Return an answer of each process, by group and rank, of the groups that are well."""
    end = time.monotonic() + seconds
    found: dict[str, list[Any]] = {g.name: [None] * len(g.children) for g in groups if not g.outcome}
    waiting: dict[Any, tuple[Group, int]] = {
        child.pipe: (g, rank) for g in groups if not g.outcome for rank, child in enumerate(g.children)
    }
    while waiting:
        left = end - time.monotonic()
        heard: list[Any] = wait(list(waiting), max(0.0, min(left, POLL)))
        for pipe in heard:
            group, rank = waiting.pop(pipe)
            if not group.outcome:
                try:
                    found[group.name][rank] = pipe.recv()
                except (EOFError, OSError):
                    _wait_for_end(group)
                    group.stop("failed", max(group.ended(), 0))
        for group, rank in [] if heard else waiting.values():
            if not group.outcome and group.ended() >= 0:
                group.stop("failed", group.ended())
            elif not group.outcome and left <= 0:
                group.stop("hung", rank)
        waiting = {pipe: (g, rank) for pipe, (g, rank) in waiting.items() if not g.outcome}
    return {g.name: found[g.name] for g in groups if not g.outcome}


def _wait_for_end(group: Group) -> None:
    """A pipe closes a little before its process has an exit code."""
    end = time.monotonic() + POLL
    while group.ended() < 0 and time.monotonic() < end:
        time.sleep(0.01)


def ask(groups: Sequence[Group], what: str, seconds: float) -> dict[str, list[Any]]:
    """Ask each process of the groups that are well, and return their answers."""
    for group in groups:
        if not group.outcome:
            group.send(what)
    return hear(groups, seconds)


def end(groups: Sequence[Group], seconds: float) -> None:
    """Let the groups that are well end. One that does not end in time hung, and one with an exit code failed."""
    until = time.monotonic() + seconds
    for group in groups:
        if not group.outcome:
            group.send(END)
    for group in groups:
        while not group.outcome and (running := group.running()):
            if any(child.process.poll() for child in group.children):
                break
            if time.monotonic() > until:
                group.stop("hung", running[0])
            time.sleep(0.01)
        if not group.outcome and any(child.process.poll() for child in group.children):
            group.stop("failed", group.ended())


def serve(begin: Callable[[], Mapping[str, Callable[[], Any]]]) -> None:
    """In a child: answer once `begin` has returned, then each request by what it returned, until the parent lets the child end or
    is gone."""
    place = int(os.environ.pop(PIPE))
    os.set_inheritable(place, False)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    with Connection(place) as pipe:
        does = begin()
        pipe.send(None)
        while (asked := pipe.recv()) != END:
            pipe.send(does[asked]())
