"""The replay's digests are the same in every process, and the first difference is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ci import replay

ROOT = Path(__file__).parents[3]
CASE = replay.Case("x86_onednn", "bert", "fp32", "infer")
needs_onednn = pytest.mark.skipif(
    replay.registry.info("x86_onednn").cls is None, reason="fusewright-onednn is not installed"
)


def dumped(folder: Path, seed: int) -> Mapping[str, str]:
    """Produce the texts of one case in a process of its own."""
    names = [f"--{key}={value}" for key, value in vars(CASE).items()]
    command = [sys.executable, "-m", "ci.replay", "dump", str(folder), *(n.replace("=", "s=", 1) for n in names)]
    env = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": str(seed)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {p.stem: p.read_text(encoding="utf-8") for p in (folder / str(CASE)).glob("*.txt")}


@needs_onednn
@pytest.mark.slow
def test_hash_seeds_and_threads_change_nothing(tmp_path: Path) -> None:
    first, second = (dumped(tmp_path / str(seed), seed) for seed in (1, 2))
    assert first.keys() == set(replay.SECTIONS) and all(first[s].strip() for s in ("plan", "kernels", "source"))
    assert first == second
    assert str(ROOT) not in "".join(first.values())


@needs_onednn
def test_cases_before_it_change_nothing() -> None:
    from fusewright_cpu.onednn.left_behind import MOST, SHAPES

    case = replay.Case("graviton_acl", "llama", "fp32", "infer")
    for k in range(MOST):  # models that are gone
        SHAPES.admit(f"shape {k}", None)
    behind = replay.texts(case)
    SHAPES.clear()
    assert replay.first_difference(replay.digests(behind), replay.digests(replay.texts(case))) is None


def test_the_record_has_every_case() -> None:
    every = replay.cases(tuple(replay.BACKENDS), replay.MODELS, replay.DTYPES, replay.PHASES)
    for rows in json.loads(replay.RECORD.read_text()).values():
        assert rows.keys() == set(map(str, every))
        assert all(row["because"] and row["digests"].keys() == set(replay.SECTIONS) for row in rows.values())


def recorded(monkeypatch: pytest.MonkeyPatch, path: Path, **changed: str) -> None:
    """Make a record of one case, compared with which the texts in `changed` now differ."""
    was = {s: f"{s}\n" for s in replay.SECTIONS}
    rows = {str(CASE): {"because": "first", "digests": replay.digests(was)}}
    path.write_text(json.dumps({replay.versions(): rows}))
    monkeypatch.setattr(replay, "RECORD", path)
    monkeypatch.setattr(replay, "texts", lambda case: {**was, **changed})


def test_what_changed_first_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(monkeypatch, tmp_path / "r.json")
    assert replay.check([CASE]) == 0
    recorded(monkeypatch, tmp_path / "r.json", source="other\n", partition="other\n")
    assert replay.check([CASE]) == 1
    assert f"{CASE}: DIFFERS first in partition" in capsys.readouterr().out


def test_an_accepted_change_keeps_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, tmp_path / "r.json", plan="other\n")
    assert replay.accept([CASE], "the plan frees earlier") == 0 and replay.check([CASE]) == 0
    assert (
        json.loads((tmp_path / "r.json").read_text())[replay.versions()][str(CASE)]["because"]
        == "the plan frees earlier"
    )


def test_other_versions_have_no_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(monkeypatch, tmp_path / "r.json")
    monkeypatch.setattr(replay, "versions", lambda: "torch 1.0, transformers 1.0")
    assert replay.check([CASE]) == 2 and "--against COMMIT" in capsys.readouterr().out


def test_the_first_lines_that_differ_are_shown() -> None:
    shown = replay.excerpt("a\nb\nc\n", "a\nB\nc\n", "x/plan")
    assert "-b" in shown and "+B" in shown and "x/plan (was)" in shown
