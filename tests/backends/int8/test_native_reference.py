"""The native core's reference against the quantization ops of graphs, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # brings the ops
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewright_int8.run import reference
from fusewright_int8.run.reference import RULES

DECOMPOSED = torch.ops.quantized_decomposed
SPECIAL = (0.0, -0.0, 0.5, 1.5, -2.5, 1e-30, 1e30, -1e30, 3e38)


def matrix(seed: int, rows: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers, including special values."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=g) * 10 ** torch.empty(rows, 1).uniform_(-6, 6, generator=g)
    few = torch.rand(rows, k, generator=g) < 0.05
    chosen = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL) - 4, (rows, k), generator=g)]
    return torch.where(few, chosen, x).to(dtype)


@given(st.integers(0, 1 << 20), st.floats(1e-6, 1e3), st.integers(0, 255))
@settings(max_examples=50, deadline=None)
def test_quantize_is_the_decomposed_op(seed: int, scale: float, zero: int) -> None:
    x = matrix(seed, 7, 33) * scale
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38])
    theirs = DECOMPOSED.quantize_per_tensor(x, scale, zero, 0, 255, torch.uint8)
    assert torch.equal(reference.quantize(x, scale, zero, torch.uint8), theirs)
    back = DECOMPOSED.dequantize_per_tensor(theirs, scale, zero, 0, 255, torch.uint8)
    assert torch.equal(reference.dequantize(theirs, scale, zero), back)


def _decomposed(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rule = RULES[name]
    if rule.per_row:
        choose = (
            DECOMPOSED.choose_qparams_per_token
            if rule.symmetric
            else DECOMPOSED._choose_qparams_per_token_asymmetric_impl
        )
        scale, zero = choose(x, torch.int8)
        return DECOMPOSED.quantize_per_token(x, scale, zero, rule.low, rule.high, torch.int8), scale, zero
    choose = DECOMPOSED.choose_qparams_symmetric if rule.symmetric else DECOMPOSED.choose_qparams
    dtype = torch.int8 if rule.symmetric else torch.uint8
    scale, zero = choose.tensor(x, rule.low, rule.high, rule.eps, dtype)
    return DECOMPOSED.quantize_per_tensor.tensor(x, scale, zero, rule.low, rule.high, dtype), scale, zero


F32, BF16 = torch.float32, torch.bfloat16
# In bf16 `quantize_per_token` multiplies in bf16 when the scales are bf16; the core does not follow it there.
DYNAMIC = [(n, d) for n in ("tensor", "tensor_symmetric", "token", "token_symmetric") for d in (F32, BF16)]
DYNAMIC.remove(("token_symmetric", BF16))


@pytest.mark.parametrize(("name", "dtype"), DYNAMIC)
def test_dynamic_rules_are_the_decomposed_ops(name: str, dtype: torch.dtype) -> None:
    for seed in range(40):
        x = matrix(seed, 1 + seed % 5, 1 + 7 * seed % 50, dtype)
        q, scale, zero = reference.quantize_dynamic(x, RULES[name])
        want, want_scale, want_zero = _decomposed(x, name)
        assert torch.equal(scale.double(), want_scale.double().reshape(-1)), seed
        assert torch.equal(zero.long(), want_zero.long().reshape(-1)), seed
        assert torch.equal(q, want), seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["row", "row_symmetric"])
def test_row_rules_are_torchaos(name: str, dtype: torch.dtype) -> None:
    primitives = pytest.importorskip("torchao.quantization.quant_primitives", reason="compares with torchao: pip install torchao")
    mapping = primitives.MappingType.SYMMETRIC if RULES[name].symmetric else primitives.MappingType.ASYMMETRIC
    for seed in range(40):
        x = matrix(seed, 1 + seed % 5, 1 + 7 * seed % 50, dtype)
        block = [1, x.shape[1]]
        scale, zero = primitives.choose_qparams_affine(
            x, mapping, block, torch.int8, -128, 127, RULES[name].eps, torch.float32, torch.int8, keepdim=True
        )
        want = primitives.quantize_affine(x, block, scale, zero, torch.int8, -128, 127)
        q, own_scale, own_zero = reference.quantize_dynamic(x, RULES[name])
        assert torch.equal(own_scale, scale.reshape(-1)), seed
        assert torch.equal(own_zero, zero.int().reshape(-1)), seed
        assert torch.equal(q, want), seed


def test_the_reference_of_a_linear_is_the_dequantized_product() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (5, 40), generator=g, dtype=torch.uint8)
    w = torch.randint(-128, 128, (7, 40), generator=g, dtype=torch.int8)
    w_scale, bias = torch.rand(7, generator=g), torch.randn(7, generator=g)
    want = ((x.double() - 11) * torch.tensor(0.3).double()) @ (w.double() * w_scale.double()[:, None]).t() + bias
    torch.testing.assert_close(reference.linear(x, w, w_scale, bias, 0.3, 11).double(), want, rtol=2**-23, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_weight_only_is_at_least_as_accurate_as_a_float_product(dtype: torch.dtype) -> None:
    for seed in range(20):
        x, g = matrix(seed, 5, 300, F32).clamp(-1e6, 1e6).to(dtype), torch.Generator().manual_seed(seed)
        w, scale = torch.randint(-128, 128, (40, 300), generator=g, dtype=torch.int8), torch.rand(40, generator=g)
        exact = (x.double() @ w.double().t()) * scale.double()
        eager = torch.nn.functional.linear(x, w.to(dtype)) * scale
        own = reference.weight_linear(x, w, scale, None)
        assert (own - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-30, seed
