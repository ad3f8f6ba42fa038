"""The rows of x86_onednn in a compiled model: counted in its report, switched off by id, limited by fuel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fusewright import report
from fusewright_cpu.onednn.lowerings import ROWS
from fusewright_cpu.onednn.norms import RULE

pytestmark = [pytest.mark.hardware("x86_onednn"), pytest.mark.usefixtures("fresh_dynamo")]

PRODUCT, UNARY = "onednn.product", "onednn.product.unary"


def compiled(**options: Any) -> report.GraphReport:
    """Compile a perceptron, compare it with eager, and return the report."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU()).eval()
    x = torch.randn(4, 64)
    given = {"prepack": "always", "cache": False, "strict": True, **options}
    with report.recording() as reports, torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="x86_onednn", options=given)(x), model(x))
    return reports[0]


def activations(r: report.GraphReport) -> int:
    """Count the products in the plan that compute an activation."""
    return r.texts["plan"].count("'gelu'")


def test_rows_are_counted_in_the_report_as_the_hosts_rules_are() -> None:
    r = compiled()
    assert activations(r) == 2 and (r.rules[PRODUCT], r.rules[UNARY]) == (2, 2)


def test_a_row_that_is_switched_off_is_not_in_the_plan() -> None:
    r = compiled(disable_rules=[UNARY])
    assert activations(r) == 0 and "_linear_pointwise" in r.texts["plan"] and UNARY not in r.rules
    torch.compiler.reset()
    r = compiled(disable_rules=[PRODUCT])
    assert "_linear_pointwise" not in r.texts["plan"] and not r.rules[PRODUCT]


def test_the_environment_switches_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_DISABLE_RULE", UNARY)
    assert activations(compiled()) == 0


def test_fuel_that_is_left_by_the_hosts_rules_limits_those_of_the_backend() -> None:
    before = compiled().rules
    ours = {PRODUCT, UNARY}
    hosts = sum(n for rule, n in before.items() if rule not in ours and rule != "cse")
    for left in (0, 1, 2):
        torch.compiler.reset()
        r = compiled(fuel=hosts + left)
        assert (r.rules[PRODUCT], activations(r)) == (left, left), "one claim is one rewrite"


def test_every_row_has_an_id_of_its_own() -> None:
    steps = [s.rule for row in ROWS for s in getattr(row.pattern, "steps", ()) if s.rule]
    ids = [row.id for row in ROWS] + steps + [RULE]
    assert len(set(ids)) == len(ids) and all(i.startswith("onednn.") for i in ids)
