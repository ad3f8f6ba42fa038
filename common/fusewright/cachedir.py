"""The cache directory: private to its user, written atomically, and never a reason to fail."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import stat
from pathlib import Path

import platformdirs

log = logging.getLogger(__name__)


def path() -> Path:
    """Where the cache is or would be: FUSEWRIGHT_CACHE_DIR, or the user's cache directory."""
    chosen = os.environ.get("FUSEWRIGHT_CACHE_DIR")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("fusewright", appauthor=False))


def usable() -> Path | None:
    """The cache directory, made if missing; None (and one warning) when it cannot be used safely."""
    return _checked(path())


@functools.cache
def _checked(directory: Path) -> Path | None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = _unsafe(directory)
    except (OSError, RuntimeError) as e:  # RuntimeError: no home directory
        problem = str(e)
    if problem:
        log.warning(
            "fusewright: no cache in %s: %s. Everything works, but is compiled anew each time.", directory, problem
        )
        return None
    return directory


def _unsafe(directory: Path) -> str:
    """Why others could have put files there, or "". A directory of our own that is too open is closed."""
    info = directory.lstat()
    if stat.S_ISLNK(info.st_mode):
        return "it is a symbolic link"
    if hasattr(os, "getuid") and info.st_uid != os.getuid():
        return "it belongs to another user"
    if os.name == "posix" and stat.S_IMODE(info.st_mode) & 0o077:
        directory.chmod(0o700)
    return "" if os.access(directory, os.W_OK | os.X_OK) else "it cannot be written"


def file(name: str) -> Path | None:
    """The path of a file in the cache, or None when there is no cache."""
    directory = usable()
    return directory / name if directory else None


def write(target: Path, data: bytes) -> None:
    """Write a file so that readers see the old or the new content, never a part. Raises OSError."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(8)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as f:
            f.write(data)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
