"""The attention kernel as torch operators that a plan can name, on GPUs and (interpreted) on CPU tensors.

`fusewright_triton::attention`: a mask of any strides, or none. `fusewright_triton::attention_decomposed`: the bias of
decomposed relative positions. Both take a target's name, which determines the block sizes.
`fusewright_triton::attention_varying`: torch's own kernels, but none that is planned anew for each length.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusewright_triton.run.handwritten import NAMESPACE, Kernel, operator, or_else
from fusewright_triton.target import Target, named

KERNEL = Kernel("attention", "attention")
ATTENTION = f"{NAMESPACE}::attention.default"
DECOMPOSED = f"{NAMESPACE}::attention_decomposed.default"
VARYING = f"{NAMESPACE}::attention_varying.default"

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_DIM = 256
FEW_KEYS = 64
"""The most keys for which a block takes fewer of them."""
LARGEST_IMAGE = 256
"""The most rows plus columns of an image of keys, unless it is as wide as a block of keys."""


OFTEN = 256
"""Calls with the same sizes after which a plan for them pays."""
MOST_SIZES = 4096
"""The most sizes whose calls are counted."""
_calls: dict[tuple[Any, ...], int] = {}


@dataclass(frozen=True)
class Tiles:
    """Blocks of BM queries and BN keys, and how Triton builds the kernel. `bias` 1 and 2 are the kernel's BIAS."""

    bm: int
    bn: int
    warps: int
    stages: int
    bias: int = 0


def power_of_two(n: int) -> int:
    """Return the next power of two, at least 16, the least block size of `tl.dot`."""
    return max(16, 1 << (n - 1).bit_length())


