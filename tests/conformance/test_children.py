"""Jobs in child processes end when the process that requested them ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fusewright.conformance.jobs.children import Job, Pool

ANSWERS = """
import json, pathlib, sys, time
for job in json.loads(sys.stdin.read()):
    pathlib.Path(job["folder"], str(job["n"])).touch()
    time.sleep(job["sleeps"]) if job["sleeps"] >= 0 else sys.exit(3)
    print(json.dumps({"n": job["n"]}), flush=True)
"""

DEADLY = -1.0


def pool(**settings: Any) -> Pool:
    return Pool([sys.executable, "-c", ANSWERS], lambda job, why: {"n": job["n"], "why": why}, {}, **settings)


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
    assert next(results) == {"n": 0}
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert time.monotonic() - start < 300
    assert not Path(tmp_path, "2").exists()
