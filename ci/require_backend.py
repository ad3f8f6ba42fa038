"""Read `fusewright doctor --json` and fail unless the named backend found its device and computed on it, or with
`--simulated` computed on a simulated one."""

from __future__ import annotations

import json
import sys


def verdict(report: dict[str, list[dict[str, object]]], name: str, simulated: bool = False) -> str:
    """Return why the backend does not pass, or an empty string."""
    row = next((r for r in report["rows"] if r["name"] == name), None)
    if row is None:
        return f"{name} is not installed"
    if not row["loads"] or row["device"] is None:
        return f"{name}: {row['reason']}; fix: {row['fix']}"
    if row["simulated"] and not simulated:
        return f"{name}: only a simulated device was found"
    return "" if row["runs"] else f"{name}: {row['reason']}"


if __name__ == "__main__":
    sys.exit(verdict(json.load(sys.stdin), sys.argv[1], "--simulated" in sys.argv) or 0)
