"""Kernels for 64-bit Arm, run under QEMU and compared with the reference interpreter and torch. No Arm hardware is involved.

Every buffer ends at a guard page, so that a read or write past the last element crashes the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, given, settings

from ci.aarch64.emulator import Emulator, missing
from fusewright.toolkit.ir import Builder, Kernel, interpret, to_text
from fusewright.toolkit.ir.extent import evaluate
from fusewright.toolkit.ir.types import from_torch, to_torch
from fusewright_cpu.emit.math import MATH
from fusewright_cpu.kernels.by_hand import Attention, Depthwise, Gemv
from fusewright_cpu.run.sources import hash_of
from fusewright_cpu.target import aarch64_target
from tests.backends.cpu import test_attention as attention
from tests.backends.cpu.emit import test_math as elementary
from tests.backends.cpu.kernels import test_gemv as gemv
from tests.backends.cpu.test_aarch64_assembly import KERNELS, reversed_places
from tests.backends.cpu.test_random_kernels import SETTINGS, Case, cases, same_bits
from tests.backends.cpu.test_targets import transposed, weighted_pairs
from tests.backends.onednn.kernels import test_depthwise_kernel as depthwise
from tests.kernels import cumsum

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
RANDOM = 25


@pytest.fixture(scope="module", params=["neoverse-n1", "neoverse-v1", "neoverse-v2"])
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with Emulator(aarch64_target(request.param), tmp_path_factory.mktemp(request.param)) as emulator:
        yield emulator


def random_cases(count: int) -> list[Case]:
    """The first cases of the strategy, to be compiled together."""
    found: list[Case] = []

    @settings(SETTINGS, max_examples=count, derandomize=True, phases=[Phase.generate], database=None)
    @given(cases())
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def test_random_kernels_agree_with_the_interpreter(arm: Emulator) -> None:
    drawn = random_cases(RANDOM)
    libraries = arm.build([c.kernel for c in drawn])
    for case in drawn:
        wanted, got = ([t.clone() for t in case.tensors] for _ in range(2))
        interpret(case.kernel, wanted, case.sizes)
        assert arm.run(case.kernel, libraries[hash_of(case.kernel)], got, case.sizes, threads=3) == 0
        assert all(map(same_bits, got, wanted)), f"{to_text(case.kernel)}\n{case.sizes}"


def run(arm: Emulator, kernel: Kernel, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The last tensor, which the kernel writes."""
    assert arm.run(kernel, arm.build([kernel])[hash_of(kernel)], tensors, threads=2) == 0
    return tensors[-1]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_models_are_as_near_to_fp64_as_the_interpreter(arm: Emulator, name: str, dtype: str) -> None:
    kernel = KERNELS[name](dtype)
    sizes = [1003] if len(kernel.sizes) == 1 else [math.prod(n for n in kernel.sizes if isinstance(n, int))]
    count = {"w": 1003, "b": 1003, "out": kernel.p[0] if "sum" in name else sizes[0]}
    made = [(torch.rand(evaluate(count.get(b.name, sizes[0]), [])) * 3 + 0.1).to(to_torch(b.dtype)) for b in kernel.buffers]
    near, exact = ([t.clone() for t in made] for _ in range(2))
    interpret(kernel, near)
    interpret(kernel, exact, exact=True)
    got, want = run(arm, kernel, made).double(), exact[-1].double()
    theirs, eps = float((near[-1].double() - want).abs().max()), torch.finfo(made[-1].dtype).eps
    assert float((got - want).abs().max()) <= 2 * theirs + 2 * eps * float(want.abs().max())


@pytest.mark.parametrize("name", sorted(elementary.EXACT))
def test_elementary_functions_are_within_their_bounds(arm: Emulator, name: str) -> None:
    """Polynomials are evaluated in a different order than on x86."""
    x = elementary.sweep(200_003, near=8)
    b = Builder(name, p=[x.numel()])
    i, source, out = b.axes[0], b.input("x", "f32"), b.output("y", "f32")
    b.store(out, i, b.op(name, b.load(source, i)))
    got = run(arm, b.build(), [x, torch.empty_like(x)])
    assert elementary.ulps(got, elementary.EXACT[name](x.double())) <= MATH[name].ulp
    assert name != "erf" or bool(((got.abs() <= 1) | x.isnan()).all())
    assert name not in elementary.ODD or torch.equal(torch.signbit(got)[x == 0], torch.signbit(x)[x == 0])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_lengths_around_whole_steps(arm: Emulator, dtype: str) -> None:
    """Lengths of unrolled steps, of whole vectors, and of a partial last vector."""
    for n in (1, 3, 4, 7, 15, 16, 31, 36, 53):
        x, y = torch.randint(-9, 9, (2, n)).to(to_torch(dtype))
        b = Builder("add", p=[n])
        i, (p, q), out = b.axes[0], (b.input("x", dtype), b.input("y", dtype)), b.output("out", dtype)
        b.store(out, i, (b.load(p, i).to("f32") + b.load(q, i).to("f32")).to(dtype))
        assert torch.equal(run(arm, b.build(), [x, y, torch.empty_like(x)]), x + y)


