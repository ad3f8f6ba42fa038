"""A child of the kit: `main([SETTINGS])` answers each of a JSON list of jobs with a line."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Sequence


def warm_up() -> None:
    """Import what every child needs."""
    from fusewright.conformance.jobs import levels

    assert levels


def main(argv: Sequence[str]) -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from fusewright.conformance.jobs import levels
    from fusewright.conformance.settings import Settings

    settings = Settings.from_json(json.loads(argv[0]))
    out, sys.stdout = sys.stdout, sys.stderr  # checked code may print
    for job in json.loads(sys.stdin.read()):
        checks = levels.perform(job, settings)
        print(json.dumps({"job": job, "checks": [c.as_json() for c in checks]}), file=out, flush=True)
    return 0
