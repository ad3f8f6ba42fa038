"""The kit catches each of these deliberately broken backends; the correct one passes the same checks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from fusewright import registry
from fusewright.cli.conformance import conformance
from fusewright.conformance.jobs import levels
from fusewright.conformance.settings import Settings
from fusewright.conformance.verdicts import Check, Verdict

pytestmark = [pytest.mark.faulty, pytest.mark.usefixtures("fresh_dynamo", "mutants")]

HERE = Path(__file__).parent
NAMES = (
    "wrong_stride wrong_dtype swapped_operands missing_mask off_by_one stale_constant aliasing_output dropped_nan wrong_rounding "
    "lost_sign lost_digits overflow integers_as_floats reused_memory fingerprint_of_one_process crashing"
).split()


@pytest.fixture
def mutants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the package of mutants for this process and its children."""
    info = tmp_path / "fusewright_mutants-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fusewright-mutants\nVersion: 1\n")
    classes = ["".join(w.title() for w in n.split("_")).replace("Nan", "NaN") for n in NAMES]
    points = "\n".join(f"{n} = fusewright_mutants:{c}" for n, c in zip(NAMES, classes, strict=True))
    (info / "entry_points.txt").write_text(f"[fusewright.backends]\n{points}\n")
    for path in (str(HERE), str(tmp_path)):
        monkeypatch.syspath_prepend(path)
    kept = filter(None, [str(HERE), str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(kept))
    registry.refresh()
    yield
    registry.refresh()


def checks(backend: str, part: str, name: str, dtype: str = "float32") -> list[Check]:
    settings = Settings(backend, dtypes=(dtype,))
    assert name in levels.PARTS[part].names(settings), "a whole run has this job"
    return levels.perform({"part": part, "name": name}, settings)


CAUGHT = {
    "wrong_stride": ("add", Verdict.ERROR, "strides"),
    "wrong_dtype": ("mean", Verdict.ERROR, "dtype"),
    "swapped_operands": ("atan2", Verdict.WRONG, "off by"),
    "missing_mask": ("exp", Verdict.WRONG, "off by"),
    "off_by_one": ("cumsum", Verdict.WRONG, "off by"),
    "stale_constant": ("mm", Verdict.WRONG, "second call"),
    "aliasing_output": ("clone", Verdict.ERROR, "shares memory with an input"),
    "dropped_nan": ("maximum", Verdict.WRONG, "differ from eager's"),
    "wrong_rounding": ("cast", Verdict.WRONG, "differ from eager's"),
    "lost_sign": ("neg", Verdict.WRONG, "other sign"),
    "lost_digits": ("expm1", Verdict.WRONG, "of a value"),
    "overflow": ("softmax", Verdict.WRONG, "NaN or Inf"),
    "integers_as_floats": ("mul", Verdict.WRONG, "differ from eager's"),
    "reused_memory": ("exp", Verdict.WRONG, "changed an earlier result"),
}
"""Mutation -> the row that reveals it, and how."""


@pytest.mark.parametrize("mutation", CAUGHT)
def test_a_mutation_is_caught(mutation: str) -> None:
    row, verdict, words = CAUGHT[mutation]
    found = checks(mutation, "opset", row, "int64" if mutation == "integers_as_floats" else "float32")
    assert any(c.verdict is verdict and words in c.detail for c in found), found


@pytest.mark.parametrize("row", sorted({row for row, _, _ in CAUGHT.values()}))
def test_the_right_one_passes(row: str) -> None:
    found = checks("fusewright_interp", "opset", row)
    assert {c.verdict for c in found} <= {Verdict.LOWERED_OK, Verdict.FALLBACK_OK}, [c for c in found if c.verdict.bad]
    assert sum(c.verdict is Verdict.LOWERED_OK for c in found) > 5


@pytest.mark.parametrize(
    ("backend", "verdict"), [("fingerprint_of_one_process", "ERROR"), ("fusewright_interp", "PASSED")]
)
def test_a_fingerprint_of_one_process_is_caught(backend: str, verdict: str) -> None:
    (found,) = checks(backend, "contract", "fingerprint is equal in two processes")
    assert found.verdict == verdict, found


def test_a_crash_costs_one_row_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [{"part": "opset", "name": row} for row in ("cos", "exp", "sin")]
    monkeypatch.setattr(levels, "jobs", lambda wanted, settings: jobs)
    out = tmp_path / "out.json"
    done = CliRunner().invoke(conformance, ["--backend", "crashing", "--level", "C2", "--json", str(out)])
    assert done.exit_code == 1, done.output
    found = json.loads(out.read_text())["backends"]["crashing"]
    assert [c["name"] for c in found["checks"] if c["verdict"] == "CRASHED"] == ["exp"]
    correct, lowered = found["correct"], found["lowered"]
    assert correct["of"] == correct["total"] - 1 > 20 and lowered["of"] > 10
