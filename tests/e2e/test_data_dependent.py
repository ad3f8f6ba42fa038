"""Data-dependent sizes and numbers in one graph (`fullgraph=True`): values, assertions, and the plan cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from fusewright import pipeline, registry
from tests.compare import differences

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BACKENDS = {"fusewright_null": {}, "fusewright_interp": {}, "x86_onednn": {}, "nvidia_triton": {"simulate": True}}


@pytest.fixture(params=BACKENDS)
def compiling(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The arguments of `torch.compile`."""
    if request.param == "nvidia_triton":
        pytest.importorskip("triton", reason="a simulated GPU backend prints Triton")
    elif not registry.info(request.param).available:
        pytest.skip(f"{request.param}: {registry.info(request.param).device}")
    options = {"fallback": "allow", **BACKENDS[request.param]}
    return {"backend": request.param, "options": options, "fullgraph": True}


def first(n: int, of: int = 8) -> Tensor:
    """`n` positive numbers, then negative ones."""
    return torch.cat([torch.arange(1.0, n + 1), -torch.arange(1.0, of - n + 1)])


def repeated(x: Tensor) -> Tensor:
    return torch.repeat_interleave(x.view(4, 2), (x[:4] > 0).long() * 2, 0).exp().sum(1)


def parts(x: Tensor) -> list[Tensor]:
    n = (x > 0).sum()
    return [p * 2 for p in x.split(torch.stack([n, 8 - n]).tolist())]


def some(x: Tensor) -> Tensor:
    n = (x > 0).sum().item()
    torch._check(n <= 8)
    return x[:n].exp() + torch.arange(n)


def written(x: Tensor) -> Tensor:
    y = x + 1
    y[y > 2] = y[y > 2] * 5
    return y * 2


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = x[x > 0], x[x < 0]
    return torch.cat([a, b]).exp() * 2, a.sum() + b.sum()


def by_a_matrix(x: Tensor) -> Tensor:
    kept = x.view(4, 2)
    return (kept[kept[:, 0] > 0] @ torch.ones(2, 3)).relu().softmax(-1)


def between_matrices(x: Tensor) -> Tensor:
    kept = x.view(4, 1, 2)[x[::2] > 0]
    return kept @ kept.transpose(1, 2)


def attended(x: Tensor) -> Tensor:
    kept = x.view(4, 1, 2, 1)[x[::2] > 0]
    return F.scaled_dot_product_attention(kept, kept, kept)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "a mask": lambda x: x[x > 0],
    "a mask, then pointwise and a sum": lambda x: (x[x > 0].exp() * 2 + 1, x[x > 0].sin().sum()),
    "masked_select": lambda x: torch.masked_select(x, x > 0).sin() + 1,
    "item": lambda x: x * x.sum().item() + (x > 0).sum().item(),
    "tolist": lambda x: x * x[:2].long().tolist()[1],
    "split by a list": parts,
    "nonzero": lambda x: x.relu().nonzero() * 2 + 1,
    "nonzero as a tuple": lambda x: (x > 0).nonzero(as_tuple=True)[0] + 3,
    "unique": lambda x: torch.unique(x > 0).float() * 2 + 1,
    "repeat_interleave": repeated,
    "rows by a mask, then a product": by_a_matrix,
    "matrices by a mask, then their products": between_matrices,
    "sequences by a mask, then attention": attended,
    "writes at a mask": written,
    "two masks": two,
    "a number as a size": some,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_at_many_counts(name: str, compiling: dict[str, Any]) -> None:
    fn = FUNCTIONS[name]
    compiled = torch.compile(fn, **compiling)
    with torch.no_grad():
        for n in (5, 2, 0, 1, 8):
            wanted, got = tree_flatten(fn(first(n)))[0], tree_flatten(compiled(first(n)))[0]
            assert differences(wanted, got, exact=compiling["backend"] == "fusewright_null") == [], n


@pytest.mark.parametrize("name", ["a mask, then pointwise and a sum", "a number as a size", "repeat_interleave"])
def test_beside_symbolic_sizes(name: str, compiling: dict[str, Any]) -> None:
    fn = FUNCTIONS[name] if name != "repeat_interleave" else lambda x: torch.repeat_interleave(x, (x > 0).long()) * 2
    compiled = torch.compile(fn, dynamic=True, **compiling)
    with torch.no_grad():
        for n, of in ((5, 8), (3, 10), (0, 11)):
            wanted, got = tree_flatten(fn(first(n, of)))[0], tree_flatten(compiled(first(n, of)))[0]
            assert differences(wanted, got, exact=False) == []


