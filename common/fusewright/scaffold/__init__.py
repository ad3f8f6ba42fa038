"""A package for a new backend, generated from templates: `fusewright new-backend NAME`.

A template is a file under `template` with the suffix ".in". Placeholders such as `@NAME@` are replaced; the folder `module` is
renamed to the import package.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from fusewright.errors import FusewrightError
from fusewright.interface import INTERFACE, OPSET
from fusewright.version import __version__

LICENSES = ("Apache-2.0", "BSD-3-Clause", "MIT", "LicenseRef-Proprietary")
"""SPDX names that the command offers. The author adds the license text."""
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LONGEST = 40


class ScaffoldError(FusewrightError, ValueError):
    """A package cannot be written, because of its name or its target folder."""


@dataclass(frozen=True)
class Package:
    """The names of a backend: `vendor_device` becomes `fusewright-vendor-device`, `fusewright_vendor_device` and
    `VendorDevice`."""

    name: str
    license: str = "LicenseRef-Proprietary"

    @property
    def dist(self) -> str:
        return f"fusewright-{self.name.replace('_', '-')}"

    @property
    def module(self) -> str:
        return f"fusewright_{self.name}"

    @property
    def cls(self) -> str:
        return "".join(part.capitalize() for part in self.name.split("_"))

    def filled(self, text: str) -> str:
        """Fill a template with this package's names."""
        minor = ".".join(__version__.split(".")[:2])
        known = {
            "NAME": self.name, "DIST": self.dist, "MODULE": self.module, "CLASS": self.cls, "LICENSE": self.license,
            "INTERFACE": str(INTERFACE), "OPSET": str(OPSET), "VERSION": minor,
        }  # fmt: skip
        return re.sub("@([A-Z]+)@", lambda m: known[m[1]], text)


def check_name(name: str, taken: Collection[str]) -> None:
    """Raise `ScaffoldError` for a name that torch, Python or another backend uses, or that is not a lower-case identifier."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        proposed = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789")[:_LONGEST]
        hint = f"; how about {proposed!r}?" if _NAME.fullmatch(proposed) else ""
        raise ScaffoldError(
            f"{name!r} is no name for a backend: small letters, digits and single underscores, a letter first, "
            f"{_LONGEST} at most{hint}"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise ScaffoldError(f"{name!r} is a word of Python's; choose another, such as {name + '_device'!r}")
    if name.startswith("fusewright"):
        raise ScaffoldError(f"{name!r}: the prefix is put before it anyway, and names that begin so are the host's own")
    if name in taken:
        raise ScaffoldError(f"a backend called {name!r} is installed already; choose another name, or uninstall that one")


def write(package: Package, folder: Path) -> list[Path]:
    """Write the package's files into `folder`, which must be empty or not exist; else raise `ScaffoldError`."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ScaffoldError(f"{folder} exists and is not empty; name another folder with --into, or remove it")
    made = []
    for path, text in _templates():
        target = folder / package.filled(path.replace("module/", f"{package.module}/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(package.filled(text), encoding="utf-8")
        made.append(target)
    return made


def _templates() -> Iterator[tuple[str, str]]:
    """Paths in the package, with their texts."""
    yield from _below(files(__name__) / "template", "")


def _below(place: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(place.iterdir(), key=lambda e: e.name):
        if entry.is_dir():
            yield from _below(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".in"):
            yield prefix + entry.name.removesuffix(".in"), entry.read_text(encoding="utf-8")
