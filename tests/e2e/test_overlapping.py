"""Writes into inputs whose elements share memory: eager's error, or eager's result where it allows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusewright import report
from fusewright.storage import overlaps

pytestmark = [pytest.mark.hardware("x86_onednn"), pytest.mark.usefixtures("fresh_dynamo")]


def augmented(x: Tensor) -> Tensor:
    x += 1
    return x * 2


def assigned(x: Tensor) -> Tensor:
    x[0, :] = 1.0
    return x + 1


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "add_": lambda x: x.add_(1).sin(),
    "+=": augmented,
    "[]=": assigned,
    "a row": lambda x: x[0].add_(1) * 2,
    "relu_": lambda x: torch.relu_(x) + 1,
    "inplace": lambda x: F.relu(x, inplace=True) + 1,
    "scatter_": lambda x: x.scatter_(1, torch.zeros(3, 1, dtype=torch.long), 1.0) + 1,
    "fill_, which eager allows": lambda x: x.fill_(2) + 1,
    "masked_fill_, which eager allows": lambda x: x.masked_fill_(x > 0, 1.0) + 1,
}


def outcome(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    try:
        return f(x).tolist(), x.tolist()
    except RuntimeError as e:
        return type(e), str(e)


@pytest.mark.parametrize("backend", ["x86_onednn", "fusewright_interp"])
@pytest.mark.parametrize("name", WRITES)
def test_what_eager_does(name: str, backend: str) -> None:
    x = torch.randn(3, 1)
    run = torch.compile(WRITES[name], backend=backend, options={"fallback": "allow"})
    assert outcome(run, x.clone().expand(3, 4)) == outcome(WRITES[name], x.clone().expand(3, 4))


WINDOWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a row": lambda x: x[0].copy_(x[-1]) * 2,
    "steps": lambda x: x[:, ::2].fill_(1) * 2,
    "one element": lambda x: x[1, 1].add_(1) * 2,
}


@pytest.mark.parametrize("backend", ["x86_onednn", "fusewright_interp"])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_write_to_a_window_shows_in_those_that_share_its_elements(name: str, backend: str) -> None:
    """The functional graph writes into a copy with the windows' strides: the last write stays, in the order of eager's loop."""
    run = torch.compile(WINDOWS[name], backend=backend, options={"fallback": "allow"})
    x, y = (torch.arange(8.0).as_strided((6, 3), (1, 1)) for _ in range(2))
    assert outcome(run, x) == outcome(WINDOWS[name], y)


def test_other_writes_stay_compiled() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.exp()
        y += 1
        return y * 2

    with report.recording() as reports:
        torch.compile(f, backend="x86_onednn")(torch.randn(300, 1).expand(300, 400))
    assert sum(r.count("lowered") for r in reports)


def test_which_tensors_overlap() -> None:
    x = torch.randn(6)
    assert overlaps(x[:3, None].expand(3, 4)) and overlaps(x.as_strided((3, 4), (1, 1)))
    assert not any(map(overlaps, (x, x[::2], x.view(2, 3).t(), x[:1].expand(1, 1), torch.randn(0, 3), 3)))


def test_a_view_that_a_kernel_reads_at_other_elements_is_not_overwritten_by_it() -> None:
    """The tangent of a product reads its input and a view of it shifted by one."""
    w, x, v = torch.randn(4, 4), torch.rand(4), torch.rand(4)

    def f(x: Tensor, v: Tensor) -> Any:
        return torch.func.jvp(lambda x: (x @ w).sigmoid().prod(), (x,), (v,))

    torch.testing.assert_close(torch.compile(f, backend="x86_onednn")(x, v), f(x, v))
