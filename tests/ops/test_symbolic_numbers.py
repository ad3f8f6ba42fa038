"""Symbolic numbers: a kernel or eager computes with their current value, never with that of the first call."""

from __future__ import annotations

import pytest
import torch

from ci.operators import one_call, symbolic_numbers
from fusewright import _torch_compat as compat
from fusewright.conformance.ops import opinfo
from fusewright.ops import shape_rules

ROWS = "^(softplus|select|tril|slice_scatter|slice|arange)$"
CALLS = {
    (c.row.name, c.argument, c.number < 0): c
    for c in symbolic_numbers.calls(ROWS)
    if opinfo.call(c, c.sample, None).error is None
}


@pytest.mark.parametrize("key", CALLS, ids=lambda k: f"{k[0]}-{k[1]}{'-negative' if k[2] else ''}")
def test_a_number_of_a_row_may_be_a_symbol(key: tuple[str, str, bool]) -> None:
    outcome = one_call.checked(CALLS[key], CALLS[key].sample, opinfo.Compiler("x86_onednn", dynamic=True))
    assert (outcome.checks, outcome.problems) == (1, [])


def test_an_index_from_the_end_is_one_whatever_its_number() -> None:
    x = torch.randn(2, 5, 3)
    compiled = torch.compile(lambda x, i: -x[:, i], backend="x86_onednn", dynamic=True)
    for i in (-2, -4, 3, 0, -1):
        assert torch.equal(compiled(x, i), -x[:, i])


def test_an_index_that_only_data_tell_may_count_from_the_end() -> None:
    x = torch.randn(2, 5, 3)
    compiled = torch.compile(lambda x, i: -torch.select(x, 1, i.item()), backend="x86_onednn", fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for i in (-2, 3, 0):
            assert torch.equal(compiled(x, torch.tensor(i)), -x[:, i])


def test_a_shape_has_the_number_that_a_guard_has_made_of_a_symbol() -> None:
    x = compat.symbolic_mode().from_tensor(torch.empty(7, 5))
    assert x.shape[0] == 7  # a guard
    guarded, free = shape_rules.shape(x)
    assert type(guarded) is int
    assert type(free) is torch.SymInt


def test_an_alias_that_computes_with_a_number_leaves_a_symbol_to_eager() -> None:
    compiled = torch.compile(lambda x, a: torch.celu(x, a) + x * a, backend="x86_onednn", dynamic=True)
    for alpha in (0.5, 1.5, 3):
        x = torch.randn(7, requires_grad=True)
        torch.testing.assert_close(compiled(x, alpha), torch.celu(x, alpha) + x * alpha)
