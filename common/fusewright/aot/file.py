"""The file format: JSON and raw bytes, authenticated as a whole before anything is parsed.

A file is valid for a reader who passes its SHA-256 or, without one, for the user who wrote it, on the same machine
(`cache.seal`). The file format executes nothing by itself; whoever passes the digest decides what may run.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusewright.cache import seal
from fusewright.errors import ArtifactError, printable

MAGIC = b"fusewright-aot-1\n"
NAME = "aot"
"""The name that files are sealed under."""
LIMIT = 1 << 32
"""Maximum size of a file in bytes."""
_TAG = 32


def write(path: Path, head: dict[str, Any], blobs: Sequence[bytes]) -> str:
    """Write the file atomically, whoever else may write to its folder; return its SHA-256 in hex. Raises `ArtifactError`."""
    text = json.dumps({**head, "blobs": [len(b) for b in blobs]}, separators=(",", ":")).encode()
    body = len(text).to_bytes(8, "little") + text + b"".join(blobs)
    tag = seal.seal(NAME, body)[len(seal.MAGIC) : len(seal.MAGIC) + _TAG] if seal.usable() else bytes(_TAG)
    data = MAGIC + tag + body
    part = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.part")  # of this call alone
    try:
        with open(part, "xb") as f:  # no link or file that somebody planted there
            f.write(data)
        part.replace(path)
    except OSError as e:
        raise ArtifactError(f"{path} cannot be written: {e.strerror or e}") from e
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return hashlib.sha256(data).hexdigest()


def read(path: Path, sha256: str | None) -> tuple[dict[str, Any], list[bytes]]:
    """Read back what `write` was given. Raises `ArtifactError`."""
    data = _bytes(path)
    _authenticate(path, data, sha256)
    try:
        return _parsed(memoryview(data)[len(MAGIC) + _TAG :])
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ArtifactError(f"{path}: it is damaged ({type(e).__name__}: {printable(e)[:200]}); save it again") from e


def _bytes(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=_without_waiting) as f:
            info = os.fstat(f.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ArtifactError(f"{path}: it is no plain file")
            if info.st_size > LIMIT:
                raise ArtifactError(f"{path}: {info.st_size} bytes are more than such a file has")
            return f.read(info.st_size)
    except OSError as e:
        raise ArtifactError(f"{path}: {e.strerror or e}") from e


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; opening a pipe does not wait for its writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _authenticate(path: Path, data: bytes, sha256: str | None) -> None:
    if not data.startswith(MAGIC) or len(data) < len(MAGIC) + _TAG:
        raise ArtifactError(f"{path}: it is no file that fusewright.save wrote, or one of another version")
    if sha256 is not None:
        if len(sha256) != 64:
            raise ArtifactError(f"sha256={sha256!r} is no SHA-256: give the 64 hexadecimal digits that save returned")
        if not hmac.compare_digest(hashlib.sha256(data).hexdigest(), sha256.lower()):
            raise ArtifactError(
                f"{path}: its SHA-256 is not the one given; it was changed, cut short, or is another file"
            )
        return
    body = memoryview(data)[len(MAGIC) + _TAG :]
    tag = data[len(MAGIC) : len(MAGIC) + _TAG]
    try:
        seal.unseal(NAME, b"".join([seal.MAGIC, tag, body]))
    except seal.Broken as e:
        raise ArtifactError(
            f"{path}: this user did not write it on this machine, or it was changed since. It holds machine code: where you trust "
            "it all the same, give load(..., sha256=...) what save returned"
        ) from e


def _parsed(body: memoryview) -> tuple[dict[str, Any], list[bytes]]:
    end = 8 + int.from_bytes(body[:8], "little")
    head = json.loads(bytes(body[8:end]))
    if not isinstance(head, dict):
        raise ValueError("it holds no programs")
    blobs, at = [], end
    for size in head["blobs"]:
        if not isinstance(size, int) or size < 0 or at + size > len(body):
            raise ValueError("it is cut short")
        blobs.append(bytes(body[at : at + size]))
        at += size
    if at != len(body):
        raise ValueError("it has bytes that nobody wrote")
    return head, blobs
