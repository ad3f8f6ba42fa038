"""The docs match the code: links resolve, shown code is real code, tables are generated."""

from __future__ import annotations

import json
import pkgutil
import re
from pathlib import Path

import pytest

from ci.docs import results, tables

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLE = ROOT / "tests/plugin_example"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_walk_through_shows_the_code_of_the_example() -> None:
    text = (ROOT / "docs/interface.md").read_text()
    sources = "\n".join(p.read_text() for p in EXAMPLE.rglob("*") if p.suffix in (".py", ".toml"))
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        assert block in sources, block


def test_the_ten_questions_are_answered_with_files_that_exist() -> None:
    text = (ROOT / "docs/contributing.md").read_text().partition("## Ten questions")[2]
    packages = [ROOT / "common/fusewright", *(ROOT / "backends").iterdir()]
    assert len(re.findall(r"^\| .*\?", text, re.MULTILINE)) == 10
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", text):
        assert any((package / name).exists() for package in packages), name


def test_paths_that_the_docs_name_exist() -> None:
    """Checks full paths of the tree; studies and records may name paths of their time."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text()
        modules = [f"{m.replace('.', '/')}.py" for m in re.findall(r"python -m (ci[\w.]+\w)", text)]
        paths = re.findall(r"`((?:ci|tests|common|backends|examples|docs|cmake)/[\w./-]+?)`", text)
        missing = [name for name in (*paths, *modules) if not (ROOT / name).exists()]
        assert not missing, f"{page.name}: {missing}"


@pytest.mark.parametrize("page", [PAGES[0], *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_dotted_names_of_the_host_that_the_docs_name_exist(page: Path) -> None:
    group = {"fusewright.backends"}  # an entry-point group
    for name in set(re.findall(r"`(fusewright(?:\.\w+)+)(?:\(.*?\))?`", page.read_text())) - group:
        assert pkgutil.resolve_name(name) is not None, name


@pytest.mark.parametrize("page", tables.GENERATED, ids=lambda p: p.name)
def test_generated_tables_are_up_to_date(page: Path) -> None:
    assert tables.updated(page) == page.read_text(), "run: python -m ci.docs.tables"


@pytest.mark.parametrize("page", results.MACHINES)
def test_pages_of_results_hold_what_the_records_say(page: str) -> None:
    path = results.FOLDER / f"{page}.md"
    assert results.pages()[path] == path.read_text(), "run: python -m ci.docs.tables"


@pytest.mark.parametrize("record", sorted(results.FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_every_record_is_of_one_known_kind(record: Path) -> None:
    document = json.loads(record.read_text())
    assert sum(holds(document) for holds, _ in results.KINDS) == 1


def test_a_record_of_an_unknown_machine_has_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "2026-11-21-b300-check.json").write_text("{}")
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="b300"):
        results.pages()


def test_the_page_of_figures_stays_short() -> None:
    """Experiments belong to docs/studies, rows to docs/results."""
    assert len((ROOT / "docs/performance.md").read_text().splitlines()) <= 150
