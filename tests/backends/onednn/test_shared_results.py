"""Results that share memory in eager share it here, also where a convolution made them with other strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

RESULTS: dict[str, Callable[[torch.Tensor], Sequence[torch.Tensor]]] = {
    "itself": lambda y: (y, y[:, 1:3]),
    "apart": lambda y: (y[:, :2], y[:, 2:]),
    "parts": lambda y: y.split(4, 1),
    "rows": lambda y: (y, y.flatten(2).transpose(1, 2)),
    "deep": lambda y: (y.flatten(2)[:, 1], y[:, 1:].permute(0, 2, 3, 1)),
    "read": lambda y: (y * 2, y, y[:, 1:3]),
    "activated": lambda y: (F.silu(y), F.silu(y)[:, :1], y),
}


def shared(results: Sequence[torch.Tensor]) -> list[int]:
    """For each result the first one in the same memory."""
    places = [r.untyped_storage().data_ptr() for r in results]
    return [places.index(p) for p in places]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_share_what_eagers_share(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(4, 8, 3).to(dtype)

    def fn(x: torch.Tensor) -> Any:
        return RESULTS[name](conv(x))

    x = torch.randn(2, 4, 9, 9).to(dtype)
    with torch.no_grad():
        wanted, got = fn(x), torch.compile(fn, backend="x86_onednn")(x)
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(b, a)
        assert a.stride() == b.stride()
    if name != "activated":  # eager computes it twice
        assert shared(got) == shared(wanted)
