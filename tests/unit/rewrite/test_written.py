"""Pieces that are written into an input at positions that Python counts are written alone, in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusewright import report
from fusewright.rewrite.written import ID

Write = Callable[[Tensor, Tensor, int], Tensor]
LENGTH, WIDTH = 32, 8


def _one(c: Tensor, x: Tensor, p: int) -> Tensor:
    c[:, p] = x[:, 0] * 2
    return c.sum(1)


def _several(c: Tensor, x: Tensor, p: int) -> Tensor:
    c[:, p : p + 2] = x.expand(-1, 2, -1)
    return c[:, : p + 2].softmax(1)


def _of_some_sequences(c: Tensor, x: Tensor, p: int) -> Tensor:
    c[:2, p : p + 1] = x[:2]
    return c[:2, : p + 1].mean(1)


def _apart(c: Tensor, x: Tensor, p: int) -> Tensor:
    c[:2, :, 3:5] = x[:2, :, :2]
    return c.sum(1)


def _of_another_type(c: Tensor, x: Tensor, p: int) -> Tensor:
    c[:, p : p + 1] = (x * 3).double()
    return c + 1


def _every_other(c: Tensor, x: Tensor, p: int) -> Tensor:
    c[1][p, ::2] = x[0, 0, ::2]
    return c * 1


def _a_number(c: Tensor, x: Tensor, p: int) -> Tensor:
    c[:, p] = 7
    return c * 2


def _through_a_view(c: Tensor, x: Tensor, p: int) -> Tensor:
    c.transpose(1, 2)[:, :, p : p + 1] = x.transpose(1, 2)
    return c * 1


def _from_the_end(c: Tensor, x: Tensor, p: int) -> Tensor:
    c[:, LENGTH - p - 1] = x[:, 0]
    c[:, -1:] = x
    return c * 1


def _twice(c: Tensor, x: Tensor, p: int) -> Tensor:
    c[:, p : p + 1] = x
    total = c.amax()
    c[:, p + 1 : p + 2] = x * total
    return total


def _read_before(c: Tensor, x: Tensor, p: int) -> Tensor:
    before = c * 2
    c[:, p : p + 1] = x
    return before


def _returned(c: Tensor, x: Tensor, p: int) -> Tensor:
    c[:, p : p + 1] = x
    return c[:, p : p + 1]


FORMS: tuple[Write, ...] = (
    _one, _several, _of_some_sequences, _apart, _of_another_type, _every_other, _a_number, _from_the_end, _twice, _read_before,
    _returned,
)  # fmt: skip


def _compare(write: Write, dynamic: bool | None, of_a_larger: bool) -> list[report.Report]:
    """Call a function at several positions, compiled and in eager; return the reports."""
    torch.compiler.reset()
    torch.manual_seed(0)
    content = torch.randn(3, 4, LENGTH, WIDTH)
    ours, theirs = content.clone(), content.clone()
    caches = [large[1] if of_a_larger else large[1].clone() for large in (ours, theirs)]
    compiled = torch.compile(write, backend="x86_onednn", dynamic=dynamic, options={"cache": False, "fallback": "allow"})
    with report.recording() as reports, torch.no_grad():
        for p in (3, 4, 20, 1, 0):
            x = torch.randn(4, 1, WIDTH)
            result, expected = compiled(caches[0], x, p), write(caches[1], x, p)
            torch.testing.assert_close(result, expected)
            assert (result.storage_offset(), result.stride()) == (expected.storage_offset(), expected.stride())
            torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    return reports


@pytest.mark.parametrize("of_a_larger", [False, True], ids=["alone", "part of a larger tensor"])
@pytest.mark.parametrize("dynamic", [None, True], ids=["", "dynamic"])
@pytest.mark.parametrize("write", FORMS, ids=lambda f: f.__name__[1:])
def test_values_are_eagers(write: Write, dynamic: bool | None, of_a_larger: bool) -> None:
    assert all(r.rules[ID] for r in _compare(write, dynamic, of_a_larger))


def test_where_the_piece_is_not_an_input_s_own_the_graph_stays() -> None:
    assert not any(r.rules[ID] for r in _compare(_through_a_view, None, False))


@pytest.mark.parametrize("dynamic", [None, True], ids=["", "dynamic"])
def test_only_the_piece_is_written(dynamic: bool | None) -> None:
    for r in _compare(_one, dynamic, False):
        assert "slice_scatter" not in r.texts["plan"] and "select_scatter" not in r.texts["plan"]
        made = [line for line in r.texts["plan"].splitlines() if "empty_strided" in line]
        assert len(made) == 1, "the result alone: no copy of the cache"


def test_a_large_piece_is_written_with_the_rest() -> None:
    def write(c: Tensor, x: Tensor, p: int) -> Tensor:
        c[:, : LENGTH // 2 + 1] = x
        return c * 1

    assert not any(r.rules[ID] for r in _compare(write, None, False))


def test_a_position_that_may_count_from_the_end_is_left_to_eager() -> None:
    def write(c: Tensor, x: Tensor, p: int) -> Tensor:
        c[:, p - 4 : p - 4 + 1] = x
        return c * 1

    _compare(write, True, False)
