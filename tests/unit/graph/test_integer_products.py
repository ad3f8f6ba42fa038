"""`_int_mm` of matrices that BLAS cannot address: eager's values on the host are meaningless, ours are right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.graph.canonicalize import canonicalize

MEMORY = torch.randint(-128, 128, (200,), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
SHAPES = ((3, 4), (1, 4), (4, 1), (1, 1))
STRIDES = ((0, 1), (1, 0), (1, 1), (3, 1), (4, 1), (1, 3), (1, 4), (3, 5))


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch._int_mm(a, b)


def canonical(a: Tensor, b: Tensor, symbolic: bool = False) -> torch.fx.GraphModule:
    traced = make_fx(product, tracing_mode="symbolic" if symbolic else "fake")(a, b)
    canonicalize(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced


def copies(traced: torch.fx.GraphModule) -> int:
    return len(traced.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_right_in_any_layout(shape: tuple[int, int]) -> None:
    for strides in STRIDES:
        x = MEMORY.as_strided(shape, strides, 3)
        right, left = MEMORY[: shape[1] * 5].view(-1, 5), MEMORY[: 5 * shape[0]].view(5, -1)
        for a, b in ((x, right), (left, x)):
            assert torch.equal(canonical(a, b)(a, b).double(), a.double() @ b.double()), strides


@pytest.mark.parametrize("symbolic", [False, True])
def test_what_eager_reads_as_it_lies_is_not_copied(symbolic: bool) -> None:
    x, w = MEMORY[:24].view(4, 6), MEMORY[:30].view(5, 6)
    for a in (x, x.t().contiguous().t(), MEMORY[:80].view(4, 20)[:, 1:19:3]):
        assert copies(canonical(a, w.t(), symbolic)) == 0
    assert copies(canonical(x[:1].expand(4, 6), w.t(), symbolic)) == 1


def test_a_matrix_that_is_both_operands_is_copied_once() -> None:
    x = MEMORY.as_strided((4, 4), (0, 1))
    traced = make_fx(lambda x: torch._int_mm(x, x), tracing_mode="fake")(x)
    canonicalize(traced.graph)
    traced.recompile()
    assert copies(traced) == 1
    assert torch.equal(traced(x).double(), x.double() @ x.double())


def test_the_compiled_product_of_an_expanded_matrix() -> None:
    a, b = MEMORY[:16].view(1, 16).expand(32, 16), MEMORY[:128].view(16, 8)
    compiled = torch.compile(product, backend="fusewright_null", options={"cache": False, "fallback": "allow"})
    assert torch.equal(compiled(a, b).double(), a.double() @ b.double())
