"""Long sums of fp32 convolutions are computed in parts and as accurate as eager's."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from fusewright_cpu.onednn import sums
from fusewright_cpu.target import host_target
from tests.backends.onednn.common import BF16, F32, check, compiled
from tests.fragments import Context, Sketch, targets

CONV = "mkldnn::_convolution_pointwise"
ADDED = "kernel add"


def drawn(g: Sketch, shape: tuple[int, ...], out: int, taps: tuple[int, ...], **how: Any) -> Any:
    """Sketch a convolution of an image or a sequence that preserves the number of points."""
    torch.manual_seed(0)
    dtype, groups = how.get("dtype", F32), how.get("groups", 1)
    w = torch.randn(out, shape[1] // groups, *taps, dtype=dtype) / 16
    bias = g.input(torch.randn(out, dtype=dtype), const=True) if how.get("bias") else None
    w = w.to(memory_format=how.get("layout", torch.contiguous_format))
    ones, padding = [1] * len(taps), [t // 2 for t in taps]
    args = (ones, padding, ones, False, [0] * len(taps), groups)
    return g.op("conv", g.input(torch.randn(*shape, dtype=dtype)), g.input(w, const=True), bias, *args)


@pytest.mark.parametrize(("shape", "taps"), [
    ((1, 256, 8, 8), (3, 3)), ((1, 512, 99), (3,)), ((1, 128, 100), (11,)),
])  # fmt: skip
def test_long_sums_are_as_exact_as_eagers(shape: tuple[int, ...], taps: tuple[int, ...]) -> None:
    """Compares root mean square errors against fp64. A single running sum has 2.5 to 4 times eager's."""
    g = Sketch()
    y = drawn(g, shape, 128, taps)
    (ours,) = g.run(compiled(g, [y]), [y])
    x, w = (g.tensors[v.id].double() for v in g.ops[0].inputs())
    exact = torch.convolution(x, w, None, *g.ops[0].args[3:])
    error, theirs = ((t.double() - exact).square().mean().sqrt() for t in (ours, g.tensors[y.id]))
    assert error <= 2.3 * theirs, f"{error / theirs:.2f} times eager's error"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_follows_rides_on_the_kernel_that_adds_up(bias: bool, layout: torch.memory_format) -> None:
    g = Sketch()
    y = drawn(g, (2, 192, 7, 7), 32, (3, 3), bias=bias, layout=layout)
    norm = [g.input(t, const=True) for t in (*torch.randn(3, 32), torch.rand(32) + 0.5)]
    z = g.op("silu", g.op("batch_norm", y, *norm, 0.1, 1e-5))
    fragment = check(g, [z])
    names = targets(fragment)
    assert names[0] == CONV and len(names) == 2 and names[1].startswith(ADDED)


@pytest.mark.skipif(host_target().vector_bytes != 64, reason="1x1 convolutions are linears with AVX-512; runs where: a CPU has it")
@pytest.mark.parametrize(("shape", "taps", "act", "asked"), [
    ((1, 512, 7, 7), (1, 1), "relu", [(1, "none")]), ((1, 1104, 7, 7), (1, 1), "relu", [(2, "none")]),
    ((1, 512, 7, 7), (1, 1), "silu", [(1, "swish")]), ((1, 1104, 7, 7), (1, 1), "silu", [(2, "none")]),
    ((1, 16, 14, 14), (3, 3), "silu", [(1, "swish")]), ((1, 3, 28, 28), (3, 3), "silu", [(1, "swish")]),
])  # fmt: skip
def test_a_librarys_convolution_is_measured_with_its_parts_and_activation(
    shape: tuple[int, ...], taps: tuple[int, ...], act: str, asked: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call without them is faster than what the plan would run. Sums are small: the exponentials of large ones are no normal
    numbers, with which a CPU is slow."""
    found: list[tuple[int, str]] = []

    def choose(self: Context, key: str, candidates: Any) -> str:
        call = torch.ops.mkldnn._convolution_pointwise
        noting = types.SimpleNamespace(**{n: getattr(torch.ops.mkldnn, n) for n in ("_reorder_convolution_weight",)})

        def noted(*args: Any) -> torch.Tensor:
            found.append(args[6:8])
            assert call(*args[:7], "none", [], "").abs().max() < 10
            return call(*args)

        noting._convolution_pointwise = noted
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops, "mkldnn", noting)
            for make in candidates.values():
                make()
        return "packed"

    monkeypatch.setattr(Context, "choose", choose)
    g = Sketch()
    compiled(g, [g.op(act, drawn(g, shape, 32, taps))])
    assert found == asked


def test_activations_ride_on_a_sequences_sum() -> None:
    g = Sketch()
    z = g.op("gelu", drawn(g, (2, 256, 21), 32, (3,), bias=True))
    views = {"aten::unsqueeze", "aten::squeeze.dim"}
    names = [t for t in targets(check(g, [z])) if t not in views]
    assert names[:2] == ["kernel clone", CONV] and len(names) == 3 and names[2].startswith(ADDED)


@pytest.mark.parametrize(("shape", "taps", "how", "parts"), [
    ((1, 64, 8, 8), (3, 3), {}, 1),
    ((1, 128, 8, 8), (3, 3), {}, 2),
    ((1, 320, 8, 8), (3, 3), {}, 5),
    ((1, 100, 8, 8), (3, 3), {}, 2),
    ((1, 32, 32, 32), (17, 17), {}, 4),  # of 8 channels, which is as few as there may be
    ((1, 512, 1, 1), (3, 3), {}, 1),  # the other taps add nothing
    ((1, 3, 32, 32), (16, 16), {}, 1),
    ((1, 256, 8, 8), (3, 3), {"groups": 2}, 1),
    ((1, 256, 8, 8), (3, 3), {"dtype": BF16}, 1),
])  # fmt: skip
def test_parts(shape: tuple[int, ...], taps: tuple[int, ...], how: dict[str, Any], parts: int) -> None:
    g = Sketch()
    drawn(g, shape, 16, taps, **how)
    assert sums.parts_of(g.ops[0]) == parts


def test_parts_stay_in_memory_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    g = Sketch()
    drawn(g, (1, 512, 8, 8), 16, (3, 3))
    assert sums.parts_of(g.ops[0]) == 8
    monkeypatch.setattr(sums, "LARGEST", 8 * 16 * 64 * 4)
    assert sums.parts_of(g.ops[0]) == 4


def test_the_result_may_be_read_by_many() -> None:
    g = Sketch()
    y = drawn(g, (1, 128, 9, 9), 16, (3, 3), bias=True)
    check(g, [y, g.op("relu", y), g.op("mean", y, [2, 3], True)])
