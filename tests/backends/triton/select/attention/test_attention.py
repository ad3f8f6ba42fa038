"""Attention of the GPU backends: the kernel against fp64 in Triton's interpreter, and the graphs that use it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fusewright.bench.accuracy import compare
from fusewright.interface import Device, Fragment, Value
from fusewright_cpu import llvm_loader
from fusewright_triton.backend import NvidiaTriton, RocmTriton, TritonBackend
from fusewright_triton.kernels import attention_ops as kernel
from fusewright_triton.target import named
from tests.backends.triton.select.test_calls import Net, lowered
from tests.fragments import Context, Sketch, targets

TARGETS = ("sm_80", "sm_90", "gfx90a", "gfx942", "gfx950", "gfx1100")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ATTENTION, DECOMPOSED = "fusewright_triton::attention", "fusewright_triton::attention_decomposed"
VIEWS = {"aten::view", "aten::transpose.int"}


def passes(wide: Tensor, eager: Tensor, ours: Tensor, dtype: str) -> None:
    verdict = compare([wide], [eager], [ours], "bf16" if dtype == "fp16" else dtype)
    assert verdict.passed, verdict


def qkv(dtype: str, batch: int, heads: int, queries: int, keys: int, dim: int, kv_heads: int = 0) -> list[Tensor]:
    """Return query, key and value [B, H, L, D] with the strides of projections [B, L, H * D]."""
    g = torch.Generator().manual_seed(queries * dim)
    sizes = [(batch, n, h, dim) for n, h in ((queries, heads), (keys, kv_heads or heads), (keys, kv_heads or heads))]
    return [torch.randn(s, generator=g).to(DTYPES[dtype]).transpose(1, 2) for s in sizes]


def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **how: Any) -> Tensor:
    causal, scale, zero = how.get("causal", False), how.get("scale"), how.get("zero", True)
    stride = torch.empty_like(q).stride()
    return kernel.attention(q, k, v, mask, how.get("sink"), causal, scale, zero, stride, how.get("target", "sm_90"))


# ---------------------------------------------------------------- the kernel


@pytest.mark.parametrize("target", ["sm_90", "gfx1100"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "keys", "dim"), [(1, 1, 16), (63, 64, 64), (64, 65, 32), (130, 129, 80), (7, 200, 128), (5, 40, 256)]
)
def test_lengths_around_blocks(queries: int, keys: int, dim: int, dtype: str, target: str) -> None:
    given = qkv(dtype, 2, 2, queries, keys, dim)
    wide = scaled_dot_product_attention(*(t.double() for t in given))
    passes(wide, scaled_dot_product_attention(*given), run(*given, target=target), dtype)


def masks() -> dict[str, Tensor]:
    """Return masks of shape [2, 2, 70, 90], or of shapes that broadcast to it."""
    g = torch.Generator().manual_seed(1)
    kept = torch.rand(2, 2, 70, 90, generator=g) > 0.3
    added = torch.randn(2, 2, 70, 90, generator=g)
    return {
        "kept": kept,
        "kept, of keys": kept[:, :1, :1],
        "kept, expanded": kept[:, :1, :, :1].expand(2, 1, 70, 90),
        "added": added,
        "added, one for all": added[0, 0],
        "added, transposed": added.transpose(2, 3).contiguous().transpose(2, 3),
        "added, the least number": torch.where(kept, 0.0, torch.finfo(torch.float32).min),
        "added, the least number everywhere": torch.full((70, 1), torch.finfo(torch.float32).min).expand(70, 90),
        "added, of other dtype": added.double(),
    }


@pytest.mark.parametrize("name", masks())
def test_masks(name: str) -> None:
    q, k, v = qkv("fp32", 2, 2, 70, 90, 32)
    mask = masks()[name]
    wide_mask = mask if mask.dtype == torch.bool else mask.double()
    eager = scaled_dot_product_attention(q, k, v, mask if mask.dtype == torch.bool else mask.float())
    wide = scaled_dot_product_attention(q.double(), k.double(), v.double(), wide_mask)
    passes(wide, eager, run(q, k, v, mask), "fp32")


def test_causal_attention_and_a_scale() -> None:
    for queries, keys in ((100, 100), (40, 90), (90, 40)):
        given = qkv("fp32", 1, 2, queries, keys, 32)
        how = {"is_causal": True, "scale": 0.3}
        wide = scaled_dot_product_attention(*(t.double() for t in given), **how)
        passes(wide, scaled_dot_product_attention(*given, **how), run(*given, causal=True, scale=0.3), "fp32")


def test_heads_that_share_keys() -> None:
    given = qkv("fp32", 2, 6, 40, 50, 32, kv_heads=2)
    wide = scaled_dot_product_attention(*(t.double() for t in given), enable_gqa=True)
    passes(wide, scaled_dot_product_attention(*given, enable_gqa=True), run(*given), "fp32")


@pytest.mark.parametrize("added", [True, False])
def test_rows_that_see_no_key(added: bool) -> None:
    """Their result is 0 as in torch's own attention, or NaN as in a softmax."""
    q, k, v = qkv("fp32", 1, 2, 40, 70, 16)
    kept = torch.ones(40, 70, dtype=torch.bool)
    kept[3], kept[5, :64] = False, False
    mask = torch.zeros(40, 70).masked_fill(~kept, -math.inf) if added else kept
    eager = scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(run(q, k, v, mask), eager)
    assert not eager[:, :, 3].any()
    spelled_out = run(q, k, v, mask, zero=False)
    assert spelled_out[:, :, 3].isnan().all()
    torch.testing.assert_close(spelled_out[:, :, 4:], eager[:, :, 4:])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_with_a_score_that_is_no_number(bad: float) -> None:
    q, k, v = qkv("fp32", 1, 1, 20, 70, 16)
    mask = torch.zeros(20, 70)
    mask[4, 65] = bad
    torch.testing.assert_close(run(q, k, v, mask), scaled_dot_product_attention(q, k, v, mask), equal_nan=True)


