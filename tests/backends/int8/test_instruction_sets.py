"""Which engines a CPU can use: all that compute exact sums there, and no other."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fusewright import machine
from fusewright.interface import Device, Unavailable
from fusewright_int8 import engines, operators
from fusewright_int8.backend import X86Int8
from fusewright_int8.operators import name
from fusewright_int8.run import native, reference
from fusewright_int8.target import TARGETS, best
from tests.backends.int8.common import BY_NAME, DEVICE, ENGINES, F32, U8, needs_core
from tests.fragments import Context, by_preference

AVX2 = frozenset({"avx2", "fma3"})
EXTREMES = {"highest": (255, 127), "lowest": (255, -128), "signed": (-128, -128), "random": None}
"""Bytes of activations and weights whose products in pairs, summed at 16 bits, saturate."""


def _filled(shape: tuple[int, ...], wshape: tuple[int, ...], case: str) -> tuple[torch.Tensor, torch.Tensor]:
    if (values := EXTREMES[case]) is None:
        return torch.randint(0, 256, shape).to(U8), torch.randint(-128, 128, wshape, dtype=torch.int8)
    dtype = torch.int8 if values[0] < 0 else U8
    return torch.full(shape, values[0], dtype=dtype), torch.full(wshape, values[1], dtype=torch.int8)


PLAIN = (None, 1.0, 0, "none", (), F32, 1.0, 0, 0, 0)


@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [(1, 64, 64), (3, 10, 5), (8, 768, 96), (33, 100, 33), (128, 256, 64), (1, 4096, 48)])
def test_sums_of_products_do_not_saturate(shape: tuple[int, int, int], engine: str, case: str) -> None:
    (m, k, n), e = shape, BY_NAME[engine]
    x, w = _filled((m, k), (n, k), case)
    packed = engines._operator(e.pack_linear)(w)
    ours = engines._operator(e.linear)(x, packed, torch.ones(n), None, 1.0, 0, *PLAIN)
    assert torch.equal(ours.double(), x.double() @ w.double().T)


@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sizes", [(64, 32, 3, 1), (64, 32, 1, 1), (3, 16, 7, 1), (32, 32, 3, 32), (16, 24, 3, 2)])
def test_sums_of_convolutions_do_not_saturate(sizes: tuple[int, int, int, int], engine: str, case: str) -> None:
    (c, n, window, groups), e = sizes, BY_NAME[engine]
    x, w = _filled((1, c, 9, 9), (n, c // groups, window, window), case)
    x, geometry = x.contiguous(memory_format=torch.channels_last), ((1, 1), (window // 2,) * 2, (1, 1), groups)
    unsigned = 128 if x.dtype is torch.int8 else 0
    rest = (groups,) if engine == "core" else (torch.ones(n), 1.0, unsigned, *geometry, x.shape)
    packed = engines._operator(e.pack_conv)(w, *rest)
    ours = engines._operator(e.conv)(x, packed, torch.ones(n), None, 1.0, 0, (window, window), *geometry, *PLAIN)
    assert torch.equal(ours.double(), F.conv2d(x.double(), w.double(), None, *geometry))


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 447, 64), (2, 448, 16), (3, 449, 33), (13, 1000, 130), (1, 9000, 17)])
def test_long_sums_of_float_rows_are_exact(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """AVX2 without VNNI puts them together from stretches, each of which just fits 32 bits."""
    m, k, n = shape
    x = torch.full((m, k), 1.9921875, dtype=dtype)
    x[1:] = torch.randn(m - 1, k)
    w, scale = torch.full((n, k), -128, dtype=torch.int8), torch.rand(n)
    w[n // 2 :] = torch.randint(-128, 128, (n - n // 2, k), dtype=torch.int8)
    expected = reference.weight_linear(x, w, scale, None)
    for isa in native.isas():
        native.use_isa(isa)
        ours = native.weight_linear(x, native.pack_linear(w), scale, None, out_dtype=F32)
        native.use_isa(None)
        assert torch.equal(ours, expected), isa


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_are_compared_with_the_float_kernel_that_would_compute_them(dtype: torch.dtype) -> None:
    ctx = Context({**X86Int8.options, "prepack": "never"}, DEVICE, by_preference(engines.FEW_FLOATS, "core"))
    assert [engines.reading_pays(ctx, m, 64, 32, dtype) for m in (1, 4, 40)] == [False, False, True]


def test_a_measurement_calls_what_a_plan_calls() -> None:
    assert engines._operator(name("linear")) is operators.linear


def test_every_target_is_one_of_the_cores_instruction_sets() -> None:
    names = [t.arch for t in TARGETS]
    assert names == ["amx_int8", "avx512_vnni", "avx_vnni", "avx2"]
    assert native.absent() or set(native.isas()) <= {*names, "portable"}
    found = best(AVX2)
    assert found is not None and found.arch == "avx2"


@needs_core
def test_without_vnni_the_core_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_features", lambda: AVX2)
    device = X86Int8.probe()
    assert isinstance(device, Device) and device.arch == "avx2"
    assert [e.name for e in engines.present()] == ["core"]
    assert "our core" in X86Int8.remark() and "no onednn: onednn's int8 sums saturate" in X86Int8.remark()


@pytest.mark.parametrize("value", ["AVX2", "avx512_core"])
def test_onednn_that_is_kept_from_vnni_is_no_engine(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_features", lambda: AVX2 | {"avx512_vnni"})
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    assert BY_NAME["onednn"].absent() is None or not torch.backends.mkldnn.is_available()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", value)
    assert BY_NAME["onednn"].absent()


def test_a_machine_on_which_nothing_computes_int8_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    monkeypatch.setattr(machine, "cpu_features", lambda: frozenset({"avx"}))
    found = X86Int8.probe()
    assert isinstance(found, Unavailable) and "no AVX2" in found.reason and "x86_onednn" in found.fix
    monkeypatch.setattr(machine, "cpu_features", lambda: AVX2)
    monkeypatch.setattr(engines, "ENGINES", [e for e in engines.ENGINES if e.name == "onednn"])
    found = X86Int8.probe()
    assert isinstance(found, Unavailable) and "saturate" in found.reason and "compiler" in found.fix
