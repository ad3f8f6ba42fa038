"""`fusewright doctor`: its verdicts, and how it handles a backend that crashes its process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fusewright import registry
from fusewright.cli import checks, doctor
from fusewright.cli.app import app
from fusewright.cli.checks import Report, Row
from fusewright.interface import Device
from fusewright.plan import native

FACTS: dict[str, Any] = {
    "cache": {"path": "cache", "bytes": 0, "writable": True},
    "platform": "linux x86_64", "libc": "", "unknown_env": {}, "cores": 2, "threads": 2, "quota": None,
}  # fmt: skip


def _row(name: str, **values: Any) -> Row:
    common = {"dist": "d", "version": "1", "reference": False, "loads": True, "simulated": False, "lowers": 2}
    return Row(name=name, **{**common, "device": "cpu x", **values})


CHILD = """
import json, os, signal, sys
for name in sys.argv[1:]:
    print(json.dumps({"name": name, "event": "start"}), flush=True)
    if name == "killer":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "liar":
        result = {"ok": False, "error": "wrong result"}
    else:
        result = {"ok": True, "ms": 1.0, "first_ms": 2.0, "error": ""}
    print(json.dumps({"name": name, "event": "end", **result}), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL; any POSIX system runs this")
def test_a_backend_that_dies_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(checks, "SMOKE", (sys.executable, str(script)))
    rows = [_row("first"), _row("killer"), _row("liar"), _row("last")]
    checks.run_smoke(rows)
    assert [r.runs for r in rows] == [True, False, False, True]
    assert "killed by signal 9" in rows[1].reason and rows[1].fix
    assert rows[2].reason == "wrong result" and rows[2].broken


def test_a_child_that_never_starts_is_reported_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SMOKE", (sys.executable, "-c", "raise SystemExit('no torch')"))
    rows = [_row("a"), _row("b")]
    checks.run_smoke(rows)
    assert all(r.runs is False and "no torch" in r.reason for r in rows)


@pytest.mark.parametrize(
    ("rows", "facts", "problem", "warning"),
    [
        ([_row("a", chosen=True)], {}, "", ""),
        ([_row("a", clashes=("other",))], {}, "offered by d, which is used, and by other", ""),
        ([], {"cache": {"path": "c", "bytes": 0, "writable": False}}, "cache cannot be written", ""),
        ([], {"unknown_env": {"FUSEWRIGHT_X": "did you mean 'Y'?"}}, "", "FUSEWRIGHT_X is not read"),
        ([], {"threads": 4, "quota": 1.5}, "", "4 threads on 1.5 granted cores"),
        ([_row("a", device=None)], {}, "", "no backend works here"),
    ],
)
def test_problems_and_warnings(rows: list[Row], facts: dict[str, Any], problem: str, warning: str) -> None:
    report = Report({**FACTS, **facts}, rows)
    checks.judge(report)
    assert problem in " ".join(report.problems) and bool(problem) == bool(report.problems)
    assert warning in " ".join(report.warnings)
    assert report.ok == (not problem)


def test_a_simulated_backend_is_never_called_working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(checks, "SMOKE", (sys.executable, str(script)))
    fields = {"simulated": True, "device": "cuda gfx942", "reason": "no AMD GPU is visible"}
    row, wrong = _row("rocm", **fields), _row("liar", **fields)
    checks.run_smoke([row, wrong])
    assert row.reason == "no AMD GPU is visible; simulated on CPU, no such device here (as cuda gfx942): its result was right"
    cells = doctor._cells(row)
    assert "simulated" in cells and "none" in cells and not any("ms" in c for c in cells)
    assert wrong.broken and "FAILS" in doctor._cells(wrong)


def test_a_backend_without_a_device_is_simulated_where_it_can_be() -> None:
    rows = {r.name: r for r in checks.collect(smoke=False).rows}
    for name in ("nvidia_triton", "rocm_triton"):
        stand_in = registry.info(name).cls.simulated({"target": ""})  # type: ignore[union-attr]
        if not registry.info(name).available and isinstance(stand_in, Device):
            assert rows[name].simulated and rows[name].reason and not rows[name].chosen


def test_json_has_a_schema_and_every_backend() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json", "--no-smoke"])
    report = json.loads(done.stdout)
    assert report["schema"] == checks.SCHEMA
    assert {"x86_onednn", "nvidia_triton", "fusewright_null"} <= {r["name"] for r in report["rows"]}
    assert report["machine"]["torch"] and done.exit_code == (0 if report["ok"] else 1)


def test_the_table_says_what_lowers_nothing() -> None:
    done = CliRunner().invoke(app, ["doctor", "--no-smoke"])
    assert "nvidia_triton" in done.stdout and "fix: " in done.stdout
    assert "fusewright_null" not in done.stdout
    assert "fusewright_null" in CliRunner().invoke(app, ["doctor", "--no-smoke", "--all"]).stdout


@pytest.mark.parametrize(("reason", "where"), [(None, "C++\n"), ("no compiler", "Python: no compiler\n")])
def test_it_says_whether_the_native_launcher_is_there(monkeypatch: pytest.MonkeyPatch, reason: str | None, where: str) -> None:
    monkeypatch.setattr(native, "absent", lambda: reason)
    assert f"checks of weights in {where}" in CliRunner().invoke(app, ["doctor", "--no-smoke"]).stdout


def test_a_wrong_command_gets_the_nearest_name() -> None:
    done = CliRunner().invoke(app, ["docter"])
    assert done.exit_code == 2 and "did you mean 'doctor'?" in done.output


def test_config_lists_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_STRICKT", "1")
    done = CliRunner().invoke(app, ["config"])
    assert "FUSEWRIGHT_FUEL = None" in done.stdout and "did you mean 'FUSEWRIGHT_STRICT'?" in done.stdout
