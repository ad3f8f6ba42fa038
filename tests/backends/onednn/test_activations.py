"""Activations that model code spells out are in the call of the product before them, and NaN stays where eager has it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch

from fusewright import report
from tests.hosts import FLOATS

C = math.sqrt(2 / math.pi)

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.hardware("x86_onednn")]

Curve = Callable[[torch.Tensor], torch.Tensor]

SPELLED: dict[str, Curve] = {
    "gelu_new": lambda x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0)))),
    "gelu_fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "bloom": lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
    "products": lambda x: (1 + torch.tanh(C * (x + 0.044715 * x * x * x))) * x / 2,
    "sum": lambda x: 0.5 * x + x.mul(0.5) * torch.tanh(C * x + C * 0.044715 * x.square() * x),
    "scalars": lambda x: 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2 / math.pi)) * (x + 0.044715 * x**3))),
    "in fp32": lambda x: (0.5 * x.float() * (1 + torch.tanh(C * (x.float() + 0.044715 * x.float() ** 3)))).to(x.dtype),
    "silu": lambda x: x * torch.sigmoid(x),
    "silu of exp": lambda x: x / (1 + torch.exp(-x)),
}
OTHERS: dict[str, Curve] = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "another constant": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
    "erf, which makes NaN of infinity in oneDNN alone": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "a part is read elsewhere": lambda x: (t := torch.sigmoid(x)) * x + t.sum(),
}


def compiled(curve: Curve, product: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, str]]:
    """The result, and what became of each op."""
    with report.recording() as graphs, torch.no_grad():
        made = torch.compile(lambda x: curve(product(x)), backend="x86_onednn", options={"prepack": "always", "strict": True})(x)
    (graph,) = graphs
    return made, {op.op: op.note for op in graph.ops}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SPELLED)
def test_a_spelled_activation_is_in_its_products_call(name: str, dtype: torch.dtype) -> None:
    product, x = torch.nn.Linear(64, 32).to(dtype).eval(), torch.randn(2, 16, 64, dtype=dtype)
    made, notes = compiled(SPELLED[name], product, x)
    eps = 8 * torch.finfo(dtype).eps
    with torch.no_grad():
        exact = SPELLED[name](copy.deepcopy(product).double()(x.double()))
    torch.testing.assert_close(made.double(), exact, rtol=eps, atol=eps)
    assert notes["linear"].endswith(("+ gelu", "+ silu"))


@pytest.mark.parametrize("name", OTHERS)
def test_other_formulas_stay(name: str) -> None:
    product, x = torch.nn.Linear(64, 32).eval(), torch.randn(2, 16, 64)
    made, notes = compiled(OTHERS[name], product, x)
    torch.testing.assert_close(made, OTHERS[name](product(x)).detach())
    assert notes["linear"] == "oneDNN linear, packed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPELLED)
def test_nan_stays_where_eager_has_it(name: str, dtype: torch.dtype) -> None:
    most, inf = torch.finfo(dtype).max, math.inf
    x = torch.tensor([0.0, 1.0, -1.0, most**0.5, -(most**0.5), most, -most, inf, -inf, math.nan], dtype=dtype)
    product = torch.nn.Linear(1, 1, bias=False).to(dtype).eval()
    torch.nn.init.ones_(product.weight)
    made, _ = compiled(SPELLED[name], product, x[:, None])
    assert torch.equal(made[:, 0].isnan(), SPELLED[name](x).isnan())


class _Conv1D(torch.nn.Module):
    """GPT-2's linear: rows are flattened by hand, and the weight is transposed."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.randn(k, n)), torch.nn.Parameter(torch.randn(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16])
def test_an_explicit_cast_to_fewer_digits_rounds(rounded: torch.dtype) -> None:
    def curve(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x.to(rounded).float())

    product, x = torch.nn.Linear(32, 32, bias=False).eval(), torch.randn(16, 32)
    torch.nn.init.eye_(product.weight)
    made, _ = compiled(curve, product, x)
    torch.testing.assert_close(made, curve(x))


@pytest.mark.parametrize("squeezed", [False, True])
def test_a_product_of_flattened_rows_has_its_activation(squeezed: bool) -> None:
    product, x = _Conv1D(64, 32).eval(), torch.randn(2, 16, 64)

    def model(x: torch.Tensor) -> torch.Tensor:
        return SPELLED["gelu_new"](product(x).view(4, 8, 32) if squeezed else product(x))

    with report.recording() as graphs, torch.no_grad():
        made = torch.compile(model, backend="x86_onednn", options={"prepack": "always", "strict": True})(x)
        torch.testing.assert_close(made, model(x))
    run = graphs[0].texts["plan"].partition("def run(")[2]
    assert "'gelu', [], 'tanh'" in run and run.count("aten_view") == squeezed
