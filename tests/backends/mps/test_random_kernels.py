"""Random kernels: emitted Metal against the reference interpreter, bit for bit, run by the shim with every access checked.

The kernels are those of the CPU emitter's tests. Several go into one library, because compilation dominates the time."""

from __future__ import annotations

import math

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fusewright.toolkit.ir import interpret, structural_hash, to_text
from fusewright.toolkit.ir.extent import evaluate
from fusewright_mps.emit.schedule import Config, choose
from fusewright_mps.emitter import Variant, emit, library
from fusewright_mps.simulate.library import compile_shader
from fusewright_mps.target import TARGETS, TYPICAL
from tests.backends.cpu.test_random_kernels import Case, cases, same_bits
from tests.backends.mps.simulated import Module

SETTINGS = settings(
    max_examples=7, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)  # each shrinking step would run the compiler, and printed kernels are readable anyway


LARGEST = 20000


def metal_has_it(case: Case) -> bool:
    """Whether the case uses no f64 and runs quickly."""
    points = math.prod(max(1, evaluate(s, case.sizes)) for s in case.kernel.sizes)
    return points <= LARGEST and all(n.dtype != "f64" for n in case.kernel.nodes())


def different(found: list[Case]) -> list[Case]:
    """Keep one case per kernel: libraries identify functions by the kernel's hash."""
    return list({structural_hash(c.kernel): c for c in found}.values())


batches = st.lists(cases().filter(metal_has_it), min_size=8, max_size=8).map(different)


def check(module: Module, found: list[Case]) -> None:
    for k, case in enumerate(found):
        wanted = [t.clone() for t in case.tensors]
        interpret(case.kernel, wanted, case.sizes)
        got = [t.clone() for t in case.tensors]
        module.run(k, got, case.sizes)
        for a, b in zip(got, wanted, strict=True):
            assert same_bits(a, b), f"{to_text(case.kernel)}\n{module.sources[k].text}\n{case.sizes}\n{a}\n{b}"


@SETTINGS
@given(batches, st.booleans(), st.sampled_from(list(TARGETS)))
def test_agrees_with_the_interpreter(found: list[Case], aligned: bool, chip: str) -> None:
    sources = [emit(c.kernel, Variant(aligned, check_division=True), TARGETS[chip]) for c in found]
    check(Module(sources, compile_shader(library(sources), checked=True)), found)


@SETTINGS
@given(batches, st.data())
def test_any_configuration_gives_the_same_whoever_runs_first(found: list[Case], data: st.DataObject) -> None:
    """A row per thread, simdgroup, threadgroup or columns of threads, held or read again, with 64-bit offsets."""
    sources = []
    for c in found:
        variant = Variant(data.draw(st.booleans()), data.draw(st.booleans()), check_division=True)
        sources.append(emit(c.kernel, variant, config=data.draw(configs(c, variant))))
    check(Module(sources, compile_shader(library(sources), checked=True, backward=True)), found)


@st.composite
def configs(draw: st.DrawFn, case: Case, variant: Variant) -> Config | None:
    kernel = case.kernel
    if not kernel.r or draw(st.booleans()):
        return None
    formula = choose(kernel, TYPICAL, variant.aligned)
    n_p, last = len(kernel.p), len(kernel.sizes) - 1
    order = tuple(reversed(range(n_p)))
    workers = draw(st.sampled_from(["thread", "simd", "group", *(["columns"] if n_p else [])]))
    if workers == "thread":
        return Config("thread", 1, None, 1, order, (64, 1, 1))
    if workers == "columns":
        count = draw(st.sampled_from([1, 3, 8]))
        return Config("columns", count, last, 1, order, (32, count, 1))
    count = 32 if workers == "simd" else draw(st.sampled_from([32, 96, 256]))
    together = draw(st.sampled_from([1, 4])) if workers == "simd" and n_p else 1
    vector = formula.vector if formula.along == last else 1
    row = math.prod(evaluate(s, case.sizes) for s in kernel.r)
    static = all(isinstance(s, int) for s in kernel.r)
    held = -(-row // (count * vector)) if static and draw(st.booleans()) else 0
    group = count * together
    return Config("simd" if workers == "simd" else "group", count, last, vector, order, (group, 1, 1), held)


def test_same_bits_means_something() -> None:
    assert not same_bits(torch.tensor([1.0]), torch.tensor([2.0]))
