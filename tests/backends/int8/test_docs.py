"""Runs the quantization guide block by block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torchao", reason="torchao is an optional dependency of fusewright-int8 (extra `quantize`)")

PAGE = Path(__file__).parents[3] / "docs/quantization.md"


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_walk_through_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["y"].shape == (8, 10)  # type: ignore[attr-defined]


def test_every_command_of_the_page_is_there() -> None:
    from fusewright.cli.app import COMMANDS

    told = re.findall(r"^fusewright (\w+)", PAGE.read_text(), re.MULTILINE)
    assert told and set(told) <= COMMANDS.keys()
