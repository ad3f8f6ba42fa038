"""C2, second part: torch's own OpInfo database, forward and gradients (`fusewright.conformance.ops.opinfo` judges an entry)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fusewright.conformance.ops import opinfo
from fusewright.conformance.settings import Settings
from fusewright.conformance.verdicts import Check, Verdict
from fusewright.errors import FusewrightError

LEVEL = "C2"
PREFIX = "OpInfo "
"""Prefix of check names, to distinguish them from opset rows."""


def names(settings: Settings) -> list[str]:
    """ "entry dtype", dtype by dtype; none where the settings leave the database out."""
    if not settings.opinfo:
        return []
    if missing := opinfo.lacks():
        raise FusewrightError(
            f"torch's OpInfo database needs {missing}: pip install 'fusewright[conformance]', or give --no-opinfo"
        )
    found = [
        f"{entry} {dtype}"
        for dtype in settings.dtypes
        for entry in opinfo.entries(getattr(torch, dtype), settings.tensors_on())
    ]
    return found[:: settings.part]


def check(name: str, settings: Settings) -> Iterator[Check]:
    """One entry at one dtype."""
    entry, _, dtype = name.rpartition(" ")
    by = opinfo.Compiler(settings.backend, device=settings.tensors_on(), simulate=settings.simulate)
    found = opinfo.check(entry, getattr(torch, dtype), by, settings.samples, gradients=True)
    yield Check(LEVEL, PREFIX + name, *verdict(found))


def verdict(found: opinfo.Outcome) -> tuple[Verdict, str]:
    """The verdict of the worst finding. An entry counts as lowered if its forward and gradients are all lowered."""
    if found.problems:
        raised = all(": raises:" in p or p.startswith("bug: ") for p in found.problems)
        return Verdict.ERROR if raised else Verdict.WRONG, "; ".join(found.problems)[:300]
    if found.skipped or not found.checks:
        return Verdict.SKIPPED, found.skipped or "eager runs none of its samples"
    if found.shared:
        return Verdict.SKIPPED, f"aot_eager too: {found.shared[0]}"[:300]
    others = found.eager + found.carried
    if found.lowered and not others:
        return Verdict.LOWERED_OK, ""
    return Verdict.FALLBACK_OK, f"{found.lowered} of {found.lowered + others} ops lowered"
