"""The load of other processes, and which processes of a run are suspended while one of its rows is timed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusewright.bench import load
from fusewright.bench.contenders import EAGER, KNOWN
from fusewright.bench.load import OthersMeter
from fusewright.bench.measure import measure
from fusewright.bench.steady import Settings
from fusewright.bench.turns import Stopped, Turns
from fusewright.bench.worker import WorkerError

TOYS = Path(__file__).with_name("toy_models.py")
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
    """Rows timed in parallel on separate cores do not disturb each other."""
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
    assert 0.0 <= meter.read() <= 10 * (os.cpu_count() or 1)  # cores; clock ticks are coarse compared with 0.1 s


def state(pid: int) -> str:
    """The state letter of a process as in proc(5): T if stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def eventually(pid: int, letters: str) -> bool:
    end = time.monotonic() + 5
    while state(pid) not in letters and time.monotonic() < end:
        time.sleep(0.01)
    return state(pid) in letters


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="a process's state is read from /proc")
def test_others_stand_still_during_a_turn_and_go_on_behind_it() -> None:
    turns = Turns()
    with turns.worker({}, 1) as mine, turns.worker({}, 1) as other:
        with turns.alone([mine.pid]):
            assert eventually(other.pid, "T") and state(mine.pid) != "T"
        assert eventually(other.pid, "SRD")


KILLED = """
import os, signal
from fusewright.bench.turns import Turns
turns = Turns()
with turns.worker({}, 1) as worker, turns.alone([]):
    print(worker.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="a process's state is read from /proc")
def test_who_stands_still_ends_with_a_killed_run() -> None:
    run = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60)
    assert run.returncode == -signal.SIGKILL
    end = time.monotonic() + 20
    while alive(int(run.stdout)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(int(run.stdout))


def alive(pid: int) -> bool:
    try:
        return state(pid) != "Z"
    except FileNotFoundError:
        return False


def test_a_turn_waits_for_the_one_before_it_even_if_that_fails() -> None:
    turns = Turns()
    with pytest.raises(ValueError), turns.alone([]):
        raise ValueError
    with turns.alone([]):
        pass


def test_an_interrupted_run_ends_its_processes_and_starts_none() -> None:
    turns = Turns()
    with turns.worker({}, 1) as worker:
        turns.stop()
        with pytest.raises(WorkerError, match=f"code -{int(signal.SIGKILL)}"):
            worker.ask("memory", 60, contender="eager", calls=1)
    with pytest.raises(Stopped), turns.worker({}, 1):
        pass
    turns.open()
    with turns.worker({}, 1) as worker:
        assert os.getpgid(worker.pid) == worker.pid


@pytest.mark.parametrize(("check", "held"), [("all", [True, True]), ("ours", [False, True]), ("none", [False, False])])
def test_whose_results_are_compared(check: str, held: list[bool]) -> None:
    settings = Settings(seconds=0.05, warm_seconds=0.05, check=check)  # type: ignore[arg-type]
    row = measure(f"{TOYS}:mlp", "fp32", [EAGER, KNOWN["dynamo-eager"], KNOWN["aot_eager"]], settings, lambda text: None)
    assert ["accuracy" in row["contenders"][name] for name in ("dynamo-eager", "aot_eager")] == held
