"""Loops are split where a condition on the position changes: the same results, and no test inside a part."""

import pytest
import torch

from fusewright.toolkit.ir import Builder, Kernel, interpret
from fusewright_cpu.emit.segments import segments
from fusewright_cpu.run.jit import compile_kernels


def joined(rows: int, left: int, right: int) -> Kernel:
    """Concatenate the squares of one tensor with another tensor."""
    b = Builder("joined", p=[rows, left + right])
    i, j = b.axes
    x, y, out = b.input("x", "f32"), b.input("y", "f32"), b.output("out", "f32")
    here = b.index_value(j) < left
    v = b.load(x, i * left + j, here, 0)
    w = b.load(y, i * right + j - left, b.index_value(j) >= left, 0)
    b.store(out, i * (left + right) + j, b.where(here, v * v, w))
    return b.build()


@pytest.mark.parametrize(("rows", "left", "right"), [(3, 5, 7), (2, 16, 48), (2, 33, 1), (1, 3000, 1111)])
def test_parts_beside_each_other(rows: int, left: int, right: int) -> None:
    kernel = joined(rows, left, right)
    tensors = [torch.randn(rows, left), torch.randn(rows, right), torch.empty(rows, left + right)]
    compile_kernels([kernel]).launcher(kernel).checked(tensors)
    expected = tensors[2].clone()
    interpret(kernel, [*tensors[:2], expected])
    assert torch.equal(tensors[2], expected)


def test_conditions_are_known_in_each_segment() -> None:
    kernel = joined(3, 5, 7)
    found = segments(kernel, len(kernel.p) - 1)
    assert [(s.start, s.stop) for s in found] == [(0, 5), (5, 12)]
    assert [sorted(s.known.values()) for s in found] == [[False, True], [False, True]]
