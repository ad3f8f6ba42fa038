"""Every example runs unchanged and prints its findings."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fusewright import registry

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = {
    "inference": "largest difference from eager",
    "training": "loss",
    "generation": "tokens",
    "dynamic_shapes": "1 graph compiled",
    "own_backend": "softmax was called with (4, 8)",
    "explain": "lowered",
    "profiling": "request",
}
"""Examples run here in turn, with a part of their last output."""
PROCESSES = {"process_group": "equal weights after 3 steps", "server_start": "files shipped"}
"""Examples that start processes."""


def test_every_example_is_run_and_listed() -> None:
    files = {p.stem for p in FOLDER.glob("*.py")}
    assert files == {*EXAMPLES, *PROCESSES, "quantization"}
    assert all(f"[{name}.py]({name}.py)" in (FOLDER / "README.md").read_text() for name in files)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEWRIGHT_STATE_DIR", str(tmp_path / "state"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "generation":
        pytest.importorskip("transformers", reason="needs fusewright[bench]")
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    module.main()
    assert EXAMPLES[name] in capsys.readouterr().out


def test_a_model_becomes_int8(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchao", reason="needs fusewright-int8[quantize]")
    if not registry.info("x86_int8").available:
        pytest.skip(f"x86_int8: {registry.info('x86_int8').device}")
    runpy.run_path(str(FOLDER / "quantization.py"), run_name="__main__")
    assert "signal over noise" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_it_runs_with_processes_of_its_own(name: str) -> None:
    path = f"{FOLDER.parent / 'common'}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), path])}
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert PROCESSES[name] in done.stdout
