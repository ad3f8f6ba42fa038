"""Build the documentation site, with an API reference from docstrings: `python -m ci.docs.site` writes it to build/site.

Every warning is an error, including those about links between pages and to headings, and so is any broken link in the built pages.
`--external` requests every external link, which needs the network. mkdocs comes with the extra `docs`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build/site"


class Page(HTMLParser):
    """Collects the links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.update(v for key in ("id", "name") if (v := found.get(key)))
        self.links += [v for key in ("href", "src") if (v := found.get(key))]


def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def broken(site: Path) -> Iterator[str]:
    """Yield internal links to missing files or anchors."""
    found = pages(site)
    for path, page in found.items():
        if path.name == "404.html":  # its links start at the site's root, wherever that is
            continue
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{path.relative_to(site)}: {link} leads to no file"
            elif parts.fragment and target in found and unquote(parts.fragment) not in found[target].anchors:
                yield f"{path.relative_to(site)}: {link} leads to no heading"


def unanswered(site: Path) -> Iterator[str]:
    """Yield external links that do not answer."""
    links = {link for page in pages(site).values() for link in page.links if link.startswith(("http://", "https://"))}
    for link in sorted(links):
        request = urllib.request.Request(link, method="HEAD", headers={"User-Agent": "link check"})
        try:
            urllib.request.urlopen(request, timeout=30).close()
        except (urllib.error.URLError, TimeoutError) as e:
            yield f"{link}: {e}"


def build(folder: Path) -> Iterator[str]:
    """Build the site of a folder with a mkdocs.yml. Yield the problems, one per line."""
    # Not `--quiet`: `--strict` does not count warnings that are not printed.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("INFO ")]
    yield from lines or [f"mkdocs ended with {done.returncode}"] * bool(done.returncode)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--external", action="store_true", help="ask for links to elsewhere too")
    external = parser.parse_args(argv).external
    if warnings := list(build(ROOT)):
        print("\n".join(warnings))
        return 1
    wrong = [*broken(SITE), *(unanswered(SITE) if external else ())]
    print("\n".join(wrong) or f"site: {len(pages(SITE))} pages in {SITE.relative_to(ROOT)}, every link leads somewhere")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
