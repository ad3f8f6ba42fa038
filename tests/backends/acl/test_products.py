"""Products with weights: their forms in ACL and OpenBLAS, and the epilogues that each can fuse."""

from __future__ import annotations

import pytest
import torch

from fusewright.interface import Dim, Value
from fusewright_acl.backend import GravitonAcl
from tests.backends.acl.common import BF16, F32, check, compiled, core
from tests.fragments import Sketch, symbolic, targets
from tests.hosts import FLOATS, needs_bf16

LINEAR, PACK = "mkldnn::_linear_pointwise", "mkldnn::_reorder_linear_weight"
CONV, PACK_CONV = "mkldnn::_convolution_pointwise", "mkldnn::_reorder_convolution_weight"


def _linear(dtype: torch.dtype = F32, bias: bool = True, rows: tuple[int, ...] = (2, 8), k: int = 32) -> tuple[Sketch, Value]:
    torch.manual_seed(0)
    g = Sketch()
    x = g.input(torch.randn(*rows, k, dtype=dtype))
    w = g.input(torch.randn(48, k, dtype=dtype) / 6, const=True)
    b = g.input(torch.randn(48, dtype=dtype), const=True) if bias else None
    return g, g.op("linear", x, w, b)


@pytest.mark.parametrize("form", ["packed", "blas", "aten"])
@pytest.mark.parametrize("bias", [True, False])
def test_fp32_in_each_form(form: str, bias: bool) -> None:
    g, y = _linear(bias=bias)
    fragment = check(g, [y], form)
    assert targets(fragment) == {"packed": [LINEAR], "blas": ["aten::linear"], "aten": ["aten::linear"]}[form]
    wanted = {"packed": [PACK], "blas": ["aten::t", "aten::clone", "aten::t"], "aten": []}[form]
    assert targets(fragment, prepare=True) == wanted


@needs_bf16
@pytest.mark.parametrize("rows", [(2, 8), (1,), (16,), (1, 1, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_bf16_product_is_a_convolution_of_one_point(rows: tuple[int, ...], bias: bool) -> None:
    g, y = _linear(BF16, bias, rows)
    fragment = check(g, [y], "point")
    assert CONV in targets(fragment) and LINEAR not in targets(fragment)
    assert PACK_CONV in targets(fragment, prepare=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["mm", "addmm"])
def test_products_of_matrices(name: str, dtype: torch.dtype) -> None:
    g = Sketch()
    x, w = g.input(torch.randn(9, 24, dtype=dtype)), g.input(torch.randn(24, 40, dtype=dtype), const=True)
    bias = g.input(torch.randn(40, dtype=dtype), const=True)
    y = g.op("mm", x, w) if name == "mm" else g.op("addmm", bias, x, w)
    check(g, [y], "packed", "point")
    check(g, [y], "blas")


@pytest.mark.parametrize("name", ["relu", "gelu", "tanh", "sigmoid"])
def test_what_acl_computes_behind_a_packed_product_rides_on_it(name: str) -> None:
    g, y = _linear()
    assert targets(check(g, [g.op(name, y)])) == [LINEAR]


@pytest.mark.parametrize(("name", "args"), [("gelu", {"approximate": "tanh"}), ("silu", {}), ("hardswish", {})])
def test_what_would_make_it_a_reference_kernel_does_not(name: str, args: dict[str, str]) -> None:
    g, y = _linear()
    assert targets(check(g, [g.op(name, y, **args)])) == [LINEAR, f"kernel {name}"]


@needs_bf16
def test_nothing_rides_on_a_bf16_product() -> None:
    g, y = _linear(BF16)
    found = targets(check(g, [g.op("relu", y)]))
    assert CONV in found and found[-1] == "kernel relu"


@pytest.mark.parametrize("form", ["blas", "aten"])
def test_an_activation_behind_another_form_is_a_kernel(form: str) -> None:
    g, y = _linear()
    assert targets(check(g, [g.op("relu", y)], form)) == ["aten::linear", "kernel relu"]


def test_a_nan_stays_behind_an_activation() -> None:
    torch.manual_seed(0)
    g = Sketch()
    data = torch.randn(4, 32)
    data[1, 3] = float("nan")
    x, w = g.input(data), g.input(torch.randn(16, 32), const=True)
    y = g.op("tanh", g.op("linear", x, w))
    assert torch.isnan(g.run(compiled(g, [y]), [y])[0]).sum() == 16


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [(1,), (4,), (1, 1), (2, 2)])
def test_few_rows_are_multiplied_by_a_kernel_that_reads_the_weight_once(rows: tuple[int, ...], dtype: torch.dtype) -> None:
    g, y = _linear(dtype, rows=rows, k=136)
    found = targets(check(g, [g.op("relu", y)], "gemv"))
    kind = "f32" if dtype is F32 else "bf16"
    assert found[0].startswith("kernel gemv_") and found[0].endswith(f"{kind}_{kind}_bias") and found[1] == "kernel relu"


def test_a_matrix_that_lies_the_other_way_round_is_not_read_so() -> None:
    for dense in (True, False):
        g = Sketch()
        x, w = g.input(torch.randn(2, 24)), torch.randn(40, 24).t() if dense else torch.randn(24, 40)
        found = targets(check(g, [g.op("mm", x, g.input(w, const=True))], "gemv"))
        assert found[0].startswith("kernel gemv_2") == dense


def test_a_weight_that_is_trained_stays_eagers() -> None:
    g = Sketch("forward")
    x, w = g.input(torch.randn(5, 32)), g.input(torch.randn(16, 32))
    assert targets(compiled(g, [g.op("linear", x, w)])) == ["aten::linear"]


@pytest.mark.parametrize("k", [1, 3])
def test_narrow_products_stay_eagers(k: int) -> None:
    for dtype in (F32, BF16):
        g, y = _linear(dtype, k=k)
        assert targets(check(g, [y])) == ["aten::linear"]


def test_symbolic_rows_stay_eagers() -> None:
    op = _linear()[0].ops[0]
    assert GravitonAcl(core()).supports(symbolic(op, input=(2, Dim("s0", 8), 32)))
    assert not GravitonAcl(core()).supports(symbolic(op, weight=(48, Dim("s1", 32))))
