"""Layers of a Transformer's encoder, which torch calls whole in inference, are lowered like any other model code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright import registry
from fusewright.accuracy import compare
from fusewright.report import recording

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH, HEADS, LENGTH = 16, 2, 6
PADDED = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [4], [1]])
PAST = torch.ones(LENGTH, LENGTH).triu(1).bool()
MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "keys": {"src_key_padding_mask": PADDED},
    "no_keys": {"src_key_padding_mask": PADDED | (torch.arange(3) == 1)[:, None]},
    "queries": {"src_mask": PAST},
    "both": {"src_mask": PAST, "src_key_padding_mask": PADDED},
    "heads": {"src_mask": PAST.expand(3 * HEADS, -1, -1).clone()},
}


def _layer(**given: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True, **given)
    for p in layer.parameters():
        nn.init.normal_(p, 0.1, 0.3)
    return layer.eval()


def _compiled(module: nn.Module, backend: str = "x86_onednn", **given: Any) -> Any:
    if not (info := registry.info(backend)).available:
        pytest.skip(f"{backend}: {info.device.reason}; runs where: {info.device.fix}")  # type: ignore[union-attr]
    return torch.compile(module, backend=backend, options={"cache": False, "never_slower": False, "strict": True}, **given)


@torch.no_grad()
def _right(layer: nn.Module, compiled: Any, x: Tensor, masks: dict[str, Tensor]) -> None:
    made, want = compiled(x, **masks), layer(x, **masks)
    exact = layer.double()(x.double(), **masks)
    layer.to(x.dtype)
    assert (made.dtype, made.stride()) == (want.dtype, want.stride())
    torch.testing.assert_close(made.isnan(), want.isnan())
    found = compare([exact.nan_to_num()], [want.nan_to_num()], [made.nan_to_num()], {torch.float32: "fp32"}.get(x.dtype, "bf16"))
    assert found.passed, found.reason


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("mask", MASKS)
def test_results_are_eagers(mask: str, activation: str, norm_first: bool) -> None:
    layer = _layer(activation=activation, norm_first=norm_first)
    with recording() as reports:
        _right(layer, _compiled(layer), torch.randn(3, LENGTH, WIDTH), MASKS[mask])
    (report,) = reports
    assert report.count("eager") == 0
    assert report.count("lowered") > 5


def test_images_of_tokens_in_another_order_and_half_types() -> None:
    layer = _layer().bfloat16()
    _right(layer, _compiled(layer), torch.randn(LENGTH, 3, WIDTH, dtype=torch.bfloat16).transpose(0, 1), {})


def test_sizes_may_be_symbols() -> None:
    layer = _layer()
    compiled = _compiled(layer, dynamic=True)
    with recording() as reports:
        for rows, length in ((3, 6), (2, 5), (5, 9)):
            x = torch.randn(rows, length, WIDTH)
            _right(layer, compiled, x, {"src_key_padding_mask": torch.arange(length).expand(rows, -1) >= length - 2})
    assert len(reports) == (torch.__version__ >= "2.13")  # older ones trace no such layer, and leave it to eager


def test_a_backend_that_claims_nothing_calls_the_layer() -> None:
    layer, x = _layer(), torch.randn(3, LENGTH, WIDTH)
    with torch.no_grad(), recording() as reports:
        assert torch.equal(torch.compile(layer, backend="fusewright_null", options={"cache": False})(x), layer(x))
    assert [o.op for r in reports for o in r.ops] == ["aten._transformer_encoder_layer_fwd.default"]


def test_what_eager_nests_is_padded() -> None:
    """By default the encoder nests what is padded, but not while Dynamo traces it: padded positions hold numbers then."""
    encoder = nn.TransformerEncoder(_layer(), 2).eval()
    x = torch.randn(3, LENGTH, WIDTH)
    with torch.no_grad(), recording() as reports:
        made, want = (fn(x, src_key_padding_mask=PADDED) for fn in (_compiled(encoder), torch.compile(encoder, backend="eager")))
    torch.testing.assert_close(made, want, rtol=1e-4, atol=1e-4)
    assert all(r.count("eager") == 0 for r in reports)
