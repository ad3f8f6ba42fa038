"""The plan cache on disk: one sealed file per entry, JSON and raw bytes, limited in total size.

An entry is used only if its seal is valid (see `seal`) and it was written for exactly the requested key; anything else is a
miss, logged once, and removed. Beside each entry lies a file that grows by one byte with every hit.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import filelock

from fusewright.cache import place, seal
from fusewright.cache.folder import Folder, Found, reason
from fusewright.cache.seal import Broken
from fusewright.errors import printable
from fusewright.report import warn_once

log = logging.getLogger("fusewright")

SUFFIX, HITS, MADE = ".plan", ".hits", ".made"
_ENTRY = re.compile(r"[0-9a-f]{64}\.plan")
_OURS = re.compile(r"[0-9a-f]{64}\.(plan|hits|made)|choices(\.json)?")
"""Names of our own files; no other file is ever removed."""
_TEMPORARY = re.compile(rf"\.(?:{_OURS.pattern})\.\d+\.[0-9a-f]{{16}}\.tmp")
STALE = 3600.0
"""Age in seconds at which a temporary file counts as abandoned."""

CHOICES = "choices"


@dataclass(frozen=True)
class Key:
    """What a plan depends on, by name: all of it is stored in the entry and compared."""

    parts: Mapping[str, str]

    @property
    def name(self) -> str:
        return seal.name_of(json.dumps(dict(self.parts), sort_keys=True))


@dataclass(frozen=True)
class Entry:
    """A plan in the cache: its name, size in bytes, time of last use (seconds since 1970) and hits."""

    name: str
    bytes: int
    used: float
    hits: int = 0


@dataclass(frozen=True)
class Content:
    """The content of an entry: metadata (including its key), the plan as JSON data, the code of its kernels."""

    facts: Mapping[str, Any]
    data: dict[str, Any]
    code: bytes


def read(key: Key) -> Content | None:
    """Read the entry of a key, or None. A file that is not an entry of exactly this key is removed, with a warning."""
    folder, name = place.cache(), key.name
    if folder is None:
        return None
    try:
        found = open_entry(folder, name)
        if found.facts["key"] != key.parts:
            raise Broken("it was made for another key")
    except FileNotFoundError:
        return None
    except Exception as e:  # whatever damaged bytes cause, it is a miss
        reject(name, e)
        return None
    try:
        folder.append(name + HITS, b"+")
        folder.touch(name + SUFFIX)  # the least recently used entry is pruned first
    except OSError as e:
        log.debug("the time of last use was not recorded: %s", e)
    return found


def reject(name: str, why: Exception) -> None:
    """Remove an unusable entry, and log it."""
    log.warning(
        "fusewright: %s in the plan cache cannot be used (%s: %s); it is removed and compiled anew",
        name[:16], type(why).__name__, printable(why)[:300],
    )  # fmt: skip
    folder = place.existing_cache()
    if folder is not None:
        _remove(folder, name + SUFFIX, name + HITS)


def _remove(folder: Folder, *names: str) -> None:
    for name in names:
        try:
            folder.remove(name)
        except OSError as e:
            log.debug("%s could not be removed: %s", name, e)


def open_entry(folder: Folder, name: str) -> Content:
    """The content of an entry by name. Raises `Broken`, OSError or JSON's errors."""
    body = seal.unseal(name, folder.read(name + SUFFIX))
    facts, rest = _json(body)
    data, code = _json(rest)
    if not isinstance(facts, dict) or not isinstance(data, dict):
        raise Broken("it holds no plan")
    return Content(facts, data, bytes(code))


def _json(body: memoryview) -> tuple[Any, memoryview]:
    end = 8 + int.from_bytes(body[:8], "little")
    return json.loads(bytes(body[8:end])), body[end:]


