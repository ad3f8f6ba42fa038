"""Contenders that need more than a backend's name."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn

from fusewright.bench.contenders import KNOWN, Unavailable, from_backend

MISSING = [name for name in ("onnxruntime", "onnxscript") if importlib.util.find_spec(name) is None]


class Scaled(nn.Module):
    """With a number that is no tensor, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, shift: torch.Tensor, factor: float = 1.0) -> dict[str, torch.Tensor]:
        y = self.linear(x) * factor
        return {"y": y, "z": y + shift}


@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}, of the extra `onnxruntime`")
def test_results_are_eagers() -> None:
    model, x, shift = Scaled().eval(), torch.randn(2, 4), torch.randn(3)
    with torch.no_grad():
        found = from_backend("onnxruntime[spinning=true]").compile(model)(x, factor=2.0, shift=shift)
        expected = model(x, shift, 2.0)
    for ours, eager in zip(found, expected.values(), strict=True):
        torch.testing.assert_close(ours, eager)


def test_only_modules_are_exported() -> None:
    with pytest.raises(TypeError, match="exported modules"):
        replace(KNOWN["onnxruntime"], package="").compile(torch.relu)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip install 'fusewright\[onnxruntime\]'"):
        KNOWN["onnxruntime"].check_available()


def test_options_reach_the_runtime() -> None:
    contender = from_backend("onnxruntime[spinning=true]")
    assert contender.exports and contender.options == {"spinning": True}
