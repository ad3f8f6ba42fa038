"""Ops that place elements by a mask, by strides or by a search: kernels against eager on random calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright import _torch_compat as compat
from fusewright import pipeline, report
from fusewright.config import Options
from tests.ops.lowering import Kernels

aten = torch.ops.aten

SIZES = st.integers(1, 5)
SYMBOLIC = pytest.mark.parametrize("symbolic", [False, True], ids=["fixed", "symbolic"])


def compiled(fn: Callable[..., Tensor], tensors: Sequence[Tensor], symbolic: bool) -> tuple[Callable[..., Any], bool]:
    """Compile the function to loop kernels; also return whether it consists of kernels only."""
    mode = compat.symbolic_mode() if symbolic else None
    fakes = [mode.from_tensor(t) for t in tensors] if mode is not None else list(tensors)
    gm = make_fx(lambda *a: [fn(*a)], tracing_mode="symbolic" if symbolic else "fake")(*fakes)
    with report.recording() as reports:
        options = Options(cache=False, strict=True, fallback="allow")
        run = pipeline.compile_graph(Kernels(), options, gm, "infer", frozenset(), "direct")
    return run, all(r.where != "eager" for r in reports[-1].ops)


def values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers that include NaN, infinities and duplicates."""
    few = [0, 1, 2, 3, 4] if not dtype.is_floating_point else [0.0, -0.0, 1.5, -2.0, math.nan, math.inf, -math.inf]
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(len(few), tuple(shape), generator=generator)
    return torch.tensor(few)[picked].to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether values are bitwise equal; any NaN equals any other."""
    kind = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    return kind and torch.equal(a.nan_to_num(7), b.nan_to_num(7)) and torch.equal(a.isnan(), b.isnan())


@SYMBOLIC
@settings(max_examples=6, deadline=None)
@given(
    shape=st.lists(SIZES, max_size=3),
    seed=st.integers(0, 99),
    mask_dims=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
def test_masked_scatter(symbolic: bool, shape: list[int], seed: int, mask_dims: int, dtype: torch.dtype) -> None:
    x, source = values(shape, dtype, seed), values([math.prod(shape)], dtype, seed + 1)
    mask = values(shape[max(0, len(shape) - mask_dims) :], torch.int64, seed + 2) > 1
    run, all_kernels = compiled(torch.masked_scatter, [x, mask, source], symbolic)
    assert all_kernels
    (got,) = run([x, mask, source])
    assert same(got, torch.masked_scatter(x, mask, source))


@SYMBOLIC
def test_masked_scatter_of_strided_and_expanded_tensors(symbolic: bool) -> None:
    x, mask, source = torch.randn(6, 4).t(), (torch.rand(1, 6) > 0.4).expand(4, 6), torch.randn(5, 8)[:, ::2].t()
    run, all_kernels = compiled(torch.masked_scatter, [x, mask, source], symbolic)
    assert all_kernels
    assert same(run([x, mask, source])[0], torch.masked_scatter(x, mask, source))


@SYMBOLIC
def test_masked_scatter_needs_enough_elements(symbolic: bool) -> None:
    x, mask, source = torch.zeros(9), torch.ones(9, dtype=torch.bool), torch.ones(8)
    run, _ = compiled(torch.masked_scatter, [x, mask, source], symbolic)
    with pytest.raises(RuntimeError):
        run([x, mask, source])
    mask[3] = False
    assert same(run([x, mask, source])[0], torch.masked_scatter(x, mask, source))


@SYMBOLIC
def test_masked_scatter_fuses_with_what_is_around_it(symbolic: bool) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.masked_scatter(x * 2, y > 0, y.exp()) + 1

    x, y = torch.randn(7, 5), torch.randn(7, 5)
    run, all_kernels = compiled(fn, [x, y], symbolic)
    assert all_kernels
    torch.testing.assert_close(run([x, y])[0], fn(x, y))


@SYMBOLIC
@settings(max_examples=6, deadline=None)
@given(
    size=st.lists(SIZES, min_size=1, max_size=3),
    gaps=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    order=st.permutations([0, 1, 2]),
    before=st.integers(0, 4),
    given_offset=st.booleans(),
    inner=st.integers(0, 3),
)
def test_as_strided_scatter(
    symbolic: bool, size: list[int], gaps: list[int], order: list[int], before: int, given_offset: bool, inner: int
) -> None:
    """Strides in any order, with gaps; the tensor itself may have a storage offset."""
    step, stride = 1, [0] * len(size)
    for d in (d for d in order if d < len(size)):
        step += gaps[d]
        stride[d] = step
        step = step * (size[d] - 1) + step
    offset = before + inner if given_offset else None
    x, src = torch.randn(before + inner + step + 3)[before:], torch.randn(size)

    def fn(x: Tensor, src: Tensor) -> Tensor:
        return aten.as_strided_scatter(x, src, size, stride, offset)

    run, all_kernels = compiled(fn, [x, src], symbolic)
    assert all_kernels or symbolic
    assert same(run([x, src])[0], fn(x, src))


def test_as_strided_scatter_counts_from_the_storage() -> None:
    """The target is a column of a padded matrix; places before the tensor's own first element are outside of it."""
    base, src = torch.randn(9, 8), torch.randn(5)
    x = base[3:, :6]

    def fn(x: Tensor, src: Tensor) -> Tensor:
        return aten.as_strided_scatter(x, src, [5], [8], 17)

    run, all_kernels = compiled(fn, [x, src], False)
    assert all_kernels
    assert same(run([x, src])[0], fn(x, src))
    other = torch.randn(12, 8)[4:10, :6]
    assert same(run([other, src])[0], fn(other, src))


