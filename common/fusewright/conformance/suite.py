"""The kit's only test, for `fusewright.conformance.plugin`: `from fusewright.conformance.suite import *` in a test file."""

from __future__ import annotations

from typing import Any

import pytest

from fusewright.conformance.jobs import levels
from fusewright.conformance.verdicts import Verdict

__all__ = ["test_conformance"]


def test_conformance(conformance_job: Any) -> None:
    """Run one job of one backend, in this process."""
    settings, job = conformance_job
    checks = levels.perform(job, settings)
    bad = [f"{c.level} {c.name}: {c.verdict} {c.detail}" for c in checks if c.verdict.bad]
    assert not bad, "\n".join(bad)
    if checks and all(c.verdict is Verdict.SKIPPED for c in checks):
        pytest.skip(checks[0].detail)
