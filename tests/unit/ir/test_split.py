"""Long rows of symbolic sizes, split into parts: the same results at every size, even for very few elements."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fusewright.toolkit.ir import Builder, Kernel, interpret, symbol
from fusewright.toolkit.ir.extent import evaluate
from fusewright.toolkit.ir.symbols import Step
from fusewright.toolkit.ir.types import to_torch
from fusewright.toolkit.transform.scans import split_scan
from fusewright.toolkit.transform.split import Split, split_rows
from fusewright.toolkit.transform.split_columns import few_columns, split_columns
from fusewright_cpu.emit.segments import row_end
from fusewright_cpu.run.jit import compile_kernels

TYPES = {"any": "bool", "argmax": "i64"}


def rowwise(how: str, across: bool = False) -> Kernel:
    """A reduction of every row of a tensor [p, r], or of [r, p] with `across`, both sizes unknown."""
    seen = {"p": 48, "r": 9000} if across else {"p": 3, "r": 70000}
    b = Builder(how, p=[symbol("p")], r=[symbol("r")], symbols=seen)
    x, y = b.input("x", "f32"), b.output("y", TYPES.get(how, "f32"))
    i, j = b.axes
    v = b.load(x, j * symbol("p") + i if across else i * symbol("r") + j)
    b.store(y, i, b.reduce(how, v > 2.5 if how == "any" else v))
    return b.build()


def run(kernel: Kernel | Step, tensors: Sequence[torch.Tensor], known: Sequence[int], by_llvm: bool) -> None:
    """Run a kernel of these sizes, or a step of such a kernel."""
    if isinstance(kernel, Step):
        known, kernel = [evaluate(s, known) for s in kernel.sizes], kernel.kernel
    if by_llvm:
        compile_kernels([kernel]).launcher(kernel).checked(tensors, known)
    else:
        interpret(kernel, tensors, known)


def in_parts(split: Split, tensors: Sequence[torch.Tensor], known: Sequence[int], by_llvm: bool) -> None:
    parts = [torch.empty(evaluate(n, known), dtype=to_torch(t)) for t, n in split.partials]
    run(split.first, [*(tensors[b] for b in split.first_buffers), *parts], known, by_llvm)
    run(split.second, [*tensors, *parts], known, by_llvm)


@pytest.mark.parametrize("by_llvm", [False, True], ids=["interpreter", "llvm"])
@pytest.mark.parametrize("how", ["sum", "max", "any", "argmax", "mean"])
@pytest.mark.parametrize("across", [False, True], ids=["rows", "columns"])
def test_parts_of_a_symbolic_row(how: str, across: bool, by_llvm: bool) -> None:
    split = split_rows(rowwise(how, across))
    assert split is not None
    for p, r in ((3, 70000), (1, 32768), (2, 1), (5, 31), (17, 2081), (4, 0)):
        if r == 0 and how in ("argmax", "mean"):
            continue
        x = torch.randn(r, p).t() if across else torch.randn(p, r)
        x[..., r // 2 :: 7] = 4.0
        got = torch.empty(p, dtype=to_torch(TYPES.get(how, "f32")))
        in_parts(split, [x, got], [p, r], by_llvm)
        want = torch.empty_like(got)
        run(rowwise(how, across), [x, want], [p, r], False)
        torch.testing.assert_close(got, want, atol=1e-4 * max(r, 1) ** 0.5, rtol=1e-6)


def scaled(symbolic: bool) -> Kernel:
    """Twice every element, stored, and the sum of each row of them."""
    p, r = (symbol("p"), symbol("r")) if symbolic else (3, 40001)
    b = Builder("scaled", p=[p], r=[r], symbols={"p": 3, "r": 70000} if symbolic else {})
    x, z, y = b.input("x", "f32"), b.output("z", "f32"), b.output("y", "f32")
    i, j = b.axes
    v = b.load(x, i * r + j) * 2
    b.store(z, i * r + j, v)
    b.store(y, i, b.reduce("sum", v))
    return b.build()


@pytest.mark.parametrize("by_llvm", [False, True], ids=["interpreter", "llvm"])
@pytest.mark.parametrize("symbolic", [False, True])
def test_elements_are_stored_by_the_kernel_of_the_parts(symbolic: bool, by_llvm: bool) -> None:
    split = split_rows(scaled(symbolic))
    assert split is not None
    for p, r in ((3, 70000), (1, 32768), (2, 1), (17, 2081), (4, 0)) if symbolic else ((3, 40001),):
        x, z, y = torch.randn(p, r), torch.full((p, r), torch.nan), torch.empty(p)
        in_parts(split, [x, z, y], [p, r] if symbolic else [], by_llvm)
        assert torch.equal(z, 2 * x)
        torch.testing.assert_close(y, z.sum(1), atol=1e-4 * max(r, 1) ** 0.5, rtol=1e-6)


def test_rows_that_were_short_when_seen_stay_whole() -> None:
    b = Builder("short", p=[symbol("p")], r=[symbol("r")], symbols={"p": 3, "r": 700})
    x, y = b.input("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    b.store(y, i, b.reduce("sum", b.load(x, i * symbol("r") + j)))
    assert split_rows(b.build()) is None


def test_passes_over_few_symbolic_columns() -> None:
    b = Builder("norm", p=[symbol("c")], r=[symbol("n")], symbols={"c": 32, "n": 9000})
    x, y = b.input("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    at = j * symbol("c") + i
    v = b.load(x, at)
    b.store(y, at, v - b.reduce("mean", v))
    kernel = b.build()
    steps = split_columns(kernel)
    assert few_columns(kernel) and steps is not None
    for c, n in ((32, 9000), (3, 5), (1, 1)):
        known, data, out = [c, n], torch.randn(n, c), torch.empty(n, c)
        temporaries = [torch.empty(evaluate(k, known), dtype=to_torch(t)) for t, k in steps.temporaries]
        for step in steps.steps:
            run(step, [data, out, *temporaries], known, by_llvm=False)
        torch.testing.assert_close(out, data - data.mean(0))


def counted(p: int | None, r: int | None) -> Kernel:
    """Every hit gets the value at its running count, everything else -1. Sizes of None are symbolic."""
    b = Builder("counted", [symbol("p") if p is None else p], [symbol("r") if r is None else r], {"p": 2, "r": 70000})
    mask, source, y = b.input("mask", "bool"), b.input("source", "f32"), b.output("y", "f32")
    (i, j), row = b.axes, b.r[0]
    hit = b.load(mask, i * row + j)
    number = b.bound(b.scan("sum", b.cast(hit, "i64")) - 1, row, mask=hit)
    b.store(y, i * row + j, b.where(hit, b.load(source, b.indirect(number), hit, 0), -1.0))
    return b.build()


@pytest.mark.parametrize("by_llvm", [False, True], ids=["interpreter", "llvm"])
@pytest.mark.parametrize(("p", "r"), [(2, 32768), (3, 40001), (None, None)])
def test_counting_along_a_row_in_parts(p: int | None, r: int | None, by_llvm: bool) -> None:
    kernel = counted(p, r)
    steps = split_scan(kernel)
    assert steps is not None and len(steps.steps) == 3
    for a, b in [(p, r)] if p and r else [(2, 70000), (3, 1), (1, 257), (5, 40001)]:
        known, mask, source = [a, b], torch.rand(a, b) > 0.4, torch.randn(b)
        y, extra = torch.empty(a, b), [torch.empty(evaluate(n, known), dtype=to_torch(t)) for t, n in steps.temporaries]
        for step in steps.steps:
            run(step, [mask, source, y, *extra], known, by_llvm)
        want = torch.stack([torch.full((b,), -1.0).masked_scatter(row, source) for row in mask])
        assert torch.equal(y, want)


def test_sums_of_floats_are_not_counted_in_parts() -> None:
    b = Builder("cumsum", p=[1], r=[70000])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    b.store(y, b.axes[1], b.scan("sum", b.load(x, b.axes[1])))
    assert split_scan(b.build()) is None


def test_the_last_part_ends_early_without_tests() -> None:
    """Loops of a part stop at the row's end; values that depend on steps beyond it keep their guards."""
    split = split_rows(rowwise("sum"))
    assert split is not None
    (stage,) = (s for s in split.first.kernel.stages if s.over == "PR")
    assert row_end(split.first.kernel, stage, None) is not None
    b = Builder("counted", p=[3], r=[100])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    v = b.load(x, i * 100 + j)
    b.store(y, i, b.reduce("sum", b.where(b.index_value(j) < 60, v, 1.0)))
    kernel = b.build()
    assert all(row_end(kernel, s, None) is None for s in kernel.stages)
