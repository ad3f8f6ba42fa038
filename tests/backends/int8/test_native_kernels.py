"""Every instruction set of the native core that this CPU can run, and simulated AMX, against the reference bit for bit."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewright_int8.run import core, native, reference
from fusewright_int8.run.reference import RULES, Epilogue

pytestmark = pytest.mark.skipif(core.absent() is not None, reason=f"no native core: {core.absent()}")
SETS = () if core.absent() else tuple(core.extension().isas())
"""Includes `amx_simulated`: the AMX kernels with tile instructions emulated in C++. AMX itself needs a CPU that has it."""

EXACT = ("none", "relu", "clamp")
EXTREMES = torch.tensor([-128, -127, -1, 0, 1, 127], dtype=torch.int8)


@pytest.fixture(params=SETS, autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    native.use_isa(request.param)
    yield request.param
    native.use_isa(None)


def check(test: Any) -> Any:
    return settings(max_examples=25, deadline=None)(test)


def some_bytes(g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random values, only extreme ones, or one value everywhere."""
    kind = int(torch.randint(0, 4, (), generator=g))
    if kind == 0:
        t = EXTREMES[torch.randint(0, 6, shape, generator=g)]
    elif kind == 1:
        t = torch.full(shape, int(EXTREMES[torch.randint(0, 6, (), generator=g)]), dtype=torch.int8)
    else:
        t = torch.randint(-128, 128, shape, generator=g, dtype=torch.int8)
    return t.view(dtype)


