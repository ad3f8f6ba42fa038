"""Build products of backends' own tools: sealed files beside the plans, keyed by what they were built from. If the cache fails,
they are just built again."""

from __future__ import annotations

import logging

from fusewright.cache import place, seal, store
from fusewright.cache.folder import reason
from fusewright.config import env_or_default
from fusewright.errors import printable
from fusewright.report import warn_once

log = logging.getLogger("fusewright")


def read(made_of: str) -> bytes | None:
    """Read what was stored under this text; None if there is nothing, or not by this user on this machine."""
    folder = place.cache()
    if folder is None or not seal.usable():
        return None
    name = seal.name_of(f"artifact\0{made_of}") + store.MADE
    try:
        found = bytes(seal.unseal(name, folder.read(name)))
        folder.touch(name)
        return found
    except FileNotFoundError:
        return None
    except (OSError, seal.Broken) as e:
        log.warning("fusewright: %s in the cache cannot be used (%s); it is made anew", name[:16], printable(e)[:300])
        return None


def write(made_of: str, data: bytes) -> None:
    """Store `data` under this text."""
    folder = place.cache()
    if folder is None or not seal.usable():
        return
    name = seal.name_of(f"artifact\0{made_of}") + store.MADE
    try:
        folder.write(name, seal.seal(name, data))
        store.prune(max(0, env_or_default("CACHE_MB")) * 1_000_000)
    except OSError as e:
        warn_once(f"a build result was not cached: {reason(e)}")
