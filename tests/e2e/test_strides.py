"""Strides of results, and values that `as_strided` reads through them, are eager's even if FakeTensor is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytestmark = [pytest.mark.hardware("x86_onednn"), pytest.mark.usefixtures("fresh_dynamo")]

MEAN, VAR = torch.zeros(8), torch.ones(8)
TURNED = torch.randn(8, 6).t()
IMAGE = torch.randn(4, 4, 8, 2).permute(3, 2, 1, 0)
LAST = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)


def first(x: Tensor) -> Tensor:
    return x.as_strided((9,), (1,)) * 2


PROGRAMS: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "roll": (lambda x: torch.roll(x.exp(), 1, 1) + 1, LAST),
    "roll, strided": (lambda x: first(torch.roll(x.exp(), (1, 1), (1, 2)) + 1), LAST),
    "batch_norm": (lambda x: F.batch_norm(x.exp(), MEAN, VAR).relu(), IMAGE),
    "batch_norm, strided": (lambda x: first(F.batch_norm(x.exp(), MEAN, VAR).relu()), IMAGE),
    "ones_like": (lambda x: torch.ones_like(x.t()) * 2, TURNED),
    "ones_like, strided": (lambda x: first(torch.ones_like(x) * x.exp().contiguous()), TURNED),
    "logsigmoid": (lambda x: F.logsigmoid(x.exp()) * 2, TURNED),
    "copysign": (lambda x: first(torch.copysign(x.exp(), x) * 2), TURNED),
    "rounded division": (lambda x: torch.div(x.exp(), x.contiguous(), rounding_mode="floor") * 2, TURNED),
    "power of a number": (lambda x: first(2.0**x), TURNED),
    "index_fill": (lambda x: x.index_fill(0, torch.tensor([1]), 2.0) * 2, torch.randn(8, 12).t()[::2]),
    "logaddexp": (lambda x: torch.logaddexp(x.exp()[:1].expand(6, 8), x) * 2, TURNED),
}


def steps(t: Tensor) -> list[tuple[int, int]]:
    return [(n, s) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1]


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_strides_are_eagers(name: str, dynamic: bool) -> None:
    f, x = PROGRAMS[name]
    run, want = torch.compile(f, backend="x86_onednn", dynamic=dynamic, options={"fallback": "allow"}), f(x)
    for _ in range(2):
        got = run(x)
        torch.testing.assert_close(got, want)
        assert steps(got) == steps(want)