def zero_point(g: torch.Generator, dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return int(torch.tensor([info.min, info.max, 3])[torch.randint(0, 3, (), generator=g)])


def factors(g: torch.Generator, n: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales, and a bias or None."""
    bias = torch.randn(n, generator=g) * 100
    return torch.rand(n, generator=g) * 0.02 + 1e-6, bias if torch.rand((), generator=g) < 0.7 else None


def some_epilogue(g: torch.Generator, shape: tuple[int, ...], scale: float, floats: bool = False) -> dict[str, Any]:
    """Epilogue arguments of a call; `scale` is roughly the magnitude of its results."""

    def one(*options: Any) -> Any:
        return options[int(torch.randint(0, len(options), (), generator=g))]

    given: dict[str, Any] = {"post": one(*EXACT), "out_dtype": one(torch.float32, torch.bfloat16)}
    if given["post"] == "clamp":
        given["post_args"] = [-0.5 * scale, 6.0 * scale]
    kind = (
        one(None, torch.float32, torch.bfloat16)
        if floats
        else one(None, torch.float32, torch.bfloat16, torch.uint8, torch.int8)
    )
    if kind in (torch.float32, torch.bfloat16):
        given["residual"] = (torch.randn(shape, generator=g) * scale).to(kind)
    elif kind is not None:
        given |= {
            "residual": some_bytes(g, shape, kind),
            "residual_scale": scale / 50,
            "residual_zero_point": one(0, 9),
        }
    if not floats and (dtype := one(None, torch.uint8, torch.int8)) is not None:
        given |= {"out_dtype": dtype, "out_scale": scale / one(3.0, 60.0), "out_zero_point": zero_point(g, dtype)}
        if dtype == torch.int8 and one(False, True):
            given |= {"out_low": -127, "out_zero_point": 0}
    return given


def same(own: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(own, want, rtol=0, atol=0, equal_nan=True)


SIZES = st.tuples(st.integers(0, 70), st.integers(1, 150), st.integers(0, 300))
SEEDS = st.integers(0, 1 << 30)
BYTE_TYPES = (torch.uint8, torch.int8)
BYTES = st.sampled_from(BYTE_TYPES)
FLOATS = st.sampled_from([torch.float32, torch.bfloat16])
RULE = st.sampled_from(sorted(RULES))


@check
@given(SIZES, SEEDS, BYTES)
def test_linear_is_the_reference(sizes: tuple[int, int, int], seed: int, dtype: torch.dtype) -> None:
    (m, n, k), g = sizes, torch.Generator().manual_seed(seed)
    x, w = some_bytes(g, (m, k), dtype), some_bytes(g, (n, k), torch.int8)
    w_scale, bias = factors(g, n)
    zero, after = zero_point(g, dtype), some_epilogue(g, (m, n), 0.5 * max(k, 1) ** 0.5)
    own = native.linear(x, native.pack_linear(w), w_scale, bias, 0.011, zero, **after)
    same(own, reference.linear(x, w, w_scale, bias, 0.011, zero, Epilogue(**after)))


@settings(max_examples=6, deadline=None)
@given(st.integers(30, 200), st.integers(1, 80), st.integers(449, 1200), SEEDS, BYTES)
def test_a_deep_product_is_the_reference(m: int, n: int, k: int, seed: int, dtype: torch.dtype) -> None:
    """Several blocks of rows, and many steps of k with a rest."""
    g = torch.Generator().manual_seed(seed)
    x, w = some_bytes(g, (m, k), dtype), some_bytes(g, (n, k), torch.int8)
    w_scale, bias = factors(g, n)
    zero, after = zero_point(g, dtype), some_epilogue(g, (m, n), 0.5 * k**0.5)
    own = native.linear(x, native.pack_linear(w), w_scale, bias, 0.011, zero, **after)
    same(own, reference.linear(x, w, w_scale, bias, 0.011, zero, Epilogue(**after)))


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize(("n", "groups"), [(40, 1), (200, 1), (24, 2)])
def test_a_convolution_is_the_reference_however_it_is_divided(threads: int, n: int, groups: int) -> None:
    """Of several panels, threads gather pixels once for successive ones."""
    g = torch.Generator().manual_seed(threads + n)
    x = some_bytes(g, (2, 64, 12, 12), torch.uint8).contiguous(memory_format=torch.channels_last)
    w, after = some_bytes(g, (n, 64 // groups, 3, 3), torch.int8), some_epilogue(g, (2, n, 12, 12), 12.0)
    w_scale, bias = factors(g, n)
    geometry = (1, 1), (1, 1), (1, 1), groups
    with on_threads(threads):
        own = native.conv2d(x, native.pack_conv2d(w, groups), (3, 3), w_scale, bias, 0.011, 7, *geometry, **after)
    same(own, reference.conv2d(x, w, w_scale, bias, 0.011, 7, *geometry, Epilogue(**after)))


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize(("m", "k", "n"), [(33, 100, 520), (300, 72, 90), (1030, 64, 40)])
def test_a_product_is_the_reference_however_it_is_divided(threads: int, m: int, k: int, n: int) -> None:
    g = torch.Generator().manual_seed(threads + m)
    x, w = some_bytes(g, (m, k), torch.uint8), some_bytes(g, (n, k), torch.int8)
    w_scale, bias = factors(g, n)
    after = some_epilogue(g, (m, n), 0.5 * k**0.5)
    with on_threads(threads):
        own = native.linear(x, native.pack_linear(w), w_scale, bias, 0.011, 9, **after)
    same(own, reference.linear(x, w, w_scale, bias, 0.011, 9, Epilogue(**after)))


@pytest.mark.skipif(sys.platform != "linux", reason="protects a page as Linux does")
@pytest.mark.parametrize("k", [64, 70, 133])
def test_nothing_is_read_past_the_end_of_an_input(k: int) -> None:
    """The input ends where a page begins that may not be read."""
    g, m, n = torch.Generator().manual_seed(k), 37, 48
    protect, none, both = ctypes.CDLL(None, use_errno=True).mprotect, 0, 3
    with mmap.mmap(-1, 4 * mmap.PAGESIZE) as room:
        size = len(room) - mmap.PAGESIZE
        x = torch.frombuffer(room, dtype=torch.uint8)[size - m * k : size].view(m, k)
        x.copy_(some_bytes(g, (m, k), torch.uint8))
        last = ctypes.c_void_p(x.data_ptr() + m * k)
        w, w_scale = some_bytes(g, (n, k), torch.int8), factors(g, n)[0]
        packed, wanted = native.pack_linear(w), reference.linear(x, w, w_scale, None, 0.1, 7)
        assert protect(last, mmap.PAGESIZE, none) == 0
        try:
            own = native.linear(x, packed, w_scale, None, 0.1, 7)
        finally:
            assert protect(last, mmap.PAGESIZE, both) == 0
        same(own, wanted)
        del x


@check
@given(
    SEEDS, st.sampled_from(EXACT), st.sampled_from([None, *BYTE_TYPES]), st.sampled_from([1.0, 1e-30, 1e30, 2.0**-126])
)
def test_levels_in_the_middle_of_two_round_half_to_even(
    seed: int, post: str, residual: torch.dtype | None, unit: float
) -> None:
    """Results lie halfway between levels, and the bias is much larger than the rest: plain fp32 would round either way."""
    g = torch.Generator().manual_seed(seed)
    x, w = some_bytes(g, (9, 31), torch.uint8), torch.randint(-1, 2, (83, 31), generator=g, dtype=torch.int8)
    bias = (torch.randint(-9, 9, (83,), generator=g) * (0.5 if seed % 2 else 1000.5)).float() * unit
    after: dict[str, Any] = {"post": post, "out_dtype": torch.uint8, "out_scale": unit, "out_zero_point": 101}
    if post == "clamp":
        after["post_args"] = [-20.5 * unit, 60.5 * unit]
    if residual is not None:
        after |= {"residual": some_bytes(g, (9, 83), residual), "residual_scale": 1.5 * unit, "residual_zero_point": 7}
    own = native.linear(x, native.pack_linear(w), torch.full((83,), 0.5 * unit), bias, 1.0, 3, **after)
    same(own, reference.linear(x, w, torch.full((83,), 0.5 * unit), bias, 1.0, 3, Epilogue(**after)))


@pytest.mark.parametrize("dtype", BYTE_TYPES)
@pytest.mark.parametrize("post", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("out_scale", [0.003, 0.011, 0.047, 7.0])
def test_gelu_rounds_to_the_level_of_its_fp32_result(dtype: torch.dtype, post: str, out_scale: float) -> None:
    """The fast path computes another gelu; of 256 x 300 results many lie near the middle between two levels."""
    g = torch.Generator().manual_seed(3)
    x, w = torch.arange(256, dtype=torch.uint8)[:, None], some_bytes(g, (300, 1), torch.int8)
    w_scale, bias = torch.rand(300, generator=g) * 0.02, torch.randn(300, generator=g)
    w_scale[::20] *= 30  # far below -LAST, and levels that clamp
    product = x, native.pack_linear(w), w_scale, bias, 0.05, 100
    floats = native.linear(*product, post=post)
    own = native.linear(*product, post=post, out_dtype=dtype, out_scale=out_scale, out_zero_point=17)
    same(own, reference.quantize(floats, out_scale, 17, dtype))


def test_gelu_of_numbers_beyond_any_level_clamps() -> None:
    x, w = torch.tensor([[0], [1], [255]], dtype=torch.uint8), torch.tensor([[127], [-128]], dtype=torch.int8)
    for w_scale in (1e3, 1e12, 1e36, math.inf):
        product = x, native.pack_linear(w), torch.full((2,), w_scale), None, 1.0, 0
        own = native.linear(*product, post="gelu", out_dtype=torch.uint8, out_scale=0.1, out_zero_point=3)
        same(own, reference.quantize(native.linear(*product, post="gelu"), 0.1, 3, torch.uint8))


@check
@given(SIZES, SEEDS, BYTES, BYTES, st.booleans(), st.integers(1, 3))
def test_a_product_of_two_activations_is_the_reference(
    sizes: tuple[int, int, int], seed: int, left: torch.dtype, right: torch.dtype, transposed: bool, batch: int
) -> None:
    (m, n, k), g = sizes, torch.Generator().manual_seed(seed)
    x, y = some_bytes(g, (batch, m, k), left), some_bytes(g, (batch, n, k) if transposed else (batch, k, n), right)
    y = y.transpose(1, 2) if transposed else y
    points, after = (0.011, zero_point(g, left), 0.02, zero_point(g, right)), some_epilogue(g, (batch, m, n), 100.0)
    after = {name: value for name, value in after.items() if not name.startswith("residual")}
    own = native.matmul(x, y, *points, **after)
    same(own, reference.matmul(x, y, *points, Epilogue(**after)))


def test_the_longest_sums_of_two_activations_do_not_overflow() -> None:
    k = native.MOST_INNER
    x, y = torch.full((1, 1, k), 255, dtype=torch.uint8), torch.zeros(1, k, 17, dtype=torch.uint8)
    own = native.matmul(x, y, 1.0, 0, 1.0, 255)
    assert own[0, 0, 0] == torch.tensor(-255.0 * 255 * k)
    with pytest.raises(ValueError, match="can overflow int32"):
        native.matmul(
            torch.zeros(1, k + 1, dtype=torch.uint8), torch.zeros(k + 1, 1, dtype=torch.uint8), 1.0, 0, 1.0, 0
        )


@check
@given(SIZES, SEEDS, RULE, FLOATS)
def test_dynamic_linear_is_the_reference(sizes: tuple[int, int, int], seed: int, rule: str, dtype: torch.dtype) -> None:
    (m, n, k), g = (sizes[0] + 1, sizes[1], sizes[2] + 1), torch.Generator().manual_seed(seed)
    x = (torch.randn(m, k, generator=g) * 10 ** torch.empty(m, 1).uniform_(-5, 5, generator=g)).to(dtype)
    w = some_bytes(g, (n, k), torch.int8)
    w_scale, bias = factors(g, n)
    after = some_epilogue(g, (m, n), 1.0, floats=True)
    own = native.dynamic_linear(x, native.pack_linear(w), w_scale, bias, rule, **after)
    same(own, reference.dynamic_linear(x, w, w_scale, bias, RULES[rule], Epilogue(**after)))


@check
@given(
    st.integers(1, 60),
    st.integers(1, 90),
    SEEDS,
    RULE,
    FLOATS,
)
def test_quantization_is_the_reference(m: int, k: int, seed: int, rule: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-40, 40, (m, k), generator=g).to(dtype) / 4  # many ties
    if seed % 3:
        x = (torch.randn(m, k, generator=g) * 1e3 ** torch.randn(m, 1, generator=g)).to(dtype)
    x[torch.rand(m, k, generator=g) < 0.02] = 0.0
    for own, want in zip(native.quantize_dynamic(x, rule), reference.quantize_dynamic(x, RULES[rule]), strict=True):
        same(own, want)
    for q in (torch.uint8, torch.int8):
        scale, zero = float(torch.rand((), generator=g)) + 0.01, zero_point(g, q)
        same(native.quantize(x, scale, zero, q), reference.quantize(x, scale, zero, q))


def test_ties_and_what_is_not_finite_round_as_torch_does() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 300.0, -300.0, math.inf, -math.inf, math.nan, 3e38, -3e38, -0.0] * 3)
    for dtype, zero in ((torch.uint8, 0), (torch.uint8, 128), (torch.int8, 0), (torch.int8, -128)):
        same(native.quantize(x, 1.0, zero, dtype), reference.quantize(x, 1.0, zero, dtype))


def test_a_row_that_is_not_finite_spoils_itself_alone() -> None:
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    x[1, 3], x[3, 5] = math.nan, -math.inf
    w = torch.ones(20, 40, dtype=torch.int8)
    own = native.dynamic_linear(x, native.pack_linear(w), torch.ones(20), None, "row")
    assert own[[1, 3]].isnan().all() and own[[0, 2, 4]].isfinite().all()
    assert native.dynamic_linear(x, native.pack_linear(w), torch.ones(20), None, "tensor").isnan().all()


@check
@given(SIZES, SEEDS, FLOATS)
def test_weight_only_is_the_reference(sizes: tuple[int, int, int], seed: int, dtype: torch.dtype) -> None:
    (m, n, k), g = sizes, torch.Generator().manual_seed(seed)
    x = (torch.randn(m, k, generator=g) * 10 ** torch.empty(m, 1).uniform_(-30, 30, generator=g)).to(dtype)
    x[torch.rand(m, k, generator=g) < 0.1] *= 1e-3
    if k and seed % 5 == 0:
        x[::3, k // 2] = (math.nan, math.inf, -math.inf)[seed % 3]
    w = some_bytes(g, (n, k), torch.int8)
    w_scale, bias = factors(g, n)
    after = some_epilogue(g, (m, n), 1.0, floats=True)
    own = native.weight_linear(x, native.pack_linear(w), w_scale, bias, **after)
    same(own, reference.weight_linear(x, w, w_scale, bias, Epilogue(**after)))


CONVS = st.tuples(
    st.sampled_from([(1, 1, 1), (3, 8, 5), (4, 6, 2), (64, 64, 64), (70, 70, 70), (6, 9, 3), (130, 20, 1), (5, 5, 5)]),
    st.integers(1, 2), st.tuples(st.integers(1, 9), st.integers(1, 9)), st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)), st.tuples(st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
)  # fmt: skip


@check
@given(CONVS, SEEDS, BYTES, st.booleans())
def test_conv2d_is_the_reference(conv: Any, seed: int, dtype: torch.dtype, channels_last: bool) -> None:
    (c, n, groups), batch, size, kernel, stride, padding, dilation = conv
    groups = math.gcd(c, n, groups)
    size = [max(s, d * (k - 1) + 1 - 2 * p, 1) for s, k, p, d in zip(size, kernel, padding, dilation, strict=True)]
    g = torch.Generator().manual_seed(seed)
    x, w = some_bytes(g, (batch, c, *size), dtype), some_bytes(g, (n, c // groups, *kernel), torch.int8)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    w_scale, bias = factors(g, n)
    zero, window = zero_point(g, dtype), (stride, padding, dilation, groups)
    shape = tuple(reference.conv2d(x, w, w_scale, bias, 0.011, zero, *window).shape)
    after = some_epilogue(g, shape, 2.0 * (c // groups * kernel[0] * kernel[1]) ** 0.5)
    own = native.conv2d(x, native.pack_conv2d(w, groups), kernel, w_scale, bias, 0.011, zero, *window, **after)
    same(own, reference.conv2d(x, w, w_scale, bias, 0.011, zero, *window, Epilogue(**after)))


@check
@given(
    st.sampled_from([2, 16, 32, 70, 96, 144]), st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 40),
    st.tuples(st.integers(1, 5), st.integers(1, 12)), SEEDS, BYTES,
)  # fmt: skip
def test_depthwise_convolutions_with_any_window_are_the_reference(
    c: int, kernel: tuple[int, int], width: int, steps: tuple[int, int], seed: int, dtype: torch.dtype
) -> None:
    """Windows that share columns of the input and windows that lie apart, of one row and of many."""
    (kh, kw), (stride, dilation), g = kernel, steps, torch.Generator().manual_seed(seed)
    down = 1 + seed % 2
    height, width = max(5, down * (kh - 1) - 1), max(width, dilation * (kw - 1) - 1)
    x = some_bytes(g, (2, c, height, width), dtype).contiguous(memory_format=torch.channels_last)
    w, (w_scale, bias), zero = some_bytes(g, (c, 1, kh, kw), torch.int8), factors(g, c), zero_point(g, dtype)
    window = ((down, stride), (1, 1), (down, dilation), c)
    shape = tuple(reference.conv2d(x, w, w_scale, bias, 0.011, zero, *window).shape)
    after = some_epilogue(g, shape, 2.0 * (kh * kw) ** 0.5)
    own = native.conv2d(x, native.pack_conv2d(w, c), kernel, w_scale, bias, 0.011, zero, *window, **after)
    same(own, reference.conv2d(x, w, w_scale, bias, 0.011, zero, *window, Epilogue(**after)))


@pytest.mark.parametrize("kernel", [(1, 1000), (1000, 1), (31, 33)])
def test_the_largest_depthwise_windows_are_the_reference(kernel: tuple[int, int]) -> None:
    g, c = torch.Generator().manual_seed(3), 34
    x = some_bytes(g, (1, c, kernel[0] + 1, kernel[1] + 2), torch.uint8).contiguous(memory_format=torch.channels_last)
    w, (w_scale, bias) = some_bytes(g, (c, 1, *kernel), torch.int8), factors(g, c)
    window = ((1, 1), (0, 0), (1, 1), c)
    own = native.conv2d(x, native.pack_conv2d(w, c), kernel, w_scale, bias, 0.011, 7, *window)
    same(own, reference.conv2d(x, w, w_scale, bias, 0.011, 7, *window))


@pytest.mark.parametrize("post", ["gelu", "gelu_tanh", "silu"])
def test_smooth_post_ops_follow_torch_to_a_few_units_in_the_last_place(post: str) -> None:
    values = torch.cat([torch.linspace(-12, 12, 1500), torch.tensor([0.0, 1e-20, -1e-20, 80.0, -80.0])])
    zeros = torch.zeros(1, values.numel(), dtype=torch.uint8)
    w = torch.zeros(values.numel(), values.numel(), dtype=torch.int8)
    own = native.linear(zeros, native.pack_linear(w), torch.ones(len(values)), values, 1.0, 0, post=post)[0].double()
    exact, eager = reference.POSTS[post](values.double()), reference.POSTS[post](values).double()
    allowed = 2 * (eager - exact).abs() + 4e-7 * values.double().abs().clamp(max=12) + 1e-30
    assert ((own - exact).abs() <= allowed).all()
    nan = native.linear(
        zeros[:, :4], native.pack_linear(w[:4, :4]), torch.ones(4), torch.full((4,), math.nan), 1.0, 0, post=post
    )
    assert nan.isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_the_longest_sums_do_not_overflow(dtype: torch.dtype) -> None:
    k = native.MOST_K
    x = (
        torch.full((2, k), 255, dtype=torch.uint8).view(dtype)
        if dtype == torch.uint8
        else torch.full((2, k), -128, dtype=dtype)
    )
    w = torch.full((17, k), -128, dtype=torch.int8)
    w[3] = 127
    zero = torch.iinfo(dtype).max if dtype == torch.int8 else 0
    own = native.linear(x, native.pack_linear(w), torch.ones(17), None, 1.0, zero)
    assert own[0, 0] == (255 * -128 * k if dtype == torch.uint8 else 255 * 128 * k)
    same(own, reference.linear(x, w, torch.ones(17), None, 1.0, zero))


def test_neither_inputs_nor_neighbours_of_a_result_are_touched() -> None:
    room = torch.full((40, 200), 99, dtype=torch.uint8)
    x = room[3:36, 5:138]  # padded rows, at an odd address
    w = torch.randint(-128, 128, (19, 133), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    x.copy_(torch.randint(0, 256, x.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2)))
    before = room.clone()
    own = native.linear(x, native.pack_linear(w), torch.ones(19), None, 0.1, 7)
    assert torch.equal(room, before)
    same(own, reference.linear(x.contiguous(), w, torch.ones(19), None, 0.1, 7))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    g = torch.Generator().manual_seed(5)
    x, w = torch.randn(90, 257, generator=g), some_bytes(g, (300, 257), torch.int8)
    packed, scale = native.pack_linear(w), torch.rand(300, generator=g)
    results = []
    for threads in (1, 3):
        with on_threads(threads):
            dynamic = [native.dynamic_linear(x, packed, scale, None, r) for r in RULES]
            results.append([*dynamic, native.weight_linear(x, packed, scale, None)])
    for a, b in zip(*results, strict=True):
        same(a, b)
