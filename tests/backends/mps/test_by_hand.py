"""Handwritten kernels, run by the shim with every access checked, against fp64; and the graphs that they serve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fusewright import report
from fusewright.bench.accuracy import compare
from fusewright_mps.emit.source import Variant
from fusewright_mps.emitter import library
from fusewright_mps.kernels.decode import Combined, Parts, chunk_for
from fusewright_mps.kernels.gemv import Gemv, rows_for
from fusewright_mps.kernels.handwritten import METAL, Handwritten, from_json, hash_of, to_json
from fusewright_mps.runtime import BY_HAND
from fusewright_mps.simulate.library import compile_shader
from fusewright_mps.target import TARGETS, TYPICAL

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

DTYPES = tuple(METAL)

WIDE = 1104
"""Columns of weights too large to keep in bf16 in addition to their 8 bits."""


def run(kernel: Handwritten, tensors: Sequence[Tensor], scalars: Sequence[float] = (), aligned: bool = True) -> None:
    source = kernel.source(Variant(aligned))
    assert source.aligned(tensors)
    shaders = compile_shader(library([source]), True)
    for call in source.calls(tensors, kernel.sizes, scalars):
        getattr(shaders, call.entry)(*call.args, threads=call.threads, group_size=call.group_size)


def near(got: Tensor, exact: Tensor, terms: Tensor) -> None:
    """Check the error bound: one rounding of the result, plus fp32 summation error over these absolute terms."""
    wide = torch.finfo(got.dtype).eps * exact.abs() + 1e-6 * terms + 1e-30
    assert ((got.double() - exact).abs() <= wide).all()


# ---------------------------------------------------------------- products


def nibbles(q: Tensor) -> list[Tensor]:
    """Return low and high nibbles, two per byte, and which rows need the high ones."""

    def packed(t: Tensor) -> Tensor:
        return ((t[:, ::2] & 15) | ((t[:, 1::2] & 15) << 4)).to(torch.uint8)

    return [packed(q.int()), packed(q.int() >> 4), ((q < -8) | (q > 7)).any(1).int()]


@settings(max_examples=8, deadline=None)
@given(
    m=st.integers(1, 4), n=st.integers(1, 40), groups=st.integers(1, 9), group=st.sampled_from([8, 32, 64]),
    bits=st.sampled_from([4, 8]), zeros=st.sampled_from(["", "char", "same"]), biased=st.booleans(),
    rows=st.sampled_from([1, 2, 4]), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_product_of_few_rows_rounds_once(
    m: int,
    n: int,
    groups: int,
    group: int,
    bits: int,
    zeros: str,
    biased: bool,
    rows: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    g, k = torch.Generator().manual_seed(seed), groups * group
    x = torch.randn(m, k, generator=g).to(dtype)
    q = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
    q[::2] = q[::2] % 16 - 8  # these rows are 4 bits
    scale = (torch.rand(n, groups, generator=g) / 64).to(dtype)
    zero = torch.randint(-8, 8, (n, groups), generator=g, dtype=torch.int8).to(dtype if zeros == "same" else torch.int8)
    kind = METAL[dtype] if zeros == "same" else zeros
    bias, out = torch.randn(n, generator=g).to(dtype), torch.full((m, n), math.nan, dtype=dtype)
    kernel = Gemv(METAL[dtype], bits, m, n, k, group, kind, biased, rows)
    weights = [q] if bits == 8 else nibbles(q)
    run(kernel, [x, *weights, scale, *[zero] * bool(zeros), *[bias] * biased, out])
    q64, z64 = q.double().view(n, groups, group), zero.double()[..., None] * bool(zeros)
    w = ((q64 - z64) * scale.double()[..., None]).view(n, k)
    wide = ((q64.abs() + z64.abs()) * scale.double()[..., None]).view(n, k)
    exact = x.double() @ w.t() + (bias.double() if biased else 0)
    near(out, exact, x.double().abs() @ wide.t() + 1)


@pytest.mark.parametrize("packed", ["tinygemm", "affine"])
@pytest.mark.parametrize(
    ("m", "n", "group", "dtype"), [(1, 40, 32, torch.bfloat16), (3, 9, 64, torch.float16), (4, 5, 8, torch.float32)]
)
def test_a_product_with_packed_weights_rounds_once(packed: Any, m: int, n: int, group: int, dtype: torch.dtype) -> None:
    g, groups = torch.Generator().manual_seed(n), 5
    k = groups * group
    x, out = torch.randn(m, k, generator=g).to(dtype), torch.full((m, n), math.nan, dtype=dtype)
    q = torch.randint(0, 16, (n, k), generator=g)
    scale, zero = ((torch.rand(n, groups, generator=g) / 64).to(dtype) for _ in range(2))
    run(Gemv(METAL[dtype], 4, m, n, k, group, METAL[dtype] if packed == "affine" else "", False, 2, packed),
        [x, nibbles(q)[0], *factors(packed, scale, zero), out])  # fmt: skip
    w = unpacked(q - 8 * (packed == "tinygemm"), scale, zero)
    near(out, x.double() @ w.t(), x.double().abs() @ unpacked(q + 8, scale, zero).t() + 1)


def factors(packed: str, scale: Tensor, zero: Tensor) -> list[Tensor]:
    """Scale and zero [n, groups] in the form of a layout."""
    return [torch.stack([scale, zero], -1).transpose(0, 1).contiguous()] if packed == "tinygemm" else [scale, zero]


def unpacked(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    n, groups = scale.shape
    return (q.double().view(n, groups, -1) * scale.double()[..., None] + zero.double()[..., None]).view(n, -1)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_of_buffers_that_begin_anywhere_is_the_same(bits: int) -> None:
    def moved(t: Tensor) -> Tensor:
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    kernel = Gemv("half", bits, 2, 6, 64, 32, "", False, 2)
    q = torch.randint(-100, 100, (6, 64), dtype=torch.int8)
    given = [torch.randn(2, 64).half(), *([q] if bits == 8 else nibbles(q)), torch.rand(6, 2).half()]
    outs = [torch.zeros(2, 6).half() for _ in range(2)]
    run(kernel, [*given, outs[0]])
    anywhere = [*map(moved, given), outs[1]]
    assert not kernel.source(Variant()).aligned(anywhere)
    run(kernel, anywhere, aligned=False)
    assert torch.equal(*outs) and outs[0].any()


def test_nan_and_infinity_go_through_a_product() -> None:
    x = torch.ones(2, 64)
    x[0, 3], x[1, 5] = math.nan, math.inf
    q, scale, out = torch.ones(4, 64, dtype=torch.int8), torch.ones(4, 1), torch.empty(2, 4)
    run(Gemv("float", 8, 2, 4, 64, 64, "", False, 4), [x, q, scale, out])
    assert out[0].isnan().all() and (out[1] == math.inf).all()


def test_outputs_of_a_simd_group_leave_work_for_every_core() -> None:
    assert [rows_for(n, TARGETS["M4"]) for n in (64, 512, 4096)] == [1, 2, 4] and rows_for(
        4096, TARGETS["M3 Ultra"]
    ) == 2


# ---------------------------------------------------------------- attention


@settings(max_examples=8, deadline=None)
@given(
    batch=st.integers(1, 2), heads=st.integers(1, 3), group=st.integers(1, 4), queries=st.integers(1, 3),
    keys=st.integers(1, 150), dim=st.sampled_from([8, 32, 64, 80, 128]), mask=st.sampled_from(["", "bool", "added"]),
    dtype=st.sampled_from(DTYPES), gap=st.sampled_from([0, 2, 3]), aligned=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_of_few_queries(
    batch: int, heads: int, group: int, queries: int, keys: int, dim: int, mask: Any, dtype: torch.dtype, gap: int,
    aligned: bool, seed: int,
) -> None:  # fmt: skip
    """The cache has another layout, and some rows see no key."""
    g = torch.Generator().manual_seed(seed)
    h = heads * group
    q = torch.randn(batch, queries, h, dim, generator=g).to(dtype).transpose(1, 2)
    k, v = (torch.randn(batch, heads, keys + 5, dim + gap, generator=g).to(dtype)[:, :, :keys, :dim] for _ in range(2))
    hides = None
    if mask == "bool":
        hides = torch.rand(batch, 1, queries, keys, generator=g) > 0.4
        hides[0, 0, 0] = False
    elif mask == "added":
        hides = torch.randn(1, h, 1, keys, generator=g).to(dtype)
    strides = tuple(s for t in (q, k, v) for s in t.stride()[:3])
    if hides is not None:
        strides += tuple(hides.expand(batch, h, queries, keys).stride())
    parts = Parts(
        METAL[dtype], mask, dim, batch, heads, group, queries, keys, chunk_for(keys, batch * heads, TYPICAL), strides
    )
    shape = (batch * heads, parts.parts, parts.rows)
    sums, top, total = (torch.full(s, math.nan) for s in ((*shape, dim), shape, shape))
    out = torch.full((batch, queries, h, dim), math.nan, dtype=dtype).transpose(1, 2)
    combined = Combined(METAL[dtype], dim, batch, heads, group, queries, parts.parts, out.stride()[:3])
    run(parts, [q, k, v, *([hides] if hides is not None else []), sums, top, total], [dim**-0.5], aligned)
    run(combined, [sums, top, total, out])
    wide = hides.double() if hides is not None and hides.is_floating_point() else hides
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), wide, enable_gqa=True)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-5)


@pytest.mark.parametrize(("dim", "row", "width"), [(128, 128, 4), (128, 130, 2), (128, 131, 1), (64, 64, 2), (80, 80, 1)])
def test_a_lane_reads_as_many_neighbours_as_heads_and_strides_allow(dim: int, row: int, width: int) -> None:
    parts = Parts("half", "", dim, 1, 2, 4, 1, 100, 50, (*(dim,) * 3, *(row * 100, row * 100, row) * 2))
    assert parts.width == width and parts.name.endswith("v4" if width == 4 else "v2" if width == 2 else "r4")
    assert parts.alignment[:3] == ((2 * width,) * 3 if width > 1 else (1, 1, 1))


@pytest.mark.parametrize("kernel", [
    Gemv("half", 4, 2, 96, 256, 32, "char", False, 4),
    Gemv("half", 4, 2, 96, 256, 32, "", False, 4, "tinygemm"),
    Parts("bfloat", "bool", 64, 1, 2, 4, 1, 100, 50, tuple(range(13))),
    Combined("float", 64, 1, 2, 4, 1, 2, (1, 2, 3)),
])  # fmt: skip
def test_the_cache_keeps_a_kernel(kernel: Handwritten) -> None:
    again = from_json(to_json(kernel), BY_HAND)
    assert again == kernel and hash_of(again) == hash_of(kernel) and again.text() == kernel.text()


# ---------------------------------------------------------------- graphs


def lowered(fn: Any, *args: Tensor, **options: Any) -> tuple[Tensor, report.GraphReport]:
    compiled = torch.compile(fn, backend="apple_mps", options={"simulate": True, "strict": True, **options})
    with report.recording() as reports, torch.no_grad():
        result = compiled(*args)
    return result, reports[-1]


def launches(r: report.GraphReport) -> int:
    return r.texts["plan"].partition("def run")[2].count("launch_")


class Columns(nn.Module):
    """int8 weights as torchao writes them: `mm(x, widened) * scale + bias`."""

    def __init__(self, n: int, k: int, biased: bool = True) -> None:
        super().__init__()
        self.q = nn.Buffer(torch.randint(-128, 128, (n, k), dtype=torch.int8))
        self.scale, self.bias = nn.Buffer(torch.rand(n) / 64), nn.Buffer(torch.randn(n)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        out = torch.mm(x, self.q.t().to(x.dtype)) * self.scale.to(x.dtype)
        return out if self.bias is None else out + self.bias.to(x.dtype)


class Groups(nn.Module):
    """int4 weights in groups as torchao writes them (`IntxUnpackedToInt8Tensor`)."""

    def __init__(self, n: int, k: int, group: int, dtype: torch.dtype, most: int = 8) -> None:
        super().__init__()
        self.group = group
        self.q = nn.Buffer(torch.randint(-most, most, (n, k), dtype=torch.int8))
        self.scale = nn.Buffer((torch.rand(n, k // group) / 64).to(dtype))
        self.zero = nn.Buffer(torch.randint(-2, 2, (n, k // group), dtype=torch.int8))
        self.bias = nn.Buffer(torch.randn(n).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        n, k = self.q.shape
        q, s, z = self.q.view(n, -1, self.group), self.scale.view(n, -1, 1), self.zero.view(n, -1, 1)
        return F.linear(x, ((q.to(x.dtype) - z.to(x.dtype)) * s).view(n, k), self.bias)


def judged(module: nn.Module, x: Tensor, got: Tensor, name: Any) -> None:
    with torch.no_grad():
        eager = module(x)
        wide = module.double()(x.double())
    verdict = compare([wide], [eager], [got], name)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("rows", [1, 4])
def test_int8_weights_are_read_as_they_are(rows: int) -> None:
    module, x = Columns(WIDE, 1056), torch.randn(rows, 1056)
    got, r = lowered(module, x)
    assert (
        launches(r) == 1 and r.rules["mps.int8.linear"] == 1 and "int8" not in r.texts["plan"].partition("def run")[2]
    )
    judged(module, x, got, "fp32")


def test_many_rows_are_torchs_product() -> None:
    module, x = Columns(WIDE, 1024), torch.randn(64, 1024)
    got, r = lowered(module, x)
    assert not r.rules["mps.int8.linear"] and "mm" in r.texts["plan"].partition("def run")[2]
    judged(module, x, got, "fp32")


@pytest.mark.parametrize("most", [8, 128])
def test_int4_weights_are_read_in_nibbles(most: int) -> None:
    """Weights that do not fit a nibble are read as two."""
    module, x = Groups(WIDE, 1024, 32, torch.bfloat16, most), torch.randn(2, 1024).bfloat16()
    got, r = lowered(module, x)
    assert launches(r) == 1 and r.rules["mps.int4.linear"] == 1
    judged(module, x, got, "bf16")


class TinyGemm(nn.Module):
    """torch's own product with 4-bit weights, packed as its MPS kernel expects them."""

    def __init__(self, n: int, k: int, group: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = group
        self.q = torch.randint(0, 16, (n, k))
        self.scale, self.zero = ((torch.rand(n, k // group) / 64).to(dtype) for _ in range(2))
        self.w = nn.Buffer(nibbles(self.q)[0].view(torch.int32).view(n // 8, k // 128, 32, 4))
        self.factors = nn.Buffer(factors("tinygemm", self.scale, self.zero)[0])

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(torch.ops.aten._weight_int4pack_mm(x, self.w, self.group, self.factors))

    def exact(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The result with weights and sums in `dtype`."""
        return F.silu(x.to(dtype) @ unpacked(self.q - 8, self.scale, self.zero).to(dtype).t())


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.bfloat16), (4, torch.float16)])
def test_torchs_packed_int4_weights_are_read_as_they_are(rows: int, dtype: torch.dtype) -> None:
    """Eager lacks this product on CPUs, so one with weights in the activation type replaces it."""
    module, x = TinyGemm(WIDE, 1024, 128, dtype), torch.randn(rows, 1024).to(dtype)
    got, r = lowered(module, x)
    assert r.rules["mps.packed.linear"] == 1 and launches(r) == 2 and "int4pack" not in r.texts["plan"]
    verdict = compare(
        [module.exact(x, torch.float64)], [module.exact(x, dtype)], [got], "bf16" if rows == 1 else "fp16"
    )
    assert verdict.passed, verdict.reason


def test_torchs_packed_int8_weights_are_read_as_they_are() -> None:
    q, scale = torch.randint(-128, 128, (WIDE, 1024), dtype=torch.int8), torch.rand(WIDE) / 64

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.scale = nn.Buffer(q), nn.Buffer(scale.bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.aten._weight_int8pack_mm(x, self.q, self.scale)

    x = torch.randn(2, 1024).bfloat16()
    got, r = lowered(Packed(), x)
    assert r.rules["mps.packed.linear"] == 1 and launches(r) == 1
    exact = x.double() @ q.double().t() * scale.bfloat16().double()
    verdict = compare([exact], [Packed()(x)], [got], "bf16")
    assert verdict.passed, verdict.reason


def test_torchaos_packed_int4_weights_are_read_as_they_are() -> None:
    """The operator of torchao's MPS extension is defined by its schema, since only a Mac can build the extension."""
    with torch.library._scoped_library("torchao", "FRAGMENT") as lib:
        lib.define("_linear_fp_act_4bit_weight(Tensor A, Tensor B, int group_size, Tensor S, Tensor Z) -> Tensor")
        lib.impl("_linear_fp_act_4bit_weight", lambda a, b, group, s, z: a.new_empty(len(a), len(b)), "Meta")
        q, (scale, zero) = torch.randint(0, 16, (WIDE, 1024)), torch.rand(2, WIDE, 32) / 64

        class Packed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w, self.s, self.z = nn.Buffer(nibbles(q)[0]), nn.Buffer(scale), nn.Buffer(zero)

            def forward(self, x: Tensor) -> Tensor:
                return torch.ops.torchao._linear_fp_act_4bit_weight(x, self.w, 32, self.s, self.z)

        x = torch.randn(1, 1024)
        got, r = lowered(Packed(), x, cache=False)
    assert r.rules["mps.packed.linear"] == 1 and launches(r) == 1
    w = unpacked(q, scale, zero)
    verdict = compare([x.double() @ w.t()], [x @ w.float().t()], [got], "fp32")
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize(("rule", "sums"), [("mps.int4.linear", 1), ("mps.int4.linear,gemv", 0)])
def test_without_the_row_it_is_a_sum_or_torchs_product(rule: str, sums: int) -> None:
    module, x = Groups(WIDE, 1024, 32, torch.float32), torch.randn(1, 1024)
    got, r = lowered(module, x, disable_rules=rule.split(","))
    assert not r.rules["mps.int4.linear"] and r.rules["gemv"] == sums
    judged(module, x, got, "fp32")


def test_weights_that_change_are_packed_again() -> None:
    module, x = Groups(WIDE, 1024, 32, torch.float32), torch.randn(1, 1024)
    compiled = torch.compile(module, backend="apple_mps", options={"simulate": True, "strict": True})
    with torch.no_grad():
        compiled(x)
        module.q.neg_()
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)


def test_a_cache_is_read_once_for_all_heads_of_a_group() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (t[:, :, None].expand(1, 2, 4, 80, 64).reshape(1, 8, 80, 64) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, (k, v) = torch.randn(1, 8, 1, 64), torch.randn(2, 1, 2, 80, 64)
    mask = torch.rand(1, 1, 1, 80) > 0.2
    got, r = lowered(step, q, k, v, mask)
    assert r.rules["mps.attention.decode"] == 1 and launches(r) == 2 and "reshape" not in r.texts["plan"]
    torch.testing.assert_close(got, step(q, k, v, mask))


def test_few_keys_and_gradients_are_torchs_attention() -> None:
    q, (k, v) = torch.randn(1, 8, 1, 64), torch.randn(2, 1, 8, 40, 64)
    _, r = lowered(F.scaled_dot_product_attention, q, k, v)
    assert not r.rules["mps.attention.decode"]