def test_gradients_through_a_mask(compiling: dict[str, Any]) -> None:
    compiled = torch.compile(lambda x: x[x > 0].exp().square().sum(), **compiling)
    for n in (5, 0, 2):
        x = first(n).requires_grad_()
        compiled(x).backward()
        torch.testing.assert_close(x.grad, torch.where(x > 0, 2 * (2 * x).exp(), 0).detach())


@pytest.mark.parametrize("compiling", ["x86_onednn", "nvidia_triton"], indirect=True)  # other backends store nothing
def test_a_stored_plan_knows_the_sizes_too(compiling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(x: Tensor) -> tuple[Tensor, Tensor]:
        n = (x > 0).sum().item()
        torch._check(n <= 8)
        return torch.masked_select(x, x > 0).exp() + 1, torch.ones(n).sin() * 2

    with torch.no_grad():
        torch.compile(compute, **compiling)(first(5))
        torch.compiler.reset()
        monkeypatch.setattr(pipeline, "_compile", None)  # a stored plan must not be compiled again
        again = torch.compile(compute, **compiling)
        for n in (3, 0, 8):
            for w, g in zip(compute(first(n)), again(first(n)), strict=True):
                torch.testing.assert_close(g, w)


def rows(x: Tensor) -> Tensor:
    found = x.relu().nonzero()
    torch._check(found.size(0) == 4)
    return found + 3


def factor(x: Tensor) -> Tensor:
    n = (x > 0).sum().item()
    torch._check(n > 3, lambda: "too few")
    return x * n


def pairs(x: Tensor) -> Tensor:
    kept = x[x > 0]
    torch._check(kept.shape[0] % 2 == 0)
    return kept.view(-1, 2).sum(1)


def asserted(x: Tensor) -> Tensor:
    assert (x > 0).sum() == 4, "four"
    return (x + 1).exp()


def unsaid(x: Tensor) -> Tensor:
    torch._assert_async((x > 0).sum() == 4)
    return x + 1


def twice(x: Tensor) -> Tensor:
    y = x.exp()
    torch._assert_async((y > 1).sum() >= 4, "the first")
    z = y * 2
    torch._assert_async((z > 2).sum() <= 4, "the second")
    return z.sin() + y


def before_a_lookup(x: Tensor) -> Tensor:
    index = (x > 0).sum() * 2 - 1
    torch._assert_async(index < 8, "no such place")
    return x[index] * 2


CHECKED: dict[str, Callable[[Tensor], Any]] = {
    "a size": rows,
    "a number": factor,
    "a multiple": pairs,
    "an assertion": asserted,
    "an assertion without words": unsaid,
    "assertions between kernels": twice,
    "before what it guards": before_a_lookup,
    "one_hot's classes": lambda x: F.one_hot((x > 0).sum() - 2, 3) * 2,
    "two sizes": lambda x: x[x > 0] + x[x < 0],
}


DROPPED = {"an assertion without words"} | ({"a size"} if torch.__version__ < "2.13" else set())
"""Assertions that `aot_eager` drops, so that it returns a result."""


def outcome(fn: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return fn(x)
    except RuntimeError as e:
        return str(e)


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("counts", [(4, 2, 6), (2, 4, 6)], ids=["held first", "failed first"])
def test_assertions_hold_or_raise_as_under_aot_eager(
    name: str, counts: tuple[int, ...], compiling: dict[str, Any]
) -> None:
    fn = CHECKED[name]
    reference = torch.compile(fn, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        wanted = [outcome(reference, first(n)) for n in counts]
        torch.compiler.reset()
        compiled = torch.compile(fn, **compiling)
        got = [outcome(compiled, first(n)) for n in counts]
    for n, w, g in zip(counts, wanted, got, strict=True):
        if name in DROPPED:
            assert isinstance(g, str) == (n != 4)
        elif isinstance(w, str):
            assert g == w, n
        else:
            torch.testing.assert_close(g, w)


class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async(self.weight.sum() > 0, "a closed gate")
        return x * self.weight


@torch.no_grad()
def test_an_assertion_on_weights_runs_at_every_call(compiling: dict[str, Any]) -> None:
    gate = Gate()
    compiled = torch.compile(gate, **compiling)
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3))
    gate.weight.neg_()
    with pytest.raises(RuntimeError, match="a closed gate"):
        compiled(torch.ones(3))
