"""Products over a few features are sums in loop kernels, together with what stands around them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.interface import Fragment
from fusewright.plan.ir import Launch
from fusewright_triton.select import narrow
from tests.backends.triton.select.test_calls import BF16, F32, Net, check, lowered, text


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "LEAST", 1)


def kernels(fragment: Fragment) -> int:
    """The number of kernels of a fragment that has no product."""
    assert not [t for t in text(fragment) if "linear" in t or "mm" in t]
    return sum(isinstance(i, Launch) for i in fragment.instructions)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_points(k: int, bias: bool, dtype: torch.dtype) -> None:
    g = Net(dtype)
    linear = g.op("linear", g.tensor(5, 7, k), g.weight(33, k), g.weight(33) if bias else None)
    assert kernels(check(g, [g.relu(linear)])) == 1


def test_a_product_in_training_and_one_of_a_transposed_matrix() -> None:
    g = Net()
    assert kernels(check(g, [g.op("mm", g.tensor(70, 5), g.tensor(5, 9))])) == 1
    assert kernels(check(g, [g.op("mm", g.op("t", g.tensor(4, 70)), g.op("t", g.tensor(9, 4)))])) == 1


def test_heads_are_mixed_where_they_lie() -> None:
    """Talking heads (arXiv:2003.02436): two kernels, and no copy with the heads last."""
    g = Net()
    scores = g.tensor(2, 4, 6, 10)

    def mixed(x: object) -> object:
        last = g.op("view", g.op("clone", g.op("permute", x, (0, 2, 3, 1)), memory_format=torch.contiguous_format), (120, 4))
        made = g.op("linear", g.op("view", last, (2, 6, 10, 4)), g.weight(4, 4), g.weight(4))
        return g.op("permute", made, (0, 3, 1, 2))

    out = g.op("clone", mixed(g.op("softmax", mixed(scores), -1, False)), memory_format=torch.contiguous_format)
    assert kernels(check(g, [out])) == 2


@pytest.mark.parametrize(("k", "n"), [(9, 4), (8, 64)])
def test_rows_that_suit_a_library(k: int, n: int) -> None:
    g = Net()
    assert text(lowered(g, [g.op("linear", g.tensor(64, k), g.weight(n, k), None)])) == ["aten::linear('_', '_')"]


def test_few_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    g = Net()
    assert text(lowered(g, [g.op("linear", g.tensor(64, 3), g.weight(9, 3), None)])) == ["aten::linear('_', '_')"]
