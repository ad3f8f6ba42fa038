"""The threat model of docs/reliability.md, line by line: each line names an existing test that proves it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reliability.md"


def lines() -> list[list[str]]:
    """The cells of every row of the table."""
    text = PAGE.read_text().partition("## Who may write what\n")[2].partition("\n## ")[0]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return rows[1:]


def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("row", lines(), ids=lambda r: f"{r[0]} {r[1]}"[:60])
def test_every_line_of_the_threat_model_has_its_test(row: list[str]) -> None:
    who, what, _, happens, named = row
    path, _, name = named.strip("`").partition("::")
    assert (who or what) and happens and (ROOT / path).is_file(), named
    test = functions_of(ROOT / path).get(name)
    assert test is not None, f"{path} has no test called {name}"
    asserts = [n for n in ast.walk(test) if isinstance(n, ast.Assert) or "raises" in ast.unparse(n)[:20]]
    assert asserts, f"{name} asserts nothing"


def test_the_table_is_whole() -> None:
    """It covers every kind of actor and everything read from disk: the directory, entries, choices, the key."""
    assert len(lines()) >= 20 and all(len(r) == 5 for r in lines())
    text = " ".join(" ".join(r) for r in lines())
    for word in ("cache directory", "entry", "choices", "the key", "machine code", "verifier", "vocabulary"):
        assert word in text
