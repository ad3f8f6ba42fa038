"""Products with weights: forms, post-ops, concatenation, and cases left to eager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from fusewright import _torch_compat as compat
from fusewright.interface import Dim, Why
from fusewright.plan.ir import Launch
from fusewright_cpu.onednn.choices import Product, Unary, _linear_thunk, _matrix
from fusewright_onednn.backend import X86OneDnn
from tests.backends.onednn.common import BF16, DEVICE, F32, check, close, compiled
from tests.fragments import Sketch, symbolic, targets
from tests.hosts import FLOATS

LINEAR, PACK = "mkldnn::_linear_pointwise", "mkldnn::_reorder_linear_weight"
MKL, PACK_MKL = "mkl::_mkl_linear", "mkl::_mkl_reorder_linear_weight"

in_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch is built without MKL")


def _linear(dtype: torch.dtype = F32, bias: bool = True, rows: tuple[int, ...] = (2, 8)) -> tuple[Sketch, object]:
    torch.manual_seed(0)
    g = Sketch()
    x = g.input(torch.randn(*rows, 32, dtype=dtype))
    w = g.input(torch.randn(48, 32, dtype=dtype) / 6, const=True)
    b = g.input(torch.randn(48, dtype=dtype), const=True) if bias else None
    return g, g.op("linear", x, w, b)


@pytest.mark.parametrize("form", ["packed", "dense", "aten"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_linear_in_each_form(form: str, bias: bool, dtype: torch.dtype) -> None:
    g, y = _linear(dtype, bias)
    fragment = check(g, [y], form)
    assert targets(fragment) == {"packed": [LINEAR], "dense": [LINEAR], "aten": ["aten::linear"]}[form]
    assert targets(fragment, prepare=True) == ([PACK] if form == "packed" else [])


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("gelu", {}),
        ("gelu", {"approximate": "tanh"}),
        ("silu", {}),
        ("tanh", {}),
        ("sigmoid", {}),
        ("hardswish", {}),
        ("leaky_relu", {"negative_slope": 0.2}),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_unary_op_rides_on_the_product(name: str, args: dict[str, object], dtype: torch.dtype) -> None:
    g, y = _linear(dtype)
    z = g.op(name, y, **args)
    assert targets(check(g, [z])) == [LINEAR]


@pytest.mark.parametrize(("name", "args"), [("relu", ()), ("clamp", (0.0, 6.0)), ("hardsigmoid", ())])
def test_what_loses_nan_rides_only_under_finite_math(name: str, args: tuple[float, ...]) -> None:
    g, y = _linear()
    z = g.op(name, y, *args)
    assert targets(check(g, [z])) == [LINEAR, f"kernel {name}"]
    assert targets(check(g, [z], finite_math=True)) == [LINEAR]


@in_mkl
@pytest.mark.parametrize(("rows", "packs"), [((2, 256), True), ((2, 8), False)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_only_large_fp32_products_are_packed_for_mkl(dtype: torch.dtype, rows: tuple[int, ...], packs: bool) -> None:
    g, y = _linear(dtype, rows=rows)
    fragment = check(g, [y], "mkl")
    taken = packs and dtype is F32
    assert targets(fragment) == [MKL if taken else LINEAR]
    assert targets(fragment, prepare=True) == [PACK_MKL if taken else PACK]


@in_mkl
@pytest.mark.parametrize("rows", [1, 2, 11, 16])
def test_small_products_beside_a_large_bias_are_as_exact_as_eagers(rows: int) -> None:
    """As in an untrained classifier: MKL's product of few rows begins with the bias and rounds at every step."""
    g = Sketch()
    x, w, bias = torch.rand(rows, 1280) * 1e-3, torch.randn(1000, 1280) * 0.03, torch.rand(1000) * 0.05
    y = g.op("linear", g.input(x), g.input(w, const=True), g.input(bias, const=True))
    (made,) = g.run(compiled(g, [y], "mkl"), [y])
    exact = x.double() @ w.double().t() + bias.double()
    assert (made - exact).abs().max() <= 2 * torch.finfo(torch.float32).eps * 0.05


@in_mkl
def test_a_unary_op_after_a_product_in_mkl_is_a_kernel() -> None:
    g, y = _linear(rows=(2, 256))
    assert targets(check(g, [g.op("gelu", y, approximate="tanh")], "mkl")) == [MKL, "kernel gelu"]


@in_mkl
@pytest.mark.parametrize("kind", ["addmm", "mm"])
def test_a_product_in_mkl_packs_a_transposed_weight_as_it_is(kind: str) -> None:
    g = Sketch()
    x, w = g.input(torch.randn(64, 128).t()), g.input(torch.randn(64, 96), const=True)
    y = g.op("mm", x, w) if kind == "mm" else g.op("addmm", g.input(torch.randn(96), const=True), x, w)
    assert targets(check(g, [y], "mkl"), prepare=True) == ["aten::t", PACK_MKL]


