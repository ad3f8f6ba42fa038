"""mkdocs hooks: the README becomes the front page, and links to files that are not pages become their names.

The pages are written for reading in the checkout, where they also link to sources and tests.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that are files in the checkout's root."""
_LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, source in PAGES.items():
        text = localized((ROOT / source).read_text(encoding="utf-8"), source)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    path = page.file.src_uri
    return markdown if path in PAGES else localized(markdown, f"docs/{path}")


def localized(markdown: str, source: str) -> str:
    """Return the text with links as the site needs them. A broken link is kept, and fails the build."""
    return _LINK.sub(lambda m: _link(m, source), markdown)


def _link(m: re.Match[str], source: str) -> str:
    image, text, path, heading = m[1], m[2], m[3], m[4] or ""
    target = (ROOT / PurePosixPath(source).parent / path).resolve()
    if not target.exists():
        return m[0]
    inside = target.relative_to(ROOT).as_posix()
    pages = {v: k for k, v in PAGES.items()}
    if inside in pages or (inside.startswith("docs/") and target.is_file()):
        here = PurePosixPath(pages.get(source, source.removeprefix("docs/"))).parent
        there = pages.get(inside, inside.removeprefix("docs/"))
        return f"{image}[{text}]({'../' * len(here.parts)}{there}{heading})"
    if image:
        return m[0]
    return text if text.startswith("`") else f"{text} (`{inside}`)"
