"""Products of few rows, as in decoding: a kernel that reads the weight once, where it lies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusewright import report
from fusewright_cpu.kernels.by_hand import Gemv
from fusewright_cpu.target import host_target
from fusewright_onednn.backend import X86OneDnn
from tests.backends.onednn.common import BF16, DEVICE, F32, OPTIONS, check, close, without_halves
from tests.fragments import Context, Sketch, by_preference, targets

REFUSED = Gemv(1, "f32", "f32").refused(host_target())
pytestmark = pytest.mark.skipif(bool(REFUSED), reason=f"this CPU lacks what the kernel needs: it {REFUSED}")
WIDE = 1024
"""Columns for which the weight is large enough for the kernel to be measured."""
WITHOUT_BF16 = replace(DEVICE, features=frozenset())


def _sketch(rows: tuple[int, ...], dtype: torch.dtype = F32, const: bool = True) -> tuple[Sketch, tuple[object, ...]]:
    torch.manual_seed(0)
    g = Sketch()
    x, w = torch.randn(*rows, 264, dtype=dtype), torch.randn(WIDE, 264, dtype=dtype) / 16
    return g, (g.input(x), g.input(w, const=const), g.input(torch.randn(WIDE, dtype=dtype), const=const))


@pytest.mark.parametrize("const", [True, False])
@pytest.mark.parametrize("rows", [(1,), (4,), (1, 1), (2, 2)])
def test_the_weight_is_read_where_it_lies(rows: tuple[int, ...], const: bool) -> None:
    g, given = _sketch(rows, const=const)
    fragment = check(g, [g.op("gelu", g.op("linear", *given))], "gemv")
    assert targets(fragment) == [f"kernel gemv_{rows[0] * rows[-1] ** (len(rows) - 1)}_f32_f32_bias", "kernel gelu"]
    assert not targets(fragment, prepare=True)


def test_a_factor_behind_it_is_in_the_weight() -> None:
    g, given = _sketch((2,))
    found = check(g, [g.op("mul", g.op("linear", *given), 0.125)], "gemv")
    assert targets(found) == ["kernel gemv_2_f32_f32_bias"] and len(targets(found, prepare=True)) == 2


def test_a_transposed_weight_is_read_so_and_others_are_not() -> None:
    for dense in (True, False):
        g = Sketch()
        x, w = g.input(torch.randn(2, 264)), torch.randn(WIDE, 264).t() if dense else torch.randn(264, WIDE)
        found = targets(check(g, [g.op("mm", x, g.input(w, const=True))], "gemv"))
        assert found[0].startswith("kernel gemv_2") == dense


@pytest.mark.parametrize("columns", [16, WIDE])
def test_calls_of_tiny_products_take_longer_than_they_do(columns: int) -> None:
    g = Sketch()
    y = g.op("linear", g.input(torch.randn(2, 264)), g.input(torch.randn(columns, 264), const=True))
    assert targets(check(g, [y], "gemv")) == ["kernel gemv_2_f32_f32"]


@pytest.mark.parametrize(("rows", "columns"), [(5, WIDE), (2, 128)])
def test_more_rows_and_small_weights_stay_with_the_libraries(rows: int, columns: int) -> None:
    g = Sketch()
    y = g.op("linear", g.input(torch.randn(rows, 264)), g.input(torch.randn(columns, 264), const=True))
    assert targets(check(g, [y], "gemv")) == ["mkldnn::_linear_pointwise"]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("bias", [torch.randn(WIDE, 3)[:, 1], torch.randn(1).expand(WIDE), torch.randn(1)])
@pytest.mark.parametrize("rows", [2, 40])
def test_no_call_of_ours_reads_strides_of_a_bias(rows: int, bias: torch.Tensor) -> None:
    w = torch.randn(WIDE, 264)
    for prepack in ("auto", "never", "always"):
        torch.compiler.reset()
        given = torch.randn(rows, 264), w, bias
        ours = torch.compile(torch.nn.functional.linear, backend="x86_onednn", options={"prepack": prepack, "strict": True})
        with torch.no_grad():
            close(ours(*given), torch.nn.functional.linear(*given))


@pytest.mark.parametrize("columns", [WIDE, 48])
def test_bf16_needs_no_instructions_for_it(columns: int) -> None:
    """Eager, which emulates it, is no better for small weights."""
    g = Sketch()
    x, w = torch.randn(3, 264, dtype=BF16), torch.randn(columns, 264, dtype=BF16) / 16
    y = g.op("linear", g.input(x), g.input(w, const=True), g.input(torch.randn(columns, dtype=BF16), const=True))
    g.temporaries.clear()
    ctx = Context(OPTIONS, WITHOUT_BF16, by_preference("gemv"), specs=g.temporaries)
    fragment = X86OneDnn(WITHOUT_BF16).compile(g.region([y]), ctx)
    assert targets(fragment) == ["kernel gemv_3_bf16_bf16_bias"]
    close(g.run(fragment, [y])[0], g.expected([y])[0])


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.hardware("x86_onednn")
def test_a_linear_of_bf16_is_widened_only_for_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    without_halves(monkeypatch)
    m = torch.nn.Linear(264, WIDE).eval().bfloat16()
    for rows, widened in ((4, 0), (8, 1)):
        x = torch.randn(rows, 264).bfloat16()
        with torch.no_grad(), report.recording() as graphs:
            close(torch.compile(m, backend="x86_onednn", dynamic=False)(x), m(x))
        assert graphs[0].rules["product.wider"] == widened
