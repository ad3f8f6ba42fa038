"""A whole run of the kit: jobs, children, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from fusewright.conformance.jobs import levels, worker
from fusewright.conformance.jobs.children import Job, Pool, Result
from fusewright.conformance.settings import Settings
from fusewright.conformance.verdicts import Check

THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""For what children load themselves; `worker` sets torch's own."""


def shard(jobs: Sequence[dict[str, str]], part: str) -> list[dict[str, str]]:
    """The k-th of n equal parts, "k/n" with k from 1. ValueError for anything else."""
    try:
        k, n = map(int, part.split("/"))
    except ValueError:
        raise ValueError(f"{part!r} is no shard; write k/n, such as 1/4") from None
    if not 1 <= k <= n:
        raise ValueError(f"shard {part}: parts go from 1 to {n}")
    return list(jobs[k - 1 :: n])


def checks(
    settings: Settings, jobs: Sequence[dict[str, str]], processes: int, limit: float,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[Check]:  # fmt: skip
    """Yield the checks of jobs as they arrive. `processes` 0 runs them in this process, where a crash ends the run. `progress`
    receives the number of finished jobs."""
    if processes == 0:
        for done, job in enumerate(jobs, 1):
            yield from levels.perform(job, settings)
            progress(done)
        return
    pool = Pool(worker.__name__, asdict(settings), _ended, THREADS, jobs=processes, limit=limit)
    for done, result in enumerate(pool.run(jobs), 1):
        yield from map(Check.from_json, result["checks"])
        progress(done)


def _ended(job: Job, why: str) -> Result:
    return {"job": dict(job), "checks": [levels.crashed(job, why).as_json()]}
