"""`ci/gpu/check.py` with processes that only pretend to have a GPU: what it asks, what it says is wrong, its tables."""

from __future__ import annotations

import json
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from ci.gpu import check as tool
from ci.gpu import processes
from ci.gpu import table as gpu_table
from ci.gpu import worker as gpu_worker


def pretend_work(connection: Connection, jobs: int) -> None:
    """Answers at once."""
    connection.send({"ready": True})
    while True:
        try:
            connection.send(answered(connection.recv()))
        except EOFError:
            return


def pretend_work_that_fails(connection: Connection, jobs: int) -> None:
    """Like `pretend_work`, but for reduce-overhead and a token."""
    connection.send({"ready": True})
    while True:
        try:
            r = connection.recv()
        except EOFError:
            return
        fails = r["do"] == "round" and r["contender"] == "reduce-overhead"
        connection.send({"error": "RuntimeError: no"} if fails else answered(r, wrong=1))


def answered(r: dict[str, Any], wrong: int = 0) -> dict[str, Any]:
    if r["do"] in ("check", "check_training"):
        right = r["model"] != "vit" or r.get("dtype") != "fp32"
        return {
            "model": r["model"], "dtype": r.get("dtype", "amp"), "right": right, "ratio": 1.0, "bugs": [],
            "reason": "" if right else "output 0: error 2 against eager's 1", "replay": ["replayed, 5 instructions"],
        }  # fmt: skip
    if r["do"] == "first":
        return {"seconds": 2.0 if r["contender"] == "ours" else 10.0}
    if r["do"] == "round":
        return {"ms": {"eager": 3.0, "inductor": 2.0, "reduce-overhead": 1.5, "ours": 1.0}[r["contender"]]}
    answers: dict[str, dict[str, Any]] = {
        "ready": {}, "decode_alone": {"ms": 4.0}, "decode_agrees": {"tokens": 32, "equal": 30, "wrong": wrong},
        "bandwidth": {"copy_gb_s": 3000.0, "bytes": 2.4e9},
    }  # fmt: skip
    return answers[r["do"]]


def end_at_once(connection: Connection, jobs: int) -> None:
    sys.exit("no GPU")


def hang(connection: Connection, jobs: int) -> None:
    time.sleep(60)


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the tool with workers that answer at once; gives its exit code and its record."""

    def run(*arguments: str, fails: bool = False) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(processes.Worker, "WORK", staticmethod(pretend_work_that_fails if fails else pretend_work))
        monkeypatch.setattr(tool, "_device", lambda: {"device": "a GPU"})
        monkeypatch.setenv("OUT", str(tmp_path))
        code = tool.main(arguments)
        return code, json.loads((tmp_path / "gpu_check.json").read_text())

    return run


def test_a_run_without_fault(pretend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = pretend("--stages", "accuracy,table,decode", "--models", "bert,llama", "--suite", "bert")
    assert code == 0 and record["wrong"] == []
    assert [r["model"] for r in record["table"]] == ["bert", "llama"]
    assert record["table"][0]["inference"]["ms"] == {"eager": 3.0, "inductor": 2.0, "reduce-overhead": 1.5, "ours": 1.0}
    bars = {b["id"]: b for b in record["bars"]}
    assert bars["G4"]["value"] == pytest.approx(5.0) and bars["G4"]["of"] == 2, "warm first calls do not count"
    assert bars["G1"]["verdict"] == "goal" and bars["share"]["value"] == pytest.approx(0.8)
    shown = capsys.readouterr().out
    assert "ours 1.00 (4.00); 80% of 3000 GB/s; 30 of 32 tokens are eager's, 0 wrong" in shown
    assert "accuracy: 2 of 2 right, 2 of them replayed" in shown
    assert shown.rstrip().splitlines()[-1].startswith("decode "), "the bars come last"


def test_what_is_wrong_shows(pretend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = pretend("--stages", "accuracy,table,decode", "--models", "bert", "--suite", "vit", fails=True)
    assert code == 1
    assert "decode: 1 of 32 tokens are not eager's" in record["wrong"]
    assert record["wrong"][0] == "accuracy of vit fp32: output 0: error 2 against eager's 1 "
    assert "bert, inference, reduce-overhead: RuntimeError: no" in record["wrong"]
    assert "G2" not in {b["id"] for b in record["bars"]}
    assert "WRONG accuracy of vit fp32" in capsys.readouterr().out


def test_full_compiles_nothing_beforehand(pretend: Any) -> None:
    code, record = pretend("--full", "--stages", "table", "--models", "vit")
    assert code == 0
    assert next(b for b in record["bars"] if b["id"] == "G4")["of"] == 2, "cold first calls of training count"


def test_a_missed_bar_is_wrong_and_an_aim_is_not() -> None:
    row = {"model": "vit", "inference": {"ms": {"eager": 1.0, "inductor": 1.1, "ours": 1.0}}}
    bars = {b["id"]: b["verdict"] for b in gpu_table.judged([row], {}, False)}
    assert bars == {"G1": "MISS", "vit": "below"}


def test_no_time_is_said(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "ALL", 0.0)
    code, record = pretend("--stages", "table,decode", "--models", "bert")
    assert code == 1
    assert record["wrong"] == ["bert: left out for want of time", "decode: left out for want of time"]


def test_jobs_wait_for_memory_and_end_in_time() -> None:
    at_once: list[int] = []
    running: set[str] = set()

    def job(name: str, gib: float) -> processes.Job:
        def run(seconds: float) -> str:
            running.add(name)
            at_once.append(len(running))
            time.sleep(0.05)
            running.discard(name)
            return name

        return processes.Job(name, run, gib)

    found = dict((j.name, r) for j, r in processes.side_by_side([job(n, 2.0) for n in "abcd"], 60.0, 8, 5.0))
    assert found == {n: n for n in "abcd"} and max(at_once) == 2

    def fail(seconds: float) -> None:
        raise processes.Failed("no")

    ((_, result),) = processes.side_by_side([processes.Job("x", fail)], 60.0, 8, 5.0)
    assert isinstance(result, processes.Failed)
    ((_, result),) = processes.side_by_side([job("late", 1.0)], -1.0, 8, 5.0)
    assert str(result) == "out of time"


def test_a_worker_that_ends_or_hangs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.Worker, "WORK", staticmethod(end_at_once))
    dead = processes.Worker(tmp_path, "dead", "caches")
    with pytest.raises(processes.Failed, match="the process ended with 1: no GPU"):
        dead.ask(30, do="first")
    monkeypatch.setattr(processes.Worker, "WORK", staticmethod(hang))
    slow = processes.Worker(tmp_path, "slow", "caches")
    with pytest.raises(processes.Failed, match="out of time"):
        slow.ask(0.2, do="first")
    assert slow.process.exitcode is not None


def test_memory_that_others_held_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [torch.OutOfMemoryError("CUDA out of memory"), None]

    def command() -> dict[str, Any]:
        if (error := left.pop(0)) is not None:
            raise error
        return {"seconds": 1.0}

    monkeypatch.setattr(gpu_worker.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(gpu_worker, "release", lambda: None)
    assert gpu_worker.answered(command, {}, True) == {"seconds": 1.0}
    left[:] = [torch.OutOfMemoryError("CUDA out of memory")]
    assert "out of memory" in gpu_worker.answered(command, {}, False)["error"]
