"""Transposed convolutions in our own kernel against fp64, for any geometry that it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewright_cpu.kernels.by_hand import DirectConv
from fusewright_cpu.kernels.transposed_conv import packed, taps
from fusewright_cpu.onednn.tiles import TILES
from fusewright_cpu.run.codegen import kernels_to_text, to_object
from fusewright_cpu.run.sources import hash_of
from fusewright_cpu.target import target_machine, x86_target
from tests.backends.cpu.amx.test_amx_linear import OPS, SCALARS
from tests.backends.cpu.kernels.test_direct_conv import TILE, here
from tests.backends.cpu.launchers import launcher


@dataclass(frozen=True)
class Case:
    batch: int = 2
    c: int = 8
    n: int = 11
    size: tuple[int, int] = (5, 4)
    window: tuple[int, int] = (4, 4)
    stride: tuple[int, int] = (2, 2)
    padding: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def end(self) -> tuple[int, ...]:
        """The output padding with which strides divide the size of the result."""
        sides = zip(self.window, self.stride, self.padding, strict=True)
        return tuple((2 * p - k) % s for k, s, p in sides)

    @property
    def of_phase(self) -> tuple[int, ...]:
        sides = zip(self.size, self.window, self.stride, self.padding, self.end, strict=True)
        return tuple(((n - 1) * s - 2 * p + k + e) // s for n, k, s, p, e in sides)

    @property
    def pixels(self) -> int:
        return self.batch * math.prod(self.of_phase) if min(self.of_phase) > 0 else 0


def transposed(bias: bool = False, add: bool = False, after: str = "") -> DirectConv:
    return DirectConv(TILE.rows, TILE.columns, bias, add, after, transposed=True)


def assert_exact(a: DirectConv, case: Case, x: torch.Tensor | None = None, apart: int = 0) -> torch.Tensor:
    """Check that the error is that of sums of 384 products in fp32, and that nothing else is written or read."""
    torch.manual_seed(case.pixels + case.c)
    channels, columns = case.groups * case.c, case.groups * case.n
    wide = torch.full((case.batch, channels + apart, *case.size), math.nan).contiguous(memory_format=torch.channels_last)
    wide[:, :channels] = torch.randn(case.batch, channels, *case.size) if x is None else x
    image = wide[:, :channels]
    weight = torch.randn(channels, case.n, *case.window) / math.sqrt(case.c * math.prod(case.window))
    height, width = (n * s for n, s in zip(case.of_phase, case.stride, strict=True))
    result = case.batch, columns, height, width
    bias, other = torch.randn(columns), torch.randn(result).contiguous(memory_format=torch.channels_last)
    around = torch.full((case.batch * height * width + 2, columns), 7.0)
    values = [image, packed(weight, case.groups, case.stride, a.columns), *([F.pad(bias, (0, a.columns))] if a.bias else [])]
    values += [*([other] if a.add else []), torch.zeros(case.c)]
    of_phase = taps(case.window, case.stride)
    window = (*of_phase, *case.stride, 1, 1, *case.padding)
    sizes = (case.pixels, case.n, case.c * math.prod(of_phase), case.groups, case.c, *case.size, *case.of_phase, *window)
    steps = (image.stride(0), image.stride(2), image.stride(3))
    out = around[1:-1].view(case.batch, height, width, columns).permute(0, 3, 1, 2)
    launcher(a).checked([*values, out], [*sizes, *steps, *case.window], SCALARS.get(a.after, ()))
    exact = F.conv_transpose2d(image.double(), weight.double(), None, case.stride, case.padding, case.end, case.groups)
    exact = OPS[a.after](exact + (bias.view(-1, 1, 1) if a.bias else 0) + (other if a.add else 0))
    assert (around[0] == 7).all()
    assert (around[-1] == 7).all()
    torch.testing.assert_close(out.double(), exact, rtol=2e-6, atol=4e-6, equal_nan=True)
    return out


@here
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("after", ["", "relu", "silu"])
def test_activations_and_additions(add: bool, after: str) -> None:
    assert_exact(transposed(True, add, after), Case())


strides = st.tuples(st.integers(1, 4), st.integers(1, 3))
CASES = st.builds(
    Case, batch=st.integers(1, 3), c=st.sampled_from([1, 3, 8, 17, 130, 300]), n=st.integers(1, 40),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)), window=st.tuples(st.integers(4, 7), st.integers(3, 5)), stride=strides,
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)), groups=st.integers(1, 3),
)  # fmt: skip


@here
@settings(max_examples=60, deadline=None)
@given(CASES, st.sampled_from([0, 5]))
def test_any_geometry(case: Case, apart: int) -> None:
    if case.pixels >= TILE.rows:
        assert_exact(transposed(bias=case.n % 2 == 0), case, apart=apart)


@here
def test_more_pixels_than_an_item_has() -> None:
    assert_exact(transposed(bias=True), Case(size=(23, 29), n=50, groups=2))


@here
@pytest.mark.parametrize("window", [(4, 4), (3, 3), (2, 2)])
def test_nan_and_infinity_reach_what_eager_lets_them_reach(window: tuple[int, int]) -> None:
    """Phases of fewer taps have no products with zeros instead."""
    x = torch.randn(2, 8, 5, 4)
    x[0, 3, 2, 2], x[1, 1, 4, 3] = math.nan, math.inf
    out = assert_exact(transposed(True, after="relu"), replace(Case(), window=window), x)
    assert not out[0, :, :2].isnan().any()


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_targets(isa: str) -> None:
    target = x86_target(isa)
    for tile in TILES[target.vector_bytes]:
        a = DirectConv(tile.rows, tile.columns, True, True, "gelu", transposed=True)
        assert not a.refused(target)
        text, symbols = kernels_to_text({hash_of(a): a}, target, parallel=True)
        assert to_object(text, target_machine(target))
        assert "GOMP_parallel" in symbols