def decomposed(dtype: torch.dtype, n: int, height: int, width: int, dim: int) -> list[Tensor]:
    """Return q, k, v [N, L, D], and rel_h and rel_w [N, H, W, H or W] with the strides of einsum's results."""
    g = torch.Generator().manual_seed(height * width)
    given = [torch.randn(n, height * width, dim, generator=g) for _ in range(3)]
    given.append(torch.randn(height, n, width, height, generator=g).transpose(0, 1))
    given.append(torch.randn(width, n, height, width, generator=g).permute(1, 2, 0, 3))
    return [t.to(dtype) for t in given]


def spelled_out(q: Tensor, k: Tensor, v: Tensor, rel_h: Tensor, rel_w: Tensor, scale: float) -> Tensor:
    scores = (q * scale) @ k.transpose(-2, -1)
    scores = scores + (rel_h[:, :, :, :, None] + rel_w[:, :, :, None, :]).reshape_as(scores)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("height", "width", "dim"), [(14, 14, 64), (5, 7, 16), (4, 17, 64), (3, 64, 64), (4, 50, 32), (2, 129, 16), (5, 33, 80)]
)
def test_decomposed_positions(height: int, width: int, dim: int, dtype: str, target: str) -> None:
    given = decomposed(DTYPES[dtype], 2, height, width, dim)
    ours = kernel.attention_decomposed(*given, 0.2, given[0].stride(), target)
    passes(spelled_out(*(t.double() for t in given), 0.2), spelled_out(*given, 0.2), ours, dtype)


@pytest.mark.parametrize(("height", "width"), [(6, 5), (3, 32)])
def test_positions_that_hide_keys(height: int, width: int) -> None:
    """-inf hides a row or a column of keys; +inf and NaN make their row of scores NaN, and no other."""
    given = decomposed(torch.bfloat16, 1, height, width, 16)
    given[3][:, :, :, 1] = -math.inf
    given[4][:, :, :, 2] = -math.inf
    given[3][0, 0, 0, 2] = math.inf
    given[4][0, 1, 1, 0] = math.nan
    ours = kernel.attention_decomposed(*given, 0.25, given[0].stride(), "sm_90")
    wide = spelled_out(*(t.double() for t in given), 0.25)
    assert torch.equal(ours.isnan(), wide.isnan())
    torch.testing.assert_close(ours.double(), wide, rtol=2e-2, atol=2e-2, equal_nan=True)


