"""Products whose code oneDNN keeps after their models are freed."""

from __future__ import annotations

import gc

import pytest
import torch

from fusewright.report import recording
from fusewright_cpu.onednn import left_behind
from fusewright_cpu.onednn.left_behind import Shapes
from tests.hosts import FLOATS


class Model:
    """An owner of compiled code."""


def test_products_of_living_models_are_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_behind, "MOST", 2)
    shapes, model = Shapes(), Model()
    assert all(shapes.admit(f"product {k}", model) for k in range(100))


def test_new_products_are_refused_when_dropped_models_have_left_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_behind, "MOST", 2)
    shapes, first, second = Shapes(), Model(), Model()
    assert all(shapes.admit(key, first) for key in ("a", "b", "c")) and shapes.admit("c", second)
    del first
    gc.collect()
    assert not shapes.admit("d", second)  # "a" and "b" are left behind
    assert shapes.admit("a", second)  # oneDNN still has code for it, which is reused
    assert shapes.admit("d", second)


def notes_of_a_linear(width: int) -> set[str]:
    model = torch.nn.Linear(width, 40).eval()
    with torch.no_grad(), recording() as reports:
        torch.compile(model, backend="x86_onednn", options={"cache": False})(torch.randn(8, width))
    torch.compiler.reset()
    gc.collect()
    return {op.note for op in reports[0].ops if op.op == "linear"}


def test_code_that_was_compiled_and_dropped_counts_and_eager_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(left_behind, "MOST", 2)
    monkeypatch.setattr("fusewright_cpu.onednn.choices.linear_form", lambda ctx, p, forms, after: asked.append(p.key) or "packed")
    found = [notes_of_a_linear(width) for width in (31, 32, 33, 34, 31)]
    assert [key.partition(" bias")[0].split("x")[1] for key in asked] == ["31", "32", "31"]
    assert found[2] == found[3] and found[0] == found[4] != found[2]


@pytest.mark.parametrize("kind", FLOATS)
def test_only_bf16_products_of_symbolic_rows_go_to_onednn_where_eagers_do_so_too(kind: torch.dtype) -> None:
    model = torch.nn.Linear(64, 256, dtype=kind).eval()
    with torch.no_grad(), recording() as reports:
        compiled = torch.compile(model, backend="x86_onednn", dynamic=True, options={"cache": False})
        x = torch.randn(48, 64, dtype=kind)
        torch.testing.assert_close(compiled(x), model(x))
    plan = reports[0].texts["plan"]
    assert ("mkldnn__linear_pointwise" in plan) == (kind is torch.bfloat16)
