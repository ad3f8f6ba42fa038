"""Locations of the cache and of the user's state, which holds the key that seals entries. Never a reason to fail."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import platformdirs

from fusewright.cache.folder import POSIX, Folder, Untrusted
from fusewright.report import warn_once


def path() -> Path:
    """The cache path that the user chose, or the system's. RuntimeError if that needs a home directory and there is none.

    The actual folder may be a subfolder: see `cache`.
    """
    return _chosen("FUSEWRIGHT_CACHE_DIR") or _absolute(platformdirs.user_cache_dir("fusewright", appauthor=False))


def state_path() -> Path:
    """The same for the user's persistent state."""
    return _chosen("FUSEWRIGHT_STATE_DIR") or _absolute(platformdirs.user_state_dir("fusewright", appauthor=False))


def _chosen(variable: str) -> Path | None:
    text = os.environ.get(variable)
    return _absolute(text) if text else None


@functools.cache
def _absolute(text: str) -> Path:
    """Make a path absolute, so that later changes of the working directory do not matter."""
    return Path(os.path.abspath(Path(text).expanduser()))


def cache() -> Folder | None:
    """The folder for plans and choices, created if missing; None, with one warning, if that fails."""
    try:
        return _folder(path(), make=True)
    except (OSError, RuntimeError) as e:  # RuntimeError: no home directory
        warn_once(f"nothing is cached on disk: {e}. Everything works, but is compiled anew each time.")
        return None


def existing_cache() -> Folder | None:
    """The folder if it exists, for read-only uses: nothing is created or logged."""
    try:
        return _folder(path(), make=False)
    except (OSError, RuntimeError):
        return None


def state() -> Folder:
    """The folder for the user's key, created if missing. OSError or RuntimeError if that fails."""
    return _folder(state_path(), make=True)


def _folder(base: Path, make: bool) -> Folder:
    """`base` if it belongs to this user alone, else a subfolder that does. Folders of others are not changed."""
    if make:
        _make(base)
    try:
        folder = Folder(base)
        folder.check()
        return folder
    except Untrusted as e:
        if base.is_symlink() or not base.is_dir():
            raise Untrusted(f"{base} cannot be used: {e}") from e
        reason = e
    own = Folder(base / f"fusewright-{os.geteuid() if POSIX else 0}")
    try:
        if make:
            own.path.mkdir(mode=0o700, exist_ok=True)
        own.check()
    except FileNotFoundError:
        raise
    except OSError as e:
        raise Untrusted(f"{base} cannot be used, {reason}; nor can {own.path.name} in it: {e}") from e
    return own


def _make(directory: Path) -> None:
    """Create the directory and its missing parents, closed to other users whatever the umask."""
    missing = []
    while not directory.exists() and not directory.is_symlink():
        missing.append(directory)
        directory = directory.parent
    for d in reversed(missing):
        try:
            d.mkdir(mode=0o700)
        except FileExistsError:
            continue  # another process created it first; its owner is checked with the rest
