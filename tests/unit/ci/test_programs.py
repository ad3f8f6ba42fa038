"""`ci/programs`: every program has its full size, and the runner times and judges small ones on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from ci.programs import kernelbench_1, kernelbench_2, timing
from ci.programs.measure import Case, Job, run
from ci.programs.program import Given, Program, Size, inputs, size_within

SUITES = {"kernelbench_1": kernelbench_1.PROGRAMS, "kernelbench_2": kernelbench_2.PROGRAMS}
ON_CPU = ["--backend", "x86_onednn", "--small"]


def output(program: Program, size: Size) -> torch.Tensor:
    """The output of eager without memory."""
    with torch.device("meta"), torch.no_grad():
        module, given = program(size)
        args = [torch.empty(g.shape) if g.floating else torch.empty(g.shape, dtype=torch.int64) for g in given]
        return module.eval()(*args)


@pytest.mark.parametrize("suite", SUITES)
def test_each_program_runs_at_both_sizes(suite: str) -> None:
    assert [int(name[1:4]) for name in SUITES[suite]] == list(range(1, 101))
    for name, program in SUITES[suite].items():
        full, small = output(program, Size()), output(program, Size(small=True))
        assert full.numel() >= small.numel() > 0, name
        assert full.ndim == small.ndim, name


def test_batches_are_cut_to_a_limit() -> None:
    size = size_within(kernelbench_1.PROGRAMS["p019_relu"], 4, 1e9)
    assert output(kernelbench_1.PROGRAMS["p019_relu"], size).shape == (635, 393216)
    assert size_within(kernelbench_1.PROGRAMS["p001_square_matmul"], 4, 1e9) == Size()


def test_inputs_are_the_same_for_a_seed() -> None:
    given = [Given((4, 6), "pareto"), Given((4,), "class"), Given((6,), "sign")]
    x, classes, signs = inputs(given, "cpu", torch.bfloat16)
    assert torch.equal(x, inputs(given, "cpu", torch.bfloat16)[0]) and x.dtype is torch.bfloat16
    assert classes.dtype is torch.int64 and classes.max() < 6
    assert set(signs.tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize(
    ("suite", "program", "mode"),
    [("kernelbench_1", "p020_leaky_relu", "inference"), ("kernelbench_2", "p086_gemm_divide_gelu", "training")],
)
def test_programs_are_judged_by_fp64(suite: str, program: str, mode: str) -> None:
    found = run(Job(suite, program, mode=mode, small=True, check=True, contenders=("eager", "ours")), lambda: None)
    assert found["outcome"] == "right", found["words"]


def test_positions_are_not_trained() -> None:
    assert run(Job("kernelbench_1", "p051_argmax", mode="training", small=True), lambda: None) == {"outcome": "no gradient"}


def test_a_wrong_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "_compiled", lambda self, name, module: module if name == "eager" else lambda x: module(x) + 1)
    found = run(Job("kernelbench_1", "p019_relu", small=True, check=True, contenders=("eager", "ours")), lambda: None)
    assert found["outcome"] == "wrong" and "error 1 against eager's" in found["words"]


def test_a_program_is_timed_once_nothing_else_runs() -> None:
    waited: list[bool] = []
    job = Job("kernelbench_1", "p019_relu", small=True, contenders=("eager",), rounds=2, warm_s=0.01)
    assert run(job, lambda: waited.append(True))["eager"] > 0
    assert waited == [True]


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that compute nothing; one fails."""
    script = tmp_path / "child"
    script.write_text(f"#!{sys.executable}\n{CHILD}")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


CHILD = """
import json, sys

for job in json.loads(sys.argv[-1]):
    if job["program"] == "p020_leaky_relu":
        sys.exit("sent.Error: what went wrong\\n\\nSet a variable to see more")
    print("@ready", flush=True)
    input()
    ours = 1.0 if job["program"] == "p019_relu" else 2.0
    found = {"outcome": "timed", "eager": 3.0, "inductor": 1.5, "ours": ours, "ratio": 1.5 / ours}
    print("@" + json.dumps(found), flush=True)
"""


def test_a_failed_program_leaves_the_others(children: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [*ON_CPU, "--suite", "kernelbench_1", "--match", "p019|p02[01]", "--group", "2", "--jobs", "2"]
    assert timing.main([*command, "--json", str(record)]) == 1
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[:3]] == ["p019_relu", "p021_sigmoid", "p020_leaky_relu"]
    assert "p020_leaky_relu" + " " * 42 + "failed  sent.Error: what went wrong" in said
    assert "over inductor: 1.061x of 2 programs, least 0.75x" in said
    assert "below 0.97x of the better: 1 of 2" in said
    assert [row["outcome"] for row in json.loads(record.read_text())["rows"]] == ["timed", "failed", "timed"]


def test_what_is_not_reached_is_told(children: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert timing.main([*ON_CPU, "--match", "p019_relu|p086_gemm", "--seconds", "0"]) == 0
    assert "not reached: p019_relu p086_gemm_divide_gelu" in capsys.readouterr().out
