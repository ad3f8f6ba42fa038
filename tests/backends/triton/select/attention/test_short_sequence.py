"""Attention over few keys: when the Hopper kernel is used, its block sizes, and on a GPU its results against fp64."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusewright.interface import Device
from fusewright_triton.backend import NvidiaTriton
from fusewright_triton.kernels import short_sequence_ops as kernel
from tests.backends.triton.select.test_calls import lowered
from tests.fragments import Sketch, targets

CALL = "fusewright_triton::attention_short_sequence"
BF16, FP16 = torch.bfloat16, torch.float16


def packed(batch: int, heads: int, length: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Return query, key and value [B, H, L, D] as slices of one product's result."""
    torch.manual_seed(length)
    return list(torch.randn(batch, length, 3, heads, dim, device=device).to(dtype).permute(2, 0, 3, 1, 4))


@given(st.integers(1, kernel.MOST_KEYS))
def test_blocks_of_keys_hold_all_and_waste_little(keys: int) -> None:
    found = kernel.pieces(keys)
    used = [n for n in found if n]
    assert len(found) == 3 and used == sorted(used, reverse=True) and found[: len(used)] == tuple(used)
    assert all(n >= 16 and n & (n - 1) == 0 for n in used)
    assert keys <= sum(used) < keys + 32


@pytest.mark.parametrize(
    ("shape", "stride", "named"),
    [
        ((2, 12, 197, 64), (197 * 2304, 64, 2304, 1), True),
        ((1, 12, 197, 64), (5, 64, 2304, 1), True),  # the stride of a dimension of size 1 does not matter
        ((2, 12, 197, 64), (197 * 2304, 64, 2300, 1), False),  # rows not aligned to 16 bytes
        ((2, 12, 197, 64), (197 * 768, 197 * 64, 1, 197), False),
        ((2, 12, 197, 64), (0, 64, 2304, 1), False),
    ],
)
def test_strides_that_a_descriptor_takes(shape: tuple[int, ...], stride: tuple[int, ...], named: bool) -> None:
    assert kernel.describable(shape, stride, 2) is named


# ---------------------------------------------------------------- in graphs


def attended(g: Sketch, qkv: list[Tensor], **more: Any) -> list[str]:
    """Return the calls that compute this attention."""
    y = g.op("sdpa", *(g.input(t) for t in qkv), **more)
    return targets(lowered(g, [y]))


@pytest.mark.parametrize(("length", "dim"), [(197, 64), (50, 32), (77, 64), (255, 40)])
def test_an_encoder_over_few_keys_gets_the_kernel(length: int, dim: int) -> None:
    assert attended(Sketch(), packed(12, 12, length, dim, BF16)) == [CALL]


@pytest.mark.parametrize(
    ("qkv", "more"),
    [
        (packed(12, 12, 256, 64, BF16), {}),
        (packed(12, 12, 197, 128, BF16), {}),
        (packed(12, 12, 197, 36, BF16), {}),
        (packed(4, 12, 197, 64, BF16), {}),  # too few heads to fill the GPU
        (packed(12, 12, 197, 64, torch.float32), {}),
        (packed(12, 12, 197, 64, BF16), {"is_causal": True}),
        (packed(12, 12, 197, 64, BF16), {"scale": -1.0}),
        (packed(12, 12, 197, 64, BF16), {"attn_mask": torch.zeros(197, 197, dtype=BF16)}),
    ],
)
def test_other_attention_does_not(qkv: list[Tensor], more: dict[str, Any]) -> None:
    g = Sketch()
    more = {k: g.input(v) if isinstance(v, Tensor) else v for k, v in more.items()}
    assert CALL not in attended(g, qkv, **more)


def test_training_and_older_devices_do_not() -> None:
    qkv = packed(12, 12, 50, 32, BF16)
    assert CALL not in attended(Sketch("forward"), qkv)
    g = Sketch()
    y = g.op("sdpa", *(g.input(t) for t in qkv))
    a100 = Device("cpu", "sm_80", NvidiaTriton.targets["sm_80"].all_features)
    assert CALL not in targets(lowered(g, [y], device=a100))


def test_simulated_it_gives_what_torch_gives() -> None:
    q, k, v = packed(1, 4, 37, 16, torch.float16)
    k, v = k[:, ::2], v[:, ::2]
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.3, enable_gqa=True)
    eager = scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    ours = kernel.attention_short_sequence(q, k, v, 0.3, eager.stride(), "sm_90")
    assert ours.stride() == eager.stride()
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-3


# ---------------------------------------------------------------- on a GPU


@pytest.mark.hardware("nvidia_triton")
@pytest.mark.parametrize(
    ("keys", "dim", "dtype"),
    [(1, 64, BF16), (16, 8, FP16), (17, 64, BF16), (50, 64, FP16), (64, 16, BF16), (77, 40, FP16), (128, 64, BF16),
     (160, 64, BF16), (197, 64, BF16), (197, 32, FP16), (224, 64, FP16), (241, 64, BF16), (256, 16, BF16)],
)  # fmt: skip
def test_on_a_gpu(keys: int, dim: int, dtype: torch.dtype) -> None:
    """Test every number and size of key blocks, more and fewer heads than programs, and query counts around blocks of 64."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper's matrix units; runs where: a GPU of compute capability 9.0")
    for batch, heads, queries in ((1, 2, 65), (3, 4, keys), (40, 8, 33), (50, 8, 130)):
        whole = packed(batch, heads, max(keys, queries), dim, dtype, "cuda")
        q, k, v = whole[0][:, :, :queries], whole[1][:, ::2, :keys], whole[2][:, ::2, :keys]
        eager = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
        for given_, stride in ((q, eager.stride()), (q.contiguous(), q.contiguous().stride())):
            ours = kernel.attention_short_sequence(given_, k, v, None, stride, "sm_90")
            assert ours.stride() == stride
            assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-3, (batch, heads, queries)


@pytest.mark.hardware("nvidia_triton")
def test_what_is_no_number_stays_in_its_row_and_head_on_a_gpu() -> None:
    """The rows after a head's last key and value belong to the next head, and may be NaN."""
    q, k, v = packed(70, 2, 50, 64, BF16, "cuda")
    q[3, 1, 7, 5] = torch.nan
    k[4, 0, 9, 0] = torch.nan
    v[5, 1, 0, 2] = torch.nan
    eager = scaled_dot_product_attention(q, k, v)
    ours = kernel.attention_short_sequence(q, k, v, None, eager.stride(), "sm_90")
    assert torch.equal(ours.isnan(), eager.isnan())
    torch.testing.assert_close(ours, eager, equal_nan=True, rtol=2e-2, atol=2e-2)
