"""Follows docs/adding_a_backend.md from top to bottom: its commands run, its files are written, its outputs are right."""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fusewright import scaffold
from fusewright.scaffold import Package

PAGE = Path(__file__).parents[2] / "docs/adding_a_backend.md"
BLOCKS: list[tuple[str, str]] = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
PIP = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--upgrade", "--target", "site")
LIMIT = 300
"""Seconds for one command, on however busy a machine."""


def command(line: str) -> list[str]:
    """Adapt a line of the page: packages are installed into the test's folder, and nothing is downloaded."""
    words = shlex.split(line)
    match words:
        case ["pip", "install", *rest]:
            return [sys.executable, *PIP, *rest]
        case ["fusewright", *rest]:
            return [sys.executable, "-m", "fusewright", *rest]
        case ["python", *rest]:
            return [sys.executable, *rest]
    raise AssertionError(f"what is {line!r}?")


def run(line: str, folder: Path) -> str:
    paths = [str(folder / "site"), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FUSEWRIGHT_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(command(line), cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def write(text: str, folder: Path) -> None:
    """Write a block of Python, which begins with its file name."""
    name = text.partition("\n")[0].removeprefix("# ")
    (folder / name).write_text(text.partition("\n")[2], encoding="utf-8")


def test_the_rows_have_the_argument_names_that_it_shows() -> None:
    (shown,) = [text for language, text in BLOCKS if language == "pycon"]
    parsed = doctest.DocTestParser().get_doctest(shown, {}, PAGE.name, None, None)
    assert len(parsed.examples) == 4 and doctest.DocTestRunner().run(parsed).failed == 0


def typed_in(folder: Path) -> dict[str, str]:
    """Run each command and return its output. The kit's commands are skipped: they take minutes and have their own tests."""
    printed = {}
    for language, text in BLOCKS:
        if language == "python":
            write(text, folder)
        if language == "sh":
            printed.update({line: run(line, folder) for line in text.splitlines() if "conformance" not in line})
    return printed


def test_typed_in_it_lowers_three_ops_in_under_200_lines(tmp_path: Path) -> None:
    printed = typed_in(tmp_path)  # its own tests are among the commands
    told = printed["fusewright explain model.py:build --backend demo"]
    assert "no lowering for sin" in told
    assert "3 of 4" in told or "75%" in told, told
    sources = sorted((tmp_path / "demo/fusewright_demo").glob("*.py"))
    assert len(sources) == 7
    assert sum(len(p.read_text(encoding="utf-8").splitlines()) for p in sources) < 200


def test_its_code_passes_the_linter(tmp_path: Path) -> None:
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed; it is in the extra `lint`")
    scaffold.write(Package("demo"), tmp_path / "demo")
    for language, text in BLOCKS:
        if language == "python":
            write(text, tmp_path)
    lint = [sys.executable, "-m", "ruff", "check", "--no-cache", "."]
    done = subprocess.run(lint, cwd=tmp_path / "demo", capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 0, done.stdout
