"""Errors that users can meet. Each message says what was wrong and what would put it right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class FusewrightError(Exception):
    """Base class of every error that Fusewright raises on purpose."""


class OptionError(FusewrightError, ValueError):
    """An option or environment variable that does not exist, or a value that it cannot have."""


class UnknownBackendError(FusewrightError, LookupError):
    """No installed package provides a backend of that name."""


class BackendUnavailableError(FusewrightError, RuntimeError):
    """The backend is installed but cannot be used here: it did not load, or its device is missing."""


class FallbackError(FusewrightError, RuntimeError):
    """Ops would run in eager, or by eager's own calls inside of regions, although the options say `fallback="error"`."""


class BackendContractError(FusewrightError, RuntimeError):
    """A backend broke the interface's contract: a wrong shape, a changed input, a result that is missing."""


class BackendCrashError(FusewrightError, RuntimeError):
    """A backend crashed while compiling, or one of its kernels cannot be built, in strict mode."""


class QuantizationError(FusewrightError, ValueError):
    """A model that cannot be quantized as asked: no or bad calibration inputs, an unknown recipe, nothing to quantize."""


class ArtifactError(FusewrightError, ValueError):
    """A model that cannot be saved ahead of time, or a saved file that does not fit this model, this machine or its digest."""


class FreedStorageError(FusewrightError, RuntimeError):
    """A kernel was to read a tensor whose memory was given back, e.g. sharded weights between two uses."""


def without_memory(t: Any) -> int:
    """What stands for the address of a tensor whose pointer is null: 0 for an empty one. Raises `FreedStorageError` for one with
    elements, which a kernel would read."""
    if t.numel() == 0:
        return 0
    raise FreedStorageError(
        f"a tensor of shape {tuple(t.shape)} and {t.dtype} on {t.device} has no memory; was its storage freed "
        "(untyped_storage().resize_(0))?"
    )


def sized(t: Any, sizes: tuple[int, ...], target: str) -> None:
    """Raise RuntimeError, as a failed assertion does, where `t` has not these sizes; -1 is any."""
    if any(n not in (-1, m) for n, m in zip(sizes, t.shape, strict=True)):
        wanted = " x ".join("?" if n == -1 else str(n) for n in sizes)
        made = " x ".join(map(str, t.shape))
        raise RuntimeError(f"Runtime assertion failed: {target} made {made}, and the program asserts {wanted}")


def printable(words: object) -> str:
    """Words of unknown origin as one line that every terminal and log takes."""
    text = str(words)
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def in_brief(words: object, most: int = 200) -> str:
    """The first line that says something, at most so long."""
    first = next((line for line in map(str.strip, str(words).splitlines()) if line), "")
    return printable(first if len(first) <= most else f"{first[:most]} ...")


def counted(n: int, noun: str) -> str:
    """ "1 graph", "2 graphs"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint that ends an error message: the closest valid name, or all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"valid names: {', '.join(names)}" if names else "there are none"
