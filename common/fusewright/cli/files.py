"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click


class Written(click.Path):
    """A file to write. An unwritable one is rejected before the work, not after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Raises `click.BadParameter`."""
        path = Path(str(super().convert(value, param, ctx)))
        folder = path.absolute().parent
        if not folder.is_dir():
            self.fail(f"there is no folder {str(folder)!r}", param, ctx)
        if not os.access(path if path.exists() else folder, os.W_OK):
            self.fail(f"{str(path)!r} cannot be written", param, ctx)
        return path
