"""Masks of symbolic sizes: what is read of them holds at every size, and what is not understood stays."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.capture import masks
from fusewright.capture.index_masks import NOTHING, PAST, Known, Mask, Reader

SIZES = (2, 3, 5, 8)


def positions(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of queries [1, 1, L, 1] and of keys [1, 1, 1, L]."""
    at = torch.arange(q.shape[-2]) + 0
    return at[None, None, :, None], at[None, None, None, :]


def attend(q: Tensor, mask: Tensor, **more: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask.expand(q.shape[0], -1, q.shape[-2], q.shape[-2]), **more)


def documents(q: Tensor) -> Tensor:
    """As transformers finds packed sequences: a new one where positions do not go up by one."""
    at = torch.arange(q.shape[-2]).unsqueeze(0).expand(q.shape[0], -1)
    number = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    rows, keys = positions(q)
    batch = torch.arange(q.shape[0])[:, None, None, None]
    return number[batch, rows] == number[batch, keys]


def everything(q: Tensor) -> Tensor:
    rows, _ = positions(q)
    return attend(q, rows >= 0)


def past(q: Tensor) -> Tensor:
    rows, keys = positions(q)
    return attend(q, rows.new_ones((), dtype=torch.bool) & (keys <= rows).to(q.device))


def past_of_one_document(q: Tensor) -> Tensor:
    rows, keys = positions(q)
    return attend(q, (keys < rows + 1) & documents(q))


def past_of_batches(q: Tensor) -> Tensor:
    rows, keys = positions(q)
    at = torch.arange(q.shape[-2]).unsqueeze(0).expand(q.shape[0], -1)
    batch = torch.arange(q.shape[0])[:, None, None, None]
    return attend(q, at[batch, keys] <= at[batch, rows])


def window(q: Tensor) -> Tensor:
    rows, keys = positions(q)
    return attend(q, (keys <= rows) & (keys > rows - 2))


def shifted(q: Tensor) -> Tensor:
    rows, keys = positions(q)
    return attend(q, keys <= rows + 1)


def from_the_end(q: Tensor) -> Tensor:
    """A negative position counts from the last one."""
    rows, keys = positions(q)
    at = torch.arange(q.shape[-2])
    return attend(q, at[keys - 1] <= at[rows])


def backwards(q: Tensor) -> Tensor:
    at = torch.arange(q.shape[-2] - 1, -1, -1)
    return attend(q, at[None, None, None, :] <= at[None, None, :, None])


def written_later(q: Tensor) -> Tensor:
    rows, keys = positions(q)
    mask = keys <= rows
    mask[:, :, 0] = True
    return attend(q, mask)


def written_through_a_view(q: Tensor) -> Tensor:
    rows, keys = positions(q)
    mask = keys <= rows
    mask.transpose(2, 3)[:, :, :2].fill_(True)
    return attend(q, mask)


