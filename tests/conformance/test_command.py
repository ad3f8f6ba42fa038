"""`fusewright conformance` and the pytest plugin: what they run and print, and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fusewright import registry
from fusewright.cli import conformance as command
from fusewright.cli.conformance import conformance
from fusewright.conformance.jobs import levels, run
from fusewright.conformance.ops import entries, opinfo
from fusewright.conformance.settings import Settings
from fusewright.conformance.verdicts import Check, Figure, Verdict, summary
from fusewright.errors import UnknownBackendError
from fusewright.interface import Unavailable

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_the_two_figures_are_kept_apart() -> None:
    found = [
        Check("C0", "a", Verdict.PASSED),
        Check("C2", "b", Verdict.LOWERED_OK),
        Check("C2", "c", Verdict.FALLBACK_OK),
        Check("C2", "d", Verdict.WRONG),
        Check("C2", "e", Verdict.SKIPPED),
        Check("C3", "f", Verdict.CRASHED),
    ]
    figures = summary(found)
    assert (str(figures.correct), str(figures.lowered), figures.ok) == ("3 of 5", "1 of 3", False)
    assert summary(found[:3]).ok


def test_models_are_counted_by_their_ops_too() -> None:
    """With one op left to eager a model is a fallback, so that ten models of which most is lowered would show as 0 of 10."""
    found = [Check("C4", "a", Verdict.FALLBACK_OK, ops=Figure(9, 10)), Check("C4", "b", Verdict.LOWERED_OK, ops=Figure(3, 3))]
    figures = summary(Check.from_json(json.loads(json.dumps(c.as_json()))) for c in found)
    assert (str(figures.lowered), str(figures.ops)) == ("1 of 2", "12 of 13")
    assert summary([Check("C2", "c", Verdict.LOWERED_OK)]).ops.total == 0


def test_a_backend_passes_a_sample_of_every_level(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    names = ["--backend", "fusewright_interp", "--part", "97", "--no-opinfo", "--jobs", "0", "--json", str(out)]
    done = CliRunner().invoke(conformance, names)
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())["backends"]["fusewright_interp"]
    assert set(document["verdicts"]) == set(levels.LEVELS)
    assert document["correct"]["of"] == document["correct"]["total"] and document["lowered"]["of"] > 0
    assert "correct" in done.output and "lowered" in done.output


def test_a_backend_without_a_device_is_not_called_right() -> None:
    missing = next(
        (n for n, p in registry.plugins().items() if not p.reference and not registry.info(n).available), None
    )
    if missing is None:
        pytest.skip("every installed backend has a device here")
    done = CliRunner().invoke(conformance, ["--backend", missing, "--level", "C2..C4"])
    assert done.exit_code == 2 and "NOT AVAILABLE" in done.output, done.output


def test_a_backend_that_does_not_exist_is_told_before_anything_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opinfo, "lacks", lambda: "expecttest")
    monkeypatch.setattr(run, "checks", lambda *given: pytest.fail("something was run"))
    done = CliRunner().invoke(conformance, ["--backend", "fusewright_null", "--backend", "nosuch"])
    assert isinstance(done.exception, UnknownBackendError) and "valid names" in str(done.exception)


def test_what_needs_no_device_needs_no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opinfo, "lacks", lambda: "expecttest")
    monkeypatch.setattr(Settings, "device", lambda self: Unavailable("none here", "buy one"))
    found = levels.jobs(list(levels.LEVELS), Settings("fusewright_null"))
    assert {j["part"] for j in found} == {"contract"}
    assert levels.jobs(["C2"], Settings("fusewright_null")) == []


def test_every_installed_backend_has_jobs_of_every_level() -> None:
    for name in registry.plugins():
        settings = Settings(name, simulate=not registry.info(name).available, opinfo=False, part=50)
        parts = {j["part"] for j in levels.jobs(list(levels.LEVELS), settings)}
        there = not isinstance(settings.device(), Unavailable)  # an x86 CPU without VNNI has no x86_int8, simulated neither
        assert parts == (set(levels.PARTS) - {"opinfo"} if there else {"contract"}), name


def test_a_process_of_its_own_has_jobs_of_every_row() -> None:
    """This includes rows of operators that torch defines only on request."""
    script = (
        "from fusewright import ops; from fusewright.conformance.ops import opset; "
        "from fusewright.conformance.settings import Settings; "
        "print(len(ops.ROWS) - len(opset.names(Settings('fusewright_null'))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 0


def test_a_run_tells_how_many_jobs_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "perform", lambda job, settings: [Check("C0", job["name"], Verdict.PASSED)] * 2)
    done: list[int] = []
    jobs = [{"part": "contract", "name": str(k)} for k in range(3)]
    assert len(list(run.checks(Settings("fusewright_null"), jobs, 0, 300, done.append))) == 6
    assert done == [1, 2, 3]


def test_progress_is_for_a_terminal_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command._progress(3, 9, 0.0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    command._progress(3, 9, 0.0)
    assert "3 of 9 jobs" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "words"), [("3/2", "parts go from 1"), ("half", "write k/n")])
def test_a_shard_that_makes_no_sense_is_refused(text: str, words: str) -> None:
    assert words in CliRunner().invoke(conformance, ["--shard", text]).output


def test_shards_are_a_partition() -> None:
    jobs = [{"part": "opset", "name": str(k)} for k in range(10)]
    parts = [run.shard(jobs, f"{k}/3") for k in (1, 2, 3)]
    assert sorted(j["name"] for p in parts for j in p) == sorted(j["name"] for j in jobs)


@pytest.mark.parametrize("text", ["C5", "C3..C9", "all"])
def test_a_level_that_does_not_exist_is_refused(text: str) -> None:
    assert "no level" in CliRunner().invoke(conformance, ["--level", text]).output


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (opinfo.Outcome("a", "float32", checks=2, lowered=3), "LOWERED_OK"),
        (opinfo.Outcome("a", "float32", checks=2, lowered=3, carried=1), "FALLBACK_OK"),
        (opinfo.Outcome("a", "float32", checks=2, problems=["sample 0: value: 0 error 1"]), "WRONG"),
        (opinfo.Outcome("a", "float32", checks=2, problems=["sample 0: raises: KeyError"]), "ERROR"),
        (opinfo.Outcome("a", "float32", checks=2, problems=["bug: wrong dtype"]), "ERROR"),
        (opinfo.Outcome("a", "float32", checks=2, shared=["sample 0: value: 0 error 1"]), "SKIPPED"),
        (opinfo.Outcome("a", "float32"), "SKIPPED"),
    ],
)
def test_verdicts_of_entries(found: opinfo.Outcome, verdict: str) -> None:
    assert entries.verdict(found)[0] == verdict


def test_the_pytest_plugin_runs_each_job_as_a_test(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("from fusewright.conformance.suite import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfusewright_backends = fusewright_null\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "fusewright.conformance.plugin", "--fusewright-level", "C3",
         "--fusewright-part", "9", str(tmp_path)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_conformance[fusewright_null-C3-declines] PASSED" in done.stdout
