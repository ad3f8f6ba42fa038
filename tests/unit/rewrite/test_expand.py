"""Composites are expanded for a backend that takes their primitives; each distinct composite is traced once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusewright import ops, pipeline, report
from fusewright.capture import capture
from fusewright.config import Options
from fusewright.conformance.ops.calls import arguments, traced
from fusewright.conformance.ops.cases import CASES
from fusewright.graph.constants import find
from fusewright.graph.parser import parse
from fusewright.interface import YES, CompileContext, Device, OpView, Region, Verdict, Why
from fusewright.rewrite import expand
from fusewright.toolkit.backend.fused import FusedBackend, LibraryCall, interpreter_loader

OPTIONS = Options.parse({"cache": False, "fallback": "error", "strict": True})
norm = torch.nn.functional.layer_norm


class Opening(FusedBackend):
    """Takes no norm as a whole, but all primitives of one."""

    name, device_type, loader = "opening", "cpu", interpreter_loader

    @classmethod
    def probe(cls) -> Device:
        return Device("cpu", "test")

    def supports(self, op: OpView) -> Verdict:
        if op.op in ("layer_norm", "group_norm", "pixel_shuffle"):
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
    """Their types alone are equal: a weight without a bias was computed as a bias without a weight."""
    for ours, eager in zip(compiled(fn)(X, W, B), fn(X, W, B), strict=True):
        torch.testing.assert_close(ours, eager)


def test_constants_inside_an_opened_composite_are_found() -> None:
    """Its primitives on weights only are prepared; those that read the input are not."""
    graph = parse(
        "%0: f32[4,8] = input('x')\n%1: f32[4,8] = input('w')\n"
        "%2: (f32[4,8], f32[4,1], f32[4,1]) = layer_norm(%1, [8], None, None, 1e-05)\n%3: f32[4,8] = py.getitem(%2, 0)\n"
        "%4: f32[4,8] = mul(%0, %3)\nreturn [%4]\n"
    )
    weights = frozenset(n for n in graph.find_nodes(op="placeholder") if n.target == "w")
    opened, found = expand.on_claim(graph, find(graph, weights, "infer"), Opening(), {}, "infer")
    made = [n for n in opened.nodes if n.op == "call_function" and n not in found.values]
    assert len(opened.nodes) > len(graph.nodes) and [str(n.target) for n in made] == ["aten.mul.Tensor"]


class Carrying(Opening):
    """Has no kernel for two composites, and calls of its library for both."""

    def supports(self, op: OpView) -> Verdict:
        wholes = ("reflection_pad1d_backward", "pixel_shuffle")
        return Verdict(Why.CARRIED, "as a whole") if op.op in wholes else FusedBackend.supports(self, op)


def test_what_would_be_carried_is_opened_only_if_its_row_says_so() -> None:
    graph = parse(
        "%0: f32[2,8] = input('g')\n%1: f32[2,4] = input('x')\n%2: f32[1,4,2,2] = input('y')\n"
        "%3: f32[2,4] = reflection_pad1d_backward(%0, %1, [2, 2])\n%4: f32[1,1,4,4] = pixel_shuffle(%2, 2)\nreturn [%3, %4]\n"
    )
    opened, _ = expand.on_claim(graph, find(graph, frozenset(), "infer"), Carrying(), {}, "infer")
    left = [str(n.target) for n in opened.nodes if n.op == "call_function"]
    assert "aten.pixel_shuffle.default" in left and not any("reflection" in name for name in left)


class Products(Opening):
    """Takes matrix products and ops around them, but neither linear layers nor attention as a whole, and no sizes."""

    def supports(self, op: OpView) -> Verdict:
        if op.op in ("linear", "sdpa") or op.op.startswith("aten.sym_"):
            return Verdict(Why.NO_LOWERING, "as a whole")
        products = op.op in ("mm", "addmm", "bmm")
        return YES if products else super().supports(op)

    def library(self, region: Region, ctx: CompileContext) -> list[LibraryCall]:
        return [LibraryCall((op.id,), (ctx.aten(op),)) for op in region.ops if op.op in ("mm", "addmm", "bmm")]


def lowered_ops(fn: Callable[..., Any], *calls: tuple[torch.Tensor, ...]) -> list[str]:
    """Return the ops of `fn` that are lowered with symbolic sizes, in a single graph for all calls."""
    options = Options.parse({"cache": False, "fallback": "allow", "strict": True})

    def dynamo(gm: Any, inputs: Any) -> Any:
        return capture.capture(gm, inputs, lambda *a: pipeline.compile_graph(Products(), options, *a))

    torch.compiler.reset()
    run = torch.compile(fn, backend=dynamo, dynamic=True)
    with torch.no_grad(), report.recording() as found:
        for call in calls:
            torch.testing.assert_close(run(*call), fn(*call))
    assert len(found) == 1 and not found[0].bugs
    return [o.op for o in found[0].ops if o.where != "eager"]


@pytest.mark.parametrize("probability", [0.1, 0.0])
def test_attention_that_draws_random_numbers_stays_whole(probability: float) -> None:
    """It has no formula: a model in training mode under `no_grad` did not compile on GPUs, where attention arrives whole."""
    graph = parse(
        "%0: f32[2,4,9,8] = input('x')\n"
        f"%1: f32[2,4,9,8] = sdpa(%0, %0, %0, None, {probability}, False, scale=None, enable_gqa=False)\nreturn [%1]\n"
    )
    opened, _ = expand.on_claim(graph, find(graph, frozenset(), "infer"), Products(), {}, "infer")
    assert (opened is graph) == bool(probability)


def test_sizes_inside_a_composite_are_no_backends_to_claim() -> None:
    calls = [(torch.randn(2, n, 8), torch.randn(16, 8), torch.randn(16)) for n in (3, 5)]
    assert "addmm" in lowered_ops(torch.nn.functional.linear, *calls)


def test_a_composite_stays_whole_where_opening_it_would_assume_sizes() -> None:
    """The decomposition converts the head size to a number, which specialized the graph to the first call."""
    calls = [tuple(torch.randn(2, 4, n, n + 3) for _ in range(3)) for n in (5, 7)]
    assert "bmm" not in lowered_ops(torch.nn.functional.scaled_dot_product_attention, *calls)


def test_what_primitives_leave_where_it_is_is_copied_as_by_the_whole() -> None:
    """With blocks of one pixel, eager returns new memory, but an identity permutation does not."""
    x = torch.randn(1, 9, 2, 2)
    with report.recording() as reports:
        y = compiled(lambda x: torch.nn.functional.pixel_shuffle(x, 1))(x)
    assert "pixel_shuffle" not in {o.op for o in reports[-1].ops}, "it is opened"
    assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()


def test_strides_of_symbolic_sizes_are_compared_outside_of_the_trace() -> None:
    """The composite's strides are products of symbols that the trace of its primitives does not know."""
    op = ops.OPS["group_norm"]
    for case in CASES[op.name]:
        args, kwargs = arguments(op, case, torch.float32)
        run = pipeline.compile_graph(
            Opening(Opening.probe(), {}), Options.parse({"cache": False, "fallback": "allow", "strict": True}),
            traced(op, args, kwargs, symbolic=True), "infer", frozenset(), "direct",
        )  # fmt: skip
        found, wanted = run([a for a in args if isinstance(a, torch.Tensor)])[0], op.target(*args, **kwargs)[0]
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("given", "sizes", "dim", "size", "step"),
    [
        ((1, 6, 7), [3, 22], 1, 7, 3), ((3, 6, 7), [3, 24], 1, 7, 3), ((3, 6, 7), [3, 60], -1, 7, 9),
        ((6, 7), [22], 0, 7, 3), ((2, 1, 6, 7), [2, 4, 22], 2, 7, 3), ((2, 1, 22, 2), [3, 5, 22], 0, 2, 1),
    ],
    ids=["a row for many", "a rest behind", "gaps", "one dim", "a row for some", "the first dim"],
)  # fmt: skip
def test_windows_are_added_up_at_once(given: tuple[int, ...], sizes: list[int], dim: int, size: int, step: int) -> None:
    """Also where one gradient belongs to many rows, as the windows of an inverse STFT of a batch do."""
    grad, count = torch.randn(given), given[dim % len(sizes)]
    with report.recording() as reports:
        got = compiled(lambda g: torch.ops.aten.unfold_backward(g, sizes, dim, size, step))(grad)
    whole = [*sizes, size]
    whole[dim % len(sizes)] = count
    expected = torch.ops.aten.unfold_backward(grad.expand(whole).contiguous(), sizes, dim, size, step)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()
    ran = [r.op for r in reports[-1].ops]
    assert "col2im" in ran and len(ran) < 12, ran