def _packed(data: Mapping[str, Any]) -> bytes:
    text = json.dumps(dict(data), separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text


def write(key: Key, facts: Mapping[str, Any], data: Mapping[str, Any], code: bytes, limit_bytes: int) -> None:
    """Add an entry and prune the cache to its limit. Failures are not raised."""
    folder, name = place.cache(), key.name
    if folder is None:
        return
    about = {**facts, "key": dict(key.parts), "made": time.time()}
    try:
        folder.write(name + SUFFIX, seal.seal(name, _packed(about) + _packed(data) + code))
        prune(limit_bytes)
    except OSError as e:
        warn_once(f"a plan was not cached: {reason(e)}")


def entries() -> list[Entry]:
    """The entries, least recently used first. Nothing is created or changed."""
    return _entries(_files())


def _files() -> list[Found]:
    """Our own files; none if there is no cache."""
    folder = place.existing_cache()
    try:
        found = folder.files() if folder else []
    except OSError as e:
        log.debug("the cache cannot be listed: %s", e)
        found = []
    return [f for f in found if _OURS.fullmatch(f.name) or _TEMPORARY.fullmatch(f.name)]


def _entries(files: list[Found]) -> list[Entry]:
    """A plan and its hit count form one entry."""
    hits = {f.name.removesuffix(HITS): f.bytes for f in files if f.name.endswith(HITS)}
    plans = {f.name.removesuffix(SUFFIX): f for f in files if _ENTRY.fullmatch(f.name)}
    found = [Entry(n, f.bytes + hits.get(n, 0), f.used, hits.get(n, 0)) for n, f in plans.items()]
    return sorted(found, key=lambda e: e.used)


def _artifacts(files: list[Found]) -> list[Entry]:
    """The files stored by `artifacts`, which are not plans."""
    return [
        Entry(f.name.removesuffix(MADE), f.bytes, f.used)
        for f in files
        if f.name.endswith(MADE) and not f.name.startswith(".")
    ]


def listed() -> Iterator[tuple[Entry, Mapping[str, Any]]]:
    """Entries with their metadata, which is empty for files that this user did not write on this machine."""
    folder = place.existing_cache()
    for entry in entries() if folder else ():
        try:
            assert folder is not None
            yield entry, open_entry(folder, entry.name).facts
        except Exception as e:  # damaged bytes may raise anything
            log.debug("%s cannot be read: %s", entry.name, printable(e))
            yield entry, {}


def total_bytes() -> int:
    """The total size of our files, including unfinished ones."""
    return sum(f.bytes for f in _files())


def prune(limit_bytes: int) -> int:
    """Remove abandoned temporary files, then the least recently used entries until the rest fits; return how many of these."""
    folder = place.existing_cache()
    if folder is None:
        return 0
    removed = 0
    try:
        with filelock.FileLock(folder.path / "prune.lock", timeout=1, mode=0o600):
            files = _files()
            now = time.time()
            stale = [f for f in files if _TEMPORARY.fullmatch(f.name) and not now - STALE < f.used < now + STALE]
            plans = _entries(files)
            names = {e.name for e in plans}
            kept = sorted([*plans, *_artifacts(files)], key=lambda e: e.used)
            orphans = [f for f in files if f.name.endswith(HITS) and f.name.removesuffix(HITS) not in names]
            total = sum(f.bytes for f in files) - sum(f.bytes for f in (*stale, *orphans))
            _remove(folder, *(f.name for f in (*stale, *orphans)))
            while kept and total > limit_bytes:
                oldest = kept.pop(0)
                _remove(folder, *(oldest.name + suffix for suffix in (SUFFIX, HITS, MADE)))
                total -= oldest.bytes
                removed += 1
    except filelock.Timeout:
        log.debug("another process prunes the cache")
    return removed


def clear() -> int:
    """Remove every entry, the stored choices and temporary files; return how many plans were removed."""
    files, folder = _files(), place.existing_cache()
    if folder is not None:
        _remove(folder, *(f.name for f in files))
    return len(_entries(files))


def read_choices() -> dict[str, Any]:
    """The stored choices; empty if there are none written by this user."""
    folder = place.existing_cache()
    if folder is None or not seal.usable():
        return {}
    try:
        found = json.loads(bytes(seal.unseal(CHOICES, folder.read(CHOICES))))
    except FileNotFoundError:
        return {}
    except Exception as e:  # damaged bytes may raise anything: measure again
        why = f"{type(e).__name__}: {printable(e)}"
        log.warning("fusewright: the remembered choices cannot be used (%s); they are made anew", why)
        _remove(folder, CHOICES)
        return {}
    return found if isinstance(found, dict) else {}


def write_choices(update: Any) -> None:
    """Let `update` change the stored choices, under an inter-process lock. OSError or `filelock.Timeout`."""
    folder = place.cache()
    if folder is None or not seal.usable():
        return
    with filelock.FileLock(folder.path / "choices.lock", timeout=5, mode=0o600):
        everything = read_choices()
        update(everything)
        folder.write(CHOICES, seal.seal(CHOICES, json.dumps(everything, indent=0, sort_keys=True).encode()))