def test_bf16_rounds_to_even_and_keeps_subnormals_and_nan(arm: Emulator) -> None:
    bits = torch.arange(0, 2**32, 655211, dtype=torch.int64)
    x = torch.cat([bits.to(torch.int32).view(torch.float32), torch.tensor([math.nan, math.inf, 1e-40, -1e-40])])
    b = Builder("round", p=[x.numel()])
    a, y = b.input("x", "f32"), b.output("y", "bf16")
    b.store(y, b.axes[0], b.load(a, b.axes[0]).to("bf16"))
    got, want = run(arm, b.build(), [x, torch.empty(x.shape, dtype=torch.bfloat16)]), x.bfloat16()
    odd = want.isnan()
    assert torch.equal(odd, got.isnan()) and torch.equal(got[~odd].view(torch.int16), want[~odd].view(torch.int16))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_tiles_and_pairs(arm: Emulator, dtype: str) -> None:
    x = torch.randint(-9, 9, (40, 73)).to(to_torch(dtype))
    assert torch.equal(run(arm, transposed(73, dtype), [x, torch.empty(73, 40, dtype=x.dtype)]), x.t())
    pairs = x.view(-1)[: 2 * 73]
    assert torch.equal(
        run(arm, weighted_pairs(73, dtype), [pairs, torch.empty(73)]), pairs[::2].float() + 2 * pairs[1::2].float()
    )


def test_lanes_that_change_places(arm: Emulator) -> None:
    x = torch.randn(40, 136)
    assert torch.equal(run(arm, transposed(136, "f32"), [x, torch.empty(136, 40)]), x.t())
    for places in (2, 3, 5):
        flat = torch.randn(200, places)
        assert torch.equal(run(arm, reversed_places(200, places), [flat, torch.empty(200, places)]), flat.flip(1) * 2)
    got = run(arm, cumsum(4, 130), [x[:4, :130].contiguous(), torch.empty(4, 130)])
    torch.testing.assert_close(got, x[:4, :130].cumsum(1))


@pytest.fixture
def attended(arm: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the attention tests with the emulated kernel."""

    def emulated(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False,
        scale: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        b, h, rows, width = q.shape
        kernel = Attention(from_torch(q.dtype), width, "" if mask is None else from_torch(mask.dtype), causal)
        masks = [] if mask is None else [mask.expand(b, h, rows, k.shape[2]).contiguous()]
        tensors = [q, k, v, *masks, torch.full_like(q, math.nan)]
        sizes = [b, h, rows, k.shape[2], *(s for t in tensors for s in t.stride()[:3])]
        library = arm.build([kernel])[hash_of(kernel)]
        assert (
            arm.run(kernel, library, tensors, sizes, [1 / math.sqrt(width) if scale is None else scale], threads=2) == 0
        )
        return tensors[-1]

    monkeypatch.setattr(attention, "run", emulated)


@pytest.mark.usefixtures("attended")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("rows", "keys", "width"), [(9, 20, 7), (30, 300, 80)])
def test_attention(rows: int, keys: int, width: int, causal: bool, dtype: torch.dtype) -> None:
    attention.assert_exact(attention.qkv(dtype, rows, keys, width), causal=causal)


@pytest.mark.usefixtures("attended")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_masks(dtype: torch.dtype) -> None:
    for kind in (torch.bfloat16, torch.bool):
        attention.test_masks((2, 1, 30, 35), kind, dtype)
    attention.test_rows_without_a_key_are_zero_as_in_eager(dtype)


@pytest.mark.usefixtures("attended")
@pytest.mark.parametrize("where", [0, 2])
def test_what_is_not_finite_spreads_in_attention(where: int) -> None:
    attention.test_what_is_not_finite_spreads_as_in_eager(where, math.nan)


@pytest.mark.parametrize("rows", [1, 4])
def test_products_of_few_rows(arm: Emulator, rows: int) -> None:
    kinds = [g for g in gemv.KINDS if g.rows == rows]
    libraries = arm.build(kinds)

    def emulated(g: Gemv, tensors: list[torch.Tensor], sizes: list[int]) -> None:
        assert arm.run(g, libraries[hash_of(g)], tensors, sizes, threads=2) == 0

    for g in kinds:
        for n, k in gemv.SIZES:
            gemv.assert_exact(g, n, k, emulated)


@pytest.mark.parametrize("d", [d for d in depthwise.KINDS if d.stride == (1, 1) or d.dtype == "f32"], ids=lambda d: d.name)
def test_depthwise_convolutions(arm: Emulator, d: Depthwise, monkeypatch: pytest.MonkeyPatch) -> None:
    library = arm.build([d])[hash_of(d)]

    def emulated(d: Depthwise, tensors: list[torch.Tensor], sizes: list[int], limits: list[float]) -> None:
        assert arm.run(d, library, tensors, sizes, limits, threads=2) == 0

    monkeypatch.setattr(depthwise, "launch", emulated)
    for n, c, h, w in ((1, 1, 5, 5), (2, 37, 6, 9)):
        depthwise.Case.random(d, n, c, h, w, (1, 2, 2, 1)).check()