def test_strides_of_what_a_kernel_made_count_from_its_first_element() -> None:
    """Results that calls address by storage offset are not placed in the arena behind other values."""

    def fn(x: Tensor) -> Tensor:
        a, b = torch.softmax(x, 1), torch.softmax(x * 2, 0)
        return torch.as_strided(b, (2, 3), (3, 1), 4).sum() + (a @ x) + (b @ x)

    x = torch.randn(8, 8)
    run, _ = compiled(fn, [x], False)
    torch.testing.assert_close(run([x])[0], fn(x))


def test_as_strided_scatter_onto_itself_is_eagers() -> None:
    x, src = torch.randn(9), torch.randn(3, 3)
    run, all_kernels = compiled(lambda x, s: aten.as_strided_scatter(x, s, [3, 3], [1, 1]), [x, src], False)
    assert not all_kernels
    assert same(run([x, src])[0], aten.as_strided_scatter(x, src, [3, 3], [1, 1]))


@SYMBOLIC
@settings(max_examples=6, deadline=None)
@given(
    n=st.integers(1, 70),
    shape=st.lists(SIZES, max_size=2),
    seed=st.integers(0, 99),
    ordered=st.booleans(),
    right=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
def test_bucketize(
    symbolic: bool, n: int, shape: list[int], seed: int, ordered: bool, right: bool, dtype: torch.dtype
) -> None:
    """With duplicates, NaN on either side and unsorted boundaries, the search takes the same steps as eager's."""
    x, bounds = values(shape, dtype, seed), values([n], dtype, seed + 1)
    bounds = bounds.sort().values if ordered else bounds

    def fn(x: Tensor, bounds: Tensor) -> Tensor:
        return torch.bucketize(x, bounds, right=right)

    run, all_kernels = compiled(fn, [x, bounds], symbolic)
    assert all_kernels
    assert same(run([x, bounds])[0], fn(x, bounds))


@SYMBOLIC
@pytest.mark.parametrize("n", [4095, 4096, 65537])
def test_bucketize_among_many(symbolic: bool, n: int) -> None:
    x, bounds = torch.randn(333) * n, torch.arange(n).float() * 2 - n
    run, all_kernels = compiled(torch.bucketize, [x, bounds], symbolic)
    assert all_kernels
    assert same(run([x, bounds])[0], torch.bucketize(x, bounds))


# (dims before the mask, dims of the mask, dims behind it, values): the dim of the hits is left out or of size 1
PUT = [
    ((), (4,), (3,), (3,)), ((), (4,), (3,), (1, 3)), ((), (4,), (3,), (1, 1)), ((2,), (4,), (), (2, 1)),
    ((2,), (4,), (3,), (2, 1, 3)),
    ((2,), (4,), (3,), (2, 1, 1)), ((2,), (4, 5), (3,), (3,)), ((2,), (4, 5), (3, 2), (1, 3, 1)), ((), (4,), (0,), (0,)),
    ((), (4,), (3,), ()),
]  # fmt: skip


@SYMBOLIC
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("case", PUT, ids=str)
def test_values_that_all_hits_of_a_mask_share(symbolic: bool, dtype: torch.dtype, case: tuple[tuple[int, ...], ...]) -> None:
    before, inner, behind, shape = case
    x, new = values((*before, *inner, *behind), dtype, 1), values(shape, dtype, 2)
    for accumulate in (False, True):
        for hits in (values(inner, torch.int64, 3) > 1, torch.zeros(inner, dtype=torch.bool)):

            def put(x: Tensor, mask: Tensor, new: Tensor, accumulate: bool = accumulate) -> Tensor:
                return aten.index_put(x, [None] * len(before) + [mask], new, accumulate)

            run, all_kernels = compiled(put, [x, hits, new], symbolic)
            assert all_kernels or not x.numel()
            assert same(run([x, hits, new])[0], put(x, hits, new))


@SYMBOLIC
def test_values_that_are_counted_off_hit_by_hit_are_left_to_eager(symbolic: bool) -> None:
    x, mask, new = values((4, 3), torch.float32, 1), torch.tensor([True, False, True, True]), values((3, 3), torch.float32, 2)
    run, all_kernels = compiled(lambda x, mask, new: aten.index_put(x, [mask], new), [x, mask, new], symbolic)
    assert not all_kernels
    assert same(run([x, mask, new])[0], aten.index_put(x, [mask], new))
