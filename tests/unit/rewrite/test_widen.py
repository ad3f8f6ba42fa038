"""Products of a half type in fp32: which are rewritten, and that the graph keeps its meaning, types and strides."""

from __future__ import annotations

import itertools

import pytest
import torch

from fusewright.graph import verify
from fusewright.graph.parser import parse
from fusewright.graph.printer import to_text
from fusewright.interface import RuleLog
from fusewright.rewrite.widen import ID, Wider, widen

XW = "%0: bf16[32,64] = input('x')\n%1: bf16[128,64] = input('w')\n"


def _wider(op: str, dtype: torch.dtype, rows: int) -> torch.dtype | None:
    return torch.float32 if dtype is torch.bfloat16 and (op != "linear" or rows > 4) else None


def _text(before: str, log: RuleLog | None = None, wider: Wider | None = _wider) -> str:
    graph = parse(before)
    widen(graph, wider, log or RuleLog())
    verify.check(graph, "widen")
    return to_text(graph)


def test_operands_are_widened_and_the_result_is_rounded() -> None:
    before = XW + "%2: bf16[128] = input('b')\n%3: bf16[32,128] = linear(%0, %1, %2)\n%4: bf16[32,128] = relu(%3)\nreturn [%4]\n"
    after = (
        XW + "%2: bf16[128] = input('b')\n"
        "%3: f32[32,64] = cast(%0, dtype=torch.float32)\n%4: f32[128,64] = cast(%1, dtype=torch.float32)\n"
        "%5: f32[128] = cast(%2, dtype=torch.float32)\n%6: f32[32,128] = linear(%3, %4, %5)\n"
        "%7: bf16[32,128] = cast(%6, dtype=torch.bfloat16)\n%8: bf16[32,128] = relu(%7)\nreturn [%8]\n"
    )
    log = RuleLog()
    assert _text(before, log) == after
    assert log.hits == {ID: 1}


def test_each_gradient_of_a_convolution_is_rounded() -> None:
    spatial = "[1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]"
    before = (
        "%0: bf16[2,16,8,8] = input('g')\n%1: bf16[2,8,8,8] = input('x')\n%2: bf16[16,8,3,3] = input('w')\n"
        f"%3: (bf16[2,8,8,8], bf16[16,8,3,3], bf16[16]) = conv_backward(%0, %1, %2, [16], {spatial})\n"
        "%4: bf16[2,8,8,8] = py.getitem(%3, 0)\n%5: bf16[16] = py.getitem(%3, 2)\nreturn [%4, %5]\n"
    )
    lines = _text(before).splitlines()
    assert [line.partition(" = ")[2].partition("(")[0] for line in lines[3:-1]] == [
        "cast", "cast", "cast", "conv_backward", "py.getitem", "cast", "py.getitem", "cast"
    ]  # fmt: skip
    assert all("bf16" in line for line in lines if "dtype=torch.bfloat16" in line)


@pytest.mark.parametrize(
    ("product", "why"),
    [
        ("%2: bf16[32,64] = mul(%0, 2)\nreturn [%2]\n", "it is no product"),
        ("%2: f32[32,64] = cast(%0, dtype=torch.float32)\n%3: f32[64,32]{1,64} = t(%2)\n"
         "%4: f32[32,32] = mm(%2, %3)\nreturn [%4]\n", "it is wide already"),
        ("%2: bf16[4,512] = input('a')\n%3: bf16[64,512] = input('b')\n%4: bf16[4,64] = linear(%2, %3, None)\nreturn [%4]\n",
         "its weight is read once"),
        ("%2: i64[64,64] = input('a')\n%3: i64[64,64] = mm(%2, %2)\nreturn [%3]\n", "it is of integers"),
        ("%2: f32[64,128] = input('a')\n%3: bf16[32,128] = mm(%0, %2)\nreturn [%3]\n", "its types differ"),
        ("%2: bf16[2,2] = input('a')\n%3: bf16[2,2] = mm(%2, %2)\nreturn [%3]\n", "it is small"),
    ],
)  # fmt: skip
def test_other_ops_stay(product: str, why: str) -> None:
    assert _text(XW + product) == XW + product, why


def test_it_can_be_switched_off_and_runs_on_fuel() -> None:
    before = XW + "%2: bf16[32,128] = linear(%0, %1, None)\nreturn [%2]\n"
    assert _text(before, RuleLog(disabled=(ID,))) == before
    assert _text(before, RuleLog(fuel=0)) == before
    assert _text(before, wider=None) == before


@pytest.mark.parametrize(
    ("images", "strides", "weights", "zeros"),
    [
        ("2,16,8,8", "{1024,1,128,16}", "16,16,3,3", "0, 0"),
        ("2,16,4,4,4", "{1024,1,256,64,16}", "16,16,3,3,3", "0, 0, 0"),
    ],
)  # fmt: skip
def test_a_result_keeps_its_strides(images: str, strides: str, weights: str, zeros: str) -> None:
    """Eager's convolution of a half type leaves planes where that of fp32 would return channels-last images, or the reverse."""
    ones = zeros.replace("0", "1")
    conv = f"conv(%0, %1, None, [{ones}], [{ones}], [{ones}], False, [{zeros}], 1)\nreturn [%2]\n"
    for read, laid in itertools.product(("", strides), repeat=2):
        given = f"%0: bf16[{images}]{read} = input('x')\n%1: bf16[{weights}] = input('w')\n"
        last = _text(given + f"%2: bf16[{images}]{laid} = {conv}").splitlines()[-2]
        assert f"bf16[{images}]{laid} = cast" in last


def test_attention_in_training_stays() -> None:
    """Its gradients compute the scores again, from what was saved: the forward pass has to read the same."""
    before = (
        "%0: bf16[1,2,16,8] = input('q')\n%1: bool[16,16] = input('mask')\n"
        "%2: (bf16[1,2,16,8], f32[1,2,16]{32,1,2}) = sdpa_with_lse(%0, %0, %0, 0.0, False, attn_mask=%1, scale=None)\n"
        "%3: bf16[1,2,16,8] = py.getitem(%2, 0)\n%4: f32[1,2,16]{32,1,2} = py.getitem(%2, 1)\nreturn [%3, %4]\n"
    )
    assert _text(before) == before


def test_a_mask_of_bools_is_not_widened() -> None:
    before = (
        "%0: bf16[1,2,16,8] = input('q')\n%1: bool[16,16] = input('mask')\n"
        "%2: bf16[1,2,16,8] = sdpa(%0, %0, %0, %1, 0.0, False, scale=None, enable_gqa=False)\nreturn [%2]\n"
    )
    lines = _text(before).splitlines()
    assert [line.partition(" = ")[2].partition("(")[0] for line in lines[2:-1]] == ["cast", "sdpa", "cast"]


def test_a_result_whose_strides_a_cast_cannot_give_stays() -> None:
    before = (
        "%0: bf16[1,2,16,8] = input('q')\n%1: bf16[1,2,16,8]{256,8,16,1} = sdpa(%0, %0, %0, None, 0.0, False, scale=None, "
        "enable_gqa=False)\nreturn [%1]\n"
    )
    assert _text(before) == before
