"""`fusewright new-backend`: rejected names, and a generated package that passes the linters."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fusewright import scaffold
from fusewright.cli.app import app
from fusewright.scaffold import LICENSES, Package, ScaffoldError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["new-backend", *arguments])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "my_npu2"
    done = run("my_npu2", "--into", str(folder), "--license", "MIT")
    assert done.exit_code == 0, done.output
    return folder


def test_names_follow_from_the_backends(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["license"]) == ("fusewright-my-npu2", "MIT")
    assert project["entry-points"]["fusewright.backends"] == {"my_npu2": "fusewright_my_npu2.backend:MyNpu2"}
    assert "class MyNpu2(FusedBackend)" in (package / "fusewright_my_npu2/backend.py").read_text()
    assert (package / "LICENSE").read_text().startswith("SPDX-License-Identifier: MIT\n")


def test_nothing_of_the_templates_is_left(package: Path) -> None:
    files = [p for p in package.rglob("*") if p.is_file()]
    assert len(files) == 13
    for path in files:
        assert "@" not in path.name and "@MODULE@" not in path.read_text() and not path.name.endswith(".in")


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=["lint", "format"])
def test_ruff_accepts_it(package: Path, command: tuple[str, ...]) -> None:
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed; it is in the extra `lint`")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", "."], cwd=package, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_mypy_accepts_it(package: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed; it is in the extra `lint`")
    host = Path(scaffold.__file__).parents[2]
    path = "" if host.name == "site-packages" else str(host)  # mypy finds it without being told, and rejects it on its path
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "fusewright_my_npu2", "tests"],
        cwd=package, capture_output=True, text=True, check=False,
        env={"MYPYPATH": path, "PATH": "", "MYPY_CACHE_DIR": str(package.parent / "mypy")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("My-NPU", "how about 'my_npu'?"),
        ("2fast", "how about 'fast'?"),
        ("a__b", "single underscores"),
        ("", "no name for a backend"),
        ("x" * 41, "40 at most"),
        ("../x", "how about 'x'?"),
        ("class", "a word of Python's"),
        ("fusewright_x", "the host's own"),
        ("inductor", "installed already"),
        ("eager", "installed already"),
    ],
)
def test_a_bad_name_is_refused_with_a_way_out(name: str, said: str, tmp_path: Path) -> None:
    done = run(name, "--into", str(tmp_path / "x"))
    assert done.exit_code == 2 and said in done.output, done.output
    assert not (tmp_path / "x").exists()


def test_an_installed_backends_name_is_taken() -> None:
    with pytest.raises(ScaffoldError, match="installed already"):
        scaffold.check_name("npu", ["npu"])


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("mine")
    done = run("demo", "--into", str(tmp_path))
    assert done.exit_code == 2 and "not empty" in done.output
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    assert scaffold.write(Package("demo"), tmp_path) and (tmp_path / "fusewright_demo/backend.py").exists()


def test_a_file_in_the_folders_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("")
    with pytest.raises(ScaffoldError, match="exists"):
        scaffold.write(Package("demo"), tmp_path / "demo")


def test_an_unknown_license_is_refused(tmp_path: Path) -> None:
    done = run("demo", "--into", str(tmp_path / "x"), "--license", "GPL")
    assert done.exit_code == 2 and LICENSES[0] in done.output
