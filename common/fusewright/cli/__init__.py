"""The command `fusewright`. It needs click and rich, which come with `fusewright[cli]`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the console script. Exit codes: 0 good, 1 a check failed, 2 wrong usage, 130 interrupted."""
    try:
        from fusewright.cli.app import app
    except ModuleNotFoundError as e:
        if e.name not in ("click", "rich"):
            raise
        print("the command line needs click and rich: pip install 'fusewright[cli]'", file=sys.stderr)
        sys.exit(2)

    import click

    from fusewright.errors import FusewrightError

    try:
        sys.exit(app(standalone_mode=False))
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        print("fusewright: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except FusewrightError as e:
        print(f"fusewright: {e}", file=sys.stderr)
        sys.exit(2)
