"""Rewrite rows of the GPU backends: each has an id that counts it and can switch it off."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from torch import nn

from fusewright import report
from fusewright.interface import Fragment, RuleLog
from fusewright.toolkit.region import gemv
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.backend import NvidiaTriton
from fusewright_triton.select import convolutions, more_channels, products, quantized
from fusewright_triton.select.attention import decode, sdpa, short_sequence, unfused
from tests.backends.triton.select.test_calls import REAL, Net, block, text
from tests.fragments import Context, by_preference

ROWS: tuple[Row, ...] = (
    *gemv.ROWS, *products.ROWS, *quantized.MM, *quantized.INT_MM, *convolutions.ROWS, *more_channels.ROWS,
    convolutions.BACKWARD, convolutions.PATCHES_BACKWARD, more_channels.BACKWARD,
    *decode.ROWS, *short_sequence.ROWS, *sdpa.ROWS, *unfused.ROWS,
)  # fmt: skip


def steps_of(row: Row) -> list[str]:
    return [s.rule for s in getattr(row.pattern, "steps", ()) if s.rule]


def test_every_row_has_an_id_of_its_own() -> None:
    ids = [row.id for row in ROWS]
    assert len(set(ids)) == len(ids)
    steps = {s for row in ROWS for s in steps_of(row)} | {convolutions.SHORTCUT}
    assert steps.isdisjoint(ids) and all(i.startswith(("triton.", "gemv")) for i in (*ids, *steps))


def calls(*disabled: str, fuel: int | None = None) -> tuple[list[str], RuleLog]:
    """Lower a residual block with a shortcut and some rows switched off; return its calls and the log."""
    g = Net()
    y = block(g, g.tensor(2, 8, 7, 7), shortcut=True)
    log = RuleLog(disabled, fuel)
    ctx = Context({}, REAL, by_preference("separate", "last"), specs=g.temporaries, rules=log)
    fragment = NvidiaTriton(REAL).compile(g.region([y]), ctx)
    assert isinstance(fragment, Fragment)
    return [name for t in text(fragment, prepare=False) if "conv" in (name := t.partition("(")[0])], log


ALONE, FUSED = "aten::convolution", "aten::cudnn_convolution_add_relu"


@pytest.mark.parametrize(
    ("disabled", "found"),
    [
        ([], [ALONE, FUSED]),
        (["triton.conv.residual"], [ALONE, ALONE]),
        (["triton.conv.batch_norm"], [ALONE, ALONE]),
        ([convolutions.SHORTCUT], [ALONE, FUSED]),
    ],
)
def test_a_row_that_is_switched_off_writes_nothing(disabled: list[str], found: list[str]) -> None:
    made, log = calls(*disabled)
    assert made == found
    assert log.hits.keys().isdisjoint(disabled) and log.spent


def test_a_claim_is_counted_with_what_takes_part_in_it() -> None:
    _, log = calls()
    assert dict(log.hits) == {"triton.conv.residual": 1, "triton.conv.batch_norm": 1, convolutions.SHORTCUT: 1}
    assert log.spent == 1, "one rewrite"
    _, log = calls(fuel=0)
    assert not log.hits


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_compiled_without_a_row_has_a_plan_without_it() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(512, 264, bias=False), torch.randn(1, 512)

    def compiled(**options: Any) -> report.GraphReport:
        torch.compiler.reset()
        given = {"simulate": True, "strict": True, "cache": False, **options}
        with report.recording() as reports, torch.no_grad():
            torch.testing.assert_close(torch.compile(model, backend="nvidia_triton", options=given)(x), model(x))
        return reports[0]

    r = compiled()
    assert "linear" not in r.texts["plan"].partition("def run")[2] and r.rules["gemv"] == 1
    r = compiled(disable_rules=["gemv"])
    assert "linear" in r.texts["plan"].partition("def run")[2] and not r.rules["gemv"]
