"""The tool that shows where the CPU time of a first call goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

from ci.gpu import compile_time


def test_a_case_is_traced_and_its_kernels_are_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "times.json"
    assert compile_time.main(["large:bert:train", "--size", "small", "--json", str(record)]) == 0
    times = json.loads(record.read_text())["cases"]["large:bert:train"]
    assert times["kernels"] >= times["distinct kernels"] > 10
    assert times["process"] == pytest.approx(times["torch"] + times["ours"])
    stages = [times[name] for name in ("make_ir", *compile_time.STAGES)]
    assert all(stages) and times["compiler"] >= sum(stages)
    assert min(times[name] for name in ("canonicalize", "simplify", "lower", "plan")) > 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "| | large:bert:train |" and f"| kernels | {times['kernels']} |" in printed
