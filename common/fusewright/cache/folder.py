"""A folder that only its user can write to, and files in it. Whatever else is found there is refused, never changed.

Every operation opens the folder, looks at what it has opened (`fstat`), and reaches files from there: neither a folder nor a
file can be exchanged between the look and the use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

POSIX = os.name == "posix"
LIMIT = 1 << 28
"""Bytes of a file at most. Longer ones are not read."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FOLDER = os.O_RDONLY | _NO_LINK | getattr(os, "O_DIRECTORY", 0)
_READ = (
    os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
)  # a pipe must not be waited for
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | getattr(os, "O_BINARY", 0)
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK | getattr(os, "O_NONBLOCK", 0)


class Untrusted(OSError):
    """Something that somebody else could have put there, or that is no file of ours."""


@dataclass(frozen=True)
class Found:
    """A file: its name, size in bytes, and when it was last written or used (seconds since 1970)."""

    name: str
    bytes: int
    used: float


@dataclass(frozen=True)
class Folder:
    """A folder by its absolute path. What does not exist raises FileNotFoundError, what is not to be trusted `Untrusted`,
    everything else that goes wrong OSError."""

    path: Path

    def check(self) -> None:
        """Raises unless this is a folder of the user's own that nobody else can write to."""
        with self._opened():
            pass

    def read(self, name: str, limit: int = LIMIT, private: bool = False) -> bytes:
        """The content of a file. `private`: nobody else may be able to read it either."""
        with self._opened() as folder, self._file(folder, name, _READ) as fd:
            info = os.fstat(fd)
            if private and POSIX and info.st_mode & 0o077:
                raise Untrusted(f"{self.path / name} can be read by others")
            if info.st_size > limit:
                raise Untrusted(f"{self.path / name} has {info.st_size} bytes")
            return _content(fd, info.st_size)

    def write(self, name: str, data: bytes, replace: bool = True) -> None:
        """Write a file so that readers see the old or the new content, never a part. FileExistsError for one that is there
        and not to be replaced."""
        temporary = f".{name}.{os.getpid()}.{secrets.token_hex(8)}.tmp"
        with self._opened() as folder:
            try:
                fd = os.open(self._at(folder, temporary), _NEW, 0o600, dir_fd=folder)
                with os.fdopen(fd, "wb") as f:
                    if POSIX:
                        os.fchmod(fd, 0o600)  # an odd umask takes even our own rights away
                    f.write(data)
                    if not replace:  # nobody will write it again
                        f.flush()
                        os.fsync(fd)
                self._put(folder, temporary, name, replace)
            finally:
                self._unlink(folder, temporary)

    def _put(self, folder: int | None, temporary: str, name: str, replace: bool) -> None:
        source, target = self._at(folder, temporary), self._at(folder, name)
        if replace:
            os.replace(source, target, src_dir_fd=folder, dst_dir_fd=folder)
            return
        try:
            os.link(source, target, src_dir_fd=folder, dst_dir_fd=folder)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: the last of two that come at once wins
            os.replace(source, target, src_dir_fd=folder, dst_dir_fd=folder)

    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a file, which is made if missing; other processes may do so at the same time."""
        with self._opened() as folder, self._file(folder, name, _APPEND) as fd:
            os.write(fd, data)

    def touch(self, name: str) -> None:
        """The file was used now."""
        with self._opened() as folder, self._file(folder, name, _READ) as fd:
            os.utime(fd if os.utime in os.supports_fd else self._at(folder, name))

    def remove(self, name: str) -> bool:
        """Remove a file; whether it was there."""
        with self._opened() as folder:
            return self._unlink(folder, name)

    def files(self) -> list[Found]:
        """The files in it, without what was removed meanwhile. Links and folders do not count."""
        found = []
        with self._opened() as folder:
            for name in os.listdir(self.path if folder is None else folder):
                with contextlib.suppress(FileNotFoundError):
                    info = os.stat(self._at(folder, name), dir_fd=folder, follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        found.append(Found(name, info.st_size, info.st_mtime))
        return found

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """A descriptor of the folder, checked; None where files are not reached by one (Windows)."""
        if not POSIX:
            if not self.path.is_dir():
                raise FileNotFoundError(errno.ENOENT, "no such folder", str(self.path))
            yield None
            return
        try:
            fd = os.open(self.path, _FOLDER)
        except NotADirectoryError as e:  # what Linux says of a link, too
            raise Untrusted("it is a symbolic link" if self.path.is_symlink() else "it is no folder") from e
        except OSError as e:
            if e.errno == errno.ELOOP:
                raise Untrusted("it is a symbolic link") from e
            raise
        try:
            if why := _unsafe(os.fstat(fd)):
                raise Untrusted(why)
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _file(self, folder: int | None, name: str, flags: int) -> Iterator[int]:
        try:
            fd = os.open(self._at(folder, name), flags, 0o600, dir_fd=folder)
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):  # a link; a pipe that nobody reads
                raise Untrusted(f"{self.path / name} is no plain file") from e
            raise
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise Untrusted(f"{self.path / name} is no plain file")
            if why := _unsafe(info):
                raise Untrusted(f"{self.path / name}: {why}")
            yield fd
        finally:
            os.close(fd)

    def _at(self, folder: int | None, name: str) -> str:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is no name of a file")
        return name if folder is not None else str(self.path / name)

    def _unlink(self, folder: int | None, name: str) -> bool:
        try:
            os.unlink(self._at(folder, name), dir_fd=folder)
        except FileNotFoundError:
            return False
        return True


def _content(fd: int, size: int) -> bytes:
    """All that a descriptor has, up to the size that it had."""
    parts = []
    while size > 0 and (part := os.read(fd, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _unsafe(info: os.stat_result) -> str:
    """Why others could have put or changed this, or ""."""
    if not POSIX:
        return ""
    if info.st_uid != os.geteuid():
        return "it belongs to another user"
    return "others can write to it" if info.st_mode & 0o022 else ""
