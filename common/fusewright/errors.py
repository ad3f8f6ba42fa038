"""Errors that users may see. Each message says what was wrong and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class FusewrightError(Exception):
    """Base class of every error that Fusewright raises on purpose."""


class OptionError(FusewrightError, ValueError):
    """An unknown option or environment variable, or an invalid value of one."""


class UnknownBackendError(FusewrightError, LookupError):
    """No installed package provides a backend of that name."""


class BackendUnavailableError(FusewrightError, RuntimeError):
    """The backend is installed but cannot run here: it failed to load, or its device is missing."""


class FallbackError(FusewrightError, RuntimeError):
    """Ops would run in eager, or as eager's own calls inside regions, although the options say `fallback="error"`."""


class BackendContractError(FusewrightError, RuntimeError):
    """A backend violated the interface's contract: a wrong shape, a modified input, a missing result."""


class BackendCrashError(FusewrightError, RuntimeError):
    """A backend crashed while compiling, or one of its kernels cannot be built, in strict mode."""


class QuantizationError(FusewrightError, ValueError):
    """A model that cannot be quantized as asked: no or bad calibration inputs, an unknown recipe, nothing to quantize."""


class ArtifactError(FusewrightError, ValueError):
    """A model that cannot be saved ahead of time, or a saved file that does not fit this model, this machine or its digest."""


class FreedStorageError(FusewrightError, RuntimeError):
    """A kernel would read a tensor whose memory was freed, e.g. sharded weights between two uses."""


def without_memory(t: Any) -> int:
    """Return 0, the address to pass for a tensor with a null pointer, if it is empty. Raise `FreedStorageError` if it has
    elements, which a kernel would read."""
    if t.numel() == 0:
        return 0
    raise FreedStorageError(
        f"a tensor of shape {tuple(t.shape)} and {t.dtype} on {t.device} has no memory; was its storage freed "
        "(untyped_storage().resize_(0))?"
    )


def sized(t: Any, sizes: tuple[int, ...], target: str) -> None:
    """Raise RuntimeError, as a failed assertion does, unless `t` has these sizes; -1 matches any."""
    if any(n not in (-1, m) for n, m in zip(sizes, t.shape, strict=True)):
        wanted = " x ".join("?" if n == -1 else str(n) for n in sizes)
        made = " x ".join(map(str, t.shape))
        raise RuntimeError(f"Runtime assertion failed: {target} made {made}, and the program asserts {wanted}")


def printable(words: object) -> str:
    """Format words of unknown origin as one line that is safe for every terminal and log."""
    text = str(words)
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def in_brief(words: object, most: int = 200) -> str:
    """The first non-empty line, cut to `most` characters."""
    first = next((line for line in map(str.strip, str(words).splitlines()) if line), "")
    return printable(first if len(first) <= most else f"{first[:most]} ...")


def counted(n: int, noun: str) -> str:
    """ "1 graph", "2 graphs"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def nearest(name: str, valid: Iterable[str]) -> str:
    """A suggestion to end an error message with: the closest valid name, or all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"valid names: {', '.join(names)}" if names else "there are none"
