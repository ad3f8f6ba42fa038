"""The linear for Arm CPUs that multiplies fp32 in bf16: its code for each core, and its results under QEMU."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
import torch

from ci.aarch64.emulator import Emulator, missing
from fusewright_cpu.kernels.arm.bf16_linear import packed
from fusewright_cpu.kernels.arm.int8_linear import padded
from fusewright_cpu.kernels.by_hand import Bf16Linear
from fusewright_cpu.run.sources import from_json, hash_of, to_json
from fusewright_cpu.target import aarch64_target
from tests.backends.cpu.assembly import has, instructions, loops

CORES = ("neoverse-v1", "neoverse-v2")
SIZES = [(1, 1, 1), (2, 5, 7), (3, 8, 16), (11, 70, 100), (33, 9, 33), (75, 130, 24)]
emulated = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module", params=CORES)
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with Emulator(aarch64_target(request.param), tmp_path_factory.mktemp(request.param)) as emulator:
        yield emulator


@emulated
@pytest.mark.parametrize("bias", [True, False])
def test_results_are_those_of_rounded_operands(arm: Emulator, bias: bool) -> None:
    torch.manual_seed(0)
    kernel = Bf16Linear(bias)
    library = arm.build([kernel])[hash_of(kernel)]
    for m, n, k in SIZES:
        x, weight, shift = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
        out = torch.full((m, n), math.nan)
        given = [x, packed(weight), *([padded(shift)] if bias else []), out]
        assert arm.run(kernel, library, given, [m, n, k], threads=2) == 0
        near = (t.bfloat16().double() for t in (x, weight))
        rows, columns = near
        exact = rows @ columns.t() + (shift.double() if bias else 0)
        size = rows.abs() @ columns.abs().t() + 1
        assert bool(((out.double() - exact).abs() <= torch.finfo(torch.float32).eps * 2 * size).all()), (m, n, k)


@emulated
def test_what_is_not_finite_stays_in_its_row(arm: Emulator) -> None:
    kernel = Bf16Linear()
    x = torch.ones(5, 11)
    x[1, 10], x[3, 2] = math.nan, math.inf
    out = torch.zeros(5, 9)
    assert arm.run(kernel, arm.build([kernel])[hash_of(kernel)], [x, packed(torch.ones(9, 11)), out], [5, 9, 11]) == 0
    assert torch.equal(out.nan_to_num(-1, -2)[:, 0], torch.tensor([11.0, -1, 11, -2, 11]))


@pytest.mark.parametrize("core", CORES)
def test_the_loop_is_products_of_registers(core: str) -> None:
    inner = loops(instructions(Bf16Linear(True), aarch64_target(core)))
    product = max(inner, key=lambda loop: sum(x.startswith("bfmmla") for x in loop))
    count = sum(x.startswith("bfmmla") for x in product)
    assert count == 32 and len(product) <= 1.7 * count, product
    assert not has(product, r"(bl|str|st1|[us]div)\b") and not any(re.search(r"\[sp", x) for x in product)
    assert any(has(loop, r"(bfcvtn?|fcvt)\b") and not has(loop, "fmul") for loop in inner)


def test_it_survives_json_and_needs_bf16() -> None:
    assert from_json(to_json(Bf16Linear(True))) == Bf16Linear(True)
    assert "bfmmla" in Bf16Linear().refused(aarch64_target("neoverse-n1"))