@torch.library.custom_op("fusewright_test_masks::ge", mutates_args=())
def ge(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() < 2


@ge.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.ge(a, b)


@torch.library.custom_op("fusewright_test_masks::fill", mutates_args=("mask",))
def fill(mask: Tensor) -> None:
    mask.fill_(True)


def other_operator(q: Tensor) -> Tensor:
    """Named as one of torch's."""
    rows, keys = positions(q)
    return attend(q, torch.ops.fusewright_test_masks.ge(rows, keys))


def written_by_an_operator(q: Tensor) -> Tensor:
    rows, keys = positions(q)
    mask = keys <= rows
    torch.ops.fusewright_test_masks.fill(mask[..., :2])
    return attend(q, mask)


def operators_as_methods(q: Tensor) -> Tensor:
    rows, keys = positions(q)
    return attend(q, keys.__le__(rows).__and__((rows - rows).__eq__(0)))


def by_keywords(q: Tensor) -> Tensor:
    """What is given by keywords alone is not understood."""
    at = torch.arange(q.shape[-2])
    rows, keys = torch.unsqueeze(input=at, dim=1), torch.unsqueeze(at, dim=0)
    step = torch.diff(input=at[None], dim=-1, prepend=at[None, :1] - 1)
    document = torch.cumsum(input=torch.ne(step, other=1), dim=-1)
    same = torch.logical_and(torch.eq(document, other=0), other=torch.le(input=keys, other=rows))
    return attend(q, torch.logical_and(input=same, other=keys.le(other=rows))[None, None])


def from_values(q: Tensor) -> Tensor:
    rows, keys = positions(q)
    return attend(q, (keys <= rows) & (q.sum() < 1e9))


FOLDED: dict[Callable[[Tensor], Tensor], bool | None] = {
    everything: False, past: True, past_of_one_document: True, past_of_batches: True, operators_as_methods: True,
    window: None, shifted: None, from_the_end: None, backwards: None, written_later: None, from_values: None,
    written_through_a_view: None, other_operator: None, written_by_an_operator: None, by_keywords: None,
}  # fmt: skip
"""`is_causal` of the call whose mask is gone; None if the mask stays."""


@pytest.mark.parametrize("fn", FOLDED, ids=lambda fn: fn.__name__)
def test_a_mask_goes_only_if_nothing_changes_at_any_size(fn: Callable[[Tensor], Tensor]) -> None:
    found: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        count = masks.fold(gm)
        gm.graph.lint()
        (call,) = [n for n in gm.graph.nodes if n.target is torch._C._nn.scaled_dot_product_attention]
        found.append(call.kwargs["is_causal"] if count else None)
        return gm.forward

    torch._dynamo.reset()
    run = torch.compile(fn, backend=backend, dynamic=True)
    with torch.no_grad():
        for n in SIZES:
            q = torch.randn(6, 7, n, 4)  # another size for each dimension: equal ones are traced as one symbol
            torch.testing.assert_close(run(q), fn(q))
    assert found == [FOLDED[fn]], "one graph for all sizes"


def test_queries_and_keys_of_different_lengths_keep_their_mask() -> None:
    def fn(q: Tensor, k: Tensor) -> Tensor:
        rows, keys = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
        return F.scaled_dot_product_attention(q, k, k, attn_mask=keys[None, None, None, :] <= rows[None, None, :, None])

    def backend(gm: Any, inputs: Any) -> Any:
        assert not masks.fold(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=True)(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 7, 4))


COMPARISONS = (operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.ne)


def test_every_comparison_of_positions_is_read_as_it_is() -> None:
    """Of a position with a constant, and of two positions."""

    def compared(x: Tensor) -> list[Tensor]:
        at = torch.arange(x.shape[0])
        rows, keys = at.unsqueeze(1), at.unsqueeze(0)
        pairs = [(left + c, right) for c in (-1, 0, 1) for left, right in ((rows, keys), (keys, rows), (rows, 0), (rows - rows, 0))]
        return [op(a, b).expand(x.shape[0], x.shape[0]) for op, (a, b) in itertools.product(COMPARISONS, pairs)]

    read: list[Known] = []

    def backend(gm: Any, inputs: Any) -> Any:
        reader, (output,) = Reader(lambda node: False), gm.graph.find_nodes(op="output")
        read.extend(map(reader, output.args[0]))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(compared, backend=backend, dynamic=True)(torch.zeros(4))
    kinds = {"all": 0, "none": 0, "past": 0}
    for n in SIZES:
        for found, mask in zip(read, compared(torch.zeros(n)), strict=True):
            if found == Mask():
                kinds["all"] += 1
                assert mask.all()
            elif isinstance(found, Mask) and found.empty:
                kinds["none"] += 1
                assert not mask.any()
            elif found == PAST:
                kinds["past"] += 1
                assert mask.equal(torch.ones(n, n, dtype=torch.bool).tril())
    assert min(kinds.values()) >= 2 * len(SIZES) and NOTHING.empty, kinds
