"""A folder that only its user can write to, and its files. Anything else found there is rejected, never changed.

Every operation opens the folder, checks the open descriptor (`fstat`), and accesses files relative to it, so neither the folder
nor a file can be swapped between check and use.
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
"""Maximum size of a file in bytes; longer ones are not read."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FOLDER = os.O_RDONLY | _NO_LINK | getattr(os, "O_DIRECTORY", 0)
_READ = (
    os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
)  # do not block on a pipe
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | getattr(os, "O_BINARY", 0)
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK | getattr(os, "O_NONBLOCK", 0)


class Untrusted(OSError):
    """Something that another user could have put there, or that is not one of our files."""


@dataclass(frozen=True)
class Found:
    """A file: its name, size in bytes, and time of last write or use (seconds since 1970)."""

    name: str
    bytes: int
    used: float


@dataclass(frozen=True)
class Folder:
    """A folder by its absolute path. Raises FileNotFoundError for what does not exist, `Untrusted` for what must not be
    trusted, and OSError for other failures."""

    path: Path

    def check(self) -> None:
        """Raise unless this is a folder of the user's own that nobody else can write to."""
        with self._opened():
            pass

    def read(self, name: str, limit: int = LIMIT, private: bool = False) -> bytes:
        """Return the content of a file. `private`: it must not be readable by others either."""
        with self._opened() as folder, self._file(folder, name, _READ) as fd:
            info = os.fstat(fd)
            if private and POSIX and info.st_mode & 0o077:
                raise Untrusted(f"{self.path / name} can be read by others")
            if info.st_size > limit:
                raise Untrusted(f"{self.path / name} has {info.st_size} bytes")
            return _content(fd, info.st_size)

    def write(self, name: str, data: bytes, replace: bool = True) -> None:
        """Write a file atomically: readers see the old or the new content. FileExistsError if it exists and `replace` is false."""
        temporary = f".{name}.{os.getpid()}.{secrets.token_hex(8)}.tmp"
        with self._opened() as folder:
            try:
                fd = os.open(self._at(folder, temporary), _NEW, 0o600, dir_fd=folder)
                with os.fdopen(fd, "wb") as f:
                    if POSIX:
                        os.fchmod(fd, 0o600)  # the umask may remove even our own permissions
                    f.write(data)
                    if not replace:  # the file will not be written again
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
        except OSError:  # no hard links on this file system: the last of two concurrent writers wins
            os.replace(source, target, src_dir_fd=folder, dst_dir_fd=folder)

    def append(self, name: str, data: bytes) -> None:
        """Append to a file, creating it if missing; safe with concurrent appends from other processes."""
        with self._opened() as folder, self._file(folder, name, _APPEND) as fd:
            os.write(fd, data)

    def touch(self, name: str) -> None:
        """Mark the file as used now."""
        with self._opened() as folder, self._file(folder, name, _READ) as fd:
            os.utime(fd if os.utime in os.supports_fd else self._at(folder, name))

    def remove(self, name: str) -> bool:
        """Remove a file; return whether it existed."""
        with self._opened() as folder:
            return self._unlink(folder, name)

    def files(self) -> list[Found]:
        """The files in the folder, except those removed meanwhile, links and folders."""
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
        """A checked descriptor of the folder; None on systems without access relative to one (Windows)."""
        if not POSIX:
            if not self.path.is_dir():
                raise FileNotFoundError(errno.ENOENT, "no such folder", str(self.path))
            yield None
            return
        try:
            fd = os.open(self.path, _FOLDER)
        except NotADirectoryError as e:  # Linux also raises it for a link
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
            if e.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):  # a link; a pipe without a reader
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


def reason(error: OSError) -> str:
    """Return what the system says, without the names of files: a temporary one has another each time, and a warning that
    names it is repeated with every plan."""
    return f"[Errno {error.errno}] {error.strerror}" if error.errno else str(error)


def _content(fd: int, size: int) -> bytes:
    """Read from a descriptor up to the given size."""
    parts = []
    while size > 0 and (part := os.read(fd, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _unsafe(info: os.stat_result) -> str:
    """Why others could have put or changed this file, or ""."""
    if not POSIX:
        return ""
    if info.st_uid != os.geteuid():
        return "it belongs to another user"
    return "others can write to it" if info.st_mode & 0o022 else ""
