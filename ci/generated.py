"""Check that generated files are up to date: workflows, tables and pages of the docs; also the form of the changelog.

`python -m ci.generated` prints each stale file and the command that regenerates it; exit code 1 if there are any.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ci import workflows
from ci.docs import results, tables
from ci.release import changelog


def stale() -> Iterator[str]:
    """Yield one line per stale file."""
    yield from (f".github/workflows/{name}: python -m ci.workflows" for name in workflows.stale())
    pages = {p: tables.updated(p) for p in tables.GENERATED} | dict(results.pages())
    for path, text in pages.items():
        if path.read_text(encoding="utf-8") != text:
            yield f"{path.relative_to(tables.ROOT)}: python -m ci.docs.tables"
    yield from (
        f"CHANGELOG.md: {p}" for p in changelog.problems((changelog.ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    )


if __name__ == "__main__":
    found = list(stale())
    print("\n".join(found) or "generated: nothing is stale")
    sys.exit(1 if found else 0)
