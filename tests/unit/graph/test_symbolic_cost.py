"""The compile-time cost of symbolic sizes, in counts: torch's reasoning about an expression walks all of it."""

import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from sympy.printing.str import StrPrinter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

from fusewright import _torch_compat as compat
from fusewright.graph import printer
from fusewright.graph.spec import size
from fusewright.interface import Dim
from fusewright.plan.execute.compared import text_of
from fusewright.sizes.expr import symbol as symbol_named


def sized(x: torch.Tensor) -> torch.Tensor:
    """A graph with sizes derived from sizes: strides, pooling, halves."""
    x = F.avg_pool2d(F.pad(x, (1, 2, 1, 2)).relu(), 3, 2)
    return F.avg_pool2d(x.exp() - x.mean((2, 3), keepdim=True), 2)[:, :, : x.shape[2] // 3].sigmoid()


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often Fusewright asks torch for the bounds of each expression."""
    asked: Counter[str] = Counter()
    original = ShapeEnv.bound_sympy

    def counting(self: ShapeEnv, expr: object, *args: object) -> object:
        if sys._getframe(1).f_globals["__name__"].startswith("fusewright"):
            asked[f"{id(self)} {expr} {[self.var_to_range.get(s) for s in expr.free_symbols]}"] += 1  # type: ignore[attr-defined]
        return original(self, expr, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ShapeEnv, "bound_sympy", counting)
    return asked


def test_an_expression_is_bounded_once_however_often_graphs_name_it(bounded: Counter[str]) -> None:
    x = torch.randn(2, 3, 22, 29, requires_grad=True)
    torch._dynamo.reset()
    got = torch.compile(sized, backend="x86_onednn", dynamic=True, options={"cache": False, "fallback": "allow"})(x)
    got.sum().backward()
    torch.testing.assert_close(got, sized(x))
    assert len(bounded) > 5
    assert bounded.total() == len(bounded), bounded.most_common(3)


def test_the_text_of_a_graph_asks_torch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache keys name each size of each value and the strides that it would have if contiguous. Torch multiplies
    and prints formulas an order of magnitude slower than `SizeExpr`."""
    graph = make_fx(sized, tracing_mode="symbolic")(torch.randn(2, 3, 22, 29)).graph
    asked: list[object] = []
    monkeypatch.setattr(StrPrinter, "doprint", lambda *given: asked.append(given) or "")
    monkeypatch.setattr(SymNode, "mul", lambda *given: asked.append(given) or given[0])
    first = printer.to_text(graph), text_of(graph)
    assert "//" in first[0] and "//" in first[1] and not asked


def test_bounds_follow_what_becomes_known_of_a_symbol() -> None:
    symbols = compat.Symbols()
    twice = symbols.size("2*s0 + 1")
    formula = 2 * symbol_named("s0") + 1
    assert size(twice) == Dim(formula, size(twice).hint, 1, None)  # type: ignore[union-attr]
    (symbol,) = twice.node.expr.free_symbols
    symbols.env.var_to_range[symbol] = ValueRanges(3, 8)
    assert size(twice) == Dim(formula, size(twice).hint, 7, 17)  # type: ignore[union-attr]
