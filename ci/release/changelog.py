"""Check the form of CHANGELOG.md, and extract a release's part of it.

python -m ci.release.changelog check [v0.2.0]   the form; with a tag, that this version is there, dated, and every package's
python -m ci.release.changelog notes v0.2.0     the text of a version
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
"""Headings under a version, in this order."""
_VERSION = re.compile(r"^## (\d+\.\d+\.\d+) \((unreleased|\d{4}-\d{2}-\d{2})\)$")


def sections(text: str) -> dict[str, str]:
    """Return the text under each second-level heading, by heading."""
    parts = re.split(r"^(## .*)$", text, flags=re.MULTILINE)
    return {head: body.strip() for head, body in zip(parts[1::2], parts[2::2], strict=True)}


def problems(text: str) -> Iterator[str]:
    """Yield violations of the form."""
    found = sections(text)
    if not found:
        yield "there is no version"
    for head, body in found.items():
        if not _VERSION.match(head):
            yield f"{head!r} is not '## X.Y.Z (YYYY-MM-DD)' or '## X.Y.Z (unreleased)'"
        kinds = re.findall(r"^### (.*)$", body, re.MULTILINE)
        if kinds != [k for k in KINDS if k in kinds]:
            yield f"{head!r} has {', '.join(kinds)}; kinds of changes are {', '.join(KINDS)}, each once and in this order"
        if not kinds:
            yield f"{head!r} has none of {', '.join(KINDS)}"


def released(text: str, tag: str) -> Iterator[str]:
    """Yield what keeps a tag from being released."""
    wanted = tag.removeprefix("v")
    dates = {m[1]: m[2] for head in sections(text) if (m := _VERSION.match(head))}
    if wanted not in dates:
        yield f"CHANGELOG.md has no {wanted}"
    elif dates[wanted] == "unreleased":
        yield f"CHANGELOG.md calls {wanted} unreleased; give it its date"
    for path in sorted([*ROOT.glob("*/pyproject.toml"), *ROOT.glob("backends/*/pyproject.toml")]):
        version = tomllib.loads(path.read_text())["project"]["version"]
        if version != wanted:
            yield f"{path.relative_to(ROOT)} is of version {version}, the tag of {wanted}"


def notes(text: str, tag: str) -> str:
    """Return the text of a version. Raise KeyError without that version."""
    return next(body for head, body in sections(text).items() if head.startswith(f"## {tag.removeprefix('v')} "))


def main(argv: Sequence[str]) -> int:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if len(argv) == 2 and argv[0] == "notes":
        print(notes(text, argv[1]))
        return 0
    if not argv or argv[0] != "check" or len(argv) > 2:
        print(__doc__)
        return 2
    wrong = [*problems(text), *(released(text, argv[1]) if len(argv) == 2 else ())]
    print("\n".join(wrong) or "changelog: good")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
