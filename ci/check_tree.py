"""House rules that no linter knows: file lengths, who may import whom, private torch names, local paths."""

from __future__ import annotations

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
_IMPORT = re.compile(r"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)
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
    imported = {m.group(1).split(".")[0] for m in _IMPORT.finditer(text)}
    if path.startswith("common/"):
        for vendor in sorted(imported & set(VENDORS.values())):
            yield f"imports {vendor}: the host imports no vendor"
    if path.startswith("backends/"):
        own = VENDORS.get(path.split("/")[1], "")
        for vendor in sorted((imported & set(VENDORS.values())) - {own}):
            yield f"imports {vendor}: a vendor imports no other vendor"


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
