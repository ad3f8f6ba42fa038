"""The operators that torch computes on MPS, from the table that torch is generated from."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import torch

COMPOSITE = frozenset(
    {"CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"}
)
"""Dispatch keys of kernels that call other operators, on any device."""


@cache
def kernels() -> dict[str, set[str]]:
    """The dispatch keys of every operator in torch's own table, by name and overload."""
    table = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    rows = {row.split("(")[0]: row for row in re.split(r"^- func: ", table.read_text(), flags=re.MULTILINE)[1:]}
    return {name: _keys(rows[_delegate(row) or name]) for name, row in rows.items()}


def _delegate(row: str) -> str | None:
    found = re.search(r"^  structured_delegate: (\S+)", row, re.MULTILINE)
    return found and found[1]


def _keys(row: str) -> set[str]:
    found = re.search(r"^  dispatch:\n((?:    .*\n)*)", row, re.MULTILINE)
    named = re.findall(r"^    ([\w, ]+):", found[1], re.MULTILINE) if found else ["CompositeImplicitAutograd"]
    return {key.strip() for keys in named for key in keys.split(",")}


def computes(overload: str) -> bool:
    """Whether torch has code for an overload ("add.Tensor") on MPS. False for operators of other libraries."""
    return bool(kernels().get(overload, set()) & {"MPS", *COMPOSITE})
