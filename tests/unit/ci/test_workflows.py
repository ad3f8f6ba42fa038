"""The hosting service's workflows run the jobs of the matrix, with scripts that anybody can run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ci import jobs, workflows
from ci.release import wheels
from fusewright import config, registry

ROOT = Path(__file__).parents[3]
TEXTS = workflows.workflows()


def test_the_workflows_are_what_the_matrix_makes_of_them() -> None:
    assert not workflows.stale(), "run: python -m ci.workflows"


@pytest.mark.parametrize("folder", ["ci", ".ci", ".github"])
def test_variables_with_the_projects_prefix_are_read_by_a_package(folder: str) -> None:
    """`doctor` warns of unknown variables with the prefix, so tools of `ci` use other names."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(re.findall(r"FUSEWRIGHT_\w+", path.read_text(errors="ignore")))
    assert found <= {*config.ENV, *registry.environment()}


def test_a_file_that_was_edited_or_left_over_is_stale(tmp_path: Path) -> None:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "check.yml").write_text("jobs:\n")
    (tmp_path / "old.yml").write_text("jobs:\n")
    assert workflows.stale(tmp_path) == ["check.yml", "old.yml"]


@pytest.mark.parametrize("name", TEXTS)
def test_every_step_calls_a_script_of_ci(name: str) -> None:
    for command in re.findall(r"^\s*- run: (.*)$", TEXTS[name], re.MULTILINE):
        found = re.match(r"(ci/[\w./]+)|python -m (ci[\w.]+)", command)
        assert found, command
        assert (ROOT / (found[1] or found[2].replace(".", "/") + ".py")).is_file(), command


@pytest.mark.parametrize("name", ["check.yml", "vendors.yml", "nightly.yml"])
def test_calls_give_what_the_called_workflow_takes(name: str) -> None:
    inputs = set(re.findall(r"^      (\w+):$", TEXTS["job.yml"].split("permissions:")[0], re.MULTILINE))
    calls = TEXTS[name].split("uses: ./.github/workflows/job.yml\n    with:\n")[1:]
    assert inputs == {"job", "torch", "python", "runs_on", "minutes"} and calls
    for call in calls:
        assert set(re.findall(r"^      (\w+): ", call.split("\n  ", 6)[0] + call, re.MULTILINE)) >= inputs


def test_every_job_of_the_matrix_is_run_with_every_torch_and_python() -> None:
    rows, versions = jobs.read()
    for name in ("vendors.yml", "nightly.yml"):
        assert set(re.findall(r"^      job: (\w+)$", TEXTS[name], re.MULTILINE)) == {j.name for j in rows}
    assert TEXTS["vendors.yml"].count(f"torch: {json.dumps(versions['versions'])}") == len(rows)
    assert TEXTS["vendors.yml"].count(f"python: {json.dumps(versions['python'])}") == len(rows)
    assert TEXTS["nightly.yml"].count('torch: ["newest"]') == len(rows)


def test_hardware_of_ones_own_is_waited_for_only_where_somebody_has_it() -> None:
    rows, _ = jobs.read()
    for job in rows:
        part = TEXTS["vendors.yml"].split(f"\n  {job.name}:\n")[1].split("\n    uses:")[0]
        assert ("vars.HARDWARE" in part) == job.own_hardware
        assert job.kind == "real" or not job.own_hardware
        assert (f"      job: {job.name}\n" in TEXTS["check.yml"]) == (not job.own_hardware)


def test_every_package_is_released_by_trusted_publishing() -> None:
    text = TEXTS["release.yml"]
    built = ",".join(re.findall(r"ci/release\.sh dist (\S+)", text)).split(",")
    assert sorted(built) == sorted(p.name for p in wheels.packages())
    publish = text.split("\n  publish:\n")[1]
    assert "id-token: write" in publish and "id-token" not in text.split("\n  publish:\n")[0]
    assert "password" not in text and "secrets." not in text


def test_a_required_job_fails_where_its_hardware_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jobs.FACTS, "hip", lambda: False)
    (job,) = [j for j in jobs.read()[0] if j.name == "rocm_triton"]
    assert jobs.run(job) and not jobs.run(job, require=True)


def test_a_job_leaves_a_record(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text('echo "$PYTEST_ADDOPTS" >"$OUT/said"\nexit 3\n')
    job = jobs.Job("mine", "mine", "simulated", "any", str(script), ("ubuntu-latest",), (), 5)
    assert not jobs.run(job, results=tmp_path / "results")
    record = json.loads((tmp_path / "results/mine.json").read_text())
    assert record["code"] == 3 and record["job"]["name"] == "mine"
    assert f"--junitxml={tmp_path / 'results/mine.xml'}" in (tmp_path / "results/said").read_text()
