"""Composites are opened for a backend that takes the primitives in them; equal ones are traced once, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusewright import pipeline
from fusewright.capture import capture
from fusewright.config import Options
from fusewright.graph.constants import find
from fusewright.graph.parser import parse
from fusewright.interface import Device, OpView, Verdict, Why
from fusewright.rewrite import expand
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


def test_constants_inside_an_opened_composite_are_found() -> None:
    """Its primitives on weights alone are prepared; what reads the input is not."""
    graph = parse(
        "%0: f32[4,8] = input('x')\n%1: f32[4,8] = input('w')\n"
        "%2: (f32[4,8], f32[4,1], f32[4,1]) = layer_norm(%1, [8], None, None, 1e-05)\n%3: f32[4,8] = py.getitem(%2, 0)\n"
        "%4: f32[4,8] = mul(%0, %3)\nreturn [%4]\n"
    )
    weights = frozenset(n for n in graph.find_nodes(op="placeholder") if n.target == "w")
    opened, found = expand.on_claim(graph, find(graph, weights, "infer"), Opening(), {}, "infer")
    made = [n for n in opened.nodes if n.op == "call_function" and n not in found.values]
    assert len(opened.nodes) > len(graph.nodes) and [str(n.target) for n in made] == ["aten.mul.Tensor"]
