"""Linears on AMX against fp64, with the tile instructions simulated, and for real on a CPU that has them."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewright_cpu.emit.entry import new_module
from fusewright_cpu.kernels.amx_linear import emit_amx_linear, packed
from fusewright_cpu.kernels.by_hand import AMX_BLOCK, AmxLinear
from fusewright_cpu.run.codegen import kernels_to_text, to_assembly, to_object
from fusewright_cpu.run.launch import float_bits
from fusewright_cpu.run.linker import Linker
from fusewright_cpu.run.sources import from_json, hash_of, to_json
from fusewright_cpu.target import CpuTarget, host_target, target_machine, x86_target
from tests.backends.cpu.amx.simulated import ADDRESSES, SimulatedTiles, simulate_linears
from tests.backends.cpu.launchers import launcher

SCALARS = {"clamp": (-0.5, 0.75), "leaky_relu": (0.25,)}
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x, "relu": torch.relu, "clamp": lambda x: x.clamp(-0.5, 0.75), "leaky_relu": lambda x: F.leaky_relu(x, 0.25),
    "silu": F.silu, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "tanh": torch.tanh, "sigmoid": torch.sigmoid,
}  # fmt: skip
KINDS = [AmxLinear(bias, add, after) for bias, add, after in (
    (False, False, ""), (True, False, ""), (True, True, "relu"), (False, True, ""), *((True, False, name) for name in OPS if name),
)]  # fmt: skip
Run = Callable[[AmxLinear, list[torch.Tensor], list[int]], None]
here = pytest.mark.skipif(not host_target().masks, reason="this CPU has no masked stores")
on_amx = pytest.mark.skipif(bool(AmxLinear().refused(host_target())), reason="this CPU has no AMX")


def simulated(a: AmxLinear, tensors: list[torch.Tensor], sizes: list[int]) -> None:
    machine = target_machine(host_target())
    module = new_module(host_target())
    emit_amx_linear(module, a, "simulated", parallel=False, tiles=SimulatedTiles)
    libc = {s: ctypes.cast(getattr(ctypes.CDLL(None), s), ctypes.c_void_p).value or 0 for s in ("memcpy", "memset")}
    linked = Linker(machine).link(to_object(module.render(), machine), {"k": "simulated"}, {**ADDRESSES, **libc})
    words = [*(t.data_ptr() for t in tensors), *sizes, *map(float_bits, SCALARS.get(a.after, ()))]
    call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(linked.addresses["k"])
    assert call(ctypes.addressof((ctypes.c_int64 * len(words))(*words)), 1) == 0


def on_tiles(a: AmxLinear, tensors: list[torch.Tensor], sizes: list[int]) -> None:
    launcher(a).checked(tensors, sizes, SCALARS.get(a.after, ()))


def assert_exact(run: Run, a: AmxLinear, m: int, n: int, k: int, apart: int = 0, x: torch.Tensor | None = None) -> torch.Tensor:
    """Check that the error is at most twice that of an exact result rounded once, and that nothing else is written."""
    torch.manual_seed(m + n + k)
    wide = torch.full((m, k + apart), math.nan, dtype=torch.bfloat16)
    wide[:, :k] = torch.randn(m, k) if x is None else x
    weight = (torch.randn(n, k) / math.sqrt(k)).bfloat16()
    bias, other = torch.randn(n), torch.randn(m, n).bfloat16()
    around = torch.full((m + 2, n), 7.0, dtype=torch.bfloat16)
    given = [wide, packed(weight), *([F.pad(bias, (0, -n % AMX_BLOCK))] if a.bias else []), *([other] if a.add else [])]
    run(a, [*given, around[1:-1]], [m, n, k, k + apart])
    exact = wide[:, :k].double() @ weight.double().t()
    exact = OPS[a.after](exact + (bias if a.bias else 0) + (other if a.add else 0))
    assert (around[0] == 7).all()
    assert (around[-1] == 7).all()
    torch.testing.assert_close(around[1:-1].double(), exact, rtol=2**-8, atol=1e-5 * math.sqrt(k), equal_nan=True)
    return around[1:-1]


@on_amx
def test_code_of_the_simulation_is_not_run_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        simulate_linears(other)
        simulated = launcher(AmxLinear())
    assert launcher(AmxLinear()).address != simulated.address


@here
@pytest.mark.parametrize("a", KINDS, ids=lambda a: a.name)
def test_simulated(a: AmxLinear) -> None:
    assert_exact(simulated, a, 37, 45, 64)


@here
@settings(max_examples=12, deadline=None)
@given(st.integers(AMX_BLOCK, 300), st.integers(1, 140), st.integers(1, 3), st.sampled_from([0, 8, 32]))
def test_any_size_simulated(m: int, n: int, steps: int, apart: int) -> None:
    assert_exact(simulated, AmxLinear(bias=n % 2 == 0), m, n, 32 * steps, apart)


@here
def test_sums_over_several_parts_of_k_simulated() -> None:
    assert_exact(simulated, AmxLinear(True), 40, 33, 32 * 35)


@here
@pytest.mark.parametrize("after", ["", "relu", "clamp", "gelu", "silu", "hardswish"])
def test_nan_stays_and_infinity_is_as_in_eager_simulated(after: str) -> None:
    x = torch.randn(32, 32)
    x[3, 5], x[7, 1], x[9, 0] = math.nan, math.inf, -math.inf
    out = assert_exact(simulated, AmxLinear(True, False, after), 32, 32, 32, x=x)
    assert out[3].isnan().all()
    assert not out[4].isnan().any()


def test_the_code_has_tile_instructions() -> None:
    wide = x86_target("avx512")
    target = CpuTarget(wide.triple, "sapphirerapids", f"{wide.features},+avx512bf16,+amx-tile,+amx-bf16", 64, True, True)
    host_target()
    for a in (AmxLinear(), AmxLinear(True, True, "gelu")):
        assert not a.refused(target)
        text, symbols = kernels_to_text({hash_of(a): a}, target, parallel=True)
        assert not set(symbols) - {"GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"}
        code = to_assembly(text, target_machine(target))
        assert [code.count(name) for name in ("tdpbf16ps", "ldtilecfg", "tilerelease")] == [4, 1, 1]


def test_other_cpus_refuse() -> None:
    assert all(AmxLinear().refused(x86_target(isa)) for isa in ("avx512", "avx2", "avx"))


def test_json() -> None:
    for a in KINDS:
        assert from_json(json.loads(json.dumps(to_json(a)))) == a


@on_amx
@pytest.mark.parametrize("a", KINDS, ids=lambda a: a.name)
@pytest.mark.parametrize(("m", "n", "k"), [(37, 45, 64), (128, 768, 768), (197, 2304, 1056), (1500, 97, 96), (32, 32, 3072)])
def test_on_tiles(a: AmxLinear, m: int, n: int, k: int) -> None:
    assert_exact(on_tiles, a, m, n, k)
    assert_exact(on_tiles, a, m, n, k, apart=8)