def tiles(
    t: Target, dtype: torch.dtype, dim: int, queries: int, keys: int, image: tuple[int, int] | None = None
) -> Tiles:
    """Return the blocks for heads of `dim` elements; `image` is (rows, columns) of the keys of decomposed positions.

    Measured on an H100 (docs/studies/gpu-attention.md); other targets get what fits their registers and shared memory.
    """
    wide, single = power_of_two(dim), dtype == torch.float32
    small = wide > 128 or t.matrix == "wmma" or (single and t.triton == "hip")
    bm, bn = min(64, power_of_two(queries)), 32 if small or keys <= FEW_KEYS else 64
    bias = 0
    if image is not None:
        columns = power_of_two(image[1])
        whole = columns <= 128 and 4 * image[1] >= 3 * columns and wide <= 128
        bias, bn = (1, columns) if whole else (2, 32 if small or single else 64)
        bm = min(bm, 32) if single and bias == 2 else bm
    # RDNA's warps have 32 lanes of 256 registers: four warps do not hold wide heads
    warps = 8 if t.matrix == "wmma" and wide > 64 else 4
    how = Tiles(bm, bn, warps, (2 if single else 3) if t.triton == "cuda" else 1, bias)
    while shared(how, dtype, dim, image) > t.shared and (how.stages > 1 or how.bm > 16):
        how = replace(how, stages=how.stages - 1) if how.stages > 1 else replace(how, bm=how.bm // 2)
    return how


def precision(t: Target, dtype: torch.dtype) -> str:
    """Return the precision of fp32 products: three TF32 products, which are as exact, where matrix instructions have only TF32."""
    return "tf32x3" if dtype == torch.float32 and t.triton == "cuda" else "ieee"


def shared(how: Tiles, dtype: torch.dtype, dim: int, image: tuple[int, int] | None = None) -> int:
    """Return the most bytes of shared memory that a block takes: queries, keys and values of every stage, scores, and the
    operands of a bias that is computed as a product."""
    wide, parts = power_of_two(dim), power_of_two(sum(image)) if image is not None and how.bias == 2 else 0
    elements = how.bm * wide + 2 * how.stages * how.bn * wide + parts * (how.bm + how.bn)
    # fp32 operands may be split in two for their products
    return elements * (8 if dtype == torch.float32 else 2) + how.bm * how.bn


def constants(
    how: Tiles, dtype: torch.dtype, dim: int, mask: int = 0, each: bool = False, sink: bool = False, causal: bool = False,
    zero: bool = True, query_columns: int = 1, image: tuple[int, int] = (0, 0), precision: str = "ieee",
) -> dict[str, Any]:  # fmt: skip
    """Return the kernel's compile-time arguments."""
    return {
        "D": dim, "MASK": mask, "EACH": each, "SINK": sink, "CAUSAL": causal, "ZERO": zero, "BIAS": how.bias,
        "QW": query_columns, "KH": image[0], "KW": image[1], "LEAST": torch.finfo(dtype).min,
        "BM": how.bm, "BN": how.bn, "BD": power_of_two(dim), "BR": power_of_two(sum(image)), "PRECISION": precision,
    }  # fmt: skip


def _launch(t: Target, programs: int, args: Sequence[Any], how: Tiles, fixed: Mapping[str, Any]) -> None:
    KERNEL.launch(t, programs, args, fixed, num_warps=how.warps, num_stages=how.stages)


def fits(t: Target, dtype: torch.dtype, dim: int, image: tuple[int, int] | None = None) -> bool:
    """Return whether the kernel is built for such heads on a target, and holds such an image of keys."""
    how = tiles(t, dtype, dim, LARGEST_IMAGE, LARGEST_IMAGE, image)
    large = image is not None and how.bias == 2 and sum(image) > LARGEST_IMAGE
    known = dtype in DTYPES and dim <= LARGEST_DIM and not large
    known &= dtype != torch.float32 or t.matrix != "wmma"  # WMMA multiplies half types only
    return known and shared(how, dtype, dim, image) <= t.shared


def by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, sink: torch.Tensor | None,
    is_causal: bool, scale: float | None, zero: bool, stride: Sequence[int], target: str,
) -> torch.Tensor:  # fmt: skip
    """Compute `attention` by torch's own kernels."""
    if sink is not None:
        return _placed(_with_sink(query, key, value, mask, sink, is_causal, _factor(query, scale)), stride)
    operands = query, key, value
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        operands, mask = (
            (query.float(), key.float(), value.float()),
            mask.float(),
        )  # which a narrower mask would not say
    out = torch.nn.functional.scaled_dot_product_attention(
        *operands, mask, is_causal=is_causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    if mask is not None and not zero:
        seen = mask if mask.dtype == torch.bool else mask != -math.inf
        out = torch.where(seen.any(-1, keepdim=True), out, math.nan)
    return _placed(out.to(query.dtype), stride)


def _with_sink(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sink: torch.Tensor, is_causal: bool, scale: float
) -> torch.Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    joined = torch.cat((scores, sink.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    return (joined.softmax(-1)[..., :-1].to(v.dtype) @ v).to(q.dtype)


def _placed(t: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a tensor with these strides."""
    if t.stride() == tuple(stride):
        return t
    return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)


@or_else(by_torch)
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, sink: torch.Tensor | None,
    is_causal: bool, scale: float | None, zero: bool, stride: Sequence[int], target: str,
) -> torch.Tensor:  # fmt: skip
    """Compute `scaled_dot_product_attention` without dropout, with these strides of the result.

    query [B, H, Q, D], key and value [B, Hk, K, D] of one dtype, H a multiple of Hk; mask is boolean or added, and broadcasts
    to [B, H, Q, K]. A fully masked row is 0 with `zero`, as in torch's fused kernels, else NaN, as from a softmax. `sink`, which
    broadcasts to [B, H, Q, 1], is one more score of each row, which has no value.
    """
    q, k, v = (_dense(t) for t in (query, key, value))
    batch, heads, queries, dim = q.shape
    out = torch.empty_strided(q.shape, stride, dtype=q.dtype, device=q.device)
    t = named(target)
    how = tiles(t, q.dtype, dim, queries, k.shape[2])
    kind, given = 0, q
    mask_strides: tuple[int, ...] = (0,) * 4
    if mask is not None:
        kind, given = (2, mask.view(torch.uint8)) if mask.dtype == torch.bool else (1, mask)
        mask_strides = given.expand(batch, heads, queries, k.shape[2]).stride()
    each, exact = mask_strides[2] != 0, precision(t, q.dtype)
    fixed = constants(how, q.dtype, dim, kind, each, sink is not None, is_causal, zero, precision=exact)
    numbers = (_factor(q, scale), heads, heads // k.shape[1], queries, k.shape[2])
    also, sink_strides = sinks(sink, q)
    strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(out), *mask_strides, *sink_strides, *(0,) * 8)
    if out.numel():
        programs = -(-queries // how.bm) * batch * heads
        _launch(t, programs, (q, k, v, out, given, also, q, q, *numbers, *strides), how, fixed)
    return out


def attention_varying(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float | None,
    order: Sequence[int], target: str,
) -> torch.Tensor:  # fmt: skip
    """Compute `scaled_dot_product_attention` without dropout, dense with its dims in this order. Lengths that come rarely are left
    to kernels that need no planning: cuDNN plans for tens of ms at each new one (docs/studies/gpu-decoding.md)."""
    sizes = query.shape, key.shape, None if mask is None else mask.shape, query.dtype, is_causal
    _calls[sizes] = seen = _calls.get(sizes, 0) + 1
    if len(_calls) > MOST_SIZES:
        _calls.clear()
    with without_plans() if seen <= OFTEN else contextlib.nullcontext():
        return by_torch(query, key, value, mask, None, is_causal, scale, True, strides_in(query.shape, order), target)


@contextlib.contextmanager
def without_plans() -> Iterator[None]:
    """Let torch choose among its kernels but cuDNN's in this context, if it may choose another fused one."""
    cuda = torch.backends.cuda
    chosen = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(chosen and not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled()))
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(chosen)


def strides_in(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dims lie in this order, the outermost first."""
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d], step = step, step * shape[d]
    return tuple(strides)


def decomposed_by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rel_h: torch.Tensor, rel_w: torch.Tensor,
    scale: float | None, stride: Sequence[int], target: str,
) -> torch.Tensor:  # fmt: skip
    """Compute `attention_decomposed` by torch's own kernels, with the bias as a matrix."""
    flat = query.dim() == 3
    q, k, v = (t.unsqueeze(1) if flat else t for t in (query, key, value))
    bias = (rel_h.float().unsqueeze(-1) + rel_w.float().unsqueeze(-2)).to(q.dtype)
    lengths = q.shape[2], k.shape[2]
    dense = by_torch(
        q, k, v, bias.reshape(*q.shape[:2], *lengths), None, False, scale, False, q.contiguous().stride(), target
    )
    return _placed(dense.squeeze(1) if flat else dense, stride)


@or_else(decomposed_by_torch)
def attention_decomposed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rel_h: torch.Tensor, rel_w: torch.Tensor,
    scale: float | None, stride: Sequence[int], target: str,
) -> torch.Tensor:  # fmt: skip
    """Compute attention over an image with bias[q, k] = rel_h[q, k // W] + rel_w[q, k % W], with these strides of the result.

    query, key and value [B, H, Q or K, D] or [N, Q or K, D]; rel_h [N, Qh, Qw, Kh] and rel_w [N, Qh, Qw, Kw] of any
    strides, where N = B * H, Q = Qh * Qw and K = Kh * Kw. A fully masked row is NaN.
    """
    flat = query.dim() == 3
    q, k, v = (_dense(t.unsqueeze(1) if flat else t) for t in (query, key, value))
    batch, heads, queries, dim = q.shape
    out = torch.empty_strided(query.shape, stride, dtype=q.dtype, device=q.device)
    image = rel_h.shape[3], rel_w.shape[3]
    t = named(target)
    how, exact = tiles(t, q.dtype, dim, queries, k.shape[2], image), precision(t, q.dtype)
    fixed = constants(how, q.dtype, dim, zero=False, query_columns=rel_h.shape[2], image=image, precision=exact)
    numbers = (_factor(q, scale), heads, 1, queries, k.shape[2])
    shaped = out.unsqueeze(1) if flat else out
    strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(shaped), *(0,) * 7, *rel_h.stride(), *rel_w.stride())
    if out.numel():
        programs = -(-queries // how.bm) * batch * heads
        _launch(t, programs, (q, k, v, out, q, q, rel_h, rel_w, *numbers, *strides), how, fixed)
    return out


def sinks(sink: torch.Tensor | None, query: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the tensor that a kernel reads sinks from, and its strides over batch, heads and queries."""
    return (query, (0, 0, 0)) if sink is None else (sink, _strides(sink.expand(*query.shape[:3], 1)))


def _dense(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a dense last dimension, as the kernel expects."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    return t.stride()[:3]


def _factor(query: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _meta(query: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_strided(query.shape, args[-2], dtype=query.dtype, device=query.device)


_TENSORS, _REST = "Tensor query, Tensor key, Tensor value, ", "int[] stride, str target) -> Tensor"
operator(f"attention({_TENSORS}Tensor? mask, Tensor? sink, bool is_causal, float? scale, bool zero, {_REST}", attention, _meta)
operator(
    f"attention_decomposed({_TENSORS}Tensor rel_h, Tensor rel_w, float? scale, {_REST}", attention_decomposed, _meta
)


def _meta_varying(query: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_strided(query.shape, strides_in(query.shape, args[-2]), dtype=query.dtype, device=query.device)


operator(
    f"attention_varying({_TENSORS}Tensor? mask, bool is_causal, float? scale, int[] order, str target) -> Tensor",
    attention_varying,
    _meta_varying,
)
