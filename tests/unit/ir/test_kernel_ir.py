"""The kernel IR: staging, axis normal form, verification, hashing, JSON, and the interpreter against
torch."""

import json
from dataclasses import replace

import pytest
import torch

from fusewright.toolkit.ir import (
    Builder,
    Index,
    IndexTooComplex,
    Kernel,
    KernelError,
    from_json,
    interpret,
    structural_hash,
    symbol,
    to_json,
    to_text,
    verify,
)
from fusewright.toolkit.ir.extent import divide, evaluate
from tests.kernels import decayed_maximum, recurrence


def softmax(rows: int = 5, cols: int = 64, name: str = "softmax", buffer: str = "x") -> Kernel:
    b = Builder(name, p=[rows], r=[cols])
    x, y = b.input(buffer, "f32"), b.output("y", "f32")
    i, j = b.axes
    v = b.load(x, i * cols + j)
    e = b.op("exp", v - b.reduce("max", v))
    b.store(y, i * cols + j, e / b.reduce("sum", e))
    return b.build()


def test_softmax_is_three_passes_that_keep_the_exponentials() -> None:
    k = softmax()
    assert [s.over for s in k.stages] == ["PR", "PR", "PR"]
    assert [n.op for n in k.nodes() if n.keep] == ["exp"]
    assert sum(n.op == "load" for n in k.nodes()) == 2, "the cheap load is repeated, the exponentials are not"
    x, y = torch.randn(5, 64), torch.empty(5, 64)
    interpret(k, [x, y])
    torch.testing.assert_close(y, x.softmax(-1))


def test_hash_ignores_names_but_not_sizes() -> None:
    assert structural_hash(softmax()) == structural_hash(softmax(name="other", buffer="input"))
    assert structural_hash(softmax()) != structural_hash(softmax(cols=65))


def test_json_round_trip() -> None:
    k = softmax()
    assert from_json(json.loads(json.dumps(to_json(k)))) == k
    with pytest.raises(ValueError, match="version"):
        from_json({"version": -1})


def test_neighbouring_axes_merge_and_units_vanish() -> None:
    b = Builder("add", p=[4, 1, 6], r=())
    x, y = b.input("x", "f32"), b.output("y", "f32")
    i, u, j = b.axes
    b.store(y, i * 6 + j, b.load(x, i * 6 + u * 7 + j) + 1)
    k = b.build()
    assert k.p == (24,)
    assert "x[p0]" in to_text(k)


