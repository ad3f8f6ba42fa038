"""The host's modules that a backend may import, and the imports of a source. Standard library only."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

PUBLIC = (
    "fusewright.interface", "fusewright.ops", "fusewright.toolkit", "fusewright.plan.ir",
    "fusewright.machine", "fusewright.errors", "fusewright.strict", "fusewright.dynamo.entry",
    "fusewright.cache.artifacts", "fusewright.plan.native",
)  # fmt: skip
"""Modules for partners, and so also for the vendors in this tree."""


def imports(source: str) -> Iterator[str]:
    """Full names of a module's imports: `from a import b` gives "a.b"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def not_public(imported: Iterable[str]) -> list[str]:
    """Those of the imported names that belong to the host and are not public, sorted."""
    host = {m for m in imported if m.split(".")[0] == "fusewright"}
    return sorted(m for m in host if not any(f"{m}.".startswith(f"{p}.") for p in PUBLIC))