def test_blocks_follow_the_geometry() -> None:
    """A block of keys is a whole row of the image if it fills the block; otherwise the bias is a product."""
    t = named("sm_90")
    assert kernel.tiles(t, torch.bfloat16, 64, 4096, 4096, (64, 64)).bias == 1
    assert kernel.tiles(t, torch.bfloat16, 64, 196, 196, (14, 14)).bn == 16
    assert kernel.tiles(t, torch.bfloat16, 64, 289, 289, (17, 17)).bias == 2
    assert kernel.tiles(t, torch.bfloat16, 64, 1, 1000).bm == 16
    a40, image = named("sm_86"), (40, 90)
    how = kernel.tiles(a40, torch.bfloat16, 128, 3600, 3600, image)
    assert kernel.shared(how, torch.bfloat16, 128, image) <= a40.shared
    assert named("sm_87") == named("sm_86")
    assert not kernel.fits(t, torch.bfloat16, 64, (200, 150)) and not kernel.fits(t, torch.bfloat16, 512, (64, 64))
    with pytest.raises(ValueError, match="no target"):
        named("sm_70")


# ---------------------------------------------------------------- graphs that use it


def compiled(g: Sketch, outputs: list[Value], backend: type[TritonBackend] = NvidiaTriton) -> Fragment:
    device = Device("cuda", backend.typical, simulated=True)
    g.temporaries.clear()
    result = backend(device).compile(g.region(outputs), Context(dict(backend.options), device, specs=g.temporaries))
    assert isinstance(result, Fragment)
    return result


def check(g: Sketch, outputs: list[Value], backend: type[TritonBackend] = NvidiaTriton) -> list[str]:
    """Compare with eager, and return the calls that run."""
    fragment = compiled(g, outputs, backend)
    for ours, eager in zip(g.run(fragment, outputs), g.expected(outputs), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5, equal_nan=True)
    return targets(fragment)


def drawn(g: Sketch, form: str) -> tuple[Value, Value]:
    """Draw attention over an image of 4 by 6, written in the given `form`; return its result and the bias or the scores."""
    q, k, v, rel_h, rel_w = (g.input(t) for t in decomposed(torch.float32, 4, 4, 6, 16))
    by_row, by_column = g.op("unsqueeze", rel_h, 4), g.op("unsqueeze", rel_w, 3)
    if form == "sdpa":
        bias = g.op("reshape", g.op("add", by_row, by_column), [2, 2, 24, 24])
        split = [g.op("view", x, [2, 2, 24, 16]) for x in (q, k, v)]
        return g.op("sdpa", *split, bias), bias
    scores = g.op("bmm", g.op("mul", q, 0.25), g.op("transpose", k, -2, -1))
    if form == "scores first":
        scores = g.op("view", scores, [4, 4, 6, 4, 6])
        bias = g.op("reshape", g.op("add", g.op("add", scores, by_row), by_column), [4, 24, 24])
        return g.op("bmm", g.op("softmax", bias, -1, False), v), bias
    bias = g.op("reshape", g.op("add", by_row, by_column), [4, 24, 24])
    return g.op("bmm", g.op("softmax", g.op("add", scores, bias), -1, False), v), bias


@pytest.mark.parametrize("backend", [NvidiaTriton, RocmTriton])
@pytest.mark.parametrize("form", ["sdpa", "bias first", "scores first"])
def test_decomposed_positions_are_one_call(form: str, backend: type[TritonBackend]) -> None:
    g = Sketch()
    y, _ = drawn(g, form)
    assert set(check(g, [y], backend)) - VIEWS == {DECOMPOSED}


@pytest.mark.parametrize("form", ["sdpa", "bias first", "scores first"])
def test_a_bias_that_is_used_elsewhere_is_made(form: str) -> None:
    g = Sketch()
    y, bias = drawn(g, form)
    assert DECOMPOSED not in check(g, [y, g.op("relu", bias)])


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("form", ["sdpa", "bias first"])
def test_training_is_left_to_torch(form: str, phase: Any) -> None:
    g = Sketch(phase)
    y, _ = drawn(g, form)
    assert DECOMPOSED not in check(g, [y])


