"""The command `fusewright`. It needs click and rich, which come with `fusewright[cli]`."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType


def main() -> None:
    """Entry point of the console script. Exit codes: 0 success, 1 a check failed, 2 wrong usage, 130 interrupted, 143
    terminated."""
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
        with _ended_by_signals():
            sys.exit(app(standalone_mode=False))
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        print("fusewright: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader, e.g. `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        print(f"fusewright: cannot write {e.filename or 'a file'}: {e.strerror}", file=sys.stderr)
        sys.exit(2)
    except Exception as e:
        said = getattr(e, "inner_exception", e)  # torch.compile wraps what a backend raises
        if not isinstance(said, FusewrightError):
            raise
        print(f"fusewright: {said}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Handle signals that end a job (`timeout`, a scheduler, a closed terminal) like Ctrl-C, so that child processes and
    temporary files are cleaned up."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    ending = [signal.SIGTERM] + [signal.SIGHUP] * hasattr(signal, "SIGHUP")
    before = {s: signal.signal(s, end) for s in ending if signal.getsignal(s) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
