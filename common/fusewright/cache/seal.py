"""Authentication of cache files: each was written by this user on this machine, under the name that it is read by.

A file is sealed with HMAC-SHA256 (RFC 2104) under a random key that lies in the user's state directory, readable by nobody
else, and is bound to the machine. Without such a key nothing is stored on disk.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
from pathlib import Path

from fusewright.cache import place
from fusewright.cache.folder import POSIX, Folder
from fusewright.report import warn_once

MAGIC = b"fusewright-sealed-1\n"
FILE = "key"
LENGTH = 32
_TAG = len(MAGIC) + 32
_MACHINE = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


class Broken(ValueError):
    """Bytes that this user did not write on this machine under that name, or that changed since."""


def usable() -> bool:
    """Whether there is a key; if not, one warning says why."""
    return _key() is not None


def name_of(text: str) -> str:
    """An unpredictable name (hex) for what is stored under `text`. Check `usable` first."""
    return hmac.digest(_needed(), b"name\0" + text.encode(), "sha256").hex()


def seal(name: str, body: bytes) -> bytes:
    """The sealed content of the file `name`. Check `usable` first."""
    return b"".join([MAGIC, _tag(name, body), body])


def unseal(name: str, raw: bytes) -> memoryview:
    """The body that `seal` was given. Raises `Broken` for anything else."""
    body = memoryview(raw)[_TAG:]
    if not raw.startswith(MAGIC) or len(raw) < _TAG:
        raise Broken("it is of another kind or version")
    if not hmac.compare_digest(raw[len(MAGIC) : _TAG], _tag(name, body)):
        raise Broken("it was changed, or written by somebody else or under another name")
    return body


def _tag(name: str, body: bytes | memoryview) -> bytes:
    mac = hmac.new(_needed(), b"file\0" + name.encode() + b"\0", "sha256")
    mac.update(body)
    return mac.digest()


def _needed() -> bytes:
    key = _key()
    if key is None:
        raise Broken("there is no key")
    return key


_keys: dict[tuple[Path, int], bytes] = {}


def _key() -> bytes | None:
    """The key of this user on this machine; None, with one warning, if that fails."""
    try:
        where = place.state_path(), os.geteuid() if POSIX else 0
        if where not in _keys:
            bound_to = b"fusewright 1\0%d\0" % where[1] + _machine()
            _keys[where] = hmac.digest(_secret(place.state()), bound_to, "sha256")
        return _keys[where]
    except (OSError, RuntimeError) as e:  # RuntimeError: no home directory
        warn_once(
            f"nothing is cached on disk, for want of a key: {e}. Everything works, but is compiled anew each time. "
            "FUSEWRIGHT_STATE_DIR names another folder for the key."
        )
        return None


def _secret(folder: Folder) -> bytes:
    """The content of the key file, created if missing; if two processes create it at once, one wins."""
    try:
        found = folder.read(FILE, limit=LENGTH, private=True)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            folder.write(FILE, secrets.token_bytes(LENGTH), replace=False)
        found = folder.read(FILE, limit=LENGTH, private=True)
    if len(found) != LENGTH:
        raise OSError(f"{folder.path / FILE} is no key of ours; remove it")
    return found


@functools.cache
def _machine() -> bytes:
    """An identity that distinguishes machines with a shared home directory."""
    found = b""
    for file in _MACHINE:
        with contextlib.suppress(OSError):
            found = found or file.read_bytes().strip()
    return found
