"""Shared by the tests of x86_onednn."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fusewright import registry
from fusewright.interface import Device, Fragment, Value
from fusewright_onednn import backend
from fusewright_onednn.backend import X86OneDnn
from tests.fragments import Context, Sketch, by_preference

DEVICE = Device("cpu", "x86_64_v4", frozenset({"mkldnn_bf16"}), "oneDNN 3.12")
OPTIONS = dict(X86OneDnn.options)
F32, BF16 = torch.float32, torch.bfloat16


def compiled(g: Sketch, outputs: list[Value], *prefer: str, **options: Any) -> Fragment:
    """Lower the whole sketch, choosing the first available form of `prefer`."""
    pick = by_preference(*prefer, "packed", "dense", "aten", "together", "kernel")
    g.temporaries.clear()  # those of an earlier fragment
    ctx = Context({**OPTIONS, **options}, DEVICE, pick, specs=g.temporaries)
    result = X86OneDnn(DEVICE).compile(g.region(outputs), ctx)
    assert isinstance(result, Fragment)
    return result


def close(ours: torch.Tensor, eager: torch.Tensor) -> None:
    """Check equality up to the order of additions in this dtype, and eager's strides."""
    assert ours.dtype == eager.dtype and ours.shape == eager.shape
    mine = [s for n, s in zip(ours.shape, ours.stride(), strict=True) if n > 1]
    assert mine == [s for n, s in zip(eager.shape, eager.stride(), strict=True) if n > 1]
    tolerance = {F32: 2e-5, BF16: 2e-2}[eager.dtype]
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance, equal_nan=True)


def check(g: Sketch, outputs: list[Value], *prefer: str, **options: Any) -> Fragment:
    """Lower, run and compare with eager; return the fragment for further checks."""
    fragment = compiled(g, outputs, *prefer, **options)
    for ours, eager in zip(g.run(fragment, outputs), g.expected(outputs), strict=True):
        close(ours, eager)
    return fragment


def without_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend find a CPU whose oneDNN refuses half types, whatever the process has found before."""
    monkeypatch.setattr(backend, "half_features", frozenset)
    monkeypatch.setattr(registry, "info", cache(registry.info.__wrapped__))
