"""The ratchet: a sample of each backend's lowerings in the committed files must still be lowered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ci.docs import support
from fusewright import ops
from fusewright.cli.conformance import conformance
from fusewright.conformance.coverage import OPINFO, ROWS, Coverage, Level
from fusewright.conformance.jobs import levels
from fusewright.conformance.record import Record, merged, write
from fusewright.conformance.settings import Settings
from fusewright.conformance.verdicts import Check, Verdict, summary
from fusewright.interface import Unavailable
from fusewright.ops import Kind

FILES = support.read()
DECIDED = (Kind.POINTWISE, Kind.REDUCTION, Kind.VIEW)
"""Kinds whose lowering depends only on rules; products may be left to eager where that measures faster."""
STEP = 61
"""Test every n-th row; `fusewright conformance --level C2 --no-opinfo --coverage FILE` tests all."""


@pytest.mark.parametrize("name", FILES)
def test_no_committed_lowering_is_lost(name: str) -> None:
    committed = FILES[name]
    backend = committed.backend
    settings = Settings(backend, committed.simulated, dtypes=("float32",))
    device = settings.device()
    if isinstance(device, Unavailable):
        pytest.skip(f"{backend}: {device.reason}")
    if device.arch != committed.device:
        pytest.skip(f"the file is of {committed.device}, this is {device.arch}: what is lowered there may not be here")
    rows = sorted(r for r in committed.rows if r in ops.OPS and ops.OPS[r].kind in DECIDED)[
        list(FILES).index(name) :: STEP
    ]
    found = [c for row in rows for c in levels.perform({"part": "opset", "name": row}, settings)]
    assert not [c for c in found if c.verdict.bad]
    assert committed.lost(found) == []
    assert summary(found).lowered.of > 0


def checks(*found: tuple[str, str]) -> list[Check]:
    return [Check("C2", name, Verdict(verdict)) for name, verdict in found]


def record(*found: Check, **given: Any) -> Record:
    return Record(**{"backend": "demo", "device": "cpu any", "simulated": False, "available": True, "torch": ("2.13.0",),
                     "checks": found, **given})  # fmt: skip


ONE = checks(
    ("add float32 static 0", "LOWERED_OK"),
    ("add float32 static 1", "LOWERED_OK"),
    ("add float32 not finite 0", "LOWERED_OK"),
)


def test_a_variant_is_lowered_when_all_its_samples_are(tmp_path: Path) -> None:
    some = Coverage.of(record(*ONE[:2], *checks(("add float32 not finite 0", "FALLBACK_OK"))))
    assert some.rows == {"add": {"float32": ["static"]}}
    assert (some.levels[ROWS].correct, some.levels[ROWS].lowered) == ((3, 3), (2, 3))
    some.write(tmp_path / "coverage.json")
    assert Coverage.read(tmp_path / "coverage.json") == some


def test_the_parts_of_a_run_are_counted_apart() -> None:
    skipped = Check("C2", "OpInfo sin bool", Verdict.SKIPPED, "aot_eager too: sample 0: value")
    found = checks(("OpInfo sin float32", "LOWERED_OK"), ("OpInfo cos float32", "CRASHED"), ("exp", "CRASHED"))
    levels = Coverage.of(record(*ONE, *found, skipped, Check("C0", "loads", Verdict.PASSED))).levels
    assert levels[OPINFO] == Level({"bool": 1, "float32": 2}, (1, 2), (1, 2), {"aot_eager too": 1})
    assert levels[ROWS].correct == (3, 4) and levels[ROWS].dtypes == {"float32": 3}
    assert levels["C0"] == Level({}, (1, 1), (0, 0), {})


def test_what_a_run_does_not_have_stays_as_it_stood() -> None:
    before = Coverage.of(
        record(*ONE, *checks(("OpInfo sin float32", "LOWERED_OK")), torch=("2.12.0",), entries={"float32": 3})
    )
    contract = Coverage.of(record(Check("C0", "loads", Verdict.PASSED)))
    found = contract.over(before)
    assert set(found.levels) == {"C0", ROWS, OPINFO} and found.torch == ("2.12.0", "2.13.0")
    assert (found.rows, found.tried, found.entries) == (before.rows, before.tried, before.entries)
    again = Coverage.of(record(*ONE[:1], torch=("2.14.0",)))
    assert again.over(found).rows == again.rows and set(again.over(found).levels) == set(found.levels)
    assert again.over(Coverage.of(record(*ONE))) == again, "nothing is kept: no release of torch either"
    elsewhere = Coverage.of(record(*ONE, device="cpu other"))
    assert contract.over(elsewhere) == contract


def test_a_row_that_eager_does_not_run_says_why() -> None:
    nothing = Check("C2", "rms_norm_backward", Verdict.SKIPPED, "eager runs none of its calls in float32")
    found = Coverage.of(record(*ONE, nothing))
    assert (found.tried, found.untried) == (1, {nothing.name: nothing.detail})


def test_files_of_shards_and_machines_are_one_record(tmp_path: Path) -> None:
    mended = checks(("add float32 static 0", "WRONG"))
    parts = [record(*mended, ONE[1]), record(ONE[2], torch=("2.11.0",)), record(ONE[0], entries={"bool": 9})]
    for k, part in enumerate(parts):
        write(tmp_path / f"{k}.json", [part])
    (found,) = merged(tmp_path / f"{k}.json" for k in range(3)).values()
    assert found.torch == ("2.11.0", "2.13.0") and found.entries == {"bool": 9}
    assert sorted(c.name for c in found.checks if c.verdict is Verdict.LOWERED_OK) == sorted(c.name for c in ONE)
    options = [f"--merge={tmp_path / f'{k}.json'}" for k in range(3)]
    coverage = tmp_path / "coverage.json"
    done = CliRunner().invoke(conformance, [*options, f"--coverage={coverage}", "--renew"])
    assert done.exit_code == 0 and "correct 3 of 3" in done.output, done.output
    assert Coverage.read(coverage) == Coverage.of(found)
    done = CliRunner().invoke(conformance, [options[0], f"--coverage={coverage}"])
    assert done.exit_code == 1 and "no longer lowered: add float32 static" in done.output, done.output


def test_a_device_of_two_words_keeps_both() -> None:
    assert Coverage.of(record(*ONE, device="mps M3 Pro")).device == "M3 Pro"


def test_a_row_that_crashed_counts_no_more_when_it_was_done_again() -> None:
    before = record(*checks(("add", "CRASHED"), ("exp", "CRASHED")))
    assert [c.name for c in before.with_more(record(*ONE)).checks] == ["exp", *(c.name for c in ONE)]


def test_a_row_that_has_no_call_in_the_dtypes_of_one_file_has_those_of_the_other() -> None:
    floats, integers = record(*ONE), record(*checks(("add", "SKIPPED"), ("erf", "SKIPPED")))
    for both in (floats.with_more(integers), integers.with_more(floats)):
        assert {c.name for c in both.checks} == {"erf", *(c.name for c in ONE)}
        assert list(Coverage.of(both).untried) == ["erf"]


def test_files_of_two_devices_are_not_merged(tmp_path: Path) -> None:
    write(tmp_path / "a.json", [record(*ONE)])
    write(tmp_path / "b.json", [record(*ONE, simulated=True)])
    done = CliRunner().invoke(conformance, [f"--merge={tmp_path / n}.json" for n in "ab"])
    assert done.exit_code == 2 and "on cpu any and on simulated cpu any" in " ".join(done.output.split()), done.output


def test_a_lost_lowering_is_named_and_what_was_not_tried_is_not() -> None:
    committed = Coverage.of(record(*ONE))
    assert committed.lost(ONE) == [] == committed.lost([])
    assert committed.lost(checks(("add float32 static 1", "DECLINED_LATE"))) == ["add float32 static"]
    assert committed.lost(checks(("add float32 not finite 0", "WRONG"))) == ["add float32 not finite"]


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "coverage.json").write_text("{}")
    with pytest.raises(ValueError, match="another version; renew it"):
        Coverage.read(tmp_path / "coverage.json")
    with pytest.raises(ValueError, match="run it again"):
        merged([tmp_path / "coverage.json"])
