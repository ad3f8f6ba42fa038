"""The command `fusewright`. It needs click and rich, which come with `fusewright[cli]`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script. Exit codes: 0 good, 1 a check failed, 2 wrong usage."""
    try:
        from fusewright.cli.app import app
    except ModuleNotFoundError as e:
        if e.name not in ("click", "rich"):
            raise
        print("the command line needs click and rich: pip install 'fusewright[cli]'", file=sys.stderr)
        sys.exit(2)

    from fusewright.errors import FusewrightError

    try:
        app()
    except FusewrightError as e:
        print(f"fusewright: {e}", file=sys.stderr)
        sys.exit(2)
