"""`ci/gpu/parallel.py` without a GPU: its groups of processes run one at a time, and what hangs, fails or is wrong is reported."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ci.gpu import parallel, turns

ROOT = str(Path(__file__).parents[3])

CHILD = '''
import json, shutil, sys, time
from ci.gpu import turns

job, how = json.loads(sys.argv[1]), sys.argv[2]
folder, name = job["folder"], f"{job['way']}.{job['backend']}"

def turn():
    start = time.monotonic()
    if how == "hangs":
        time.sleep(60)
    if how == "fails":
        sys.exit("what went wrong")
    time.sleep(0.01)
    with open(f"{folder}/../spans", "a") as spans:
        print(name, start, time.monotonic(), file=spans)
    return {"eager": 3.0, "aot_eager": 2.0}.get(job["backend"], 1.0) + job["rank"] / 10

def result():
    kind = "far" if how == "wrong" else "near"
    shutil.copy(f"{folder}/../{kind}.pt", f"{folder}/{name}.{job['rank']}.pt")
    return "2 of 3 plans replayed"

turns.serve(lambda: {"warm": turn, "turn": turn, "result": result, "profile": lambda: "a text"})
if how == "ends badly":
    sys.exit(3)
if how == "does not end":
    time.sleep(60)
'''


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the tool with processes that compute nothing, of which some `do` as told: {("way", "backend", rank): what}."""
    torch.save([torch.tensor([4.0, 2.0])], tmp_path / "near.pt")
    torch.save([torch.tensor([4.0, 2.5])], tmp_path / "far.pt")
    (tmp_path / "groups").mkdir()

    class Folder:
        def __enter__(self) -> str:
            return str(tmp_path / "groups")

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(parallel.tempfile, "TemporaryDirectory", lambda **_: Folder())

    def run(*args: str, do: dict[tuple[str, str, int], str] | None = None) -> tuple[int, dict[str, dict[str, Any]]]:
        def command(job: parallel.Job, _: int) -> turns.Command:
            how = (do or {}).get((job.way, job.backend, job.rank), "")
            args = [sys.executable, "-c", CHILD, json.dumps(parallel.asdict(job)), how]
            return turns.Command(args, {**os.environ, "PYTHONPATH": ROOT})

        monkeypatch.setattr(parallel, "_command", command)
        monkeypatch.setattr(parallel, "TURNS", 30)  # a second for a turn
        record = tmp_path / "record.json"
        how = ["--device", "cpu", "--against", "aot_eager", "--limit", "30", "--json", str(record)]
        code = parallel.main([*how, *args])
        return code, {row["way"]: row for row in json.loads(record.read_text())["rows"]}

    return run


def test_no_group_runs_in_the_turn_of_another(tried: Any, tmp_path: Path) -> None:
    code, rows = tried("--ways", "ddp,decode", "--calls", "40", "--profile", str(tmp_path / "profiles"))
    assert code == 0 and {row["outcome"] for row in rows.values()} == {"right"}
    assert rows["ddp"] == {
        "way": "ddp", "eager_ms": 3.1, "aot_eager_ms": 2.1, "ours_ms": 1.1, "over_eager": 2.818, "over_aot_eager": 1.909,
        "off": {"aot_eager": 0.0, "x86_onednn": 0.0}, "calls_without_a_hang": 40, "replay": "2 of 3 plans replayed",
        "outcome": "right",
    }  # fmt: skip
    lines = [line.split() for line in (tmp_path / "spans").read_text().splitlines()]
    assert len(lines) == 2 * 3 * 2 * (1 + 4), "ways, backends, ranks, turns"
    spans = sorted((float(start), float(end), name) for name, start, end in lines)
    turns_of_groups = [list(group) for _, group in itertools.groupby(spans, key=lambda span: span[2])]
    ends = [max(end for _, end, _ in turn) for turn in turns_of_groups]
    assert all(end <= turn[0][0] for end, turn in zip(ends, turns_of_groups[1:], strict=False))
    assert (tmp_path / "profiles/ddp.txt").read_text().count("a text") == 3


def test_a_group_that_hangs_is_ended_and_the_others_are_timed(tried: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = tried("--ways", "ddp,train", "--calls", "10", do={("ddp", "aot_eager", 1): "hangs"})
    assert code == 1 and rows["train"]["outcome"] == "right"
    row = rows["ddp"]
    assert row["outcome"] == "aot_eager hung" and "aot_eager_ms" not in row and row["over_eager"] > 2
    assert row["words"]["aot_eager"].startswith("rank 1: ") and "in turn" in row["words"]["aot_eager"], "where it hangs"
    assert "aot_eager hung" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "outcome"),
    [("fails", "failed"), ("ends badly", "failed"), ("does not end", "hung"), ("wrong", "wrong")],
)
def test_what_else_a_group_may_do(tried: Any, how: str, outcome: str) -> None:
    code, rows = tried("--ways", "fsdp2", "--calls", "10", do={("fsdp2", "x86_onednn", 1): how})
    assert code == 1 and rows["fsdp2"]["outcome"] == f"x86_onednn {outcome}"
    if how == "fails":
        assert rows["fsdp2"]["words"]["x86_onednn"] == "rank 1: what went wrong\n"


def test_an_interrupted_run_keeps_its_rows_and_no_process(
    tried: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[turns.Group] = []
    timed = parallel._timed

    def interrupted(groups: dict[str, turns.Group], *how: Any) -> dict[str, list[float]]:
        started.extend(groups.values())
        if len(started) > 3:
            raise KeyboardInterrupt
        return timed(groups, *how)

    monkeypatch.setattr(parallel, "_timed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tried("--ways", "ddp,train", "--calls", "10")
    assert not any(group.running() for group in started)
    assert [row["way"] for row in json.loads((tmp_path / "record.json").read_text())["rows"]] == ["ddp"]


def test_what_is_not_a_number_is_wrong(tried: Any, tmp_path: Path) -> None:
    torch.save([torch.tensor([4.0, torch.nan]), torch.tensor([1.0])], tmp_path / "far.pt")
    torch.save([torch.tensor([4.0, 2.0]), torch.tensor([1.0])], tmp_path / "near.pt")
    assert tried("--ways", "fsdp2", "--calls", "10", do={("fsdp2", "x86_onednn", 0): "wrong"})[0] == 1


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed")
def test_steps_of_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs fusewright[bench]")
    record, profiles = tmp_path / "record.json", tmp_path / "profiles"
    how = ["--device", "cpu", "--against", "aot_eager", "--calls", "10", "--limit", "500"]
    assert parallel.main(["--ways", "fsdp2", *how, "--json", str(record), "--profile", str(profiles)]) == 0
    rows = {row["way"]: row for row in json.loads(record.read_text())["rows"]}
    assert all(row["ours_ms"] > 0 and 0 < row["off"]["x86_onednn"] < 0.02 for row in rows.values())
    assert "host" in (profiles / "fsdp2.txt").read_text() and (profiles / "fsdp2.eager.0.log").exists()