def test_a_reshape_splits_the_axis_that_it_divides() -> None:
    b = Builder("reshape", p=[24])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    (i,) = b.axes
    b.store(y, i, b.load(x, i % 6 + i // 6 * 100))
    k = b.build()
    assert k.p == (4, 6)
    assert not any(n.index.divmods for n in k.nodes() if n.index)


def test_an_axis_that_a_division_counts_down_is_not_split() -> None:
    b = Builder("reversed", p=[12])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    (i,) = b.axes
    b.store(y, i, b.load(x, (12 - i) // 2))
    k = b.build()
    assert k.p == (12,)
    out = torch.empty(12)
    interpret(k, [torch.arange(8.0), out])
    assert out.tolist() == [(12 - i) // 2 for i in range(12)]


def test_symbolic_sizes_merge_too() -> None:
    b = Builder("add", p=[symbol("s"), 8], symbols={"s": 100})
    x, y = b.input("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    b.store(y, i * 8 + j, b.load(x, i * 8 + j) + 1)
    k = b.build()
    assert k.p == (symbol(0) * 8,)
    out = torch.empty(3, 8)
    interpret(k, [torch.zeros(3, 8), out], sizes=[3])
    assert bool((out == 1).all())


def test_polynomials_are_canonical() -> None:
    a, b = symbol("a"), symbol("b")
    assert (a + b) * 2 - a == a + b * 2
    assert a - a == 0
    assert divide(a * b * 6, a * 2) == b * 3
    assert divide(a + 1, 2) is None
    assert evaluate(a * a + b - 3, {"a": 4, "b": 5}) == 18


def test_division_of_a_division_is_refused_or_simplified() -> None:
    i = Index(coefs=((0, 1),), sizes=(48,))
    assert ((i // 2) % 12) // 3 == (i // 6) % 4
    with pytest.raises(IndexTooComplex):
        _ = ((i // 2) % 12) // 5


@pytest.mark.parametrize("shift", [0, 3, 53])
def test_a_shifted_quotient_is_divided_again(shift: int) -> None:
    """Rows of an image that is rolled, out of windows of 7 x 7."""
    y = torch.arange(96)
    i = Index(coefs=((0, 1),), sizes=(96,))
    cases = [
        ((i // 8 + shift) % 12, (y // 8 + shift) % 12),
        (i // 8 + shift, y // 8 + shift),
        ((i // 8 + shift) // 3, (y // 8 + shift) // 3),
        ((i % 12 + shift) % 12, (y % 12 + shift) % 12),
        ((i % 12 + shift) % 4, (y % 12 + shift) % 4),
        ((i // 8 + shift) % 12 // 3, (y // 8 + shift) % 12 // 3),
        ((i // 8 + shift) % 12 % 3, (y // 8 + shift) % 12 % 3),
    ]
    for index, expected in cases:
        b = Builder("shifted", p=[96])
        x, out = b.input("x", "f32"), b.output("out", "f32")
        b.store(out, b.axes[0], b.load(x, index))
        made = torch.empty(96)
        interpret(b.build(), [torch.arange(200.0), made])
        assert torch.equal(made, expected.float())
    with pytest.raises(IndexTooComplex):
        _ = (i % 12 + 1) // 3


def test_verifier_names_the_offending_line() -> None:
    k = softmax()
    first = k.stages[0]
    half = replace(first.nodes[0], dtype="f64")
    with pytest.raises(KernelError, match="buffer x holds f32"):
        verify(replace(k, stages=(replace(first, nodes=(half, *first.nodes[1:])), *k.stages[1:])))
    with pytest.raises(KernelError, match="before it is defined"):
        verify(replace(k, stages=k.stages[1:]))


def test_half_math_needs_a_cast() -> None:
    b = Builder("bad", p=[4])
    x, y = b.input("x", "bf16"), b.output("y", "bf16")
    v = b.load(x, b.axes[0])
    b.store(y, b.axes[0], v + v)
    with pytest.raises(KernelError, match="needs a cast"):
        b.build()


def test_gather_checks_its_index() -> None:
    b = Builder("embedding", p=[3, 4])
    ids, table, y = b.input("ids", "i64"), b.input("table", "f32"), b.output("y", "f32")
    i, j = b.axes
    row = b.bound(b.load(ids, i), 10)
    b.store(y, i * 4 + j, b.load(table, b.indirect(row, 4) + j))
    k = b.build()
    table_t, out = torch.randn(10, 4), torch.empty(3, 4)
    interpret(k, [torch.tensor([0, 9, 3]), table_t, out])
    assert torch.equal(out, table_t[[0, 9, 3]])
    with pytest.raises(IndexError):
        interpret(k, [torch.tensor([0, 10, 3]), table_t, out])


def test_scan_value_is_kept_for_later_stages() -> None:
    b = Builder("normalised_cumsum", p=[3], r=[7])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    c = b.scan("sum", b.load(x, i * 7 + j))
    b.store(y, i * 7 + j, c / b.reduce("max", c))
    k = b.build()
    assert [n.op for n in k.nodes() if n.keep] == ["scan"]
    x_t, out = torch.rand(3, 7), torch.empty(3, 7)
    interpret(k, [x_t, out])
    torch.testing.assert_close(out, x_t.cumsum(-1) / x_t.cumsum(-1).amax(-1, keepdim=True))


def test_in_place_reuse_needs_equal_indices() -> None:
    k = softmax()
    assert k.may_share(out=1, source=0)
    b = Builder("flip", p=[8])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    (i,) = b.axes
    b.store(y, i, b.load(x, 7 - i))
    assert not b.build().may_share(out=1, source=0)


@pytest.mark.parametrize("first", [None, 0.0])
def test_a_recurrence_is_a_loop_over_its_steps(first: float | None) -> None:
    a, b, h = torch.randn(6, 37, 5), torch.randn(6, 37, 5), torch.randn(6, 5)
    out = torch.empty_like(b)
    interpret(recurrence(first=first), [a, b, h, out])
    state = h if first is None else torch.zeros_like(h)
    for t in range(37):
        state = a[:, t] * state + b[:, t]
        assert torch.equal(out[:, t], state)


def test_a_step_reads_what_another_computed() -> None:
    a, b, out, second = torch.randn(5), torch.randn(6, 37, 5), torch.empty(6, 37, 5), torch.empty(6, 37, 5)
    interpret(decayed_maximum(), [a, b, out, second])
    m = n = torch.full((6, 5), -1e38)
    for t in range(37):
        m = torch.maximum(m + a, b[:, t])
        n = torch.tanh(n * m)
        assert torch.equal(out[:, t], m) and torch.equal(second[:, t], n)


@pytest.mark.parametrize(("other", "outside", "selects"), [(0, 0.0, 0), (0, -0.0, 1), (0, 1.0, 1), (1, 1.0, 1)])
def test_an_element_that_is_zero_where_it_is_not_loaded_is_not_selected_again(other: float, outside: float, selects: int) -> None:
    b = Builder("shifted", p=[6])
    x, y = b.input("x", "bf16"), b.output("y", "f32")
    (i,) = b.axes
    inside = b.index_value(i) >= 1
    b.store(y, i, b.where(inside, b.cast(b.load(x, i - 1, inside, other), "f32"), outside))
    k = b.build()
    assert sum(n.op == "where" for n in k.nodes()) == selects
    out = torch.empty(6)
    interpret(k, [torch.arange(6.0).bfloat16(), out])
    assert str(out.tolist()) == str([outside, 0.0, 1.0, 2.0, 3.0, 4.0])
