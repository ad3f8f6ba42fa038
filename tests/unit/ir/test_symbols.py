"""Kernels use positions for symbolic sizes, so kernels compare equal whatever their sizes are called."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch

from fusewright.interface import Dim, TensorSpec, Value
from fusewright.plan.ir import Launch
from fusewright.toolkit.ir import (
    Builder,
    Kernel,
    KernelError,
    from_json,
    structural_hash,
    symbol,
    to_json,
    to_text,
    verify,
)
from fusewright.toolkit.ir.extent import SizeExpr, apply, atoms
from fusewright.toolkit.ir.ir import extents_of
from fusewright.toolkit.ir.symbols import close, numbered
from tests.fragments import Sketch
from tests.unit.fuse.running import fused


def scaled(rows: str = "s0", columns: str = "s1") -> Kernel:
    """Transpose-copy [rows, columns] with a division in the index."""
    n, m = symbol(rows), symbol(columns)
    b = Builder("scaled", p=[n, m], symbols={rows: 8, columns: 16})
    x, y = b.input("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    b.store(y, j * n + i, b.load(x, (i * m + j) // m * m + j) * 2)
    return b.build()


@pytest.mark.parametrize("names", permutations(["s53", "s7", "u0"], 2))
def test_a_kernel_is_the_same_under_other_names(names: tuple[str, str]) -> None:
    kernel = scaled(*names)
    assert kernel == scaled() and structural_hash(kernel) == structural_hash(scaled())
    assert not any(n in json.dumps(to_json(kernel)) for n in names) and "s0" in to_text(kernel)
    assert {a for e in extents_of(kernel) for a in atoms(e)} == {0, 1} and list(kernel.symbols) == [0, 1]


def fusion(names: tuple[str, str]) -> tuple[list[str], list[Launch]]:
    """Return the hashes and launches of a softmax of x + y + z, where z has another layout."""
    g = Sketch()
    n, m = (Dim(name, h, 2) for name, h in zip(names, (6, 9), strict=True))
    x, y, z = (g.input(t) for t in (torch.randn(6, 9), torch.randn(6, 9), torch.randn(9, 6).t()))
    region = g.region([g.op("softmax", g.op("add", g.op("add", x, y), z), -1, False)])

    def named(v: Any) -> Any:
        if isinstance(v, tuple):
            return tuple(map(named, v))
        stride = (1, n) if getattr(v, "id", None) == z.id else (m, 1)
        return replace(v, spec=TensorSpec((n, m), stride, v.spec.dtype)) if isinstance(v, Value) else v

    ops = tuple(replace(op, args=named(op.args), outs=named(op.outs)) for op in region.ops)
    region = replace(region, ops=ops, inputs=named(region.inputs), outputs=named(region.outputs))
    fragment, _ = fused(region)
    return sorted(fragment.kernels), [i for i in fragment.instructions if isinstance(i, Launch)]


def test_fused_kernels_do_not_depend_on_the_order_of_names() -> None:
    """Regression: the order of names such as "s53" and "s7" decided which symbol came first."""
    hashes, launches = fusion(("s0", "s1"))
    for names in permutations(["s53", "s7", "z"], 2):
        others, same = fusion(names)
        assert others == hashes and [i.sizes for i in same] == [i.sizes for i in launches]


def test_formulas_become_symbols_of_their_own() -> None:
    """A chunk of a row is `(n + 31) // 32`: the launch computes it, and the kernel has an additional symbol."""
    kernel = scaled()
    chunk = apply("FloorDiv", symbol(0) + 31, 32)
    closed, order = close(replace(kernel, p=(chunk, *kernel.p[1:])), dict(enumerate(kernel.hints)))
    assert [symbol(a) for a in order] == [chunk, symbol(1), symbol(0)] and closed.hints == (1, 16, 8)
    assert closed.p[0] == symbol(0)


def test_what_is_no_position_is_refused() -> None:
    kernel = scaled()
    for size in (symbol("s0"), symbol(2), apply("FloorDiv", symbol(0), 2)):
        with pytest.raises(KernelError, match="unknown size symbols"):
            verify(replace(kernel, p=(size, *kernel.p[1:])))


def damaged(kernel: Kernel, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    data = json.loads(json.dumps(to_json(kernel)))
    change(data)
    return data  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "size",
    [
        [[["s0"], 1]], [[[5], 1]], [[[0, 0], 1], [[0], 1]], [[[{"FloorDiv": [[[[0], 1]], 2]}], 1]], [[[{"exec": [1]}], 1]],
        "s0", 1.5,
    ],
)  # fmt: skip
def test_sizes_of_stored_kernels_are_looked_at(size: Any) -> None:
    with pytest.raises((ValueError, KernelError)):
        verify(from_json(damaged(scaled(), lambda d: d["p"].__setitem__(0, size))))


def test_kernels_through_json_and_back() -> None:
    kernel = scaled()
    assert from_json(json.loads(json.dumps(to_json(kernel)))) == kernel
    static = numbered(kernel, (), {})
    assert static.hints == ()


def test_a_size_is_one_type_from_the_graph_to_the_launch() -> None:
    n = Dim("s0", 4)
    assert isinstance(n.expr, SizeExpr) and str(n) == n.symbol == "s0" and n == Dim(symbol("s0"), 4)
    assert Launch("k", (), (), (n, 3)).sizes == (n.expr, 3)
