"""Fixtures of the GPU backends' tests."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from fusewright_triton.run import handwritten


@pytest.fixture(autouse=True)
def nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nobody waits for the kernels that lowerings ask for, so none is built."""

    def ask(self: handwritten.Library, order: handwritten.Order) -> Future[Any]:
        return Future()

    if not torch.cuda.is_available():
        monkeypatch.setattr(handwritten.Library, "ask", ask)
