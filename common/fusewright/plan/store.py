"""The plan cache on disk: one file an entry, JSON and raw bytes, content hash checked, bounded in size.

An entry is read only when its hash is right; anything else is a miss, said once. Nothing in it is executed but code
that the backend's own fingerprint vouches for, from a directory that only the user can write (see `cachedir`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from fusewright import cachedir

log = logging.getLogger("fusewright")

MAGIC = b"fusewright-plan-1\n"
SUFFIX = ".plan"


@dataclass(frozen=True)
class Entry:
    """A file of the cache: its key, size in bytes and time of last use (seconds since 1970)."""

    key: str
    bytes: int
    used: float
    path: Path


def key(*parts: str) -> str:
    """A cache key: the hash of texts, whose borders count."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def read(entry_key: str) -> tuple[dict[str, Any], bytes] | None:
    """(plan data, kernel code) of an entry, or None. A damaged entry is removed, with a warning."""
    path = cachedir.file(entry_key + SUFFIX)
    if path is None:
        return None
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    found = _unpack(raw)
    if found is None:
        log.warning("fusewright: %s in the plan cache is damaged; it is removed and compiled anew", path.name)
        discard(entry_key)
        return None
    try:
        os.utime(path)  # what was used last is pruned last
    except OSError as e:
        log.debug("the time of last use was not recorded: %s", e)
    return found


def discard(entry_key: str) -> None:
    """Remove an entry that cannot be used."""
    path = cachedir.file(entry_key + SUFFIX)
    try:
        if path is not None:
            path.unlink(missing_ok=True)
    except OSError as e:
        log.debug("%s could not be removed: %s", path, e)


def _unpack(raw: bytes) -> tuple[dict[str, Any], bytes] | None:
    start = len(MAGIC) + 32
    if not raw.startswith(MAGIC) or hashlib.sha256(raw[start:]).digest() != raw[len(MAGIC) : start]:
        return None
    length = int.from_bytes(raw[start : start + 8], "little")
    data = json.loads(raw[start + 8 : start + 8 + length])
    return data, raw[start + 8 + length :]


def write(entry_key: str, data: dict[str, Any], code: bytes, limit_bytes: int) -> None:
    """Add an entry and prune the cache to its limit. A cache that cannot be written costs only time."""
    path = cachedir.file(entry_key + SUFFIX)
    if path is None:
        return
    text = json.dumps(data, separators=(",", ":")).encode()
    payload = len(text).to_bytes(8, "little") + text + code
    try:
        cachedir.write(path, MAGIC + hashlib.sha256(payload).digest() + payload)
        prune(limit_bytes)
    except OSError as e:
        log.warning("fusewright: a plan was not cached: %s", e)


def entries() -> list[Entry]:
    """What the cache holds, least recently used first."""
    return sorted(_entries(), key=lambda e: e.used)


def _entries() -> Iterator[Entry]:
    directory = cachedir.usable()
    for path in directory.glob("*" + SUFFIX) if directory else ():
        try:
            info = path.stat()
        except FileNotFoundError:
            continue  # pruned by another process meanwhile
        yield Entry(path.name.removesuffix(SUFFIX), info.st_size, info.st_mtime, path)


def prune(limit_bytes: int) -> int:
    """Remove the least recently used entries until the rest fits; how many were removed."""
    directory = cachedir.usable()
    if directory is None:
        return 0
    removed = 0
    try:
        with filelock.FileLock(directory / "prune.lock", timeout=1):
            kept = entries()
            total = sum(e.bytes for e in kept)
            while kept and total > limit_bytes:
                oldest = kept.pop(0)
                oldest.path.unlink(missing_ok=True)
                total -= oldest.bytes
                removed += 1
    except filelock.Timeout:
        log.debug("another process prunes the cache")
    return removed


def clear() -> int:
    """Remove every entry and the remembered choices; how many plans were removed."""
    removed = prune(0)
    choices = cachedir.file("choices.json")
    if choices is not None:
        choices.unlink(missing_ok=True)
    return removed
