"""Gradients of resizing: sums instead of colliding scatters."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fusewright import ops, report
from fusewright.conformance.ops.judge import strides
from fusewright.ops.semantics import resize
from tests.ops.test_kernels_vs_eager import check

aten = torch.ops.aten
SIZES = st.integers(1, 20)


@given(st.tuples(SIZES, SIZES), st.tuples(SIZES, SIZES), st.booleans())
def test_bilinear_is_the_operator_at_any_two_sizes(small, large, align_corners):
    grad = torch.randn(2, *large, dtype=torch.double)[None]
    args = (list(large), [1, 2, *small], align_corners)
    torch.testing.assert_close(resize.bilinear2d_backward(grad, *args), aten.upsample_bilinear2d_backward(grad, *args))


@given(st.tuples(SIZES, SIZES), st.integers(1, 5), st.integers(1, 5))
def test_nearest_is_the_operator_at_whole_factors(small, down, across):
    made = [small[0] * down, small[1] * across]
    grad = torch.randn(1, 2, *made, dtype=torch.double)
    args = (made, [1, 2, *small])
    torch.testing.assert_close(resize.nearest_backward(2)(grad, *args), aten.upsample_nearest2d_backward(grad, *args))


def test_an_infinite_gradient_stays_where_it_belongs():
    grad = torch.zeros(1, 1, 8, 8)
    grad[0, 0, 3, 3] = torch.inf
    for small in ([1, 1, 4, 4], [1, 1, 3, 3], [1, 1, 16, 16]):
        expected = aten.upsample_bilinear2d_backward(grad, [8, 8], small, False)
        assert torch.equal(resize.bilinear2d_backward(grad, [8, 8], small, False).isfinite(), expected.isfinite())


FORWARD = [
    ([12, 9], False, None, None),
    ([12, 9], True, None, None),
    ([3, 4], False, None, None),
    ([1, 1], True, None, None),
    ([8, 6], False, None, None),
    ([8, 12], False, None, 2.0),
    ([13, 9], False, 1.7, 1.4),
    ([8, 6], True, 0.0, -1.0),
]


@pytest.mark.parametrize("odd", [0.0, torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("args", FORWARD, ids=str)
def test_bilinear_forward_weighs_as_the_operator(args, odd):
    """This includes equal sizes, where eager uses the weights one and zero."""
    x = torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0))
    x[0, 1, 3, 2] = odd
    for given_ in (x, x.bfloat16(), x.contiguous(memory_format=torch.channels_last)):
        expected, got = aten.upsample_bilinear2d(given_, *args), resize.bilinear2d(given_, *args)
        assert (got.dtype, strides(got)) == (expected.dtype, strides(expected))
        torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("size", [[12, 9], [8, 9], [8, 6]], ids=str)
def test_the_kernel_weighs_as_the_operator(size):
    x = torch.randn(1, 2, 8, 6, generator=torch.Generator().manual_seed(0))
    x[0, 1, 3, 2] = torch.inf
    assert check(ops.OPS["upsample_bilinear2d"], [x, size, False, None, None], {})


CASES = {
    "bilinear": {"scale_factor": 4, "mode": "bilinear"},
    "bilinear, corners aligned": {"size": (20, 37), "mode": "bilinear", "align_corners": True},
    "bilinear, made smaller": {"size": (5, 7), "mode": "bilinear"},
    "bilinear, a scale that sizes do not say": {"scale_factor": 2.3, "mode": "bilinear"},
    "nearest": {"scale_factor": 2, "mode": "nearest"},
    "bicubic": {"scale_factor": 2, "mode": "bicubic"},
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["planes", "channels last"])
@pytest.mark.parametrize("case", CASES)
def test_training_through_a_resize(case, layout, fresh_dynamo):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 9).contiguous(memory_format=layout).requires_grad_()

    def f(x):
        return F.interpolate(x.sin(), **CASES[case]).flatten(1).square()

    (expected,) = torch.autograd.grad(f(x).sum(), x)
    with report.recording() as reports:
        (got,) = torch.autograd.grad(torch.compile(f, backend="x86_onednn")(x).sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert got.stride() == expected.stride()
    assert "index_put" not in {r.op for graph in reports for r in graph.ops}


def test_torch_has_its_own_forms_back_after_compiling(fresh_dynamo):
    before = dict(aten.upsample_bilinear2d.vec.py_kernels)
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    torch.compile(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), backend="x86_onednn")(x)
    assert aten.upsample_bilinear2d.vec.py_kernels == before


def test_sizes_that_vary(fresh_dynamo):
    compiled = torch.compile(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), backend="x86_onednn", dynamic=True)
    for n in (4, 7):
        x = torch.randn(1, 2, n, n + 1, requires_grad=True)
        expected, got = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (
            lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), compiled,
        ))  # fmt: skip
        torch.testing.assert_close(got, expected)
