"""Error against fp64, judged relative to eager's."""

import math

import pytest
import torch

from fusewright.bench.accuracy import compare, reference
from fusewright.bench.suite import Built, build

EXACT = torch.linspace(-1, 1, 1001, dtype=torch.float64).exp()
EAGER = EXACT.float()


def judge(ours, eager=EAGER, wide=EXACT, dtype="fp32"):
    return compare([wide], [eager], [ours], dtype)


def test_eagers_own_answer_passes():
    found = judge(EAGER)
    assert found.passed
    assert found.ratio_max == found.ratio_rms == 1.0


def test_twice_eagers_error_passes_and_ten_times_does_not():
    eager = (EXACT * (1 + 1e-5)).float()
    assert judge((EXACT * (1 - 1.9e-5)).float(), eager).passed
    found = judge((EXACT * (1 + 1e-4)).float(), eager)
    assert not found.passed
    assert found.ratio_max == pytest.approx(10, rel=0.1)
    assert "output 0" in found.reason


def test_eager_that_is_right_by_luck_is_measured_on_neighbouring_numbers_too():
    lucky, ours = EXACT.float(), (EXACT * (1 + 1.5e-6)).float()
    near = [([EXACT], [(EXACT * (1 + k * 1e-6)).float()]) for k in (0.5, 1.0)]
    endless = [([EXACT], [torch.full_like(EAGER, math.inf)])]
    assert compare([EXACT], [lucky], [ours], "fp32", near).passed
    assert not compare([EXACT], [lucky], [ours], "fp32", near[:1]).passed
    assert not compare([EXACT], [lucky], [ours], "fp32", endless).passed
    assert not compare([EXACT], [lucky], [(EXACT * (1 + 1e-4)).float()], "fp32", near).passed


def test_where_eager_is_exact_an_epsilon_is_allowed():
    exact = torch.ones(8, dtype=torch.float64)
    assert judge(torch.ones(8) + torch.finfo(torch.float32).eps, torch.ones(8), exact).passed
    assert not judge(torch.ones(8) + 1e-5, torch.ones(8), exact).passed


def test_what_cancels_to_zero_is_judged_by_what_fp64_leaves_of_it():
    torch.manual_seed(0)
    terms = torch.rand(512, 300, dtype=torch.float64)
    terms = torch.cat([terms, -terms.flip(0)])[torch.randperm(1024)]  # zero in exact arithmetic
    wide, eager = terms.sum(0), terms.float().sum(0)
    lucky = eager / 10
    assert judge(eager, lucky, wide).passed
    assert not judge(eager + 1e-3, lucky, wide).passed
    assert not judge(eager, lucky, wide + 1e-6).passed  # small, but not zero


def test_an_order_of_additions_that_leaves_more_of_what_cancels_is_right():
    """The gradient of a key's bias, to which a softmax is indifferent: 2.5 times eager's rounding, and wrong ones."""
    torch.manual_seed(0)
    given = torch.randn(3, 200, 32, dtype=torch.float64)

    def gradient_rows(dtype):
        q, k, v = given.to(dtype)
        k.requires_grad_()
        torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None]).square().sum().backward()
        return k.grad

    rows = gradient_rows(torch.float32)
    wide, eager = gradient_rows(torch.float64).sum(0), rows.sum(0)
    assert wide.abs().max() < 1e-13 * rows.abs().sum(0).max(), "zero but for rounding"
    assert judge(2.5 * eager, eager, wide).passed and judge(rows.cumsum(0)[-1], eager, wide).passed
    for wrong in (20 * eager, rows[1:].sum(0), eager + 1e-3 * rows[0]):
        assert not judge(wrong, eager, wide).passed


def test_nan_and_inf_must_be_where_eager_has_them():
    eager = EAGER.clone()
    eager[0], eager[1] = math.nan, math.inf
    assert judge(eager.clone(), eager).passed
    for index, value in ((0, 1.0), (1, -math.inf), (1, math.nan), (2, math.nan)):
        ours = eager.clone()
        ours[index] = value
        assert not judge(ours, eager).passed, (index, value)


def test_dtype_shape_and_number_of_outputs_are_eagers():
    assert "float16" in judge(EAGER.half()).reason
    assert "(1001, 1)" in judge(EAGER[:, None]).reason
    assert "2 outputs" in compare([EXACT], [EAGER], [EAGER, EAGER], "fp32").reason


def test_integers_are_compared_exactly():
    ids = torch.arange(4)
    assert compare([ids], [ids], [ids.clone()], "fp32").passed
    assert not compare([ids], [ids], [ids + 1], "fp32").passed


def test_the_worst_output_is_the_one_reported():
    bad = EAGER + 0.1
    found = compare([EXACT, EXACT], [EAGER, EAGER], [EAGER, bad], "fp32")
    assert not found.passed
    assert found.reason.startswith("output 1")


def test_the_reference_is_fp64_even_where_a_model_casts_to_fp32():
    def by_name(x):
        return torch.softmax(x.float(), -1, dtype=torch.float32).to(torch.bfloat16) * torch.ones(3)

    x = torch.tensor([0.1, 0.2, 0.3])
    (wide,) = reference(Built("f", by_name, (x,)))
    assert wide.dtype == torch.float64
    assert torch.equal(wide, torch.softmax(x.double(), -1))
    assert torch.get_default_dtype() == torch.float32


def test_llama_casts_its_norms_and_is_still_compared_in_fp64():
    built = build("llama", "small")
    with torch.no_grad():
        eager = built.run().logits
    (wide,) = reference(built)
    error = (eager.double() - wide).abs().max() / wide.abs().max()
    assert 1e-9 < error < 1e-5
    assert next(built.module.parameters()).dtype == torch.float32
