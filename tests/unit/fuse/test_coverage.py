"""Proofs that indices cover every element of a tensor; without a proof they do not count."""

from __future__ import annotations

import pytest

from fusewright.toolkit.ir import Index, symbol
from fusewright.toolkit.ir.index import axis_index
from fusewright.toolkit.rules.coverage import covers
from fusewright.toolkit.rules.evaluate import Part

N = symbol("n")
SIZES = (4, 6, N)


def axis(a: int) -> Index:
    return axis_index(a, SIZES)


WHOLE = {
    "one axis": ([axis(0)], 4),
    "two axes": ([axis(0) * 6 + axis(1)], 24),
    "the other way round": ([axis(1) * 4 + axis(0)], 24),
    "a symbolic axis": ([axis(2) * 6 + axis(1)], N * 6),
    "backwards": ([axis(0) * -1 + 3], 4),
    "the outer part of an axis": ([axis(1) // 2], 3),
    "the inner part of an axis": ([axis(1) % 2], 2),
    "both parts, changed over": ([axis(1) % 2 * 3 + axis(1) // 2], 6),
    "again and again": ([axis(1) % 3], 3),
    "moved around": ([(axis(1) + 2) % 6], 6),
    "written out": ([axis(0) * 3, axis(0) * 3 + 1, axis(0) * 3 + 2], 12),
    "one place": ([Index(sizes=SIZES)], 1),
    "one of several": ([axis(0), axis(0) * 6 + axis(1)], 24),
}
PART = {
    "fewer": ([axis(0)], 5),
    "from the second on": ([axis(0) + 1], 4),
    "every second": ([axis(0) * 2], 8),
    "a row of a table": ([axis(1)], 24),
    "the diagonal": ([axis(0) * 5], 16),
    "overlapping": ([axis(0) * 2 + axis(1)], 12),
    "another symbol": ([axis(2)], symbol("m")),
    "one part twice": ([axis(1) // 2 * 2 + axis(1) // 3], 6),
    "one missing": ([axis(0) * 3, axis(0) * 3 + 2], 12),
    "nothing": ([], 4),
}


@pytest.mark.parametrize("name", WHOLE)
def test_all_of_it(name: str) -> None:
    assert covers(*WHOLE[name])


@pytest.mark.parametrize("name", PART)
def test_not_all_of_it(name: str) -> None:
    assert not covers(*PART[name])


def test_a_part_of_the_points_is_all_of_a_joined_tensor() -> None:
    """An example is a concatenation along axis 1 whose second tensor has four columns, starting at the third."""
    inside = axis(0) * 4 + (axis(1) - 2)
    place = Part(1, 2, 4).of(inside)
    assert place is not None and covers([place], 16)
    assert not covers([inside], 16)
    shorter = Part(1, 2, 3).of(inside)
    assert shorter is not None and not covers([shorter], 16)
