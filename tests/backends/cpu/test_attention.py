"""The attention kernel against fp64, judged relative to torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as eager

from fusewright.toolkit.ir.types import from_torch
from fusewright_cpu.kernels.attention import BLOCK, LEAST_ROWS, MOST_ROWS
from fusewright_cpu.kernels.by_hand import Attention
from fusewright_cpu.run.codegen import kernels_to_text, to_object
from fusewright_cpu.run.sources import from_json, hash_of, to_json
from fusewright_cpu.target import host_target, target_machine, x86_target
from tests.backends.cpu.launchers import launcher

F32, BF16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.skipif(
    bool(Attention("f32", 16).refused(host_target())), reason="this CPU has no masked loads or no FMA"
)


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run the kernel on tensors of any strides, with a result buffer full of NaN."""
    b, h, rows, width = q.shape
    kernel = Attention(from_torch(q.dtype), width, "" if mask is None else from_torch(mask.dtype), causal)
    out = torch.full_like(q, math.nan)
    masks = [] if mask is None else [mask.expand(b, h, rows, k.shape[2])]
    tensors = [q, k, v, *masks, out]
    sizes = [b, h, rows, k.shape[2], *(s for t in tensors for s in t.stride()[:3])]
    launcher(kernel).checked(tensors, sizes, [1 / math.sqrt(width) if scale is None else scale])
    return out


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def qkv(dtype: torch.dtype, rows: int, keys: int, width: int, heads: int = 2) -> Tensors:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, heads, width).to(dtype).transpose(1, 2) for n in (rows, keys, keys))
    return q, k, v


def assert_exact(tensors: Tensors, mask: torch.Tensor | None = None, causal: bool = False) -> None:
    """Check that the error is at most twice torch's own."""
    wide = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    q, k, v = (t.double() for t in tensors)
    exact = eager(q, k, v, wide, is_causal=causal)
    same = mask.to(tensors[0].dtype) if mask is not None and mask.dtype != torch.bool else mask
    theirs = float((eager(*tensors, same, is_causal=causal).double() - exact).abs().max())
    ours = float((run(*tensors, mask, causal).double() - exact).abs().max())
    assert ours <= 2 * theirs + 4 * torch.finfo(tensors[0].dtype).eps * float(exact.abs().max())


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("rows", "keys", "width"),
    [
        (1, 1, 16),
        (49, 49, 32),
        (6, 16, 64),
        (7, 17, 64),
        (64, 1, 16),
        (1, 65, 16),
        (50, 33, 40),
        (9, 20, 7),
        (13, 70, 80),
    ],
)
def test_lengths_and_widths_around_vectors(rows: int, keys: int, width: int, causal: bool, dtype: torch.dtype) -> None:
    assert_exact(qkv(dtype, rows, keys, width), causal=causal)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("causal", [True, False])
def test_several_blocks_of_keys_and_parts_of_rows(causal: bool, dtype: torch.dtype) -> None:
    width = 256
    assert_exact(qkv(dtype, MOST_ROWS + 10, 3 * BLOCK // width + 5, width, heads=1), causal=causal)
    assert_exact(qkv(dtype, 2 * LEAST_ROWS, 20, 32, heads=1), causal=causal)


@pytest.mark.parametrize(("keys", "width"), [(300, 128), (1024, 64), (2000, 16)])
def test_errors_do_not_grow_with_the_number_of_keys(keys: int, width: int) -> None:
    """Sums of values that are not around zero show in what order they are added."""
    q, k, v = qkv(F32, 50, keys, width)
    exact = eager(q.double(), k.double(), v.double() + 1)
    ours, theirs = (float((f(q, k, v + 1) - exact).norm()) for f in (run, eager))
    assert ours <= 1.3 * theirs


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", [F32, BF16, torch.bool])
@pytest.mark.parametrize("shape", [(2, 2, 30, 35), (1, 2, 30, 35), (2, 1, 1, 35), (30, 35)])
def test_masks(shape: tuple[int, ...], kind: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    mask = torch.rand(shape) > 0.3 if kind is torch.bool else torch.randn(shape).to(kind)
    assert_exact(qkv(dtype, 30, 35, 32), mask)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_row_masked_by_the_least_float_is_the_mean_of_the_values(dtype: torch.dtype) -> None:
    """As of padding in model code, whose masks add the least float in place of -inf."""
    mask = torch.zeros(20, 300)
    mask[5], mask[7, 40:] = torch.finfo(dtype).min, torch.finfo(dtype).min
    assert_exact(qkv(dtype, 20, 300, 64), mask.to(dtype))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_scores_near_the_largest_float(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype, 20, 300, 16)
    torch.testing.assert_close(run(q, k, v, scale=1e36), eager(q, k, v, scale=1e36))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_without_a_key_are_zero_as_in_eager(dtype: torch.dtype) -> None:
    tensors = qkv(dtype, 20, 40, 16)
    mask = torch.ones(1, 1, 20, 40, dtype=torch.bool)
    mask[:, :, 5] = False
    ours = run(*tensors, mask)
    assert not ours[:, :, 5].any() and ours[:, :, 6].all()
    added = torch.zeros(1, 1, 20, 40).masked_fill_(~mask, -math.inf)
    assert torch.equal(run(*tensors, added), ours)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_spreads_as_in_eager(where: int, value: float) -> None:
    tensors = qkv(F32, 20, 21, 16)
    tensors[where][0, 1, 3, 2] = value
    ours, theirs = run(*tensors), eager(*tensors)
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf())
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("empty", [(0, 2, 5, 4), (2, 2, 0, 4), (2, 2, 5, 0)])
def test_empty(empty: tuple[int, int, int, int]) -> None:
    b, h, rows, keys = empty
    q, k, v = (torch.randn(b, h, n, 16) for n in (rows, keys, keys))
    assert torch.equal(run(q, k, v), torch.zeros(b, h, rows, 16))


def test_large_scores_and_scale() -> None:
    q, k, v = qkv(F32, 20, 300, 16)
    torch.testing.assert_close(run(q * 100, k, v, scale=0.5), eager(q * 100, k, v, scale=0.5), rtol=1e-4, atol=1e-4)


def test_threads_do_not_change_values() -> None:
    tensors, threads = qkv(F32, 200, 70, 32, heads=1), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run(*tensors)
        torch.set_num_threads(4)
        assert torch.equal(run(*tensors), alone)
    finally:
        torch.set_num_threads(threads)


def test_targets_that_it_is_not_written_for() -> None:
    assert Attention("f32", 64).refused(x86_target("avx")) and not Attention("bf16", 64).refused(x86_target("avx2"))
    assert Attention("f32", 512).refused(x86_target("avx512")) and Attention("f16", 64).refused(x86_target("avx512"))


@pytest.mark.parametrize("isa", ["avx512", "avx2"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_it_is_written_for_cpus_with_other_vectors(isa: str, dtype: str) -> None:
    kernel, target = Attention(dtype, 40, "bool"), x86_target(isa)
    text, symbols = kernels_to_text({hash_of(kernel): kernel}, target, parallel=True)
    assert f"<{target.vector_bytes // 4} x float>" in text and "dpbf16ps" not in text  # plain x86-64-v4 has no bf16
    assert to_object(text, target_machine(target)) and "GOMP_parallel" in symbols


def test_it_survives_json() -> None:
    kernel = Attention("bf16", 64, "bool", causal=True)
    assert from_json(to_json(kernel)) == kernel and hash_of(from_json(to_json(kernel))) == hash_of(kernel)
    assert hash_of(kernel) != hash_of(Attention("bf16", 64, "bool"))
