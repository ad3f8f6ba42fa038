"""Linears of fp32 in our own kernel against fp64, and for any size."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewright_cpu.kernels.by_hand import VECTOR_TILES, VectorLinear
from fusewright_cpu.kernels.vector_linear import packed
from fusewright_cpu.onednn import own, tiles
from fusewright_cpu.run.codegen import kernels_to_text, to_object
from fusewright_cpu.run.sources import from_json, hash_of, to_json
from fusewright_cpu.target import host_target, target_machine, x86_target
from tests.backends.cpu.amx.test_amx_linear import KINDS, OPS, SCALARS
from tests.backends.cpu.launchers import launcher

TILE = VECTOR_TILES.get(host_target().vector_bytes, VECTOR_TILES[64])


def linear(bias: bool = False, add: bool = False, after: str = "") -> VectorLinear:
    return VectorLinear(bias, add, after, *TILE)


here = pytest.mark.skipif(bool(linear().refused(host_target())), reason="this CPU has neither AVX2 with FMA nor AVX-512")
TILES = [t for t in tiles.TILES.get(host_target().vector_bytes, ()) if host_target().vector_bytes == 64]
KERNELS = [linear(a.bias, a.add, a.after) for a in KINDS] + [VectorLinear(True, False, "", t.rows, t.columns) for t in TILES]


def assert_exact(a: VectorLinear, m: int, n: int, k: int, apart: int = 0, x: torch.Tensor | None = None) -> torch.Tensor:
    """Check that the error is that of sums of 256 products in fp32, and that nothing else is written."""
    torch.manual_seed(m + n + k)
    wide = torch.full((m, k + apart), math.nan)
    wide[:, :k] = torch.randn(m, k) if x is None else x
    weight, bias, other = torch.randn(n, k) / math.sqrt(k), torch.randn(n), torch.randn(m, n)
    around = torch.full((m + 2, n), 7.0)
    given = [wide, packed(weight, a.columns), *([F.pad(bias, (0, -n % a.columns))] if a.bias else []), *([other] if a.add else [])]
    launcher(a).checked([*given, around[1:-1]], [m, n, k, k + apart], SCALARS.get(a.after, ()))
    exact = wide[:, :k].double() @ weight.double().t()
    exact = OPS[a.after](exact + (bias if a.bias else 0) + (other if a.add else 0))
    assert (around[0] == 7).all()
    assert (around[-1] == 7).all()
    torch.testing.assert_close(around[1:-1].double(), exact, rtol=2e-6, atol=4e-6, equal_nan=True)
    return around[1:-1]


@here
@pytest.mark.parametrize("a", KERNELS, ids=lambda a: a.name)
def test_activations_and_additions(a: VectorLinear) -> None:
    assert_exact(a, 37, 51, 65)


@here
@settings(max_examples=40, deadline=None)
@given(st.integers(TILE[0], 600), st.integers(1, 160), st.integers(1, 600), st.sampled_from([0, 1, 7, 16]))
def test_any_size(m: int, n: int, k: int, apart: int) -> None:
    assert_exact(linear(bias=n % 2 == 0), m, n, k, apart)


@here
def test_long_sums_are_as_exact_as_eagers() -> None:
    x, w = torch.rand(16, 8192), torch.rand(48, 8192)
    exact, out = x.double() @ w.double().t(), torch.empty(16, 48)
    a = linear()
    launcher(a).checked([x, packed(w, a.columns), out], [16, 48, 8192, 8192])
    theirs = (F.linear(x, w).double() - exact).abs().max()
    assert (out.double() - exact).abs().max() <= 2 * theirs


@here
@pytest.mark.parametrize("after", ["", "relu", "clamp", "silu"])
def test_nan_and_infinity_stay(after: str) -> None:
    x = torch.randn(16, 32)
    x[3, 5], x[7, 1] = math.nan, math.inf
    out = assert_exact(linear(True, False, after), 16, 48, 32, x=x)
    assert out[3].isnan().all()
    assert not out[4].isnan().any()


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_targets(isa: str) -> None:
    assert VectorLinear().refused(x86_target("avx2"))
    target = x86_target(isa)
    a = VectorLinear(True, False, "gelu", *VECTOR_TILES[target.vector_bytes])
    assert not a.refused(target)
    text, symbols = kernels_to_text({hash_of(a): a}, target, parallel=True)
    assert to_object(text, target_machine(target))
    assert "GOMP_parallel" in symbols


def test_the_tile_wastes_few_columns() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "host_target", lambda: x86_target("avx512"))
        found = {n: own.kernel_of(torch.float32, rows=784, columns=n).columns for n in (32, 64, 96, 128, 160, 768)}
    assert found == {32: 32, 64: 64, 96: 48, 128: 64, 160: 32, 768: 48}


def test_json() -> None:
    for a in KERNELS:
        assert from_json(json.loads(json.dumps(to_json(a)))) == a
