"""Attention through oneDNN Graph and through products over blocks of rows, and the operators behind it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as eager

from fusewright_onednn import choices, runtime
from tests.backends.onednn.common import BF16, F32, check
from tests.fragments import Sketch, targets

Form = Callable[..., torch.Tensor]
ATTENTION = "fusewright_onednn::attention"
pytestmark = pytest.mark.skipif(not runtime.graph_available(), reason="this torch has no oneDNN Graph")


def _qkv(dtype: torch.dtype, rows: int = 24, columns: int = 24, transposed: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = []
    for length in (rows, columns, columns):
        t = torch.randn(2, length, 3, 16, dtype=dtype).transpose(1, 2)
        made.append(t if transposed else t.contiguous())
    return made


def _error(ours: torch.Tensor, qkv: list[torch.Tensor], **how: object) -> tuple[float, float]:
    """Our largest error against fp64, and eager's."""
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in how.items()}
    exact = eager(*(t.double() for t in qkv), **wide)
    theirs = eager(*qkv, **how)
    assert ours.stride() == theirs.stride() and ours.dtype == theirs.dtype
    return float((ours.double() - exact).abs().max()), float((theirs.double() - exact).abs().max())


MASKS = {
    "none": lambda dtype: None,
    "added": lambda dtype: torch.randn(2, 1, 24, 24, dtype=dtype),
    "boolean": lambda dtype: torch.rand(2, 1, 24, 24) > 0.3,
    "keys only": lambda dtype: torch.rand(2, 1, 1, 24) > 0.3,
    "two dimensions": lambda dtype: torch.randn(24, 24, dtype=dtype),
}


by_form = pytest.mark.parametrize("form", choices.ATTENTION_FORMS.values(), ids=choices.ATTENTION_FORMS.keys())


@by_form
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("transposed", [True, False])
def test_operator_is_as_exact_as_eager(mask: str, dtype: torch.dtype, transposed: bool, form: Form) -> None:
    qkv = _qkv(dtype, transposed=transposed)
    m = MASKS[mask](dtype)
    ours, theirs = _error(form(*qkv, m, False, None), qkv, attn_mask=m)
    assert ours <= 2 * theirs + 1e-6


@by_form
@pytest.mark.parametrize(("rows", "columns"), [(24, 24), (1, 24), (8, 24), (80, 80), (80, 50), (50, 80)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_causal_and_scale(
    rows: int, columns: int, scale: float | None, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "BLOCK_SCORES", 32 * columns)  # blocks of 32 rows
    qkv = _qkv(F32, rows, columns)
    ours, theirs = _error(form(*qkv, None, True, scale), qkv, is_causal=True, scale=scale)
    assert ours <= 2 * theirs + 1e-6


@by_form
def test_a_row_without_any_key_is_zero_as_in_eager(form: Form) -> None:
    qkv = _qkv(F32)
    mask = torch.ones(2, 1, 24, 24, dtype=torch.bool)
    mask[:, :, 5] = False
    ours = form(*qkv, mask, False, None)
    torch.testing.assert_close(ours, eager(*qkv, attn_mask=mask))
    assert not ours[:, :, 5].any()


@by_form
def test_nan_stays(form: Form) -> None:
    q, k, v = _qkv(F32)
    q[0, 0, 3, 0] = math.nan
    ours = form(q, k, v, None, False, None)
    torch.testing.assert_close(ours, eager(q, k, v), equal_nan=True)


def test_the_process_setting_of_the_fuser_is_left_alone() -> None:
    before = torch._C._jit_llga_enabled()
    qkv = _qkv(F32, rows=17)
    runtime.attention(*qkv, None, False, None)
    assert torch._C._jit_llga_enabled() is before


def test_a_changed_thread_count_gets_its_own_partition() -> None:
    qkv = _qkv(F32)
    wanted = runtime.attention(*qkv, None, False, None)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads % 2 + 1)
        torch.testing.assert_close(runtime.attention(*qkv, None, False, None), wanted)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("causal", [True, False])
def test_lowering(causal: bool) -> None:
    g = Sketch()
    q, k, v = (g.input(t) for t in _qkv(F32))
    y = g.op("sdpa", q, k, v, None, 0.0, causal)
    z = g.op("view", g.op("transpose", y, 1, 2), [2, 24, 48])
    assert targets(check(g, [z]))[0] == ATTENTION
    assert targets(check(g, [z], "eager"))[0] == "aten::scaled_dot_product_attention"


@pytest.mark.parametrize("used", [True, False])
def test_the_form_that_capture_leaves(used: bool) -> None:
    """Below autograd attention is `sdpa_with_lse`; a log-sum-exp that somebody reads keeps torch's kernel."""
    g = Sketch()
    q, k, v = (g.input(t) for t in _qkv(F32))
    y = g.op("sdpa_with_lse", q, k, v)
    outputs = [y, g.ops[-1].outs[1]] if used else [y]
    name = "aten::_scaled_dot_product_flash_attention_for_cpu" if used else ATTENTION
    assert targets(check(g, outputs))[0] == name
