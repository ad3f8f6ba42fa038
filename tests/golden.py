"""Expected texts in tests/golden. `pytest --accept` rewrites those that differ and names them; read the diff before you commit it.

A file may begin with the test's input, in sections that `--accept` keeps; `read(name)` returns them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
RULER = "----"


@dataclass
class Goldens:
    """Golden files. With `accept`, files that differ are rewritten and `accepted` is called with their path."""

    accept: bool
    accepted: Callable[[Path], None]
    folder: Path = FOLDER

    def check(self, name: str, *sections: str) -> None:
        """Raise AssertionError with a diff if the file does not consist of these sections."""
        path, found = self.folder / f"{name}.txt", joined(sections)
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        if found == expected:
            return
        if not self.accept:
            raise AssertionError(f"{path.name} differs; to accept: pytest --accept\n{_diff(expected, found)}")
        path.write_text(found, encoding="utf-8")
        self.accepted(path)


def _diff(expected: str, found: str) -> str:
    lines = difflib.unified_diff(expected.splitlines(), found.splitlines(), "expected", "found", lineterm="")
    return "\n".join(lines)


def joined(sections: Iterable[str]) -> str:
    """Join sections with a ruler between them."""
    return f"{RULER}\n".join(s if s.endswith("\n") else f"{s}\n" for s in sections)


def read(name: str) -> list[str]:
    """The sections of a file."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8").split(f"{RULER}\n")


def names(prefix: str) -> Sequence[str]:
    """The files of one kind, without ".txt"."""
    return sorted(p.stem for p in FOLDER.glob(f"{prefix}_*.txt"))
