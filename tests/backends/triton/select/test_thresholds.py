"""Thresholds between kernels and library calls hold on the GPU they were measured on: other targets measure, or use the library."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.interface import Device, Fragment, Value
from fusewright_triton.backend import NvidiaTriton, RocmTriton
from fusewright_triton.target import AMD, FORMULA, NVIDIA
from tests.backends.triton.select.test_calls import Net
from tests.fragments import Context, by_preference, targets

ROOT = Path(__file__).parents[4]
TARGETS = {**NVIDIA, **AMD}
UNMEASURED = ("sm_80", "sm_100", "gfx942")


def padded_linear(g: Net) -> Value:
    return g.op("linear", g.tensor(64, 32), g.weight(30, 32), None)


def padded_operands(g: Net) -> Value:
    return g.op("mm", g.tensor(40, 30), g.tensor(30, 8))


def int8_weights(g: Net) -> Value:
    w = g.input(torch.randint(-8, 8, (24, 48), dtype=torch.int8), const=True)
    return g.op("mm", g.tensor(6, 48), g.op("cast", g.op("t", w), torch.bfloat16))


def decoding(g: Net) -> Value:
    q, k, v = g.tensor(1, 4, 1, 16), g.tensor(1, 2, 70, 16), g.tensor(1, 2, 70, 16)
    return g.op("sdpa", q, *(g.op("clone", g.tensor(1, 4, 70, 16)) for _ in (k, v)), None, 0.0, False, None, False)


def masked(g: Net) -> Value:
    q, k, v = (g.tensor(2, 4, 40, 16) for _ in range(3))
    return g.op("sdpa", q, k, v, g.tensor(1, 1, 40, 40), 0.0, False, None, False)


def few_rows(g: Net) -> Value:
    return g.op("linear", g.tensor(1, 512), g.weight(264, 512), None)


def activated(g: Net) -> Value:
    return g.op("gelu", g.op("linear", g.tensor(128, 64), g.weight(256, 64), None), "none")


def short_sequence(g: Net) -> Value:
    q, k, v = (g.tensor(8, 16, 40, 16) for _ in range(3))
    return g.op("sdpa", q, k, v, None, 0.0, False, None, False)


MEASURED: dict[str, tuple[Callable[[Net], Value], str, str]] = {
    "padded": (padded_linear, "aten::slice.Tensor", "aten::linear"),
    "padded operands": (padded_operands, "kernel", "aten::mm"),
    "int8 weights": (int8_weights, "fusewright_triton::int8_linear", "aten::mm"),
    "attention of few": (decoding, "fusewright_triton::attention_decode", "aten::scaled_dot_product_attention"),
    "attention": (masked, "fusewright_triton::attention", "aten::scaled_dot_product_attention"),
}
"""Prefix of a measurement's key -> a graph, the call that identifies our candidate, and the library's."""

LIBRARY: dict[str, tuple[Callable[[Net], Value], str, str]] = {
    "products of few rows": (few_rows, "kernel", "aten::linear"),
    "activations": (activated, "fusewright_triton::linear_activation", "aten::linear"),
    "few keys": (short_sequence, "fusewright_triton::attention_short_sequence", "aten::scaled_dot_product_attention"),
}
"""Measuring these would mean building a kernel for each shape."""


@pytest.fixture(autouse=True)
def small(thresholds: Callable[..., None]) -> None:
    thresholds(padded_results=16 * 30, product_results=1 << 10, unaligned_flops=(1.0, 1.0))


def context(arch: str, *prefer: str, **more: Any) -> Context:
    device = Device("cpu", arch, TARGETS[arch].all_features, **more)
    return Context({}, device, by_preference(*prefer, "library", "torch"))


def calls(graph: Callable[[Net], Value], ctx: Context) -> list[str]:
    g = Net()
    y = graph(g)
    cls = NvidiaTriton if ctx.device.arch in NVIDIA else RocmTriton
    fragment = cls(ctx.device).compile(g.region([y]), ctx)
    assert isinstance(fragment, Fragment)
    return [t.split()[0] for t in targets(fragment)]


@pytest.mark.parametrize("arch", UNMEASURED)
@pytest.mark.parametrize("name", MEASURED)
def test_an_unmeasured_target_measures_where_that_is_cheap(name: str, arch: str) -> None:
    graph, ours, library = MEASURED[name]
    asked = context(arch, "kernel")
    assert ours in calls(graph, asked)
    assert [k for k in asked.asked if k.startswith(name)], "nobody was asked"
    stays = calls(graph, context(arch))
    assert library in stays and ours not in stays


@pytest.mark.parametrize("arch", UNMEASURED)
@pytest.mark.parametrize("name", LIBRARY)
def test_elsewhere_an_unmeasured_target_stays_with_the_library(name: str, arch: str) -> None:
    graph, ours, library = LIBRARY[name]
    ctx = context(arch, "kernel")
    found = calls(graph, ctx)
    assert library in found and ours not in found and not ctx.asked


@pytest.mark.parametrize("name", [*MEASURED, "products of few rows", "few keys"])
def test_the_target_that_was_measured_knows(name: str) -> None:
    ctx, (graph, ours, _) = context("sm_90"), {**MEASURED, **LIBRARY}[name]
    assert ours in calls(graph, ctx) and not ctx.asked


@pytest.mark.parametrize("arch", UNMEASURED)
@pytest.mark.parametrize("name", MEASURED)
def test_a_simulated_target_runs_what_it_would_measure(name: str, arch: str) -> None:
    """A simulated target has no speed to measure, and should show its kernels."""
    ctx = context(arch, simulated=True)
    assert MEASURED[name][1] in calls(MEASURED[name][0], ctx) and not ctx.asked


@dataclass
class Measuring(Context):
    """A context whose measurements run every candidate once."""

    ran: dict[str, list[str]] = field(default_factory=dict)

    def choose(self, key: str, candidates: Mapping[str, Callable[[], Any]]) -> str:
        for name, run in candidates.items():
            run()
            self.ran.setdefault(key, []).append(name)
        return super().choose(key, candidates)


@pytest.mark.parametrize("name", MEASURED)
def test_both_candidates_of_a_measurement_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    for module in ("products", "quantized", "attention.sdpa", "attention.decode"):
        monkeypatch.setattr(f"fusewright_triton.select.{module}.REPEATS", 1)
    ctx = Measuring({}, context("gfx942").device, by_preference("library", "torch"))
    calls(MEASURED[name][0], ctx)
    (ran,) = ctx.ran.values()
    assert len(ran) == 2


@pytest.mark.parametrize("source", [FORMULA.source, *(t.fitted.source for t in TARGETS.values() if t.fitted)], ids=str)
def test_every_row_says_where_its_numbers_come_from(source: Any) -> None:
    assert source.device and re.fullmatch(r"20\d\d-\d\d-\d\d", source.date) and source.records
    for record in source.records:
        assert (ROOT / record).is_file(), f"there is no record {record}"


ELSEWHERE: dict[str, str] = {
    "backend.py": "a row of where eager is faster, with its source",
    "emit/addressing.py": "why lanes take neighbours: no number is fitted",
    "emit/memory.py": "why a mark stands in the code: its number is in the table",
    "emit/prefetch.py": "what a rule is worth; it counts registers",
    "kernels/attention_ops.py": "blocks of a kernel, which other targets take from their shared memory",
    "kernels/int8_ops.py": "blocks of a kernel, which other targets take from their shared memory",
}
"""Files other than `target.py` that name a GPU on which something was measured, and why."""


def naming() -> Sequence[str]:
    package = ROOT / "backends/triton/fusewright_triton"
    files = sorted(package.rglob("*.py"))
    named = [p for p in files if re.search(r"\b[AHBL]\d{2,3}\b|\bMI\d{3}", p.read_text())]
    return [str(p.relative_to(package)) for p in named if p.name != "target.py"]


def test_numbers_of_one_gpu_stand_in_the_table_of_targets() -> None:
    assert sorted(naming()) == sorted(ELSEWHERE)
