"""Jobs in child processes end when the process that requested them ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from fusewright.conformance.jobs import warm
from fusewright.conformance.jobs.children import Job, Pool, finishes
from tests.conformance.answers import DEADLY

MODULE = "tests.conformance.answers"


@pytest.fixture(autouse=True, params=["forked", "new"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Children are forked from a warm process, or new ones as on systems without fork."""
    if request.param == "forked" and not warm.possible():
        pytest.skip("children are forked on Linux without an accelerator")
    monkeypatch.setattr(warm, "possible", lambda: request.param == "forked")
    return str(request.param)


def pool(**settings: Any) -> Pool:
    return Pool(MODULE, ["given"], lambda job, why: {"n": job["n"], "why": why}, {"OF_THE_POOL": "1"}, **settings)


def jobs(folder: Path, *sleeps: float) -> list[Job]:
    return [{"n": n, "sleeps": s, "folder": str(folder)} for n, s in enumerate(sleeps)]


def test_every_job_has_its_result(tmp_path: Path) -> None:
    found = list(pool(jobs=2, group=2).run(jobs(tmp_path, 0, 0, 0, 0, 0)))
    assert sorted(r["n"] for r in found) == [0, 1, 2, 3, 4]


def test_a_job_that_takes_its_child_down_costs_itself_alone(tmp_path: Path) -> None:
    found = {r["n"]: r.get("why", "") for r in pool().run(jobs(tmp_path, 0, DEADLY, 0))}
    assert found == {0: "", 1: "crash: the process ended with 3", 2: ""}


@pytest.mark.parametrize("group", [1, 25])
def test_an_interrupt_ends_the_children_and_begins_no_more(tmp_path: Path, group: int) -> None:
    results = pool(group=group).run(jobs(tmp_path, 0, 600, 600, 600))
    assert next(results)["n"] == 0
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert time.monotonic() - start < 300
    assert not Path(tmp_path, "2").exists()


def test_a_child_has_the_environment_and_the_arguments_of_its_pool(
    tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what changed since the warm process started; from that one it has nothing but its imports."""
    monkeypatch.setenv("OF_THIS_TEST", start)
    job = {**jobs(tmp_path, 0)[0], "environment": ["OF_THIS_TEST", "OF_THE_POOL", "WARMED_UP_BY"]}
    (found,) = pool().run([job])
    assert found == {"n": 0, "arguments": ["given"], "OF_THIS_TEST": start, "OF_THE_POOL": "1", "WARMED_UP_BY": None}


def test_a_module_that_cannot_be_imported_is_a_crash_and_the_next_one_runs(tmp_path: Path) -> None:
    missing = Pool("tests.conformance.missing", [], lambda job, why: {"why": why}, {})
    assert list(missing.run(jobs(tmp_path, 0))) == [{"why": "crash: the process ended with 1"}]
    assert [r["n"] for r in pool().run(jobs(tmp_path, 0))] == [0]


def test_whether_a_job_finishes_is_the_answer_of_a_child(tmp_path: Path) -> None:
    fine, deadly, slow = jobs(tmp_path, 0, DEADLY, 600)
    assert finishes(MODULE, [], {}, fine, 300)
    assert not finishes(MODULE, [], {}, deadly, 300)
    assert not finishes(MODULE, [], {}, slow, 1)
