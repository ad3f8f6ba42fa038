"""Index checks in kernels: they are side effects and raise eager's messages."""

from __future__ import annotations

import pytest
import torch

from fusewright.toolkit.ir import Builder, Kernel, checks, from_json, interpret, structural_hash, symbol, to_json
from fusewright.toolkit.ir.ir import Node
from fusewright_cpu.run.jit import compile_kernels

FIRST = "IndexError: the first index {index} of {size}"
SECOND = "RuntimeError: the second index {index}"


def unused_checks(rows: bool = False) -> Kernel:
    """y[i] = 1 (or the sum of a row of ones), with checks of two indices that are not used."""
    b = Builder("ones", p=[20], r=[3] if rows else [])
    ids, y = b.input("ids", "i64"), b.output("y", "f32")
    i = b.axes[0]
    place = i * 3 + b.axes[1] if rows else i
    given = b.load(ids, place)
    b.bound(given, 5, says=FIRST)
    b.bound(given, 4, wrap=True, says=SECOND)
    one = b.const(1, "f32")
    b.store(y, i, b.reduce("sum", one) if rows else one)
    return b.build()


def bounds(kernel: Kernel) -> list[Node]:
    return [n for n in kernel.nodes() if n.op == "bound"]


@pytest.mark.parametrize("rows", [False, True])
def test_a_check_whose_result_nobody_uses_stays(rows: bool) -> None:
    kernel = unused_checks(rows)
    assert [n.says for n in bounds(kernel)] == [FIRST, SECOND]
    ids = torch.zeros(60, dtype=torch.int64)
    out = torch.empty(20)
    interpret(kernel, [ids, out])
    assert torch.equal(out, torch.full((20,), 3.0 if rows else 1.0))


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (9, IndexError, "the first index 9 of 5"),
        (-9, IndexError, "the first index -9 of 5"),
        (-3, IndexError, "the first index -3 of 5"),
        (4, RuntimeError, "the second index 4"),
        (1 << 60, IndexError, "the first index 36028797018963967 of 5"),
    ],
)
def test_what_failed_first_is_said(rows: bool, value: int, kind: type[Exception], text: str) -> None:
    """Of several failures, that of the earliest op and its first element is reported. Indices too large for the error
    word are clamped."""
    kernel = unused_checks(rows)
    ids, out = torch.zeros(60, dtype=torch.int64), torch.empty(20)
    ids[7], ids[13] = value, 4
    launch = compile_kernels([kernel]).launcher(kernel)
    with pytest.raises(kind) as e:
        launch([ids, out])
    assert type(e.value) is kind and str(e.value) == text
    if abs(value) < 1 << 55:
        with pytest.raises(kind) as interpreted:
            interpret(kernel, [ids, out])
        assert str(interpreted.value) == text
    launch([ids * 0, out])


def test_a_symbolic_size_is_the_one_of_the_call() -> None:
    n = symbol("n")
    b = Builder("take", p=[4], symbols={"n": 10})
    ids, x, y = b.input("ids", "i64"), b.input("x", "f32"), b.output("y", "f32")
    b.store(y, b.axes[0], b.load(x, b.indirect(b.bound(b.load(ids, b.axes[0]), n, says=FIRST))))
    kernel = b.build()
    launch = compile_kernels([kernel]).launcher(kernel)
    launch([torch.tensor([0, 6, 1, 2]), torch.randn(7), torch.empty(4)], [7])
    with pytest.raises(IndexError, match="the first index 6 of 6"):
        launch([torch.tensor([0, 6, 1, 2]), torch.randn(6), torch.empty(4)], [6])


def test_a_masked_check_sees_what_its_mask_shows() -> None:
    b = Builder("masked", p=[16])
    ids, y = b.input("ids", "i64"), b.output("y", "f32")
    given = b.load(ids, b.axes[0])
    b.bound(given, 5, mask=given.ne(9))
    b.store(y, b.axes[0], b.const(1, "f32"))
    kernel = b.build()
    launch = compile_kernels([kernel]).launcher(kernel)
    launch([torch.full((16,), 9), torch.empty(16)])
    with pytest.raises(IndexError, match="index 8 is out of bounds for size 5"):
        launch([torch.full((16,), 8), torch.empty(16)])


def test_what_a_check_says_is_part_of_the_kernel() -> None:
    kernel = unused_checks()
    assert from_json(to_json(kernel)) == kernel
    other = Builder("ones", p=[20])
    ids, y = other.input("ids", "i64"), other.output("y", "f32")
    given = other.load(ids, other.axes[0])
    other.bound(given, 5, says=SECOND)
    other.bound(given, 4, wrap=True, says=SECOND)
    other.store(y, other.axes[0], other.const(1, "f32"))
    assert structural_hash(other.build()) != structural_hash(kernel)


@pytest.mark.parametrize("index", [0, -1, 7, -(1 << 55), (1 << 55) - 1])
def test_an_error_word_holds_the_check_and_the_index(index: int) -> None:
    word = checks.word(3, index)
    assert (word & 0xFF, word >> 8) == (3, index)


def test_a_division_by_zero_is_told_apart() -> None:
    assert str(checks.error(unused_checks(), checks.ZERO_DIVISION, [])) == "ZeroDivisionError"
