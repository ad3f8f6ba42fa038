"""What others take of the machine."""

import os
import time

import pytest

from fusewright.bench import load
from fusewright.bench.load import OthersMeter

TICKS = os.sysconf("SC_CLK_TCK")


def write(proc, busy_s, own_s, steal_s=0):
    cpu = [busy_s * TICKS, 0, 0, 999, 999, 0, 0, steal_s * TICKS, 0, 0]
    (proc / "stat").write_text("cpu  " + " ".join(map(str, cpu)) + "\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    for pid in (os.getpid(), 77):
        (proc / str(pid)).mkdir(exist_ok=True)
        own = own_s * TICKS if pid == 77 else 0
        (proc / str(pid) / "stat").write_text(f"{pid} (a ) b) S 1 1 1 0 0 0 0 0 0 0 {own} 0 5 5 5 5 5 5 5")


@pytest.fixture
def clock(monkeypatch):
    times = iter(range(0, 100, 10))
    monkeypatch.setattr(load.time, "monotonic", lambda: next(times))


def test_what_the_measured_processes_use_is_not_others(tmp_path, clock):
    write(tmp_path, busy_s=100, own_s=50)
    meter = OthersMeter([77], tmp_path)
    write(tmp_path, busy_s=120, own_s=70)
    assert meter.read() == 0.0
    write(tmp_path, busy_s=130, own_s=75)
    assert meter.read() == pytest.approx(0.5)


def test_time_that_the_hypervisor_took_counts(tmp_path, clock):
    write(tmp_path, busy_s=100, own_s=0)
    meter = OthersMeter([77], tmp_path)
    write(tmp_path, busy_s=100, own_s=0, steal_s=10)
    assert meter.read() == pytest.approx(1.0)


def test_cores_that_this_process_may_not_run_on_do_not_count(tmp_path, clock, monkeypatch):
    """Rows that are timed side by side, each on cores of its own, do not disturb each other."""
    monkeypatch.setattr(load.os, "sched_getaffinity", lambda pid: {1, 2})

    def cores(*busy_s):
        write(tmp_path, busy_s=sum(busy_s), own_s=0)
        lines = [f"cpu{k} {s * TICKS} 0 0 9 9 0 0 0 0 0" for k, s in enumerate(busy_s)]
        (tmp_path / "stat").write_text("cpu  " + " ".join(["1"] * 10) + "\n" + "\n".join(lines) + "\nintr 5 5\n")

    cores(100, 100, 100)
    meter = OthersMeter([77], tmp_path)
    cores(200, 100, 105)
    assert meter.read() == pytest.approx(0.5)


def test_a_system_without_proc_reads_nothing(tmp_path):
    assert OthersMeter([77], tmp_path / "none").read() == 0.0


def test_this_machine_is_read():
    meter = OthersMeter([])
    time.sleep(0.1)
    assert 0.0 <= meter.read() <= 10 * (os.cpu_count() or 1)  # cores; clock ticks are coarse beside 0.1 s
