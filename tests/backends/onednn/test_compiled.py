"""Cases through `torch.compile` that differ from running a fragment by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusewright import report
from fusewright.cache import tune
from fusewright.toolkit.region.builder import Builder
from fusewright_cpu.kernels.by_hand import Attention
from fusewright_cpu.onednn import choices
from tests.hosts import FLOATS, needs_bf16

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.hardware("x86_onednn")]


@pytest.mark.parametrize("training", [False, True])
def test_choices_are_measured_on_real_tensors(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd compiles under fake tensors, whose times are meaningless and on which oneDNN's ops do not run."""
    kinds: list[type] = []
    measured: list[set[str]] = []
    original = tune.measure

    def spy(candidates: Mapping[str, Callable[[], Any]], failures: dict[str, str]) -> list[dict[str, float]]:
        rounds = original({**candidates, "probe": lambda: kinds.append(type(torch.empty(1)))}, failures)
        measured.append(set(candidates) & set(rounds[0]))
        assert measured[-1] == set(candidates), "a candidate did not run"
        return [{n: t for n, t in times.items() if n != "probe"} for times in rounds]

    monkeypatch.setattr(tune, "measure", spy)
    m = torch.nn.Linear(24, 40 + 8 * training)  # a shape that no other test has measured
    compiled = torch.compile(m, backend="x86_onednn")
    x = torch.randn(6, 24)
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(compiled(x), m(x))
    assert measured and set(kinds) == {torch.Tensor}


def test_gradients_follow_eager() -> None:
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))
    x = torch.randn(32, 64, requires_grad=True)
    inputs = [x, *m.parameters()]
    wanted = torch.autograd.grad(m(x).square().mean(), inputs)
    got = torch.autograd.grad(torch.compile(m, backend="x86_onednn")(x).square().mean(), inputs)
    for w, g in zip(wanted, got, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spread", [0.02, 0.55])
def test_a_batch_norm_in_training_errs_in_no_direction(spread: float) -> None:
    """Adding eps to a variance that is rounded moves all channels the same way, by 1.8e-8; a scale's gradient in front adds it."""
    torch.manual_seed(0)
    norm, x = torch.nn.BatchNorm2d(2048).train(), spread * torch.randn(2, 2048, 7, 7)
    exact = F.batch_norm(x.double(), None, None, training=True)
    error = torch.compile(norm, backend="x86_onednn")(x) - exact
    assert abs((error * exact).sum() / exact.square().sum()) < 6e-9


def test_branches_of_convolutions_are_one_call_until_a_weight_changes() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.Conv2d(16, 16, 1)
            self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c = self.norms
            return (0 + a(self.large(x)) + b(self.small(x)) + c(x)).relu()

    m, x = Block().requires_grad_(False).eval(), torch.randn(1, 16, 14, 14)
    compiled = torch.compile(m, backend="x86_onednn", options={"fallback": "error"})
    with report.recording() as graphs:
        torch.testing.assert_close(compiled(x), m(x))
    assert [o.op for o in graphs[0].ops if o.op in ("conv", "batch_norm")] == ["conv"]
    m.norms[2].running_var.mul_(3)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(compiled(x), m(x))


def test_a_weight_changed_in_place_is_packed_again() -> None:
    m = torch.nn.Linear(64, 64).requires_grad_(False)
    compiled = torch.compile(m, backend="x86_onednn", options={"prepack": "always"})
    x = torch.randn(8, 64)
    torch.testing.assert_close(compiled(x), m(x))
    m.weight.mul_(-2)
    torch.testing.assert_close(compiled(x), m(x))


def test_a_weight_moved_away_and_back_is_packed_again() -> None:
    """Other memory may be at its old address, with its old version."""
    m, memory = torch.nn.Linear(64, 64).requires_grad_(False), bytearray(64 * 64 * 4)
    m.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(64, 64)
    compiled = torch.compile(m, backend="x86_onednn", options={"prepack": "always"})
    x = torch.randn(8, 64)
    torch.testing.assert_close(compiled(x), m(x))
    m.weight.data = torch.ones(64, 64)
    torch.frombuffer(memory, dtype=torch.float32)[1] = 5.0
    m.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(64, 64)
    torch.testing.assert_close(compiled(x), m(x))


def test_nothing_crashes_and_says_so() -> None:
    m = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(2, 16, 64)
    with report.recording() as graphs:
        torch.testing.assert_close(torch.compile(m, backend="x86_onednn")(x, x, x)[0], m(x, x, x)[0])
    assert graphs and not [b for g in graphs for b in g.bugs]


@needs_bf16
def test_a_batch_norm_is_folded_under_autocast() -> None:
    """Autocast puts a cast between the weight and the convolution, in a region of its own."""
    m = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU()).eval()
    x = torch.randn(2, 8, 9, 9)
    with report.recording() as graphs, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(torch.compile(m, backend="x86_onednn")(x), m(x), rtol=2e-2, atol=2e-2)
    (graph,) = graphs
    notes = {op.op: op.note for op in graph.ops}
    assert notes["batch_norm"] == "in the call of conv" and "packed" in notes["conv"]
    once, _, each_call = graph.texts["plan"].partition("def run(")
    assert "_reorder_convolution_weight" in once and "_reorder_convolution_weight" not in each_call


