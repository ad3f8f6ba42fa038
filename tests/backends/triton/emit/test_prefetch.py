"""Rows held in registers: loads of rows not aligned to 16 bytes, order of loads, sums reduced together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from torch import Tensor
from torch.nn import functional as F

from fusewright.toolkit.ir import Builder, Kernel
from fusewright_triton import target
from fusewright_triton.emit import schedule
from fusewright_triton.emit.emitter import emit
from tests.backends.triton.kernels import layer_norm, simulate, softmax

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
H100 = target.NVIDIA["sm_90"]


def text_of(kernel: Kernel, **changes: Any) -> str:
    return emit(kernel, replace(schedule.choose(kernel, H100), **changes)).text


def strided(columns: int, stride: int, offset: int = 0) -> Kernel:
    """Return the kernel y[i, j] = x[i, j] / sum of the row, for rows that begin at offset + i * stride."""
    b = Builder("strided", p=[64], r=[columns])
    x, y = b.input("x", "bf16"), b.output("y", "bf16")
    i, j = b.axes
    v = b.load(x, i * stride + j + offset).to("f32")
    b.store(y, i * columns + j, (v / b.reduce("sum", v)).to("bf16"))
    return b.build()


@pytest.mark.parametrize(
    ("kernel", "neighbours"),
    [
        (layer_norm(4096, 30522, "bf16"), 2), (layer_norm(4096, 30522, "f32"), 2), (layer_norm(64, 1001, "bf16"), 1),
        (layer_norm(64, 1004, "bf16"), 4), (layer_norm(64, 1004, "f32"), None), (layer_norm(64, 1024, "bf16"), None),
        (softmax(64, 1002, "bf16"), 2), (strided(1000, 1000), None), (strided(1000, 1000, 4), 4),
        (strided(1000, 1003), 1),
    ],
)  # fmt: skip
def test_lanes_take_as_many_neighbours_as_every_tensor_lets_them(kernel: Kernel, neighbours: int | None) -> None:
    text = text_of(kernel)
    assert ("max_contiguous" in text) == (neighbours is not None)
    assert neighbours is None or f"tl.max_contiguous(tl.arange(0, RB), {neighbours})" in text


def test_rows_between_multiples_of_16_bytes_are_right_to_their_ends() -> None:
    """All rows are right, including the first and last; nothing outside them is written."""
    torch.manual_seed(0)
    for columns in (1001, 1002, 1022):
        kernel = layer_norm(4, columns, "bf16")
        x, w, b = torch.randn(4, columns), torch.rand(columns) + 0.5, torch.randn(columns)
        given = [t.bfloat16() for t in (x, w, b)]
        want = F.layer_norm(given[0].double(), (columns,), given[1].double(), given[2].double())
        got = torch.full((6, columns), 7.0, dtype=torch.bfloat16)
        simulate(kernel, [*given, got[1:-1]], target=H100)
        torch.testing.assert_close(got[1:-1].double(), want, atol=0.02, rtol=0.01)
        assert (got[0] == 7).all() and (got[-1] == 7).all()


def normed(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, w)


@pytest.mark.parametrize("fn", [normed, lambda x, w: F.softmax(x, -1), lambda x, w: F.rms_norm(x, w.shape, w)])
@pytest.mark.parametrize(("columns", "first"), [(333, 0), (333, 1), (334, 2), (336, 3)])
def test_parts_of_rows(fn: Any, columns: int, first: int) -> None:
    torch.manual_seed(columns)
    whole, w = torch.randn(5, 400).bfloat16(), torch.rand(columns).bfloat16()
    x = whole[1:, first : first + columns]
    options: dict[str, Any] = {"simulate": True, "target": "sm_90", "strict": True, "cache": False}
    with torch.no_grad():
        ours = torch.compile(fn, backend="nvidia_triton", options=options)(x, w)
    exact, eager = fn(x.double(), w.double()), fn(x, w)
    floor = 4 * torch.finfo(torch.bfloat16).eps * exact.abs().mean()
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + floor


def test_a_softmax_of_halves_is_multiplied_by_the_reciprocal_of_its_sum() -> None:
    assert "fw.reciprocal" in text_of(softmax(64, 512, "bf16")) and "tl.exp(" in text_of(softmax(64, 512, "bf16"))
    exact = text_of(softmax(64, 512, "f32"))
    assert "* fw.reciprocal" not in exact and "fw.divide_by(" in exact and "tl.exp(" not in exact
    assert "fw.reciprocal" not in text_of(strided(512, 512))  # its sums may be arbitrarily small


def products(count: int, length: int = 512) -> Kernel:
    """Return a kernel that adds `count` products of one row with weights [256, length] and the mean of its squares."""
    b = Builder("products", p=[256], r=[length])
    x, ws = b.input("x", "bf16"), [b.input(f"w{k}", "bf16") for k in range(count)]
    y = b.output("y", "f32")
    i, j = b.axes
    v = b.load(x, j).to("f32")
    squares = b.reduce("mean", v * v)
    sums = [b.reduce("sum", v * b.load(w, i * length + j).to("f32")) for w in ws]
    total = squares
    for s in sums:
        total = total + s
    b.store(y, i, total)
    return b.build()


@pytest.mark.parametrize(
    ("count", "calls"), [(1, ["reduce_sum2"]), (2, ["reduce_sum3"]), (3, ["reduce_sum3", "reduce_sum("])]
)
def test_sums_of_a_row_are_taken_together(count: int, calls: list[str]) -> None:
    kernel = products(count)
    text = text_of(kernel)
    body = text[text.index("@triton") :]
    assert all(body.count(c) == 1 for c in calls)
    assert body.rindex("tl.load") < body.index("fw.reduce")  # all loads are issued before the first reduction
    assert body.count('"evict_first"') == count and body.count('"evict_last"') == 1
    x, ws, y = torch.randn(512).bfloat16(), [torch.randn(256, 512).bfloat16() for _ in range(count)], torch.empty(256)
    simulate(kernel, [x, *ws, y], target=H100)
    want = sum((w.double() @ x.double() for w in ws), x.double().square().mean())
    torch.testing.assert_close(y.double(), want, atol=1e-4, rtol=1e-4)


def test_loads_wait_where_registers_are_few() -> None:
    """Eight blocks of 32 elements per lane are not all loaded before the first is used."""
    b = Builder("wide", p=[64], r=[32768])
    ins, y = [b.input(f"x{k}", "f32") for k in range(8)], b.output("y", "f32")
    i, j = b.axes
    v = b.load(ins[0], i * 32768 + j)
    for x in ins[1:]:
        v = v + b.load(x, i * 32768 + j)
    b.store(y, i, b.reduce("sum", v))
    body = text_of(b.build(), row=32768, persistent=True, warps=32, split=1)
    lines = [line.strip() for line in body.splitlines()]
    loads = [k for k, line in enumerate(lines) if "tl.load" in line]
    assert loads != list(range(loads[0], loads[0] + 8))
