"""Indices through views, and symbolic sizes as polynomials."""

import pytest

from fusewright.interface import Dim
from fusewright.sizes.expr import apply
from fusewright.toolkit.ir.extent import symbol
from fusewright.toolkit.ir.index import axis_index
from fusewright.toolkit.rules.space import At, ShapeMismatch, extent, factor_groups, step_of


def at(*shape: int) -> At:
    return At(shape, tuple(axis_index(a, shape) for a in range(len(shape))))


def test_sizes_are_polynomials_of_symbols() -> None:
    s = symbol("s0")
    assert extent(Dim("s0", 8)) == s
    assert extent(Dim(s * s + 1, 65)) == s * s + 1
    half = apply("FloorDiv", s, 2)
    assert half * 2 != s and half * 4 == half * 2 + half * 2, "what is no polynomial is a symbol of its own"


def test_strides_take_no_dim_for_empty() -> None:
    s, n = symbol("s0"), symbol("s1")
    assert step_of(Dim(apply("Max", 1, s) * n, 8)) == s * n
    assert step_of(Dim(apply("Max", 2, s), 8)) != s


def test_reshape_regroups_only_what_it_must() -> None:
    assert factor_groups((2, 3, 4), (6, 4)) == (((0, 1), (0,)), ((2,), (1,)))
    assert factor_groups((4, 1), (4,)) == (((0,), (0,)), ((1,), ()))
    assert factor_groups((), (1, 1)) == (((), (0,)), ((), (1,)))
    with pytest.raises(ShapeMismatch):
        factor_groups((2, 3), (5,))


def test_symbolic_reshape() -> None:
    s = symbol("s0")
    assert factor_groups((s, 4, 8), (s * 4, 8)) == (((0, 1), (0,)), ((2,), (1,)))


def test_linear_index_survives_a_reshape() -> None:
    a = at(2, 3, 4)
    there = a.reshape((6, 4))
    assert there.linear == a.linear
    assert there.dims[1] == a.dims[2]
    assert there.reshape((2, 3, 4)).linear == a.linear


def test_broadcast_dims_are_index_zero() -> None:
    b = at(2, 3).broadcast((3,))
    assert b.dims == (at(2, 3).dims[1],)
    assert not at(2, 3).broadcast((2, 1)).dims[1].axes()
    with pytest.raises(ShapeMismatch):
        at(2, 3).broadcast((4,))