@pytest.mark.parametrize("shapes", [((2, 24, 4, 1), (2, 24, 1, 6)), ((1, 24, 4, 1), (2, 1, 1, 6))])
def test_summands_that_are_broadcast(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Queries are in one dimension, and each summand depends only on a part of it."""
    g = Sketch()
    q, k, v = (g.input(torch.randn(2, 24, 16)) for _ in range(3))
    by_row, by_column = (g.input(torch.randn(s)) for s in shapes)
    bias = g.op("reshape", g.op("add", by_row, by_column), [2, 24, 24])
    scores = g.op("div", g.op("bmm", q, g.op("transpose", k, 1, 2)), 4.0)
    y = g.op("bmm", g.op("softmax", g.op("add", bias, scores), 2, False), v)
    assert check(g, [y])[-1] == DECOMPOSED


def stacked(g: Sketch, sdpa: bool) -> tuple[Value, list[Value]]:
    """Draw an image encoder's attention layer, which permutes heads before and after; return its rows, and q, k, v."""
    batch, heads, height, width, dim = 2, 3, 4, 6, 16
    length = height * width
    projected = g.op("view", g.input(torch.randn(batch, length, 3 * heads * dim)), [batch, length, 3, heads, dim])
    copy = g.op("clone", g.op("permute", projected, [2, 0, 3, 1, 4]), memory_format=torch.contiguous_format)
    q = g.op("unbind", g.op("view", copy, [3, batch * heads, length, dim]), 0)
    parts = list(g.ops[-1].outs)
    by_row, by_column = (g.input(torch.randn(s)) for s in ((6, height, width, height, 1), (6, height, width, 1, width)))
    bias = g.op("add", by_row, by_column)
    if sdpa:
        split = [g.op("view", x, [batch, heads, length, dim]) for x in parts]
        y = g.op("sdpa", *split, g.op("reshape", bias, [batch, heads, length, length]), scale=0.25)
    else:
        scores = g.op("bmm", g.op("mul", q, 0.25), g.op("transpose", parts[1], -2, -1))
        scores = g.op("add", scores, g.op("reshape", bias, [batch * heads, length, length]))
        y = g.op("bmm", g.op("softmax", scores, -1, False), parts[2])
    y = g.op("permute", g.op("view", y, [batch, heads, height, width, dim]), [0, 2, 3, 1, 4])
    y = g.op("clone", y, memory_format=torch.contiguous_format)
    return g.op("view", y, [batch, height, width, heads * dim]), parts


@pytest.mark.parametrize("read", [[], [0], [0, 1]])
@pytest.mark.parametrize("sdpa", [True, False])
def test_only_slices_that_others_read_are_copied(sdpa: bool, read: list[int]) -> None:
    g = Sketch()
    y, parts = stacked(g, sdpa)
    ran = check(g, [y, *(g.op("relu", parts[k]) for k in read)])
    assert ran.count(DECOMPOSED) == 1 and ran.count("aten::clone") == len(read)
    assert not any("clone" in name for name in ran if name.startswith("kernel"))


def test_a_sum_of_other_shape_stays_a_mask() -> None:
    g = Sketch()
    q, k, v = (g.input(torch.randn(2, 2, 24, 16)) for _ in range(3))
    mask = g.op("add", g.input(torch.randn(24, 24)), g.input(torch.randn(1, 24)))
    assert check(g, [g.op("sdpa", q, k, v, mask)])[-1] == "aten::scaled_dot_product_attention"


@pytest.mark.parametrize("mask", [torch.randn(2, 1, 24, 1), torch.rand(2, 2, 24, 1) > 0.5, torch.zeros(1)])
def test_a_mask_that_torch_refuses(mask: Tensor) -> None:
    g = Sketch()
    q, k, v = (g.input(torch.randn(2, heads, 24, 16)) for heads in (4, 2, 2))
    expanded = g.op("expand", g.input(mask), [2, mask.shape[1] if mask.dim() > 1 else 1, 24, 24])
    if mask.dim() > 1 and mask.shape[1] == 2:
        k, v = (g.input(torch.randn(2, 1, 24, 16)) for _ in range(2))
        q = g.input(torch.randn(2, 2, 24, 16))
    assert check(g, [g.op("sdpa", q, k, v, expanded, enable_gqa=True)])[-1] == ATTENTION


@pytest.mark.parametrize(("heads", "wide", "measured"), [(4, 16, False), (32, 16, True), (4, 128, True)])
def test_a_mask_with_small_steps_needs_no_measurement(heads: int, wide: int, measured: bool) -> None:
    """A mask with heads innermost, as in T5. A measurement would wait for the kernel, and choose what the test prefers."""
    g = Net()
    q, k, v = (g.tensor(2, heads, 96, wide) for _ in range(3))
    mask = g.input(torch.randn(2, 96, 96, heads).bfloat16().permute(0, 3, 1, 2))
    fragment = lowered(g, [g.op("sdpa", q, k, v, mask)], "torch")
    assert (ATTENTION in targets(fragment)) is not measured


def test_a_mask_that_torch_refuses_is_copied_for_training() -> None:
    g = Sketch("forward")
    q, k, v = (g.input(torch.randn(2, 2, 24, 16)) for _ in range(3))
    mask = g.op("expand", g.input(torch.randn(2, 1, 24, 1)), [2, 1, 24, 24])
    found = check(g, [g.op("sdpa", q, k, v, mask)])
    assert found[-3:] == ["aten::clone", "aten::scaled_dot_product_attention", "aten::contiguous"]


def heads_spelled_out(g: Sketch, dtype: torch.dtype, mask: Tensor | None, scale: float) -> Value:
    """Draw attention as `torch.matmul` of [B, H, L, D] is traced, with copies of heads."""
    q, k, v = (g.input(torch.randn(2, n, 3, 16, dtype=dtype)) for n in (20, 30, 30))
    split = [g.op("transpose", x, 1, 2) for x in (q, k, v)]
    split[1] = g.op("transpose", split[1], -2, -1)
    contiguous = [g.op("clone", g.op("expand", x, list(x.spec.shape)), memory_format=torch.contiguous_format) for x in split]
    q3, k3, v3 = (g.op("view", x, [6, *x.spec.shape[2:]]) for x in contiguous)
    scores = g.op("view", g.op("bmm", q3, k3), [2, 3, 20, 30])
    scores = scores if scale == 1 else g.op("mul", scores, scale)
    if mask is not None:
        given = g.input(mask)
        scores = g.op("masked_fill", scores, given, -math.inf) if mask.dtype == torch.bool else g.op("add", scores, given)
    weights = g.op("cast", g.op("softmax", g.op("cast", scores, torch.float32), -1, False), dtype)
    return g.op("view", g.op("bmm", g.op("view", weights, [6, 20, 30]), v3), [2, 3, 20, 16])


HIDDEN = torch.zeros(2, 1, 1, 30)
HIDDEN[:, :, :, 20:] = -math.inf


@pytest.mark.parametrize(
    "mask",
    [None, HIDDEN, HIDDEN != 0, torch.randn(20, 30), torch.randn(1, 3, 20, 30), torch.full((20, 30), -math.inf)],
)
@pytest.mark.parametrize("scale", [0.25, 1.0])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_attention_that_is_spelled_out(dtype: str, scale: float, mask: Tensor | None) -> None:
    torch.manual_seed(0)
    g = Sketch()
    mask = mask.to(DTYPES[dtype]) if mask is not None and mask.dtype != torch.bool else mask
    y = heads_spelled_out(g, DTYPES[dtype], mask, scale)
    fragment = compiled(g, [y])
    ran = targets(fragment)
    assert ATTENTION in ran and "aten::clone" not in ran and "aten::bmm" not in ran
    (ours,), (eager,) = g.run(fragment, [y]), g.expected([y])
    q, k, v = (g.tensors[x.id].transpose(1, 2).double() for x in g.inputs[:3])
    scores = q @ k.transpose(-2, -1) * scale
    if mask is not None:
        scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    passes(scores.softmax(-1) @ v, eager, ours, dtype)


def test_weights_of_attention_that_are_returned_stay() -> None:
    g = Sketch()
    y = heads_spelled_out(g, torch.bfloat16, None, 0.25)
    weights = next(op for op in reversed(g.ops) if op.op == "cast").out
    assert ATTENTION not in targets(compiled(g, [y, weights]))


def test_attention_in_fp32_that_is_spelled_out_stays() -> None:
    g = Sketch()
    assert ATTENTION not in targets(compiled(g, [heads_spelled_out(g, torch.float32, None, 0.25)]))


# ---------------------------------------------------------------- models


def encoder(implementation: str) -> nn.Module:
    """Return Segment Anything's image encoder with two layers: one over padded windows, one over the whole image."""
    transformers = pytest.importorskip("transformers")
    sam = pytest.importorskip("transformers.models.sam.modeling_sam")
    config = transformers.SamVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=8, window_size=3,
        global_attn_indexes=[1], output_channels=16, mlp_dim=64,
    )  # fmt: skip
    config._attn_implementation = implementation
    torch.manual_seed(0)
    module = sam.SamVisionEncoder(config).eval()
    for p in module.parameters():
        nn.init.normal_(p, std=0.1)
    return module


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("implementation", "dtype", "backend"),
    [("eager", "bf16", "nvidia_triton"), ("sdpa", "fp32", "nvidia_triton"), ("eager", "fp32", "rocm_triton"),
     ("sdpa", "bf16", "rocm_triton")],
)  # fmt: skip
def test_every_layer_of_segment_anything_is_one_call(
    implementation: str, dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # loop kernels are not tested here, and the interpreter would take ten seconds for them
    monkeypatch.setattr(TritonBackend, "load", lambda self, kernels: llvm_loader(kernels))
    launched: list[Any] = []
    real = kernel._launch
    monkeypatch.setattr(kernel, "_launch", lambda *a: (launched.append(a[3]), real(*a)))
    module, x = encoder(implementation), torch.randn(2, 3, 64, 64)
    wide = copy.deepcopy(module).double()
    module, x = module.to(DTYPES[dtype]), x.to(DTYPES[dtype])
    options = {"simulate": True, "strict": True, "cache": False, "fallback": "allow"}
    with torch.no_grad():
        ours = torch.compile(module, backend=backend, options=options)(x).last_hidden_state
        passes(wide(x.double()).last_hidden_state, module(x).last_hidden_state, ours, dtype)
    assert len(launched) == 2


# ---------------------------------------------------------------- on a GPU


@pytest.mark.hardware("nvidia_triton")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_on_a_gpu(dim: int, dtype: str) -> None:
    """Test every form of the kernel, with lengths that end inside a block."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    q, k, v = (t.cuda() for t in qkv(dtype, 2, 4, 333, 450, dim, kv_heads=2))
    kept = torch.rand(2, 4, 333, 450, device="cuda") > 0.2
    for mask in (None, kept, kept[:, :1, :1], kept[:, :, :, :1].expand(-1, -1, -1, 450), kept.to(q.dtype)):
        ours = run(q, k, v, mask, target=arch)
        wide_mask = mask.double() if mask is not None and mask.dtype != torch.bool else mask
        wide = scaled_dot_product_attention(q.double(), k.double(), v.double(), wide_mask, enable_gqa=True)
        passes(wide, scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), ours, dtype)
    for height, width in ((14, 14), (9, 64), (17, 17), (5, 30)):
        given = [t.cuda() for t in decomposed(DTYPES[dtype], 3, height, width, dim)]
        ours = kernel.attention_decomposed(*given, 0.1, given[0].stride(), arch)
        passes(spelled_out(*(t.double() for t in given), 0.1), spelled_out(*given, 0.1), ours, dtype)


@pytest.mark.hardware("nvidia_triton")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dim", [64, 128])
def test_a_refused_mask_on_a_gpu(dim: int) -> None:
    """Our kernel is chosen by a rule or by a measurement; the third call is a replay."""
    q, k, v = (t.cuda() for t in qkv("bf16", 2, 4, 333, 450, dim))
    mask = torch.randn(2, 4, 333, 1, device="cuda").bfloat16()

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask.expand(-1, -1, -1, 450)) * 2

    compiled = torch.compile(attend, backend="nvidia_triton", options={"strict": True, "cache": False})
    wide = attend(q.double(), k.double(), v.double(), mask.double())
    with torch.no_grad():
        for _ in range(3):
            passes(wide, attend(q, k, v, mask), compiled(q, k, v, mask), "bf16")


@pytest.mark.hardware("nvidia_triton")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_segment_anything_on_a_gpu(implementation: str) -> None:
    module, x = encoder(implementation).cuda(), torch.randn(2, 3, 64, 64, device="cuda")
    wide = copy.deepcopy(module).double()(x.double()).last_hidden_state
    module, x = module.bfloat16(), x.bfloat16()
    compiled = torch.compile(module, backend="nvidia_triton", options={"strict": True, "cache": False, "fallback": "allow"})
    with torch.no_grad():
        for _ in range(3):
            passes(wide, module(x).last_hidden_state, compiled(x).last_hidden_state, "bf16")
