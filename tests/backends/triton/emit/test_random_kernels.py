"""Random kernels: emitted Triton, run by Triton's interpreter, against the reference interpreter, bit for bit.

The kernels are the same as in the CPU emitter's tests."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusewright.toolkit.ir import interpret, to_text
from fusewright.toolkit.ir.extent import evaluate
from fusewright_triton.emit.emitter import emit
from fusewright_triton.emit.schedule import Config, Tile
from fusewright_triton.runtime import SimulatedLauncher, simulate_kernels
from tests.backends.cpu.test_random_kernels import Case, cases, same_bits

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(case: Case, run: object) -> None:
    """Check that `run` leaves the same buffers as `interpret`."""
    wanted = [t.clone() for t in case.tensors]
    interpret(case.kernel, wanted, case.sizes)
    got = [t.clone() for t in case.tensors]
    run(got, case.sizes)  # type: ignore[operator]
    for a, b in zip(got, wanted, strict=True):
        assert same_bits(a, b), f"{to_text(case.kernel)}\n{case.sizes}\n{a}\n{b}"


@SETTINGS
@given(cases())
def test_agrees_with_the_interpreter(case: Case) -> None:
    check(case, simulate_kernels([case.kernel]).launcher(case.kernel))


@settings(SETTINGS, max_examples=40)
@given(cases(), st.data())
def test_any_configuration_gives_the_same(case: Case, data: st.DataObject) -> None:
    """Blocks with and without a remainder, rows at once or in steps, rows split among programs, 64-bit offsets."""
    kernel = case.kernel
    p, rows = tuple(range(len(kernel.p))), bool(kernel.r)
    # few programs and few steps: the interpreter takes a millisecond for each
    points, length = (_product([evaluate(s, case.sizes) for s in sizes]) for sizes in (kernel.p, kernel.r))
    block = data.draw(st.sampled_from([b for b in (1, 4, 64, 1024) if points <= 10 * b] or [4096]))
    step = data.draw(st.sampled_from([s for s in (2, 16, 64, 1024) if length <= 10 * s] or [4096])) if rows else 0
    tiles = (Tile(p, block),) if p else ()
    if not rows and len(p) == 2 and points < 5000 and data.draw(st.booleans()):
        tiles = (Tile((0,), 8), Tile((1,), 16))
    static = all(isinstance(s, int) for s in kernel.r)
    held = rows and static and data.draw(st.booleans())
    if held:
        step = 1 << max(1, (max(1, length) - 1).bit_length())
    split = data.draw(st.sampled_from([1, 2, 4])) if rows and not held else 1
    config = Config(tiles, step, held, split, 4)
    source = emit(kernel, config, wide=data.draw(st.booleans()), check_division=True)
    torch.manual_seed(0)
    check(case, SimulatedLauncher(kernel, source))


def _product(sizes: list[int]) -> int:
    out = 1
    for s in sizes:
        out *= s
    return out
