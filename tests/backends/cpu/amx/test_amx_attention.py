"""Attention on AMX against fp64, with the tile instructions simulated, and for real on a CPU that has them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as eager

from fusewright_cpu.emit.intrinsics import multiplies_pairs
from fusewright_cpu.kernels.amx_attention import OnTiles
from fusewright_cpu.kernels.attention import BLOCK
from fusewright_cpu.kernels.by_hand import Attention
from fusewright_cpu.run import codegen
from fusewright_cpu.run.codegen import kernels_to_text, to_assembly
from fusewright_cpu.run.sources import hash_of
from fusewright_cpu.target import CpuTarget, host_target, target_machine, x86_target
from tests.backends.cpu.amx.simulated import SimulatedTiles, simulate
from tests.backends.cpu.test_attention import BF16, assert_exact, qkv, run

ON_AMX = OnTiles.takes(Attention("bf16", 64), host_target())
runs = pytest.mark.skipif(not multiplies_pairs(host_target()), reason="this CPU has no products of pairs of bf16, as packing needs")


class Simulated(OnTiles):
    tiles = SimulatedTiles

    @staticmethod
    def takes(a: Attention, target: CpuTarget) -> bool:
        return a.dtype == "bf16"


@pytest.fixture(autouse=True, params=["simulated", "real"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "real":
        if not ON_AMX:
            pytest.skip("this CPU has no AMX")
        yield
        return
    monkeypatch.setattr(codegen, "OnTiles", Simulated)
    simulate(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the simulation has one set of tiles
    yield
    torch.set_num_threads(threads)


@runs
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("rows", "keys", "width"),
    [(1, 1, 16), (49, 49, 32), (32, 32, 64), (33, 17, 64), (64, 1, 16), (1, 65, 16), (50, 33, 40), (9, 20, 7), (34, 95, 80)],
)
def test_lengths_and_widths_around_tiles(rows: int, keys: int, width: int, causal: bool) -> None:
    assert_exact(qkv(BF16, rows, keys, width), causal=causal)


@runs
@pytest.mark.parametrize("causal", [True, False])
def test_several_blocks_of_keys_and_parts_of_rows(causal: bool) -> None:
    assert_exact(qkv(BF16, 40, BLOCK // 256 + 37, 256, heads=1), causal=causal)
    assert_exact(qkv(BF16, OnTiles.most_rows + 10, 20, 16, heads=1), causal=causal)


@runs
@pytest.mark.parametrize("kind", [BF16, torch.float32, torch.bool])
def test_masks(kind: torch.dtype) -> None:
    torch.manual_seed(1)
    mask = torch.rand(1, 2, 40, 45) > 0.3 if kind is torch.bool else torch.randn(1, 2, 40, 45).to(kind)
    assert_exact(qkv(BF16, 40, 45, 32), mask)


@runs
def test_rows_without_a_key_are_zero_as_in_eager() -> None:
    mask = torch.ones(1, 1, 20, 40, dtype=torch.bool)
    mask[:, :, 5] = False
    ours = run(*qkv(BF16, 20, 40, 16), mask)
    assert not ours[:, :, 5].any() and ours[:, :, 6].all()


@runs
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_spreads(where: int, value: float) -> None:
    tensors = qkv(BF16, 40, 21, 16)
    tensors[where][0, 1, 3, 2] = value
    exact = eager(*(t.double() for t in tensors))  # torch's kernel for bf16 loses a NaN
    torch.testing.assert_close(run(*tensors).double(), exact, equal_nan=True, rtol=2e-2, atol=2e-2)


def test_the_code_has_tile_instructions(tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "OnTiles", OnTiles)
    wide = x86_target("avx512")
    target = CpuTarget(wide.triple, "sapphirerapids", f"{wide.features},+avx512bf16,+amx-tile,+amx-bf16", 64, True, True)
    kernel = Attention("bf16", 64, "bool")
    code = to_assembly(kernels_to_text({hash_of(kernel): kernel}, target, parallel=True)[0], target_machine(target))
    assert [code.count(name) for name in ("ldtilecfg", "tilerelease")] == [1, 1]
    assert "tdpbf16ps" in code and "vdpbf16ps" not in code
