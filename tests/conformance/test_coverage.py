"""The ratchet: what the committed files say is lowered, a sample of each backend lowers still."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import support
from fusewright import ops
from fusewright.conformance.coverage import Coverage
from fusewright.conformance.jobs import levels
from fusewright.conformance.settings import Settings
from fusewright.conformance.verdicts import Check, Verdict, summary
from fusewright.interface import Unavailable
from fusewright.ops import Kind

FILES = support.read()
DECIDED = (Kind.POINTWISE, Kind.REDUCTION, Kind.VIEW)
"""Kinds that are lowered by rules alone; a product may be left to eager where that measures faster."""
STEP = 61
"""Every how manieth row; the whole is `fusewright conformance --level C2 --no-opinfo --coverage FILE`."""


@pytest.mark.parametrize("backend", FILES)
def test_no_committed_lowering_is_lost(backend: str) -> None:
    committed = FILES[backend]
    settings = Settings(backend, committed.simulated, dtypes=("float32",))
    device = settings.device()
    if isinstance(device, Unavailable):
        pytest.skip(f"{backend}: {device.reason}")
    if device.arch != committed.device:
        pytest.skip(f"the file is of {committed.device}, this is {device.arch}: what is lowered there may not be here")
    rows = sorted(r for r in committed.rows if r in ops.OPS and ops.OPS[r].kind in DECIDED)[
        list(FILES).index(backend) :: STEP
    ]
    found = [c for row in rows for c in levels.perform({"part": "opset", "name": row}, settings)]
    assert not [c for c in found if c.verdict.bad]
    assert committed.lost(found) == []
    assert summary(found).lowered.of > 0


def checks(*found: tuple[str, str]) -> list[Check]:
    return [Check("C2", name, Verdict(verdict)) for name, verdict in found]


ONE = checks(
    ("add float32 static 0", "LOWERED_OK"),
    ("add float32 static 1", "LOWERED_OK"),
    ("add float32 not finite 0", "LOWERED_OK"),
)


def test_a_variant_is_lowered_when_all_its_samples_are(tmp_path: Path) -> None:
    some = Coverage.of("demo", "any", False, [*ONE[:2], *checks(("add float32 not finite 0", "FALLBACK_OK"))])
    assert some.rows == {"add": {"float32": ["static"]}}
    assert (some.correct, some.lowered) == ((3, 3), (2, 3))
    some.write(tmp_path / "coverage.json")
    assert Coverage.read(tmp_path / "coverage.json") == some


def test_a_lost_lowering_is_named_and_what_was_not_tried_is_not() -> None:
    committed = Coverage.of("demo", "any", False, ONE)
    assert committed.lost(ONE) == [] == committed.lost([])
    assert committed.lost(checks(("add float32 static 1", "DECLINED_LATE"))) == ["add float32 static"]
    assert committed.lost(checks(("add float32 not finite 0", "WRONG"))) == ["add float32 not finite"]


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "coverage.json").write_text("{}")
    with pytest.raises(ValueError, match="another version; renew it"):
        Coverage.read(tmp_path / "coverage.json")
