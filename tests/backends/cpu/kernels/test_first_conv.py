"""Convolutions of few channels in our own kernel against fp64, for any geometry and strides that it takes."""

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
from fusewright_cpu.kernels.by_hand import FirstConv
from fusewright_cpu.kernels.vector_linear import packing
from fusewright_cpu.onednn.tiles import FIRST_TILES
from fusewright_cpu.run.codegen import kernels_to_text, to_object
from fusewright_cpu.run.sources import from_json, hash_of, to_json
from fusewright_cpu.target import host_target, target_machine, x86_target
from tests.backends.cpu.amx.test_amx_linear import OPS, SCALARS
from tests.backends.cpu.kernels.test_direct_conv import here
from tests.backends.cpu.launchers import launcher

TILES = FIRST_TILES.get(host_target().vector_bytes, FIRST_TILES[64])
TILE = TILES[-1]


@dataclass(frozen=True)
class Case:
    batch: int = 2
    c: int = 3
    n: int = 11
    size: tuple[int, int] = (9, 37)
    padding: tuple[int, int] = (1, 1)

    def points(self, a: FirstConv) -> tuple[int, ...]:
        sides = zip(self.size, self.padding, a.kernel, a.stride, strict=True)
        return tuple((n + 2 * p - k) // s + 1 for n, p, k, s in sides)


def first(after: str = "", bias: bool = True, add: bool = False, dtype: str = "f32") -> FirstConv:
    return FirstConv(dtype, (3, 3), (2, 2), TILE.rows, TILE.columns, bias, add, after)


def assert_exact(a: FirstConv, case: Case, layout: str = "planes", x: torch.Tensor | None = None) -> torch.Tensor:
    """Check that the error is that of a sum in fp32, and that nothing else is written or read."""
    torch.manual_seed(case.n + case.c)
    dtype, (oh, ow) = to_torch(a.dtype), case.points(a)
    x = torch.randn(case.batch, case.c, *case.size) if x is None else x
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    if layout == "apart":  # a slice, between NaN
        whole = torch.full((case.batch, case.c + 1, case.size[0] + 1, case.size[1] + 2), math.nan)
        whole[:, :-1, :-1, 1:-1] = x
        x = whole[:, :-1, :-1, 1:-1]
    x = x.to(dtype)
    k = case.c * math.prod(a.kernel)
    weight, bias = torch.randn(case.n, case.c, *a.kernel) / math.sqrt(k), torch.randn(case.n)
    pad, shape, order = packing(case.n, k, a.columns)
    given = [x, F.pad(weight.view(case.n, k), pad).view(shape).permute(order).contiguous()]
    given += [F.pad(bias, (0, -case.n % a.columns))] if a.bias else []
    other = torch.randn(case.batch, case.n, oh, ow).to(dtype).contiguous(memory_format=torch.channels_last)
    around = torch.full((case.batch * oh * ow + 2, case.n), 7.0, dtype=dtype)
    out = around[1:-1].view(case.batch, oh, ow, case.n).permute(0, 3, 1, 2)
    sizes = [case.batch * oh * ow, case.n, k, case.c, *case.size, oh, ow, *case.padding, *x.stride()]
    launcher(a).checked([*given, *([other] if a.add else []), out], sizes, SCALARS.get(a.after, ()))
    exact = F.conv2d(x.double(), weight.double(), bias.double() if a.bias else None, a.stride, case.padding)
    exact = OPS[a.after](exact + (other.double() if a.add else 0))
    assert (around[0] == 7).all()
    assert (around[-1] == 7).all()
    tolerance = (2e-6, 4e-6) if dtype is torch.float32 else (4e-3, 1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=tolerance[0], atol=tolerance[1], equal_nan=True)
    return out


@here
@pytest.mark.parametrize("layout", ["planes", "channels last", "apart"])
@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.rows}x{t.columns}")
def test_layouts_and_tiles(tile, layout: str) -> None:
    assert_exact(replace(first(), rows=tile.rows, columns=tile.columns), Case(n=41), layout)


@here
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("after", ["", "relu", "clamp", "hardswish", "silu"])
def test_activations_and_additions(after: str, add: bool) -> None:
    assert_exact(first(after, not add, add), Case())


@here
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_geometry(data: st.DataObject) -> None:
    def two(low: int, high: int) -> tuple[int, int]:
        return data.draw(st.integers(low, high)), data.draw(st.integers(low, high))

    a = replace(first(), kernel=data.draw(st.sampled_from([(1, 2), (3, 3), (4, 4), (5, 3), (7, 7)])), stride=two(1, 4))
    wide = data.draw(st.integers(1, 90)) + (TILE.rows - 1) * a.stride[1] + a.kernel[1]
    case = Case(*two(1, 3), data.draw(st.integers(1, 70)), (data.draw(st.integers(7, 12)), wide), two(0, 9))
    assert_exact(a, case, data.draw(st.sampled_from(["planes", "channels last", "apart"])))


@here
@pytest.mark.parametrize("after", ["", "relu", "silu"])
def test_bf16_is_rounded_once(after: str) -> None:
    assert_exact(first(after, dtype="bf16"), Case(n=35))


@here
def test_nan_and_infinity_stay() -> None:
    x = torch.randn(2, 3, 9, 37)
    x[0, 1, 4, 5], x[1, 2, 8, 30] = math.nan, -math.inf
    out = assert_exact(first("relu"), Case(), x=x)
    assert out[0, :, 1:3, 2:4].isnan().any()


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_targets(isa: str) -> None:
    target = x86_target(isa)
    tile = FIRST_TILES[target.vector_bytes][0]
    a = replace(first("relu"), rows=tile.rows, columns=tile.columns)
    assert not a.refused(target)
    text, symbols = kernels_to_text({hash_of(a): a}, target, parallel=True)
    assert to_object(text, target_machine(target))
    assert "GOMP_parallel" in symbols


def test_json() -> None:
    assert from_json(json.loads(json.dumps(to_json(first("clamp"))))) == first("clamp")
