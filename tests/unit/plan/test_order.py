"""Order of things that wait for each other."""

from __future__ import annotations

import pytest

from fusewright.plan.order import topological


def test_what_waits_comes_later_and_all_else_stays() -> None:
    assert topological([]) == []
    assert topological([{3}, set(), {1}, set()]) == [1, 2, 3, 0]


def test_a_circle_is_refused() -> None:
    with pytest.raises(ValueError, match="2 of 3 wait for each other"):
        topological([{1}, {0}, set()])
