"""Attention of other than four dimensions becomes attention of [batch, heads, length, width] in inference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusewright.capture import attention

L, S, E = 5, 7, 8


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, **kw: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, **kw)


def rewritten(fn: Any, *args: Any, dynamic: bool = False, **kw: Any) -> int:
    """Return how many calls were rewritten. Values and strides stay."""
    found: list[int] = []

    def backend(gm: Any, inputs: Any) -> Any:
        calls = gm.graph.find_nodes(op="call_function", target=torch._C._nn.scaled_dot_product_attention)
        found.append(attention.with_four_dimensions(gm, calls))
        gm.graph.lint()
        return gm.forward

    torch._dynamo.reset()
    result, expected = torch.compile(fn, backend=backend, dynamic=dynamic)(*args, **kw), fn(*args, **kw)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()
    return found[0]


def operands(*batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(*batch, L, E), torch.randn(*batch, S, E), torch.randn(*batch, S, E)


@pytest.mark.parametrize(("batch", "masks"), [
    ((), [(L, S)]),
    ((4,), [(L, S), (4, L, S), (1, L, S)]),
    ((2, 3, 4), [(L, S), (4, L, S), (3, 4, L, S), (2, 3, 1, L, S), (1, 3, 4, L, S), (1, 1, 4, 1, S)]),
    ((2, 3, 2, 4), [(3, 2, 4, L, S), (1, 1, 1, 1, L, S)]),
])  # fmt: skip
def test_any_number_of_dimensions(batch: tuple[int, ...], masks: list[tuple[int, ...]]) -> None:
    assert rewritten(attend, *operands(*batch)) == 1
    assert rewritten(attend, *operands(*batch), is_causal=True, scale=0.3) == 1
    for shape in masks:
        assert rewritten(attend, *operands(*batch), torch.randn(shape)) == 1
        assert rewritten(attend, *operands(*batch), mask=torch.rand(shape) > 0.2) == 1


def test_the_caller_may_view_the_result() -> None:
    assert rewritten(lambda *a: attend(*a).view(-1, E), *operands(2, 3, 4)) == 1


def test_symbolic_sizes() -> None:
    assert rewritten(attend, *operands(4), dynamic=True) == 1
    assert rewritten(attend, *operands(2, 3, 4), dynamic=True) == 0  # a batch that no launch might take


def test_what_stays() -> None:
    q, k, v = operands(2, 3, 4)
    assert rewritten(attend, q[0], k[0], v[0]) == 0
    assert rewritten(attend, q.requires_grad_(), k, v) == 0
    assert rewritten(attend, q.detach(), k[:1], v) == 0  # eager repeats keys
    assert rewritten(attend, *operands(attention.MOST + 1)) == 0
    assert rewritten(attend, q.detach(), k, v, torch.randn(S)) == 0
    assert rewritten(lambda *a: torch.vmap(attend)(*a), *operands(6, 2)) == 0
