"""House rules that no linter knows: file lengths, who may import whom, private torch names, local paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 800
VENDORS = {
    "triton": "fusewright_triton", "onednn": "fusewright_onednn", "acl": "fusewright_acl",
    "mps": "fusewright_mps", "int8": "fusewright_int8",
}  # fmt: skip
SHARED = {"cpu": "fusewright_cpu"}
"""Packages under backends/ that are no vendor's: vendors import them."""
# What a partner may use is what the vendors here may use.
PUBLIC = (
    "fusewright.interface", "fusewright.ops", "fusewright.toolkit", "fusewright.plan.ir",
    "fusewright.machine", "fusewright.errors", "fusewright.strict", "fusewright.dynamo.entry",
)  # fmt: skip
_PRIVATE = re.compile(r"\btorch\._(?:dynamo|inductor|functorch|subclasses|decomp|C)\b")
_MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|Users|root|work)/\w+")
COMPAT = "common/fusewright/_torch_compat.py"


def tracked() -> list[str]:
    """Text files under version control that still exist, by their path in the checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [p for p in listed.splitlines() if (ROOT / p).is_file()]


def findings(path: str, text: str) -> Iterator[str]:
    """What breaks a rule in one file."""
    if _MACHINE_PATH.search(text):
        yield "names a path of one machine"
    if not path.endswith((".py", ".cpp", ".h", ".hpp")):
        return
    lines = text.count("\n")
    if lines > LIMIT:
        yield f"has {lines} lines; the limit is {LIMIT}"
    if path.startswith(("common/", "backends/")) and path != COMPAT and _PRIVATE.search(text):
        yield f"uses a private part of torch; those live in {COMPAT}"
    if path.endswith(".py"):
        yield from _layering(path, set(imports(text)))


def _layering(path: str, imported: set[str]) -> Iterator[str]:
    packages = {m.split(".")[0] for m in imported}
    vendors = sorted(packages & set(VENDORS.values()))
    if path.startswith("common/"):
        shared = sorted(packages & set(SHARED.values()))
        yield from (f"imports {v}: the host imports no vendor" for v in (*vendors, *shared))
    if path.startswith("backends/"):
        own = (VENDORS | SHARED).get(path.split("/")[1], "")
        yield from (f"imports {v}: a vendor imports no other vendor" for v in vendors if v != own)
        for module in sorted(m for m in imported if m.split(".")[0] == "fusewright"):
            if not any(f"{module}.".startswith(f"{p}.") for p in PUBLIC):
                yield f"imports {module}: a vendor uses only {', '.join(PUBLIC)}"


def imports(source: str) -> Iterator[str]:
    """Full names of what a module imports: `from a import b` gives "a.b"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def main() -> int:
    bad = [
        f"{path}: {finding}"
        for path in tracked()
        if path != "ci/check_tree.py"
        for finding in findings(path, (ROOT / path).read_text(errors="ignore"))
    ]
    print("\n".join(bad) or "check_tree: all files keep the rules of the house")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
