"""The int8 convolution for Arm CPUs: its code for each core, and its results under QEMU against fp64, where sums are exact."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ci.aarch64.emulator import Emulator, missing
from fusewright.toolkit.ir.types import to_torch
from fusewright_cpu.kernels.arm.int8_conv import Geometry, packed, padded
from fusewright_cpu.kernels.by_hand import Int8Conv, form_of
from fusewright_cpu.run.sources import from_json, hash_of, to_json
from fusewright_cpu.target import aarch64_target
from tests.backends.cpu.assembly import has, instructions, loops
from tests.backends.cpu.test_aarch64_int8 import CORES

RANDOM = 12
emulated = pytest.mark.skipif(bool(missing()), reason=missing())


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Draw convolutions whose result has at least one pixel."""

    def pair(least: int, most: int) -> tuple[int, int]:
        return draw(st.integers(least, most)), draw(st.integers(least, most))

    groups, depth, own = draw(st.sampled_from([1, 1, 1, 2, 3])), draw(st.integers(1, 20)), draw(st.integers(1, 20))
    kernel, dilation, padding = pair(1, 4), pair(1, 2), pair(0, 4)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for d, k, p in zip(dilation, kernel, padding, strict=True)]
    h, w = (n + draw(st.integers(0, 6)) for n in least)
    image = draw(st.integers(1, 2)), depth * groups, h, w
    return Geometry(image, own * groups, kernel, pair(1, 3), padding, dilation, groups)


def random_geometries(count: int) -> list[Geometry]:
    """The first cases of the strategy."""
    found: list[Geometry] = []

    @settings(max_examples=count, derandomize=True, phases=[Phase.generate], database=None)
    @given(geometries())
    def collect(geometry: Geometry) -> None:
        found.append(geometry)

    collect()
    return found


def exact(arm: Emulator, kernel: Int8Conv, library: Path, g: Geometry) -> bool:
    """Whether the result equals exact sums, scaled in fp64 and rounded once, bit for bit."""
    torch.manual_seed(0)
    info, n = torch.iinfo(to_torch(kernel.x)), g.columns
    x = torch.randint(info.min, info.max + 1, g.image).to(to_torch(kernel.x))
    weight = torch.randint(-128, 128, (n, g.depth, *g.kernel), dtype=torch.int8)
    w_zero = torch.randint(-128, 128, (n,), dtype=torch.int32) * int(kernel.zeros)
    w_scale, x_scale, bias = torch.rand(n) + 0.1, torch.rand(1) + 0.1, torch.randn(n) * 100 * int(kernel.bias)
    x_zero = torch.randint(info.min, info.max + 1, (1,), dtype=torch.int32)
    sums = weight.flatten(1).sum(1).to(torch.int32)
    behind = [t for t, there in ((w_zero, kernel.zeros), (bias, kernel.bias)) if there]
    first, last = ([padded(t, g.groups) for t in some] for some in ([w_scale, sums], behind))
    out = torch.full((g.image[0], *g.size, n), -1, dtype=to_torch(kernel.out))
    pixels = x.permute(0, 2, 3, 1).contiguous()
    given = [pixels, packed(weight, g.groups, g.run, kernel.form), *first, x_scale, x_zero, *last, out]
    assert arm.run(kernel, library, given, g.sizes(), threads=2) == 0
    w_zero, w_scale, bias = (t.double().view(-1, 1, 1) for t in (w_zero, w_scale, bias))
    wide = torch.conv2d(x.double() - x_zero, weight - w_zero[..., None], None, g.stride, g.padding, g.dilation, g.groups)
    return torch.equal(out.permute(0, 3, 1, 2), (wide * (x_scale.double() * w_scale) + bias).float().to(out.dtype))


@pytest.fixture(scope="module", params=CORES)
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with Emulator(aarch64_target(request.param), tmp_path_factory.mktemp(request.param)) as emulator:
        yield emulator


SOME = [
    Geometry((1, 1, 1, 1), 1, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    Geometry((1, 3, 20, 21), 16, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    Geometry((2, 16, 5, 6), 9, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    Geometry((1, 8, 9, 9), 12, (3, 3), (1, 1), (2, 2), (2, 2), 1),
    Geometry((1, 12, 7, 8), 6, (3, 2), (2, 1), (1, 2), (1, 1), 3),
    Geometry((2, 6, 5, 5), 6, (3, 3), (1, 1), (1, 1), (1, 1), 6),
    Geometry((1, 40, 7, 7), 72, (3, 3), (1, 1), (1, 1), (1, 1), 1),
]


@emulated
@pytest.mark.parametrize(("x", "out", "bias", "zeros"), [("u8", "f32", True, False), ("i8", "bf16", False, True)])
def test_results_are_exact(arm: Emulator, x: str, out: str, bias: bool, zeros: bool) -> None:
    kernel = Int8Conv(x, out, form_of(arm.target), bias, zeros)
    library = arm.build([kernel])[hash_of(kernel)]
    for geometry in (*SOME, *random_geometries(RANDOM)):
        assert exact(arm, kernel, library, geometry), geometry


@pytest.mark.parametrize(("core", "form"), CORES.items())
def test_its_loops_multiply_registers_and_copy_8_bytes(core: str, form: str) -> None:
    inner = loops(instructions(Int8Conv("u8", "f32", form, True), aarch64_target(core)))
    product = max(inner, key=lambda loop: sum(x.startswith(form) for x in loop))
    count = sum(x.startswith(form) for x in product)
    assert count == (32 if form == "smmla" else 64) and len(product) <= 1.7 * count, product
    assert not has(product, r"(bl|str|st1|[us]div)\b") and not any(re.search(r"\[sp", x) for x in product)
    copies = [x for x in inner if has(x, r"ldr\s+d\d+") and has(x, r"str\s+d\d+")]
    assert any(len(x) <= 12 for x in copies), inner


def test_geometry_says_how_long_a_packed_row_is_and_what_is_padding() -> None:
    few, many = (Geometry((1, c, 8, 8), 64, (3, 3), (1, 1), (1, 1), (1, 1), 1) for c in (3, 64))
    assert (few.run, few.taps, few.width, many.waste) == (9, 27, 48, 1.0)
    depthwise = Geometry((1, 32, 8, 8), 32, (3, 3), (1, 1), (1, 1), (1, 1), 32)
    assert depthwise.run == 1 and depthwise.waste > 50 and many.size == (8, 8)


def test_it_survives_json() -> None:
    kernel = Int8Conv("u8", "bf16", "smmla", bias=True)
    assert from_json(to_json(kernel)) == kernel and kernel.name == "int8_conv_u8_bf16_smmla_bias"
    assert "int8 and uint8" in Int8Conv("i8", "i32", "smmla").refused(aarch64_target("neoverse-v1"))
