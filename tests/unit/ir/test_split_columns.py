"""Few long columns: each pass is reduced in parts by its own kernel, and a kernel shared by all threads stores."""

import torch

from fusewright.toolkit.ir import Builder, Kernel, interpret
from fusewright.toolkit.ir.types import to_torch
from fusewright.toolkit.transform.split import split_rows
from fusewright.toolkit.transform.split_columns import few_columns, split_columns


def norm(rows: int = 8192, columns: int = 32, across: bool = True) -> Kernel:
    """Each column minus its mean, divided by the square root of its m2; also stores the mean."""
    b = Builder("norm", p=[columns], r=[rows])
    i, j = b.axes
    at = j * columns + i if across else i * rows + j
    x, y, m = b.input("x", "f32"), b.output("y", "f32"), b.output("m", "f32")
    v = b.load(x, at)
    mean, m2 = b.reduce("mean", v), b.reduce("m2", v)
    b.store(y, at, (v - mean) * b.op("rsqrt", m2))
    b.store(m, i, mean)
    return b.build()


def total(rows: int, columns: int) -> Kernel:
    b = Builder("total", p=[columns], r=[rows])
    i, j = b.axes
    x, y = b.input("x", "f32"), b.output("y", "f32")
    b.store(y, i, b.reduce("sum", b.load(x, j * columns + i)))
    return b.build()


def test_the_steps_give_what_the_kernel_gives() -> None:
    kernel = norm()
    steps = split_columns(kernel)
    assert few_columns(kernel) and steps is not None
    x = torch.randn(8192, 32) + 3
    y, m = torch.empty_like(x), torch.empty(32)
    temporaries = [torch.empty(n, dtype=to_torch(t)) for t, n in steps.temporaries]
    for step in steps.steps:
        interpret(step.kernel, [x, y, m, *temporaries])
    mean = x.double().mean(0)
    torch.testing.assert_close(m, mean.float())
    torch.testing.assert_close(y, ((x - mean) / (x - mean).square().sum(0).sqrt()).float())


def test_every_pass_over_the_rows_runs_in_parts_and_elements_are_shared() -> None:
    steps = split_columns(norm())
    assert steps is not None
    kernels = [s.kernel for s in steps.steps]
    rows = [k for k in kernels if k.r]
    assert len(rows) == 2 and all(split_rows(k) is not None for k in rows)
    assert kernels[-1].p == (8192, 32)


def test_a_column_sum_is_one_pass_and_runs_in_parts() -> None:
    kernel = total(8192, 64)
    assert split_columns(kernel) is None and split_rows(kernel) is not None


def test_rows_along_memory_short_columns_and_many_of_them_stay_whole() -> None:
    assert not few_columns(norm(across=False))
    assert not few_columns(norm(rows=1024, columns=256))
    assert split_rows(total(4096, 1024)) is None
