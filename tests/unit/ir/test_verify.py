"""The specification of kernels: built kernels obey it, and each deliberate violation is found by its rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from fusewright.toolkit.ir import Builder, Index, Kernel, KernelError, Scalar, Stage, symbol, verify
from fusewright.toolkit.ir.ir import Node
from fusewright.toolkit.ir.verify import KERNEL, RULES
from tests.backends.cpu.test_random_kernels import SETTINGS, Case, cases
from tests.kernels import recurrence
from tests.unit.ir.test_kernel_ir import softmax


def gathered() -> Kernel:
    """Gather rows of a table by checked indices under a mask, multiply by a scalar, and scatter-add by other indices."""
    b = Builder("gathered", p=[symbol("n"), 4], symbols={"n": 3})
    ids, table = b.input("ids", "i64"), b.input("table", "f32")
    total, half = b.inout("total", "f32"), b.output("half", "bf16")
    i, j = b.axes
    row = b.bound(b.load(ids, i), 10)
    v = b.load(table, b.indirect(row, 4) + j, row < 5, 1.0) * b.scalar("factor", "f32")
    b.store(total, b.indirect(row, 4) + j, b.where(v > 0, v, 2.0), how="add")
    b.store(half, i * 4 + j, v.to("bf16"))
    return b.build()


def counted() -> Kernel:
    """Cumulative sums of each row, and the position of its largest element."""
    b = Builder("counted", p=[6], r=[50])
    x, y, at = b.input("x", "i64"), b.output("y", "i64"), b.output("at", "i64")
    i, j = b.axes
    v = b.load(x, i * 50 + j)
    b.store(y, i * 50 + j, b.scan("sum", v))
    b.store(at, i, b.reduce("argmax", v))
    return b.build()


def edited(kernel: Kernel, op: str, change: Callable[[Node], Node]) -> Kernel:
    """Change the kernel's first node of that op."""
    first = next(n for n in kernel.nodes() if n.op == op)
    stages = (replace(s, nodes=tuple(change(n) if n is first else n for n in s.nodes)) for s in kernel.stages)
    return replace(kernel, stages=tuple(stages))


def node(kernel: Kernel, which: str, /, **changes: Any) -> Kernel:
    return edited(kernel, which, lambda n: replace(n, **changes))


def indexed_by_its_value(n: Node) -> Node:
    assert n.index is not None
    return replace(n, index=replace(n.index, indirect=(replace(n.index.indirect[0], value=n.args[0]),)))


def times_an_index(n: Node) -> Node:
    return replace(n, args=(next(n.id for n in gathered().nodes() if n.op == "load"), n.args[1]))


def access(kernel: Kernel, k: int, how: Any) -> Kernel:
    return replace(kernel, buffers=tuple(replace(b, access=how) if n == k else b for n, b in enumerate(kernel.buffers)))


MUTATIONS: dict[str, tuple[str, Callable[[], Kernel]]] = {
    "a size of no symbol": ("parameters", lambda: replace(gathered(), hints=())),
    "an axis of a negative size": ("parameters", lambda: replace(gathered(), p=(-2, *gathered().p[1:]))),
    "a scalar of a half type": ("parameters", lambda: replace(gathered(), scalars=(Scalar("factor", "bf16"),))),
    "a first stage left out": ("defined", lambda: replace(softmax(), stages=softmax().stages[1:])),
    "stages the other way round": ("defined", lambda: replace(softmax(), stages=softmax().stages[::-1])),
    "a stage twice": ("defined", lambda: replace(softmax(), stages=softmax().stages[:1] * 2)),
    "an op that is none": ("nodes", lambda: node(softmax(), "exp", op="exponential")),
    "a type that is none": ("nodes", lambda: node(softmax(), "exp", dtype="f31")),
    "an operand too few": ("nodes", lambda: edited(softmax(), "sub", lambda n: replace(n, args=n.args[:1]))),
    "an operand too many": ("nodes", lambda: edited(gathered(), "cast", lambda n: replace(n, args=n.args * 2))),
    "a buffer too far": ("places", lambda: node(softmax(), "load", buffer=2)),
    "a load from nowhere": ("places", lambda: node(softmax(), "load", index=None)),
    "an axis too far": ("places", lambda: node(softmax(), "load", index=Index(coefs=((2, 1),)))),
    "a scalar too far": ("places", lambda: node(gathered(), "scalar", value=1)),
    "a kept value that is not kept": ("stages", lambda: node(softmax(), "exp", keep=False)),
    "rows of a kernel without rows": ("stages", lambda: replace(gathered(), stages=(Stage("PR", gathered().stages[0].nodes),))),
    "rows in a point stage": ("points", lambda: replace(softmax(), stages=(Stage("P", softmax().stages[0].nodes[:1]),))),
    "a point that is kept": ("points", lambda: node(gathered(), "mul", keep=True)),
    "an index that is a float": ("indices", lambda: edited(gathered(), "store", indexed_by_its_value)),
    "operands of two types": ("pointwise", lambda: edited(gathered(), "mul", times_an_index)),
    "a comparison that gives a number": ("pointwise", lambda: node(gathered(), "lt", dtype="i64")),
    "an operation for integers alone": ("pointwise", lambda: node(softmax(), "exp", op="not")),
    "a load of another type": ("loads", lambda: node(softmax(), "load", dtype="f64")),
    "a store to an input": ("stores", lambda: access(softmax(), 1, "in")),
    "a store of another type": ("stores", lambda: edited(softmax(), "store", lambda n: replace(n, dtype="f64"))),
    "an accumulation into what is not read": ("accumulation", lambda: access(gathered(), 2, "out")),
    "an accumulation that is none": ("accumulation", lambda: node(gathered(), "store", how="sub")),
    "a reduction that is none": ("reductions", lambda: node(softmax(), "reduce", how="median")),
    "a position that is a float": ("reductions", lambda: node(counted(), "reduce", dtype="f32")),
    "a scan along two axes": ("scans", lambda: replace(counted(), r=(5, 10))),
    "a scan that is none": ("scans", lambda: node(counted(), "scan", how="mean")),
    "a recurrence of one operand": ("scans", lambda: node(counted(), "scan", how="step")),
    "a recurrence from a state per element": (
        "points", lambda: edited(recurrence(), "state", lambda n: replace(n, args=(n.id - 1,)))
    ),
    "a state of no recurrence": ("states", lambda: edited(recurrence(), "scan", lambda n: replace(n, args=n.args[:1], how="max"))),
    "a part of a step that is kept": ("states", lambda: node(recurrence(), "mul", keep=True)),
    "a check of no size": ("bounds", lambda: node(gathered(), "bound", extent=None)),
    "a constant of nothing": ("literals", lambda: node(gathered(), "const", value=None)),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_change_by_hand_is_found_by_the_rule_that_forbids_it(mutation: str) -> None:
    rule, broken = MUTATIONS[mutation]
    assert rule in {v.rule for v in KERNEL.violations(broken())}
    with pytest.raises(KernelError, match=rf"is not valid after a change:(.|\n)*\[rule {rule}\]"):
        verify(broken(), "a change")


def test_every_rule_has_a_change_that_it_finds() -> None:
    assert {rule for rule, _ in MUTATIONS.values()} == {r.id for r in RULES}


@pytest.mark.parametrize("kernel", [softmax, gathered, counted])
def test_what_is_built_is_valid(kernel: Callable[[], Kernel]) -> None:
    assert not list(KERNEL.violations(kernel()))


@SETTINGS
@given(cases())
def test_random_kernels_are_valid(case: Case) -> None:
    assert not list(KERNEL.violations(case.kernel))
