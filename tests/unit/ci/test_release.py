"""A faulty changelog or wheel blocks a release."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

import fusewright
from ci.release import changelog, wheels

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
VERSION = fusewright.__version__


def test_the_changelog_is_in_its_form() -> None:
    assert not list(changelog.problems(TEXT))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# Changes\n", "no version"),
        ("## 1.0.0 (soon)\n### Added\n- x\n", "unreleased"),
        ("## 1.0.0 (2026-01-01)\n- x\n", "none of"),
        ("## 1.0.0 (2026-01-01)\n### Fixed\n- x\n### Added\n- y\n", "in this order"),
        ("## 1.0.0 (2026-01-01)\n### New\n- x\n", "kinds of changes"),
    ],
)
def test_what_is_not_in_the_form_is_named(text: str, problem: str) -> None:
    assert any(problem in p for p in changelog.problems(text))


def test_a_tag_needs_its_version_a_date_and_equal_packages() -> None:
    dated = f"## {VERSION} (2026-01-01)\n\n### Added\n\n- x\n"
    assert not list(changelog.released(dated, f"v{VERSION}"))
    assert changelog.notes(dated, f"v{VERSION}") == "### Added\n\n- x"
    assert any("unreleased" in p for p in changelog.released(dated.replace("2026-01-01", "unreleased"), f"v{VERSION}"))
    assert any("has no 9.9.9" in p for p in changelog.released(dated, "v9.9.9"))
    assert any("backends/cpu/pyproject.toml is of version" in p for p in changelog.released(dated, "v9.9.9"))


def test_every_package_is_built_under_its_name() -> None:
    assert wheels.packages()[0] == ROOT / "common" and wheels.names()[0] == "fusewright"
    listed = subprocess.run(
        ["git", "ls-files", "*pyproject.toml"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    published = {p for p in listed.stdout.split() if p.startswith(("common/", "backends/"))}
    assert {f"{p.relative_to(ROOT)}/pyproject.toml" for p in wheels.packages()} == published
    assert len(set(wheels.names())) == len(wheels.packages())


@pytest.mark.parametrize("package", wheels.packages(), ids=lambda p: p.name)
def test_every_package_carries_the_licence(package: Path) -> None:
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_what_was_built_with_a_compiler_has_to_load_its_part_in_c() -> None:
    built = ("fusewright-1-py3-none-any.whl", "fusewright_native-1-cp311-cp311-manylinux_2_28_x86_64.whl")
    assert wheels.compiled(map(Path, built)) == ["fusewright_native"]


def test_a_wheel_with_other_peoples_files_is_not_good(tmp_path: Path) -> None:
    path = tmp_path / "fusewright-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("fusewright/py.typed", "tests/a.py", "fusewright-1.dist-info/METADATA"):
            archive.writestr(name, "")
    assert wheels.problems(path) == ["no LICENSE", "tests does not belong there"]
