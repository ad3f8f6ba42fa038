"""What prepares another row stands still while one is timed."""

import os
import signal
import time
from pathlib import Path

import pytest

from fusewright.bench.contenders import EAGER, KNOWN
from fusewright.bench.measure import measure
from fusewright.bench.steady import Settings
from fusewright.bench.turns import TURNS, Stopped, Turns
from fusewright.bench.worker import WorkerError

TOYS = Path(__file__).with_name("toy_models.py")


def state(pid: int) -> str:
    """The letter that proc(5) gives a process: T for a stopped one."""
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
    TURNS.open()
    row = measure(f"{TOYS}:mlp", "fp32", [EAGER, KNOWN["dynamo-eager"], KNOWN["aot_eager"]], settings, lambda text: None)
    assert ["accuracy" in row["contenders"][name] for name in ("dynamo-eager", "aot_eager")] == held
