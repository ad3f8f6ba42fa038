"""The int8 linear of Arm CPUs: its code for each core, and its results under QEMU against int64."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ci.aarch64.emulator import Emulator, missing
from fusewright.toolkit.ir.types import to_torch
from fusewright_cpu.kernels.arm.int8_linear import packed, padded
from fusewright_cpu.kernels.by_hand import Int8Linear, form_of
from fusewright_cpu.run.sources import from_json, hash_of, to_json
from fusewright_cpu.target import aarch64_target, x86_target
from tests.backends.cpu.assembly import has, instructions, loops

CORES = {"neoverse-n1": "sdot", "neoverse-v1": "smmla", "neoverse-v2": "smmla"}
emulated = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module", params=CORES)
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with Emulator(aarch64_target(request.param), tmp_path_factory.mktemp(request.param)) as emulator:
        yield emulator


def assert_exact(arm: Emulator, kernel: Int8Linear, library: Path, m: int, n: int, k: int, per_row: bool) -> None:
    """Check results bit for bit: sums are exact, scaled in fp64 and rounded once."""
    torch.manual_seed(0)
    info, count = torch.iinfo(to_torch(kernel.x)), m if per_row else 1
    x = torch.randint(info.min, info.max + 1, (m, k), dtype=torch.int64).to(to_torch(kernel.x))
    weight, w_zero = torch.randint(-128, 128, (n, k), dtype=torch.int8), torch.zeros(n, dtype=torch.int32)
    if kernel.zeros:
        w_zero = torch.randint(-128, 128, (n,), dtype=torch.int32)
    w_scale, x_scale, bias = torch.rand(n) + 0.1, torch.rand(count) + 0.1, torch.randn(n) * 100
    x_zero = torch.randint(info.min, info.max + 1, (count,), dtype=torch.int32)
    columns = [padded(w_scale), padded(weight.sum(1).to(torch.int32)), x_scale, x_zero] if kernel.scaled else []
    columns += [padded(t) for t, there in ((w_zero, kernel.zeros), (bias, kernel.bias)) if there]
    out = torch.full((m, n), -1, dtype=to_torch(kernel.out))
    given = [x, packed(weight, kernel.form), *columns, out]
    assert arm.run(kernel, library, given, [m, n, k, int(per_row)], threads=2) == 0
    if kernel.scaled:
        sums = (x.long() - x_zero[:, None]) @ (weight.long() - w_zero[:, None]).t()
        wide = sums.double() * (x_scale.double()[:, None] * w_scale.double())
        assert torch.equal(out, (wide + bias.double() if kernel.bias else wide).float().to(out.dtype))
    else:
        assert torch.equal(out, (x.long() @ weight.long().t()).to(torch.int32))


FORMS = [("i8", "f32", True, False), ("u8", "f32", False, True), ("u8", "bf16", True, False), ("i8", "bf16", True, True),
         ("i8", "i32", False, False)]  # fmt: skip


@emulated
@pytest.mark.parametrize(("x", "out", "bias", "zeros"), FORMS)
def test_results_are_those_of_integers(arm: Emulator, x: str, out: str, bias: bool, zeros: bool) -> None:
    kernel = Int8Linear(x, out, form_of(arm.target), bias, zeros)
    library = arm.build([kernel])[hash_of(kernel)]
    for m, n, k, per_row in [
        (1, 1, 1, True), (2, 5, 7, False), (3, 8, 16, True), (11, 70, 100, True), (33, 9, 33, False), (75, 130, 24, True),
    ]:  # fmt: skip
        assert_exact(arm, kernel, library, m, n, k, per_row)


@pytest.mark.parametrize(("core", "form"), CORES.items())
def test_the_loop_is_products_of_registers(core: str, form: str) -> None:
    target = aarch64_target(core)
    assert form_of(target) == form
    inner = loops(instructions(Int8Linear("u8", "f32", form, True), target))
    product = max(inner, key=lambda loop: sum(x.startswith(form) for x in loop))
    count = sum(x.startswith(form) for x in product)
    assert count == (32 if form == "smmla" else 64) and len(product) <= 1.7 * count, product
    assert not has(product, r"(bl|str|st1|[us]div)\b") and not any(re.search(r"\[sp", x) for x in product)


def test_targets_that_it_is_not_written_for() -> None:
    assert form_of(x86_target("avx512")) == "" and form_of(aarch64_target("generic")) == ""
    assert "smmla or sdot" in Int8Linear("i8", "f32", "smmla").refused(aarch64_target("neoverse-n1"))
    for wrong in (Int8Linear("i16", "f32", "smmla"), Int8Linear("u8", "i32", "smmla"), Int8Linear("i8", "i32", "smmla", bias=True)):
        assert "int8 and uint8" in wrong.refused(aarch64_target("neoverse-v1"))


def test_it_survives_json() -> None:
    kernel = Int8Linear("u8", "bf16", "smmla", bias=True)
    assert from_json(to_json(kernel)) == kernel and hash_of(kernel) != hash_of(Int8Linear("u8", "bf16", "smmla"))
