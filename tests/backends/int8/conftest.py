"""A fixture of the tests that compile whole models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fusewright import report


@pytest.fixture
def plans() -> Iterator[_Texts]:
    """Collect the text of every plan."""
    with report.recording() as reports:
        yield _Texts(reports)


class _Texts(list[str]):
    def __init__(self, reports: list[Any]) -> None:
        self._reports = reports

    def calls(self, k: int = -1) -> list[str]:
        """The int8 calls of a plan in order, without prepared constants."""
        return [w.partition("(")[0].removesuffix("_default") for w in self.text(k).split("= fusewright_int8_")[1:]]

    def text(self, k: int = -1) -> str:
        """What runs at each call."""
        return self.whole(k).partition("def run(")[2]

    def whole(self, k: int = -1) -> str:
        return str(self._reports[k].texts["plan"])
