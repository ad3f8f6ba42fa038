"""Convolutions in our own kernel against fp64, for any geometry."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewright_cpu.kernels.by_hand import DirectConv
from fusewright_cpu.kernels.direct_conv import packed
from fusewright_cpu.onednn.tiles import CONV_TILES, TILES, tile_of
from fusewright_cpu.run.codegen import kernels_to_text, to_object
from fusewright_cpu.run.sources import from_json, hash_of, to_json
from fusewright_cpu.target import host_target, target_machine, x86_target
from tests.backends.cpu.amx.test_amx_linear import KINDS, OPS, SCALARS
from tests.backends.cpu.launchers import launcher

HERE = TILES.get(host_target().vector_bytes, ()) if not host_target().arm else ()
here = pytest.mark.skipif(
    not HERE or bool(DirectConv(HERE[0].rows, HERE[0].columns).refused(host_target())),
    reason="this CPU has neither AVX2 with FMA nor AVX-512",
)
TILE = HERE[0] if HERE else TILES[32][0]
KERNELS = [DirectConv(TILE.rows, TILE.columns, a.bias, a.add, a.after) for a in KINDS]


@dataclass(frozen=True)
class Case:
    batch: int = 2
    c: int = 8
    n: int = 11
    size: tuple[int, int] = (7, 6)
    window: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def result(self) -> tuple[int, int]:
        sides = zip(self.size, self.window, self.stride, self.padding, self.dilation, strict=True)
        height, width = ((s + 2 * p - d * (k - 1) - 1) // step + 1 for s, k, step, p, d in sides)
        return height, width

    @property
    def pixels(self) -> int:
        height, width = self.result
        return self.batch * height * width if min(height, width) > 0 else 0


def assert_exact(a: DirectConv, case: Case, x: torch.Tensor | None = None, apart: int = 0) -> torch.Tensor:
    """Check that the error is that of sums of 384 products in fp32, and that nothing else is written or read."""
    torch.manual_seed(case.pixels + case.c)
    channels, columns = case.groups * case.c, case.groups * case.n
    wide = torch.full((case.batch, channels + apart, *case.size), math.nan).contiguous(memory_format=torch.channels_last)
    wide[:, :channels] = torch.randn(case.batch, channels, *case.size) if x is None else x
    image = wide[:, :channels]
    weight = torch.randn(columns, case.c, *case.window) / math.sqrt(case.c * math.prod(case.window))
    bias, other = torch.randn(columns), torch.randn(case.batch, columns, *case.result).contiguous(memory_format=torch.channels_last)
    around = torch.full((case.pixels + 2, columns), 7.0)
    values = [image, packed(weight, case.groups, a), *([F.pad(bias, (0, a.columns))] if a.bias else [])]
    values += [*([other] if a.add else []), *([] if a.pointwise else [torch.zeros(case.c)])]
    window = (*case.window, *case.stride, *case.dilation, *case.padding)
    sizes = (case.pixels, case.n, case.c * math.prod(case.window), case.groups, case.c, *case.size, *case.result, *window)
    steps = (image.stride(0), image.stride(2), image.stride(3))
    height, width = case.result
    out = around[1:-1].view(case.batch, height, width, columns).permute(0, 3, 1, 2)
    launcher(a).checked([*values, out], [*sizes, *steps], SCALARS.get(a.after, ()))
    exact = F.conv2d(image.double(), weight.double(), None, case.stride, case.padding, case.dilation, case.groups)
    exact = OPS[a.after](exact + (bias.view(-1, 1, 1) if a.bias else 0) + (other if a.add else 0))
    assert (around[0] == 7).all()
    assert (around[-1] == 7).all()
    torch.testing.assert_close(out.double(), exact, rtol=2e-6, atol=4e-6, equal_nan=True)
    return out


@here
@pytest.mark.parametrize("a", KERNELS, ids=lambda a: a.name)
def test_activations_and_additions(a: DirectConv) -> None:
    assert_exact(a, Case())


@here
@pytest.mark.parametrize("tile", HERE, ids=lambda t: f"{t.rows}x{t.columns}")
def test_every_tile(tile: object) -> None:
    rows, columns = tile.rows, tile.columns  # type: ignore[attr-defined]
    for n in (1, columns - 1, columns, columns + 3):
        assert_exact(DirectConv(rows, columns, bias=True), Case(n=n))


pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
CASES = st.builds(
    Case, batch=st.integers(1, 3), c=st.sampled_from([1, 3, 8, 17, 130, 300]), n=st.integers(1, 40),
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)), window=st.tuples(st.integers(1, 5), st.integers(1, 5)), stride=pairs,
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)), dilation=pairs, groups=st.integers(1, 3),
)  # fmt: skip


@here
@settings(max_examples=60, deadline=None)
@given(CASES, st.sampled_from([0, 5]))
def test_any_geometry(case: Case, apart: int) -> None:
    if case.pixels >= TILE.rows:
        assert_exact(DirectConv(TILE.rows, TILE.columns, bias=case.n % 2 == 0), case, apart=apart)


@here
@settings(max_examples=30, deadline=None)
@given(CASES, st.sampled_from([0, 5]))
def test_any_product(case: Case, apart: int) -> None:
    case = replace(case, window=(1, 1), stride=(1, 1), padding=(0, 0))
    if case.pixels >= TILE.rows:
        assert_exact(DirectConv(TILE.rows, TILE.columns, pointwise=True), case, apart=apart)


@here
def test_more_pixels_than_an_item_has() -> None:
    assert_exact(DirectConv(TILE.rows, TILE.columns, bias=True), Case(size=(23, 29), n=50, groups=2))


@pytest.mark.skipif(host_target().vector_bytes != 64, reason="two kinds of panels need AVX-512; runs where: a CPU has it")
@pytest.mark.parametrize("rows", [7, 8])
@pytest.mark.parametrize(("n", "groups"), [(80, 1), (112, 2), (10, 3), (65, 2), (64, 1), (160, 1)])
def test_wide_and_narrow_panels(n: int, groups: int, rows: int) -> None:
    a = DirectConv(rows, 48, True, n % 16 != 0, "relu", narrow=True)
    assert_exact(a, Case(size=(23, 29), c=9, n=n, groups=groups))
    assert_exact(replace(a, after="silu"), Case(batch=1, size=(5, 5), c=130, n=n, groups=groups))


@here
def test_long_sums_are_as_exact_as_eagers() -> None:
    x = torch.rand(1, 1024, 7, 7).contiguous(memory_format=torch.channels_last)
    weight = torch.rand(16, 1024, 3, 3)
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    out = torch.empty_like(exact, dtype=torch.float32)
    a = DirectConv(TILE.rows, TILE.columns)
    sizes = [49, 16, 9216, 1, 1024, 7, 7, 7, 7, 3, 3, 1, 1, 1, 1, 1, 1, x.stride(0), x.stride(2), x.stride(3)]
    launcher(a).checked([x, packed(weight, 1, a), torch.zeros(1024), out], sizes)
    theirs = (F.conv2d(x.contiguous(), weight, padding=1).double() - exact).abs().max()
    assert (out.double() - exact).abs().max() <= 2 * theirs


@here
@pytest.mark.parametrize("after", ["", "relu", "clamp", "silu"])
def test_nan_and_infinity_stay(after: str) -> None:
    x = torch.randn(2, 8, 7, 6)
    x[0, 3, 2, 2], x[1, 1, 5, 5] = math.nan, math.inf
    out = assert_exact(DirectConv(TILE.rows, TILE.columns, True, False, after), Case(), x)
    assert out[0, :, 1:4, 1:4].isnan().all()
    assert not out[0, :, 4:].isnan().any()


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_targets(isa: str) -> None:
    target = x86_target(isa)
    for tile in {*TILES[target.vector_bytes], *CONV_TILES[target.vector_bytes]}:
        a = DirectConv(tile.rows, tile.columns, True, True, "gelu", narrow=tile.narrow)
        assert not a.refused(target)
        text, symbols = kernels_to_text({hash_of(a): a}, target, parallel=True)
        assert to_object(text, target_machine(target))
        assert "GOMP_parallel" in symbols
    assert DirectConv(8, 48).refused(x86_target("avx2"))
    assert DirectConv(6, 16).refused(x86_target("avx"))


def test_tiles_waste_little() -> None:
    target = x86_target("avx2")

    def found(pixels: int, channels: int) -> tuple[int, int]:
        tile = tile_of(pixels, channels, target)
        assert tile is not None
        return tile.rows, tile.columns

    assert (found(3136, 64), found(3136, 24), found(16, 64)) == ((6, 16), (4, 24), (4, 16))
    assert tile_of(3, 64, target) is None


def test_json() -> None:
    for a in KERNELS:
        assert from_json(json.loads(json.dumps(to_json(a)))) == a
