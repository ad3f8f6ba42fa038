"""Composites are opened for a backend that takes the primitives in them; equal ones are traced once, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusewright import pipeline
from fusewright.capture import capture
from fusewright.config import Options
from fusewright.interface import Device, OpView, Verdict, Why
from fusewright.toolkit.backend.fused import FusedBackend, interpreter_loader

OPTIONS = Options.parse({"cache": False, "fallback": "error", "strict": True})
norm = torch.nn.functional.layer_norm


class Opening(FusedBackend):
    """Takes no norm as a whole, but all that is in one."""

    name, device_type, loader = "opening", "cpu", interpreter_loader

    @classmethod
    def probe(cls) -> Device:
        return Device("cpu", "test")

    def supports(self, op: OpView) -> Verdict:
        if op.op in ("layer_norm", "group_norm"):
            return Verdict(Why.NO_LOWERING, "as a whole")
        return super().supports(op)


def compiled(fn: Callable[..., Any]) -> Any:
    def dynamo(gm: Any, inputs: Any) -> Any:
        return capture.capture(gm, inputs, lambda *a: pipeline.compile_graph(Opening(), OPTIONS, *a))

    torch.compiler.reset()
    return torch.compile(fn, backend=dynamo)


X, W, B = torch.randn(4, 8), torch.rand(8) + 1, torch.rand(8) - 5


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, b: (norm(x, (8,), w, None), norm(x, (8,), None, b)),
        lambda x, w, b: (norm(x, (8,), w, b), norm(x, (8,), b, w), norm(x, (8,), w, w)),
        lambda x, w, b: (norm(x, (8,), w, b, 1e-5), norm(x, (8,), w, b, 0.5)),
    ],
    ids=["which one is given", "which is which", "how much"],
)
@torch.no_grad()
def test_composites_that_differ_in_their_arguments_are_opened_apart(fn: Callable[..., Any]) -> None:
    """Of types alone they are equal: a weight without a bias was computed as a bias without a weight."""
    for ours, eager in zip(compiled(fn)(X, W, B), fn(X, W, B), strict=True):
        torch.testing.assert_close(ours, eager)
