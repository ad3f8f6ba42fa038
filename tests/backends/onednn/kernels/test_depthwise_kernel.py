"""The depthwise convolution kernel against fp64 and torch, for any geometry, and what it keeps of NaN and infinity."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewright.toolkit.ir.types import to_torch
from fusewright_cpu.kernels.by_hand import DEPTHWISE_CHANNELS, Depthwise
from fusewright_cpu.kernels.depthwise import LARGE
from fusewright_cpu.run.codegen import kernels_to_text, to_object
from fusewright_cpu.run.sources import from_json, hash_of, to_json
from fusewright_cpu.target import CpuTarget, aarch64_target, host_target, target_machine, x86_target
from tests.backends.cpu.launchers import launcher

KINDS = [
    Depthwise(dtype, (k, k), (s, s), columns, before, after)
    for dtype in ("f32", "bf16")
    for k, s, columns, before, after in (
        (3, 1, 7, "clamp", "clamp"), (3, 2, 4, "relu", ""), (5, 1, 5, "", "silu"), (5, 2, 8, "hardswish", "hardswish"),
        (2, 3, 4, "silu", "relu"),
    )
] + [
    Depthwise("f32", (1, 3), (1, 1), 4), Depthwise("bf16", (5, 3), (2, 1), 4, "relu", "relu"),
    Depthwise("f32", (7, 7), (1, 1), 7, "relu", "clamp"), Depthwise("bf16", (7, 6), (2, 2), 5, "", "silu"),
]  # fmt: skip
LIMITS = (-0.5, 0.75)
OPS = {
    "": lambda x: x,
    "relu": torch.relu,
    "clamp": lambda x: x.clamp(*LIMITS),
    "silu": F.silu,
    "hardswish": F.hardswish,
}
here = pytest.mark.skipif(bool(KINDS[0].refused(host_target())), reason="this CPU has no masked loads or no FMA")


def launch(d: Depthwise, tensors: list[torch.Tensor], sizes: list[int], limits: list[float]) -> None:
    launcher(d).checked(tensors, sizes, limits)


@dataclass
class Case:
    """A kernel with its operands. `pads`: zeros above, below, left and right of the image."""

    d: Depthwise
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    pads: tuple[int, int, int, int]

    @staticmethod
    def random(d: Depthwise, n: int, c: int, h: int, w: int, pads: tuple[int, int, int, int], seed: int = 0) -> Case:
        torch.manual_seed(seed)
        x = torch.randn(n, c, h, w).to(to_torch(d.dtype))
        return Case(d, x, torch.randn(c, 1, *d.kernel), torch.randn(c), pads)

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        """The result with every step computed in this type."""
        top, bottom, left, right = self.pads
        x = F.pad(OPS[self.d.before](self.x.to(dtype)), (left, right, top, bottom))
        made = F.conv2d(x, self.weight.to(dtype), self.bias.to(dtype), self.d.stride, groups=x.shape[1])
        return OPS[self.d.after](made)

    def run(self) -> torch.Tensor:
        (n, c, h, w), (top, bottom, left, right), d = self.x.shape, self.pads, self.d
        rows = (h + top + bottom - d.kernel[0]) // d.stride[0] + 1
        columns = (w + left + right - d.kernel[1]) // d.stride[1] + 1
        x = self.x.contiguous(memory_format=torch.channels_last)
        out = torch.full((n, rows, columns, c), math.nan, dtype=x.dtype)
        wide = -c % DEPTHWISE_CHANNELS
        weight, bias = (F.pad(t.reshape(c, -1).t(), (0, wide)).contiguous() for t in (self.weight, self.bias))
        sizes = [n, c, h, w, rows, columns, top, left, h * w * c, w * c, c]
        limits = [limit for side in (d.before, d.after) if side == "clamp" for limit in LIMITS]
        launch(d, [x, weight, bias, out], sizes, limits)
        return out.permute(0, 3, 1, 2)

    def check(self) -> None:
        """Check that the error is at most twice that of an fp32 sum rounded once."""
        out, exact = self.run(), self.expected(torch.float64)
        theirs = float((self.expected(torch.float32).to(out.dtype).double() - exact).abs().max())
        size = float(exact.abs().max()) + math.sqrt(math.prod(self.d.kernel))
        assert float((out.double() - exact).abs().max()) <= 2 * theirs + 8 * torch.finfo(torch.float32).eps * size


def fits(d: Depthwise, c: int) -> Depthwise:
    """The kernel for this number of channels: without the code for a part of a vector where there is none."""
    return replace(d, part=c % (host_target().vector_bytes // 4) != 0)


@here
@pytest.mark.parametrize("d", KINDS, ids=lambda d: d.name)
def test_sizes_around_vectors_and_tiles(d: Depthwise) -> None:
    for n, c, h, w in ((1, 1, 5, 5), (2, 16, 7, 9), (1, 40, 14, 14), (3, 33, 6, 17), (1, 96, 30, 29)):
        Case.random(fits(d, c), n, c, h, w, (1, 2, 2, 1)).check()


@here
@pytest.mark.parametrize("d", [KINDS[1], KINDS[6], KINDS[-2]], ids=lambda d: d.name)
def test_rows_of_large_images_are_read_in_all_channels(d: Depthwise) -> None:
    """Work items then follow each other in another order, with a part of the ring for each block of channels."""
    c, h, w = 71, 90, 170
    assert c * h * w * to_torch(d.dtype).itemsize > LARGE
    Case.random(fits(d, c), 2, c, h, w, (1, 2, 2, 1)).check()


@here
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(KINDS), st.integers(1, 3), st.integers(1, 70), st.integers(1, 20), st.integers(1, 20),
    st.tuples(*[st.integers(0, 6)] * 4), st.integers(0, 9),
)  # fmt: skip
def test_any_geometry(d: Depthwise, n: int, c: int, h: int, w: int, pads: tuple[int, int, int, int], seed: int) -> None:
    if h + pads[0] + pads[1] >= d.kernel[0] and w + pads[2] + pads[3] >= d.kernel[1]:
        Case.random(fits(d, c), n, c, h, w, pads, seed).check()


@here
@pytest.mark.parametrize("d", KINDS, ids=lambda d: d.name)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_goes_where_eagers_goes(d: Depthwise, special: float) -> None:
    case = Case.random(d, 1, 35, 9, 11, (1, 1, 1, 1))
    for place in ((0, 0, 0, 0), (0, 16, 4, 5), (0, 34, 8, 10)):
        case.x[place] = special
    out, eager = case.run(), case.expected(torch.float64)
    assert torch.equal(out.isnan(), eager.isnan()) and torch.equal(out.isinf(), eager.isinf())


@here
def test_images_may_have_any_strides_but_that_of_channels() -> None:
    d = KINDS[0]
    whole = Case.random(d, 2, 48, 12, 12, (1, 1, 1, 1))
    x = whole.x.contiguous(memory_format=torch.channels_last)[:, 8:40, 2:10, 1:11]
    case = replace(whole, x=x, weight=whole.weight[:32], bias=whole.bias[:32])
    out = torch.empty(2, 8, 10, 32)
    weight, bias = (t.reshape(32, -1).t().contiguous() for t in (case.weight, case.bias))
    sizes = [2, 32, 8, 10, 8, 10, 1, 1, *(x.stride(k) for k in (0, 2, 3))]
    launch(d, [x, weight, bias, out], sizes, [*LIMITS, *LIMITS])
    torch.testing.assert_close(out.permute(0, 3, 1, 2), case.expected(torch.float32), rtol=1e-5, atol=1e-5)


@here
def test_threads_do_not_change_values() -> None:
    threads, outs = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            outs.append(Case.random(KINDS[0], 2, 70, 40, 40, (1, 1, 1, 1)).run())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    "target", [*map(x86_target, ("avx512", "avx2")), *map(aarch64_target, ("neoverse-n1", "neoverse-v1"))], ids=lambda t: t.cpu
)
def test_other_targets_get_code(target: CpuTarget) -> None:
    for d in KINDS:
        text, _ = kernels_to_text({hash_of(d): d}, target, True)
        assert to_object(text, target_machine(target))


def test_it_says_what_it_is_not_written_for() -> None:
    assert "AVX2" in KINDS[0].refused(x86_target("avx")) and not KINDS[0].refused(aarch64_target("neoverse-n1"))


def test_it_survives_json() -> None:
    for d in KINDS:
        assert from_json(json.loads(json.dumps(to_json(d)))) == d
    assert len({hash_of(d) for d in KINDS}) == len(KINDS)