@in_mkl
def test_a_product_in_mkl_of_flattened_rows_has_the_rows_of_its_input() -> None:
    g = Sketch()
    x, w = g.input(torch.randn(2, 128, 64)), g.input(torch.randn(64, 96), const=True)
    flat = g.op("addmm", g.input(torch.randn(96), const=True), g.op("view", x, [256, 64]), w)
    y = g.op("gelu", g.op("view", flat, [2, 128, 96]))
    assert [t for t in targets(check(g, [y], "mkl")) if "aten::view" not in t] == [MKL, "kernel gelu"]


@in_mkl
def test_the_unary_op_is_timed_in_every_form_of_a_product() -> None:
    """Regression: a product was timed alone, as if a call without post-ops computed the activation too."""
    done: list[str] = []
    after = Unary(("gelu", (), "none"), lambda product: done.append("apart"))
    product = Product(512, 32, 48, F32)
    forms = ("aten", "dense", *product.packed_forms)
    for form in forms:
        with torch.profiler.profile() as profile:
            _linear_thunk(product, form, _matrix, product.n, after)()()
        called = any(e.key == "mkldnn::_linear_pointwise" for e in profile.key_averages())
        assert called == (form in ("dense", "packed"))
    assert len(done) == 2  # eager's and MKL's


def test_a_value_that_others_use_is_stored() -> None:
    g, y = _linear()
    z = g.op("gelu", y)
    assert targets(check(g, [y, z])) == [LINEAR, "kernel gelu"]


def test_an_addition_may_overwrite_the_product_but_never_an_input() -> None:
    g, y = _linear()
    residual = g.input(torch.randn(2, 8, 48))
    z = g.op("add", residual, y)
    fragment = check(g, [z])
    assert targets(fragment) == [LINEAR, "kernel add"]
    launch = fragment.instructions[-1]
    assert isinstance(launch, Launch)
    assert y.id in [launch.inputs[i].id for _, i in launch.inplace]  # the host knows which values are dead and which are inputs


def test_additions_behind_a_product_share_a_kernel() -> None:
    g, y = _linear()
    a, b = g.input(torch.randn(2, 8, 48)), g.input(torch.randn(2, 8, 48))
    z = g.op("add", g.op("add", a, b), g.op("gelu", y))
    assert targets(check(g, [z])) == [LINEAR, "kernel add"]


def test_no_copy_of_a_weight_that_gradients_flow_to() -> None:
    g = Sketch("forward")
    x, w = g.input(torch.randn(8, 32)), g.input(torch.randn(48, 32))
    assert targets(check(g, [g.op("linear", x, w)])) == [LINEAR]
    assert not targets(compiled(g, []), prepare=True)


@pytest.mark.parametrize("prepack", ["never", "always"])
def test_prepack_option(prepack: str) -> None:
    g, y = _linear()
    assert bool(targets(check(g, [y], "dense", prepack=prepack), prepare=True)) == (prepack == "always")


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_transposed_first_matrix_is_copied_by_a_kernel(dtype: torch.dtype) -> None:
    """This occurs in the gradient of a weight. In bf16 eager's product reads it efficiently, so there is no such form."""
    g = Sketch()
    a = g.input(torch.randn(48, 32, dtype=dtype))
    b = g.input(torch.randn(48, 24, dtype=dtype))
    y = g.op("mm", g.op("transpose", g.op("relu", a), 0, 1), b)
    made = targets(check(g, [y], "copied"))
    assert ("kernel clone" in made) == (dtype is F32), made
    assert made[-1] == "mkldnn::_linear_pointwise"


@pytest.mark.parametrize("transposed", ["neither", "first", "second", "both"])
def test_mm_in_every_layout(transposed: str) -> None:
    g = Sketch("backward")
    a = g.input(torch.randn(64, 16).t() if transposed in ("first", "both") else torch.randn(16, 64))
    b = g.input(torch.randn(24, 64).t() if transposed in ("second", "both") else torch.randn(64, 24))
    assert targets(check(g, [g.op("mm", a, b)])) == ["aten::t", LINEAR]


def test_addmm_with_a_constant_weight_is_packed() -> None:
    g = Sketch()
    bias, w = g.input(torch.randn(24), const=True), g.input(torch.randn(64, 24), const=True)
    y = g.op("addmm", bias, g.input(torch.randn(16, 64)), w)
    fragment = check(g, [y])
    assert targets(fragment, prepare=True) == ["aten::t", PACK] and targets(fragment) == [LINEAR]


