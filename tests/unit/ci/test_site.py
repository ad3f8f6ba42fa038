"""Broken links of the site are found; links within the checkout become links of the site."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.docs import site, site_hooks


def built(folder: Path, **pages: str) -> Path:
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return folder


def test_links_to_no_file_and_to_no_heading_are_broken(tmp_path: Path) -> None:
    links = '<a href="b.html#there">x</a><a href="b.html#gone">x</a><a href="c.html">x</a><a href="https://pytorch.org">x</a>'
    found = list(site.broken(built(tmp_path, a=links, b='<h2 id="there">x</h2>')))
    assert found == ["a.html: b.html#gone leads to no heading", "a.html: c.html leads to no file"]


def test_a_link_into_a_page_itself_needs_its_heading(tmp_path: Path) -> None:
    assert list(site.broken(built(tmp_path, a='<a href="#one">x</a>')))
    assert not list(site.broken(built(tmp_path, a='<a href="#one">x</a><p id="one">')))


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("README.md", "[d](docs/design.md)", "[d](design.md)"),
        ("README.md", "[c](CHANGELOG.md)", "[c](changelog.md)"),
        ("docs/design.md", "[r](reliability.md#security)", "[r](reliability.md#security)"),
        ("docs/api/index.md", "[d](../deprecation.md)", "[d](../deprecation.md)"),
        ("docs/interface.md", "[c](../CHANGELOG.md)", "[c](changelog.md)"),
        ("docs/interface.md", "[an example](../tests/plugin_example)", "an example (`tests/plugin_example`)"),
        ("docs/interface.md", "[`ci/jobs.py`](../ci/jobs.py)", "`ci/jobs.py`"),
        ("README.md", "![a chart](docs/suite.svg)", "![a chart](suite.svg)"),
        ("docs/performance.md", "![a chart](suite.svg)", "![a chart](suite.svg)"),
        ("docs/interface.md", "[gone](../gone.md)", "[gone](../gone.md)"),
        ("docs/interface.md", "[out](https://pytorch.org/docs)", "[out](https://pytorch.org/docs)"),
    ],
)
def test_links_are_those_of_the_site(source: str, text: str, expected: str) -> None:
    assert site_hooks.localized(text, source) == expected


def test_a_warning_of_mkdocs_is_told(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs comes with the extra `docs` (pip install '.[docs]')")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nstrict: true\ntheme: {name: mkdocs}\n")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/index.md"
    page.write_text("# x\n")
    assert not list(site.build(tmp_path))
    page.write_text("# x\n\n[gone](gone.md)\n")
    assert any("gone.md" in line for line in site.build(tmp_path))
