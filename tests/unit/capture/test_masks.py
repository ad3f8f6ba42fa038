"""Constant masks are dropped or become `is_causal`; all others stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusewright.capture import masks

L = 6


def folded(fn: Any, *args: torch.Tensor) -> tuple[int, Any]:
    """Return how many calls were folded, and the arguments of the first attention call afterwards."""
    found: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        count = masks.fold(gm)
        gm.graph.lint()
        (call, *_) = [n for n in gm.graph.nodes if n.target is torch._C._nn.scaled_dot_product_attention]
        found.extend([count, call])
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fn, backend=backend)(*args), fn(*args))
    return found[0], found[1]


def everything(q: torch.Tensor) -> torch.Tensor:
    mask = torch.ones((), dtype=torch.bool).expand(2, 1, L, L)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def past(q: torch.Tensor) -> torch.Tensor:
    position = torch.arange(L)
    mask = (position[None, :] <= position[:, None])[None, None].expand(2, -1, -1, -1)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask & torch.full((), True))


def past_added(q: torch.Tensor) -> torch.Tensor:
    mask = torch.full((L, L), float("-inf")).triu(1)
    return F.scaled_dot_product_attention(q, q, q, mask)


def window(q: torch.Tensor) -> torch.Tensor:
    position = torch.arange(L)
    mask = (position[None, :] <= position[:, None]) & (position[None, :] > position[:, None] - 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def weighs(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.arange(L).float().expand(L, L))


def changed_later(q: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(L, L, dtype=torch.bool)
    mask[:, 0] = False
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def changed_through_a_view(q: torch.Tensor) -> torch.Tensor:
    position = torch.arange(L)
    mask = position[None, :] <= position[:, None]
    mask[:, :2].fill_(True)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def changed_by_a_called_operator(q: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(L, L, dtype=torch.bool).tril()
    mask.__ior__(torch.eye(L, dtype=torch.bool).flip(0))
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def past_beside_writes_under_vmap(q: torch.Tensor) -> torch.Tensor:
    return past(torch.vmap(lambda x: x.clone().add_(1))(q))


@pytest.mark.parametrize(("fn", "causal"), [(everything, False), (past, True), (past_added, True)])
def test_constant_masks_go(fn: Any, causal: bool) -> None:
    count, call = folded(fn, torch.randn(2, 1, L, 4))
    assert count == 1
    assert call.kwargs.get("attn_mask") is None
    assert bool(call.kwargs.get("is_causal")) == causal
    assert len([n for n in call.graph.nodes if n.op != "placeholder"]) == 2  # the ops that built the mask are gone


@pytest.mark.parametrize("fn", [window, weighs, changed_later, changed_through_a_view, changed_by_a_called_operator])
def test_other_masks_stay(fn: Any) -> None:
    count, _ = folded(fn, torch.randn(2, 1, L, 4))
    assert count == 0


def test_writes_to_what_vmap_wraps_are_seen() -> None:
    count, call = folded(past_beside_writes_under_vmap, torch.randn(2, 1, L, 4))
    assert (count, call.kwargs.get("is_causal")) == (1, True)


def test_a_mask_that_is_an_input_stays() -> None:
    def fn(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    assert folded(fn, torch.randn(2, 1, L, 4), torch.ones(L, L, dtype=torch.bool))[0] == 0