def test_an_activation_behind_a_linear_of_sequences_is_in_its_call() -> None:
    """Tracing flattens the sequence in front of the product; its view came between product and activation."""
    m = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).eval()
    x = torch.randn(2, 16, 64)
    with report.recording() as graphs, torch.no_grad():
        torch.testing.assert_close(torch.compile(m, backend="x86_onednn", options={"prepack": "always"})(x), m(x))
    (graph,) = graphs
    assert {op.op: op.note for op in graph.ops}["gelu"] == "in the call of linear"
    assert "view" not in graph.texts["plan"].partition("def run(")[2]


def test_a_scaled_image_joins_the_addition_that_reads_it_in_another_order() -> None:
    """ConvNeXt scales rows of channels and adds the residual to images."""

    def block(x: torch.Tensor, scale: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return (x * scale).permute(0, 3, 1, 2) + residual

    x, scale = torch.randn(2, 5, 6, 16), torch.randn(16)
    residual = torch.randn(2, 16, 5, 6).to(memory_format=torch.channels_last)
    with report.recording() as graphs, torch.no_grad():
        torch.testing.assert_close(torch.compile(block, backend="x86_onednn")(x, scale, residual), block(x, scale, residual))
    notes = {op.op: op.note for op in graphs[0].ops}
    assert not notes["mul"] and notes["add"].startswith("kernel")


class _Attention(torch.nn.Module):
    """Self-attention with a mask built in the graph, as in model code."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.causal = torch.nn.Linear(48, 144), causal

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 3, 16).permute(2, 0, 3, 1, 4)
        if self.causal:
            mask = torch.ones(n, n, dtype=torch.bool).tril()
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return y.transpose(1, 2).reshape(b, n, 48)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_symbolic_lengths_is_one_kernel(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _names_of_kernels(monkeypatch)
    m = _Attention().eval()
    compiled = torch.compile(m, backend="x86_onednn", dynamic=True, options={"cache": False})
    with torch.no_grad():
        for b, n in ((2, 30), (3, 57), (4, 300)):
            x, mask = torch.randn(b, n, 48), torch.rand(b, 1, n, n) > 0.3 if masked else None
            torch.testing.assert_close(compiled(x, mask), m(x, mask))
    assert len(made) == 1 and made[0].startswith("attention_f32_16_" if masked else "attention_f32_16")


def test_a_mask_of_the_future_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _names_of_kernels(monkeypatch)
    _prefer_kernels(monkeypatch)
    m, x = _Attention(causal=True).eval(), torch.randn(2, 40, 48)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(m, backend="x86_onednn", options={"cache": False})(x), m(x))
    assert made == ["attention_f32_16_causal"]


def _prefer_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always choose our kernels: which way is faster depends on the machine (torch's attention may be on a Xeon with AMX)."""
    measured = tune.Tuner.choose

    def choose(self: tune.Tuner, key: str, candidates: Mapping[str, Any]) -> str:
        return "kernel" if "kernel" in candidates else measured(self, key, candidates)

    monkeypatch.setattr(tune.Tuner, "choose", choose)


def _names_of_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the kernels for attention. Products may be kernels as well, where they measure faster."""
    names: list[str] = []
    original = Builder.launch

    def spy(self: Builder, kernel: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(kernel, Attention):
            names.append(kernel.name)
        original(self, kernel, *args, **kwargs)

    monkeypatch.setattr(Builder, "launch", spy)
    return names


def test_attention_comes_from_the_plan_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "plans"))
    made = _names_of_kernels(monkeypatch)
    _prefer_kernels(monkeypatch)
    m, x = _Attention().eval(), torch.randn(2, 40, 48)
    for _ in range(2):
        torch.compiler.reset()
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(m, backend="x86_onednn", options={"prepack": "always"})(x), m(x))
    assert made == ["attention_f32_16"]  # the second time nothing is lowered


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "step",
    [lambda x: x.sin() * 1.001 + 0.01, lambda x: F.pad(x[:, 1:], (0, 1)) * 0.99, lambda x: (x.t() + 0.01).flip(0)],
    ids=["maps", "masks", "views"],
)
def test_a_chain_is_longer_than_pythons_stack(step: Callable[[torch.Tensor], torch.Tensor], dynamic: bool) -> None:
    """Loops in model code arrive unrolled. One kernel computes a long part of such a chain."""

    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(120):
            x = step(x)
        return x

    x = torch.randn(8, 8)
    got = torch.compile(f, backend="x86_onednn", dynamic=dynamic, options={"strict": True, "fallback": "allow"})(x)
    torch.testing.assert_close(got, f(x))


class _Whisper(torch.nn.Module):
    """Self-attention as Whisper has it: scaled queries, keys without a bias, and a copy of each by heads."""

    def __init__(self, width: int, heads: int, scale: float) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.q, self.k, self.v = (torch.nn.Linear(width, width, bias=biased) for biased in (True, False, True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def by_heads(t: torch.Tensor) -> torch.Tensor:
            return t.view(*x.shape[:2], self.heads, -1).transpose(1, 2).contiguous()

        q, k, v = by_heads(self.q(x) * self.scale), by_heads(self.k(x)), by_heads(self.v(x))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).contiguous().view(x.shape)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ours", [False, True])
def test_attention_reads_heads_where_the_projections_left_them(
    dtype: torch.dtype, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "attention_form", lambda *_: "kernel" if ours else "eager")
    monkeypatch.setattr(choices, "siblings_form", lambda *_: "packed")
    m, x = _Whisper(32, 2, 0.25).to(dtype).eval(), torch.randn(2, 40, 32, dtype=dtype)
    with report.recording() as graphs, torch.no_grad():
        f = torch.compile(m, backend="x86_onednn", options={"prepack": "always", "strict": True})
        torch.testing.assert_close(f(x), m(x), rtol=2 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
    (graph,) = graphs  # the metadata of the rewritten attention is true
    run = graph.texts["plan"].partition("def run(")[2]
    assert run.count("linear_pointwise") == 1 and "clone" not in run and run.count("kernel_") == ours


def test_a_copy_of_keys_that_is_returned_stays() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = k.transpose(1, 2).contiguous()
        return F.scaled_dot_product_attention(q, k, k), k

    q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 7, 2, 16)
    with torch.no_grad():
        for made, expected in zip(torch.compile(attention, backend="x86_onednn")(q, k), attention(q, k), strict=True):
            torch.testing.assert_close(made, expected)
            assert made.stride() == expected.stride()


@pytest.mark.parametrize("factor", [0.125, 4.0, 0.3, -0.5])
@pytest.mark.parametrize(
    ("dtype", "form"),
    [(torch.float32, "packed"), (torch.float32, "mkl"), pytest.param(torch.bfloat16, "dense", marks=needs_bf16)],
)
def test_a_power_of_two_behind_a_product_is_in_its_weight(
    factor: float, dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "linear_form", lambda *_: form)
    m, x = torch.nn.Linear(64, 32).to(dtype).eval(), torch.randn(16, 64, dtype=dtype)
    with report.recording() as graphs, torch.no_grad():
        made = torch.compile(lambda x: m(x) * factor, backend="x86_onednn")(x)
        plain = torch.compile(m, backend="x86_onednn")(x)
    inside = factor in (0.125, 4.0)
    assert ({op.op: op.note for op in graphs[0].ops}["mul"] == "in the call of linear") == inside
    if inside:
        assert torch.equal(made, plain * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_torch_shares_what_it_makes_of_a_bool_mask(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "attention_form", lambda *_: "eager")

    def attention(q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(7) < lengths[:, None])[:, None, None, :].expand(2, 1, 7, 7)
        for _ in range(3):
            q = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return q

    q, lengths = torch.randn(2, 2, 7, 16, dtype=dtype), torch.tensor([4, 0])
    with torch.no_grad():
        f = torch.compile(attention, backend="x86_onednn")
        assert torch.equal(f(q, lengths), attention(q, lengths))
        with torch.profiler.profile() as profile:
            f(q, lengths)
    assert not [e for e in profile.key_averages() if e.key == "aten::where"]


def test_windows_put_back_and_rolled_are_read_by_the_addition() -> None:
    """Swin's shifted blocks: the position in a window is a quotient of a shifted quotient."""

    def residual(windows: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        rows = windows.view(1, 2, 2, 7, 7, 16).transpose(2, 3).contiguous().view(1, 14, 14, 16)
        return image + rows.roll((3, 3), (1, 2)).view(1, 196, 16)

    windows, image = torch.randn(4, 49, 16), torch.randn(1, 196, 16)
    with report.recording() as graphs, torch.no_grad():
        assert torch.equal(torch.compile(residual, backend="x86_onednn")(windows, image), residual(windows, image))
    notes = {op.op: op.note for op in graphs[0].ops}
    assert notes["add"].startswith("kernel") and not notes["roll"] and not notes["clone"]


class _RelativePositions(torch.nn.Module):
    """Attention with a bias from an embedding of distances, as in T5: heads are its last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Embedding(8, 3)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        distances = (torch.arange(24)[:, None] - torch.arange(24)).abs().clamp(max=7)
        mask = self.bias(distances).permute(2, 0, 1)[None]
        return F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, q, q, mask), q, q, mask)


@pytest.mark.parametrize("ours", [False, True])
def test_a_bias_without_dense_rows_is_copied_ahead(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "attention_form", lambda *_: "kernel" if ours else "eager")
    m, q = _RelativePositions().eval(), torch.randn(1, 3, 24, 16)
    with report.recording() as graphs, torch.no_grad():
        torch.testing.assert_close(torch.compile(m, backend="x86_onednn")(q), m(q))
    ahead, _, run = graphs[0].texts["plan"].partition("def run(")
    assert ahead.count("clone") == 1 and "clone" not in run and run.count("kernel_") == (2 if ours else 0)


@pytest.mark.parametrize("stride", [1, 2])
def test_kernels_follow_a_convolution_of_symbolic_sizes(stride: int) -> None:
    """No tensor has the size of the image behind it: it follows from the size of the result."""
    conv = torch.nn.Conv2d(3, 8, 5, stride)
    fn = lambda x: (conv(x).relu() * 2).sigmoid()  # noqa: E731
    options = {"cache": False, "never_slower": False, "strict": True}
    compiled = torch.compile(fn, backend="x86_onednn", dynamic=True, options=options)
    with torch.no_grad(), report.recording() as reports:
        for rows, size in ((2, 30), (3, 17), (2, 8)):
            x = torch.randn(rows, 3, size, size)
            torch.testing.assert_close(compiled(x), fn(x))
    (only,) = reports
    assert only.count("carried") == 0
    assert {o.op for o in only.ops if o.where == "eager"} == {"conv"}