def _qkv(*rows: int) -> tuple[Sketch, list[object]]:
    g = Sketch()
    x = g.input(torch.randn(*(rows or (2, 8)), 32))
    made = []
    for width in (32, 16, 16):
        w, b = g.input(torch.randn(width, 32), const=True), g.input(torch.randn(width), const=True)
        made.append(g.op("linear", x, w, b))
    return g, made


def test_siblings_become_one_product_and_slices() -> None:
    g, (q, k, v) = _qkv()
    outs = [g.op("transpose", g.op("view", t, [2, 8, -1, 16]), 1, 2) for t in (q, k, v)]
    outs = [g.op("mul", t, 2.0) for t in outs]
    fragment = check(g, outs)
    assert targets(fragment)[:4] == [LINEAR] + ["aten::slice.Tensor"] * 3
    assert not any("clone" in t for t in targets(fragment))
    assert targets(check(g, outs, "separate")).count(LINEAR) == 3


@in_mkl
def test_siblings_become_one_product_in_mkl() -> None:
    g, outs = _qkv(2, 256)
    outs = [g.op("mul", t, 3.0) for t in outs]
    fragment = check(g, outs, "mkl")
    assert targets(fragment)[:4] == [MKL] + ["aten::slice.Tensor"] * 3
    # the weights side by side are dead once they are packed: the call gets one of them with the sizes of all
    assert targets(fragment, prepare=True) == ["aten::cat", PACK_MKL, "aten::cat", "aten::as_strided"]


def test_a_slice_that_leaves_the_region_gets_eager_strides() -> None:
    g, outs = _qkv()
    assert targets(check(g, outs)).count("kernel clone") == 3


def test_a_slice_that_a_view_refuses_is_copied_first() -> None:
    g, (q, k, v) = _qkv()
    flat = g.op("view", q, [2, 8 * 32])  # merges the sliced dimension: no view of a slice
    rest = g.op("add", k, v)
    assert targets(check(g, [flat, rest])).count("kernel clone") == 1


@pytest.mark.parametrize("tracing", [compat.symbolic_mode, compat.python_dispatcher])
def test_whether_a_view_refuses_is_not_asked_of_fake_tensors(tracing: Callable[[], AbstractContextManager[object]]) -> None:
    """Regression: with a dimension of size one after the batch, FakeTensor allows a view that real tensors reject, which crashed a
    decoding step compiled under AOTAutograd's mode."""
    g, (q, k, v) = _qkv(2)
    parts = g.op("view", g.op("view", q, [2, 1, 32]), [4, 16])
    outs = [g.op("linear", parts, g.input(torch.randn(24, 16), const=True)), g.op("add", k, v)]
    with tracing():
        fragment = compiled(g, outs)
    for ours, eager in zip(g.run(fragment, outs), g.expected(outs), strict=True):
        close(ours, eager)


def test_a_part_of_a_slice_that_a_view_refuses_is_copied_first() -> None:
    g, (q, k, v) = _qkv()
    part = g.op("slice", g.op("view", q, [2, 8, 2, 16]), 3, 8, 16, 1)
    rows = g.op("view", part, [32, 8])  # the strides of q, but not those of a slice, make one dimension of three
    outs = [g.op("mul", rows, 2.0), g.op("add", k, v)]
    check(g, outs)
    with compat.python_dispatcher():  # as AOTAutograd traces: torch's metadata functions raise other errors there
        check(g, outs)


def test_a_repeated_slice_is_copied_once_and_repeated() -> None:
    """Grouped-query attention repeats keys with stride 0; a copy to those strides would write elements twice."""
    g, (q, k, v) = _qkv()
    heads = g.op("unsqueeze", g.op("transpose", g.op("view", k, [2, 8, 2, 8]), 1, 2), 2)
    repeated = g.op("expand", heads, [2, 2, 3, 8, 8])
    check(g, [g.op("reshape", repeated, [2, 6, 8, 8]), repeated, g.op("add", v, 1.0), q])


def test_claims() -> None:
    backend = X86OneDnn(DEVICE)
    g, _ = _linear()
    (op,) = g.ops
    assert backend.supports(op)
    rows = Dim("s0", 16)
    assert backend.supports(symbolic(op, input=(2, rows, 32)))
    assert backend.supports(symbolic(op, weight=(48, Dim("s1", 32)))).why is Why.ATTR
    g = Sketch()
    g.op(
        "linear",
        g.input(torch.randn(4, 8, dtype=torch.float64)),
        g.input(torch.randn(3, 8, dtype=torch.float64)),
    )
    assert backend.supports(g.ops[0]).why is Why.DTYPE
    weaker = X86OneDnn(type(DEVICE)("cpu", "x86_64_v3"))
    g, _ = _linear(BF16)
    assert weaker.supports(g.ops[0]).why is Why.DEVICE_FEATURE
