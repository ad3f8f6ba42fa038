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
TILES = tiles.LINEAR_TILES.get(host_target().vector_bytes, ())
ENDS = (("", False), ("gelu", True))
NARROW = [VectorLinear(True, add, after, t.rows, t.columns, t.narrow) for t in TILES for after, add in ENDS]
KERNELS = [linear(a.bias, a.add, a.after) for a in KINDS] + NARROW


def assert_exact(a: VectorLinear, m: int, n: int, k: int, apart: int = 0, x: torch.Tensor | None = None) -> torch.Tensor:
    """Check that the error is that of sums of 256 products in fp32, and that nothing else is written."""
    torch.manual_seed(m + n + k)
    wide = torch.full((m, k + apart), math.nan)
    wide[:, :k] = torch.randn(m, k) if x is None else x
    weight, bias, other = torch.randn(n, k) / math.sqrt(k), torch.randn(n), torch.randn(m, n)
    around = torch.full((m + 2, n), 7.0)
    padded = sum(count * columns for count, columns in a.panels(n))
    given = [wide, packed(weight, a), *([F.pad(bias, (0, padded - n))] if a.bias else []), *([other] if a.add else [])]
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


@pytest.mark.skipif(not NARROW, reason="this CPU has no AVX-512; runs where: it has")
@settings(max_examples=40, deadline=None)
@given(st.integers(16, 600), st.integers(1, 260), st.integers(1, 600), st.sampled_from(NARROW))
def test_any_number_of_wide_and_narrow_panels(m: int, n: int, k: int, a: VectorLinear) -> None:
    assert_exact(a, m, n, k)


def test_two_kinds_of_panels_waste_less_than_a_register() -> None:
    for n in range(17, 1000):
        assert sum(count * columns for count, columns in VectorLinear(narrow=True).panels(n)) < n + 16


@here
def test_long_sums_are_as_exact_as_eagers() -> None:
    x, w = torch.rand(16, 8192), torch.rand(48, 8192)
    exact, out = x.double() @ w.double().t(), torch.empty(16, 48)
    a = linear()
    launcher(a).checked([x, packed(w, a), out], [16, 48, 8192, 8192])
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


def test_the_tile_wastes_few_rows_and_columns() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "host_target", lambda: x86_target("avx512"))
        found = {(m, n): own.kernel_of(torch.float32, rows=m, columns=n) for m in (8, 49, 128, 196) for n in (16, 64, 112)}
    assert {m: found[m, 112].rows for m in (8, 49, 128, 196)} == {8: 8, 49: 7, 128: 8, 196: 7}
    assert {n: found[128, n].columns for n in (16, 64, 112)} == {16: 16, 64: 48, 112: 48}
    assert all(a.narrow for (_, n), a in found.items() if n > 16)


def test_json() -> None:
    for a in KERNELS:
        assert from_json(json.loads(json.dumps(to_json(a)))) == a
