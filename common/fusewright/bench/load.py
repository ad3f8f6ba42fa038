"""How much of the machine others take while something is being timed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

_PROC = Path("/proc")


class OthersMeter:
    """CPU time taken by everything but this process and `pids`, in cores, between one reading and the next.

    Other processes count, and so does what a hypervisor took away. Where there is no /proc it always reads 0.
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
        user, nice, system, _, _, irq, softirq, steal = self._ticks(self._proc / "stat", 1)[:8]
        own = sum(sum(self._ticks(self._proc / str(pid) / "stat", 13)[:2]) for pid in self._pids)
        busy = user + nice + system + irq + softirq + steal - own
        return time.monotonic(), busy / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def _ticks(file: Path, skip: int) -> list[int]:
        line = file.read_text().split("\n", 1)[0]
        # A process's name is in brackets and may hold blanks: it and what is before it count as two fields.
        fields = line.split() if ")" not in line else ["pid", "name", *line.rpartition(")")[2].split()]
        return [int(field) for field in fields[skip : skip + 8]]
