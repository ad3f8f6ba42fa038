"""Measure how much of the machine other processes use during a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

_PROC = Path("/proc")


class OthersMeter:
    """CPU time used by everything except this process and `pids`, in cores, between two readings.

    Other processes count, and so does time taken by a hypervisor, on the cores that this process may use. Without /proc it
    always reads 0.
    """

    def __init__(self, pids: Sequence[int], proc: Path = _PROC) -> None:
        self._pids = (os.getpid(), *pids)
        self._proc = proc
        self._known = (proc / "stat").exists()
        self._last = self._now()

    def read(self) -> float:
        """Cores that others used since the last reading (or since the start)."""
        before, self._last = self._last, self._now()
        seconds = self._last[0] - before[0]
        return max(0.0, (self._last[1] - before[1]) / seconds) if seconds > 0 else 0.0

    def _now(self) -> tuple[float, float]:
        """(time, CPU seconds of others so far)."""
        if not self._known:
            return time.monotonic(), 0.0
        # proc(5): user nice system idle iowait irq softirq steal; and fields 14 and 15 of a process's stat.
        lines = self._of_cores((self._proc / "stat").read_text())
        user, nice, system, _, _, irq, softirq, steal = (sum(ticks) for ticks in zip(*lines, strict=True))
        own = sum(sum(self._ticks(self._proc / str(pid) / "stat", 13)[:2]) for pid in self._pids)
        busy = user + nice + system + irq + softirq + steal - own
        return time.monotonic(), busy / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def _of_cores(text: str) -> list[list[int]]:
        """The first eight fields of each core that this process may use, or of their total."""
        fields = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("cpu")}
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
        mine = [f"cpu{k}" for k in allowed if f"cpu{k}" in fields]
        chosen = mine if 0 < len(mine) < len(fields) - 1 else ["cpu"]
        return [[int(field) for field in fields[name][:8]] for name in chosen]

    @staticmethod
    def _ticks(file: Path, skip: int) -> list[int]:
        line = file.read_text().split("\n", 1)[0]
        # A process name is in parentheses and may contain spaces: it and the text before count as two fields.
        fields = line.split() if ")" not in line else ["pid", "name", *line.rpartition(")")[2].split()]
        return [int(field) for field in fields[skip : skip + 8]]
