"""What a child of the kit does: `perform(SETTINGS, JOBS)` yields the checks of each job."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fusewright.conformance.jobs import levels
from fusewright.conformance.settings import Settings


def perform(settings: Mapping[str, Any], jobs: Sequence[dict[str, str]]) -> Iterator[dict[str, Any]]:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)  # children run in parallel, and their computations are small
    given = Settings(**settings)
    for job in jobs:
        yield {"job": job, "checks": [c.as_json() for c in levels.perform(job, given)]}
