"""Topological order and transitive closure of dependencies."""

from __future__ import annotations

import pytest

from fusewright.plan.order import closure, topological


def test_what_waits_comes_later_and_all_else_stays() -> None:
    assert topological([]) == []
    assert topological([{3}, set(), {1}, set()]) == [1, 2, 3, 0]


def test_a_circle_is_refused() -> None:
    with pytest.raises(ValueError, match="2 of 3 wait for each other"):
        topological([{1}, {0}, set()])


def test_everything_behind_counts() -> None:
    needs = [0b10, 0b100, 0, 0b1]
    assert closure(0b1, needs) == 0b111 and closure(0b1000, needs) == 0b1111 and closure(0, needs) == 0
