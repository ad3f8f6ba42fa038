"""Fixtures of the GPU backends' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusewright_triton import target
from fusewright_triton.run import handwritten


@pytest.fixture(autouse=True)
def nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, nothing waits for the kernels that lowerings order ahead, so build none."""

    def ask(self: handwritten.Library, order: handwritten.Order) -> Future[Any]:
        return Future()

    if not torch.cuda.is_available():
        monkeypatch.setattr(handwritten.Library, "ask", ask)


@pytest.fixture
def thresholds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that sets thresholds by name for every target, so that sizes of tests count as large."""

    def change(**numbers: float) -> None:
        monkeypatch.setattr(target, "H100", replace(target.H100, **numbers))  # type: ignore[arg-type]
        for table in (target.NVIDIA, target.AMD):
            for arch, t in table.items():
                monkeypatch.setitem(table, arch, replace(t, fitted=t.fitted and target.H100))
        target.named.cache_clear()

    yield change
    target.named.cache_clear()
