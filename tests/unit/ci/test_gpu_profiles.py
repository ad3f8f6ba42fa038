"""`ci/gpu/profiles.py` without a GPU: cases are timed one at a time, and what fails has rows that say so."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ci.docs import results
from ci.gpu import profiles
from ci.gpu.profile_case import Job, Late, Row, covered, limited

TOYS = Path(__file__).parents[1] / "bench/toy_models.py"


@pytest.mark.slow
def test_every_contender_of_every_case_has_a_row(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")
    cases = [f"{TOYS}:mlp:train", f"{TOYS}:crashes_when_compiled:infer"]
    how = ["--dry", "--at-once", "2", "--against", "aot_eager,inductor[nonsense=1]"]
    kept = ["--out", str(tmp_path / "out"), "--json", str(tmp_path / "record.json")]
    assert profiles.main([*cases, *how, *kept]) == 1  # ours crashed in one case

    record = json.loads((tmp_path / "record.json").read_text())
    rows = {(r["case"].split(":")[-2], r["contender"]): r for r in record["rows"]}
    assert len(rows) == len(record["rows"]) == 8
    assert {name: rows["mlp", name]["outcome"] for name in ("nvidia_triton", "eager", "aot_eager")} == {
        "nvidia_triton": "timed", "eager": "timed", "aot_eager": "timed",
    }  # fmt: skip
    assert rows["mlp", "inductor[nonsense=1]"]["outcome"] == "failed"
    assert "nonsense" in rows["mlp", "inductor[nonsense=1]"]["words"]
    assert {r["outcome"] for (name, _), r in rows.items() if name == "crashes_when_compiled"} == {"failed"}
    ours = rows["mlp", "nvidia_triton"]
    assert ours["ms"] >= ours["host_ms"] > 0 and ours["kernels"] > 0 and ours["off_max"] < 0.1

    text = next((tmp_path / "out").glob("*mlp_train.txt")).read_text()
    assert "failed" not in text.replace("inductor[nonsense=1] failed", "") and "ours by instruction" in text
    assert any("nvidia_triton" in t for holds, make in results.KINDS if holds(record) for t in make(record))


@pytest.mark.slow
def test_cases_on_a_cpu(tmp_path: Path) -> None:
    assert profiles.main([f"{TOYS}:mlp:infer", "--device", "cpu", "--no-profile", "--json", str(tmp_path / "record.json")]) == 0
    rows = {r["contender"]: r for r in json.loads((tmp_path / "record.json").read_text())["rows"]}
    assert {name: r["outcome"] for name, r in rows.items()} == {"x86_onednn": "timed", "eager": "timed", "inductor": "timed"}
    assert rows["x86_onednn"]["off_max"] < 1e-5, "fp32"


def test_time_that_is_short_ends_compilers() -> None:
    with pytest.raises(Late), limited(time.time() - 1):
        time.sleep(5)


def test_a_case_that_never_started_has_rows(tmp_path: Path) -> None:
    job = Job("large:bert", "train", "nvidia_triton", ("inductor",), str(tmp_path), until=0.0)
    run = profiles.Run(time.time() + 60, trace=False, alone_seconds=1)
    assert [(r.contender, r.words) for r in run.case(0, job)] == [
        (name, "time was short") for name in ("nvidia_triton", "eager", "inductor")
    ]


def test_the_table_has_a_line_for_each_row() -> None:
    rows = [
        Row("bert:infer", "nvidia_triton", "timed", ms=2.0, host_ms=1.0, kernels_ms=1.5, off_median=0.01),
        Row("bert:infer", "inductor", "left out", words="time was short"),
    ]
    _, ours, other = profiles.table(rows)
    assert ours.split() == ["bert:infer", "nvidia_triton", "2.00", "1.50", "1.00", "1.0e-02"]
    assert other.endswith("left out: time was short")


def test_the_summary_names_the_case_where_ours_is_least() -> None:
    ratios = {"a:infer": 4.0, "b:infer": 1.0, "c:train": 1.5}
    rows = [Row(case, "inductor", "timed", ms=1.0, ours_over_it=x) for case, x in ratios.items()]
    assert profiles.summary([*rows, Row("d:infer", "inductor", "failed")]) == [
        "infer: 2.00x over inductor (2 cases, least 1.00x: b:infer)",
        "train: 1.50x over inductor (1 cases, least 1.50x: c:train)",
    ]


def test_overlapping_kernels_are_counted_once() -> None:
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bert"], "write MODEL:train or MODEL:infer"),
        (["brt:infer"], "brt"),
        (["bert:infer", "--against", "inductr"], "inductor"),
        (["bert:infer", "--against", "inductor,inductor-freezing"], "give no other contender with it"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        profiles.main([*arguments, "--dry"])
    assert words in capsys.readouterr().err
