# ruff: noqa: E501 (one line of text per node)
"""A printed graph parses back to the same graph, and an invalid text is refused with its line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright import report
from fusewright.bench import suite
from fusewright.graph.parser import ParseError, parse
from fusewright.graph.printer import to_text

HAND_WRITTEN = {
    "strides, devices, dtypes": """\
%0: bf16[4,3]{1,4} = input('x')
%1: f32[4]@cuda = input('y')
%2: i64[] = attribute('n')
%3: f16[2,0,3]{3,3,1} = input('e')
%4: float8_e4m3fn[2] = input('q')
return [%0, %1, %2, %3, %4]
""",
    "symbols": """\
%0: sym(s0) = input('s0')
%1: f32[s0,2*s0,(s0//2)]{4*s0*((s0//2)),(s0//2),1} = input('x')
%2: sym(s0 + 3) = py.add(%0, 3)
%3: f32[Max(3, s0),s77] = input('z')
return [%2, %1, None]
""",
    "arguments of every kind": """\
%0: f32[2,3] = input('x')
%1: f32[2,3] = add(%0, -1.5, alpha=1)  # model.py:41
%2: f32[2,3] = clamp(%1, -inf, 1e-05)
%3: f32[2,3] = cast(%2, dtype=torch.float32, layout=torch.strided, device=cpu, pin_memory=False, non_blocking=False, memory_format=torch.contiguous_format)
%4: f32[2,3] = gelu(%3, 'tanh')  # a.py:7
%5: (f32[2,3], i64[2,3]) = sort(%4, stable=None, dim=-1, descending=False)
%6: f32[2,3] = py.getitem(%5, 0)
%7: f32[2,3] = masked_fill(%6, %6, nan)
%8: f32[3,2]{1,3} = permute(%7, [1, 0])
%9: c64[2] = mul((1+2j), -1j)
return [%8, [%6, 3], True]
""",
    "opaque op": """\
%0: f32[4,4] = input('x')
%1: f32[4,4] = aten.cholesky_inverse.default(%0)
return [%1]
""",
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_hand_written_texts_come_back(name: str) -> None:
    assert to_text(parse(HAND_WRITTEN[name])) == HAND_WRITTEN[name]


def test_metadata_is_that_of_the_text() -> None:
    x, y, n, *_ = parse(HAND_WRITTEN["strides, devices, dtypes"]).nodes
    assert (x.meta["val"].dtype, x.meta["val"].stride()) == (torch.bfloat16, (1, 4))
    assert y.meta["val"].device.type == "cuda"
    assert n.meta["val"].dim() == 0


def test_numbers_are_only_labels() -> None:
    text = "# by hand\n%10: f32[2] = input('x')\n\n%7: f32[2] = relu(%10)\nreturn %7\n"
    assert to_text(parse(text)) == "%0: f32[2] = input('x')\n%1: f32[2] = relu(%0)\nreturn %1\n"


def test_equal_symbols_are_one_symbol() -> None:
    a, b, *_ = parse("%0: f32[s0] = input('a')\n%1: f32[s0] = input('b')\nreturn [%0, %1]\n").nodes
    assert a.meta["val"].shape == b.meta["val"].shape


BAD = {
    "%0: f32[2] = input('x')\n%1: f32[2] = reluu(%0)\nreturn [%1]": "line 2: there is no op 'reluu'; .*relu",
    "%0: f32[2] = relu(%1)\nreturn [%0]": "line 1: %1 is used before it is defined",
    "%0: f32[2] = input('x')\n%0: f32[2] = input('y')\nreturn []": "line 2: %0 is defined twice",
    "%0: f33[2] = input('x')\nreturn []": "line 1: there is no dtype 'f33'",
    "%0: f32[2 = input('x')\nreturn []": "line 1: expected",
    "%0: f32[2,3]{1} = input('x')\nreturn []": "line 1: .* has 2 sizes but 1 strides",
    "%0: f32[2] = input('x')\n": "line 1: the graph does not return",
    "return []\n\n%0: f32[2] = input('x')": "line 3: something follows the return",
    "hello": "line 1: expected '%N: type = op",
    "%0: f32[2] = input('x')\n%1: f32[2] = relu(%0, !)\nreturn [%1]": "line 2: cannot read",
    "%0: f32[2] = input('x')\n%1: f32[2] = relu(%0, oops)\nreturn [%1]": "line 2: 'oops' is no value",
    "%0: f32[2] = input('x')\n%1: f32[2] = relu(%0 %0)\nreturn [%1]": "line 2: expected ',', found '%0'",
    "%0: f32[2] = input('x')\n%1: f32[2] = py.eval('1')\nreturn [%1]": "line 2: the Python function 'eval'",
    "%0: f32[os.getcwd()] = input('x')\nreturn []": "line 1: 'os.getcwd\\(\\)' is no size",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_text_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ParseError, match=BAD[text]):
        parse(text)


def _texts(fn: Any, *args: Any, **how: Any) -> Iterator[tuple[str, str]]:
    torch.compiler.reset()
    with report.recording() as reports:
        out = torch.compile(fn, backend="fusewright_null", **how)(*args)
        if isinstance(out, Tensor) and out.requires_grad:
            out.sum().backward()
    assert reports
    for r in reports:
        for stage in ("canonicalize", "simplify", "lower"):
            yield f"{r.phase} after {stage}", r.texts[stage]


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm(self.conv(x)))
        y = F.dropout(y, 0.5).mean((2, 3))
        return (
            F.log_softmax(self.head(y), -1)
            .masked_fill(torch.ones(5, dtype=torch.bool), float("-inf"))
            .clamp(-1e30)
        )


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
def test_training_graphs_come_back(dynamic: bool) -> None:
    x = torch.randn(2, 3, 8, 8)
    for where, text in _texts(_Layers().train(), x, dynamic=dynamic):
        assert to_text(parse(text)) == text, where


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", suite.SUITE)
def test_graphs_of_the_suite_come_back(name: str) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    built = suite.build(name, size="small")
    with torch.no_grad():
        for where, text in _texts(lambda *a: built.run(), torch.zeros(1)):
            assert to_text(parse(text)) == text, where
