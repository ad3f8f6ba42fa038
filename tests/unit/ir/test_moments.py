"""Means and squared deviations become plain sums: the same results, in as many passes as needed."""

import torch

from fusewright.toolkit.ir import Builder, Kernel, symbol
from fusewright.toolkit.ir.interp import interpret
from fusewright.toolkit.ir.verify import verify
from fusewright.toolkit.transform.moments import without_moments


def reductions(kernel: Kernel) -> list[list[str]]:
    return [[n.how for n in s.nodes if n.op == "reduce"] for s in kernel.stages if s.over == "PR"]


def variance(rows: object = 5, also_store: bool = False, mean: bool = True) -> Kernel:
    """Sum of squared deviations of 2 x over rows, and their `mean`; `also_store` also stores 2 x."""
    symbols = {} if isinstance(rows, int) else {"n": 6}
    b = Builder("variance", p=[3], r=[rows], symbols=symbols)  # type: ignore[list-item]
    i, j = b.axes
    x, y = b.input("x", "f32"), b.output("y", "f32")
    v = b.load(x, i * rows + j) * 2  # type: ignore[operator]
    if also_store:
        b.store(b.output("z", "f32"), i * rows + j, v)  # type: ignore[operator]
    b.store(y, i, b.reduce("m2", v) + b.reduce("mean", v) if mean else b.reduce("m2", v))
    return b.build()


def test_a_mean_is_a_sum_and_m2_a_second_pass() -> None:
    kernel = without_moments(variance(mean=False))
    verify(kernel)
    assert reductions(kernel) == [["sum"], ["sum"]]
    assert reductions(without_moments(variance())) == [["sum", "sum"], ["sum"]], "a mean that is read is none of distances"
    assert reductions(without_moments(variance(), short=0)) == [["sum"], ["sum", "sum"]], "sums of squares and of what they lack"


def test_results_are_the_same() -> None:
    x, y = torch.randn(3, 5), torch.empty(3)
    interpret(without_moments(variance()), [x, y])
    v = 2 * x
    torch.testing.assert_close(y, (v - v.mean(1, keepdim=True)).square().sum(1) + v.mean(1))


def test_rows_of_symbolic_size_divide_by_their_size() -> None:
    x, y = torch.randn(3, 6), torch.empty(3)
    interpret(without_moments(variance(symbol("n"))), [x, y], [6])
    torch.testing.assert_close(y, 2 * x.mean(1) + (2 * x).var(1, correction=0) * 6)


def test_nothing_is_read_again_after_a_store_that_may_have_replaced_it() -> None:
    kernel = without_moments(variance(also_store=True))
    verify(kernel)
    before = [[n.op for n in s.nodes] for s in kernel.stages]
    stores = next(k for k, ops in enumerate(before) if "store" in ops)
    assert not any("load" in ops for ops in before[stores + 1 :]) and any(n.keep for n in kernel.nodes())


def test_kernels_without_moments_stay_as_they_are() -> None:
    b = Builder("total", p=[3], r=[5])
    i, j = b.axes
    x, y = b.input("x", "f32"), b.output("y", "f32")
    b.store(y, i, b.reduce("sum", b.load(x, i * 5 + j)))
    kernel = b.build()
    assert without_moments(kernel) is kernel
