"""What reads and makes empty tensors: log-step scans, edges of windows, gradients of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import report
from tests.compare import against_eager, gradients

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _interleaved(x: Tensor, y: Tensor) -> Tensor:
    n = min(x.shape[1], y.shape[1])
    return torch.cat([torch.stack([x[:, :n], y[:, :n]], 2).flatten(1, 2), x[:, n:], y[:, n:]], 1)


def _scan(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """h[t] = a[t] * h[t - 1] + b[t], by halves; both ends have steps that nothing precedes."""
    if a.shape[1] < 2:
        return a, b
    odd_a, odd_b = _scan(a[:, 1::2] * a[:, :-1:2], a[:, 1::2] * b[:, :-1:2] + b[:, 1::2])
    last = -1 if a.shape[1] % 2 == 0 else None
    even_a, even_b = odd_a[:, :last] * a[:, 2::2], a[:, 2::2] * odd_b[:, :last] + b[:, 2::2]
    even = torch.cat([a[:, :1], even_a], 1), torch.cat([b[:, :1], even_b], 1)
    return _interleaved(even[0], odd_a), _interleaved(even[1], odd_b)


def _states(a: Tensor, b: Tensor) -> Tensor:
    return _scan(a, b)[1]


def _edges(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Of no rows: arithmetic, a product over no terms, a sum of none, padding, a write, an index."""
    none = (x[:0] * 2).exp()
    written = torch.slice_scatter(x, none + 1, 0, 2, 2)
    return (
        torch.cat([none, y]) + 1, none.T @ none, none.sum(0), torch.nn.functional.pad(none, (0, 0, 1, 2), value=3.0),
        written * 2, none.softmax(-1), none.to(torch.int64) + 1,
    )  # fmt: skip


def _made(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], list[Tensor]]:
    def make() -> list[Tensor]:
        g = torch.Generator().manual_seed(0)
        made = [torch.randn(s, generator=g) for s in sizes]
        made[0].view(-1)[0], made[1].view(-1)[1] = torch.nan, torch.inf
        return [x.to(dtype) for x in made]

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("steps", [1, 2, 7, 8])
def test_scans_by_halves(steps: int, dtype: torch.dtype) -> None:
    with report.recording() as reports:
        assert not against_eager(_states, _made((2, steps, 3), (2, steps, 3), dtype=dtype), "x86_onednn", exact=False)
    assert not [r.op for graph in reports for r in graph.by_eager]


def test_empty_results_keep_type_and_shape() -> None:
    assert not against_eager(_edges, _made((4, 3), (2, 3)), "x86_onednn", exact=False)


def test_gradients_of_scans_by_halves() -> None:
    def leaves() -> list[Tensor]:
        g = torch.Generator().manual_seed(1)
        return [torch.randn(2, 6, 3, generator=g, requires_grad=True) for _ in range(2)]

    with report.recording() as reports:
        found = gradients(torch.compile(_states, backend="x86_onednn"), leaves())
    wanted: list[Any] = gradients(_states, leaves())
    torch.testing.assert_close(found, wanted)
    assert [r.phase for r in reports] == ["forward", "backward"]
    assert not [r.op for graph in reports for r in graph.by_eager]


@pytest.mark.parametrize("rows", [5, 6])
def test_symbols_beside_a_size_that_is_0(rows: int) -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x[:, :0].exp() * 2, y.exp()], 1) + x[:, :0].sum(1, keepdim=True)

    compiled = torch.compile(run, backend="x86_onednn", dynamic=True)
    with report.recording() as reports:
        for n in (rows, rows + 3):
            x, y = _made((n, 3), (n, 4))()
            torch.testing.assert_close(compiled(x, y), run(x, y), equal_nan=True)
    assert len(reports) == 1 and not reports[0].by_eager


def test_eager_still_checks_an_index_of_rows_without_elements() -> None:
    def run(x: Tensor, i: Tensor) -> Tensor:
        return torch.cat([torch.index_select(x[:, :0] * 2, 0, i).exp(), x[:, :1]], 1)

    x, good, bad = torch.randn(2, 3), torch.tensor([1, 0]), torch.tensor([1, 7])
    compiled = torch.compile(run, backend="x86_onednn")
    torch.testing.assert_close(compiled(x, good), run(x, good))
    for call in (run, compiled):
        with pytest.raises((IndexError, RuntimeError)):
            call(x, bad)
