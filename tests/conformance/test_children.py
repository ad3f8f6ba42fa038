"""Jobs in child processes end when the process that requested them ends."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import Any

import pytest

from fusewright.conformance.jobs import children
from fusewright.conformance.jobs.children import Job, Pool, finishes

MODULE = "tests.conformance.answers"
FORKED = children.start_method() == "forkserver"


@pytest.fixture(autouse=True, params=["forkserver", "spawn"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Children are forked from a process that has imported what they need, or new ones."""
    if request.param == "forkserver" and not FORKED:
        pytest.skip("children are forked on Linux without an accelerator only; runs there")
    monkeypatch.setattr(children, "start_method", lambda: request.param)
    return str(request.param)


def pool(**settings: Any) -> Pool:
    return Pool(MODULE, {"given": 1}, lambda job, why: {"n": job["n"], "why": why}, {"OF_THE_POOL": "1"}, **settings)


def jobs(folder: Path, *does: float | str) -> list[Job]:
    """A number is for how long a job sleeps."""
    return [{"n": n, "does": what, "folder": str(folder)} for n, what in enumerate(does)]


def test_every_job_has_its_result(tmp_path: Path) -> None:
    found = list(pool(jobs=2, group=2).run(jobs(tmp_path, 0, 0, 0, 0, 0)))
    assert sorted(r["n"] for r in found) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("does", "code"), [("exit", 3), ("segfault", -11)])
def test_a_job_that_takes_its_child_down_costs_itself_alone(tmp_path: Path, does: str, code: int) -> None:
    found = {r["n"]: r.get("why", "") for r in pool().run(jobs(tmp_path, 0, does, 0))}
    assert found == {0: "", 1: f"crash: the process ended with {code}", 2: ""}


def test_a_job_that_takes_too_long_costs_itself_alone(tmp_path: Path) -> None:
    limit = 3
    found = {r["n"]: r.get("why", "") for r in pool(limit=limit).run(jobs(tmp_path, 0, 600, 0))}
    assert found == {0: "", 1: f"timeout: longer than {limit} s", 2: ""}


@pytest.mark.parametrize("group", [1, 25])
def test_an_interrupt_ends_the_children_and_begins_no_more(tmp_path: Path, group: int) -> None:
    results = pool(group=group).run(jobs(tmp_path, 0, 600, 600, 600))
    assert next(results)["n"] == 0
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert time.monotonic() - start < 300
    assert not Path(tmp_path, "2").exists()


@pytest.mark.parametrize("then", [0, "segfault"])
def test_what_a_child_has_started_ends_with_it(tmp_path: Path, then: float | str) -> None:
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    assert len(list(pool().run(jobs(tmp_path, "start a process", then)))) == 2
    with open(reader):
        assert select.select([reader], [], [], 30)[0], "somebody still holds the other end"


def test_a_child_has_the_environment_and_the_settings_of_its_pool(
    tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what changed since the process started that children are forked from; they have only its imports."""
    monkeypatch.setenv("OF_THIS_TEST", start)
    job = {**jobs(tmp_path, 0)[0], "environment": ["OF_THIS_TEST", "OF_THE_POOL"]}
    (found,) = pool().run([job])
    assert found == {"n": 0, "given": 1, "OF_THIS_TEST": start, "OF_THE_POOL": "1", "imported": start == "forkserver"}


def test_a_module_that_cannot_be_imported_is_a_crash_and_the_next_one_runs(tmp_path: Path) -> None:
    missing = Pool("tests.conformance.missing", {}, lambda job, why: {"why": why}, {})
    assert list(missing.run(jobs(tmp_path, 0))) == [{"why": "crash: the process ended with 1"}]
    assert [r["n"] for r in pool().run(jobs(tmp_path, 0))] == [0]


def test_whether_a_job_finishes_is_the_answer_of_a_child(tmp_path: Path) -> None:
    fine, deadly, slow = jobs(tmp_path, 0, "exit", 600)
    assert finishes(MODULE, {}, {}, fine, 300)
    assert not finishes(MODULE, {}, {}, deadly, 300)
    assert not finishes(MODULE, {}, {}, slow, 1)
