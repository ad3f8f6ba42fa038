"""`options={"simulate": True}`: whole models on both GPU backends with CPU tensors, and refused options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright import report
from fusewright.bench import suite
from fusewright.bench.accuracy import compare
from fusewright.capture import direct
from fusewright_triton import runtime
from fusewright_triton.backend import NvidiaTriton
from fusewright_triton.run.precompile import orders
from tests.models.test_suite import gradient_verdict, outputs, wide

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BACKENDS = ("nvidia_triton", "rocm_triton")
QUICK = ("bert", "gpt2", "t5_small", "llama", "vit", "resnet50", "whisper_tiny")
"""The other models take ten seconds or more: the interpreter runs every program of a grid."""


def simulated(fn: Any, backend: str, **options: Any) -> Any:
    options = {"simulate": True, "strict": True, "fallback": "error", **options}
    return torch.compile(fn, backend=backend, options=options)


def block(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x @ w), (x.shape[-1],), scale).softmax(-1)


def tensors(rows: int = 6, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(rows)
    return [torch.randn(s, generator=g).to(dtype) for s in ((rows, 24), (24, 24), (24,))]


# bf16 on one backend and fp32 on the other suffice: both share the emitter, whose every part handles both types
@pytest.mark.parametrize(("backend", "dtype"), list(zip(BACKENDS, ("bf16", "fp32"), strict=True)))
@pytest.mark.parametrize("model", QUICK)
def test_models_pass_the_fp64_rule(model: str, backend: str, dtype: suite.DType) -> None:
    how = {"simulate": True, "strict": True}
    with report.recording() as reports:
        got = outputs(model, dtype, backend, how)
    assert sum(r.count("lowered") for r in reports) > 20
    verdict = compare(wide(model, dtype), outputs(model, dtype, None), got, dtype)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("channels", [3, 20])
def test_convolutions_without_padding(channels: int) -> None:
    """Torch traces "valid" as one number for all dims: a lowering that took it for one dim left whole models to eager."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(channels, 16, 3, 2, "valid", bias=False).bfloat16().eval()
    x = torch.randn(2, channels, 131, 131, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(simulated(conv, "nvidia_triton")(x), conv(x), rtol=0.02, atol=0.02)


def _state_space(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    ys = []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        ys.append((h * c[:, t]).sum(-1))
    return torch.stack(ys, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_recurrence_in_training_is_a_kernel_forward_and_one_backward(backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=g, requires_grad=True) for s in ((2, 10, 3, 4), (2, 10, 3, 4), (2, 10, 1, 4), (2, 3, 4))]
    weight = torch.randn(2, 10, 3, generator=g)
    wanted = torch.autograd.grad((_state_space(*inputs) * weight).sum(), inputs)
    with report.recording() as reports:
        got = torch.autograd.grad((simulated(_state_space, backend)(*inputs) * weight).sum(), inputs)
    assert reports[0].rules["loop.recurrence"] == 1 and all(r.count("lowered") < 40 for r in reports)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_torchs_own_convolution_reads_the_strides_that_were_traced() -> None:
    """The convolution before it is channels-last; for such an input the transposed one would return untraced strides."""
    up = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 1, 1), torch.nn.GroupNorm(2, 8), torch.nn.SiLU(),
        torch.nn.ConvTranspose2d(8, 8, 2, 2), torch.nn.SiLU(),
    ).bfloat16().eval()  # fmt: skip
    x = torch.randn(2, 3, 6, 6).bfloat16()
    with torch.no_grad():
        wanted, got = up(x), simulated(up, "nvidia_triton", fallback="allow")(x)
    assert got.stride() == wanted.stride()
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_pass_the_fp64_rule(backend: str) -> None:
    verdict = gradient_verdict("bert_small", "amp", backend, {"simulate": True, "strict": True})
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize(
    ("backend", "target"), [("nvidia_triton", "sm_80"), ("rocm_triton", "gfx1100"), ("rocm_triton", "gfx950")]
)
def test_the_target_that_is_named_is_simulated(backend: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = runtime.simulate_kernels
    monkeypatch.setattr(runtime, "simulate_kernels", lambda k, t: asked.append(t.arch) or real(k, t))
    args = tensors()
    with report.recording() as reports:
        torch.testing.assert_close(simulated(block, backend, target=target, fallback="allow")(*args), block(*args))
    assert asked == [target]
    assert [op.op for op in reports[-1].by_eager] == ["mm"], "the library's product is carried, all else lowered"


@pytest.mark.parametrize("backend", BACKENDS)
def test_symbolic_sizes(backend: str) -> None:
    compiled = torch.compile(block, backend=backend, options={"simulate": True, "strict": True}, dynamic=True)
    with report.recording() as reports:
        for rows in (6, 9, 33):
            args = tensors(rows)
            torch.testing.assert_close(compiled(*args), block(*args))
    assert len(reports) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bias_of_a_convolution_whose_geometry_is_symbolic(backend: str) -> None:
    """A kernel adds it, and torch's own call gets the numbers of the call."""
    w, bias = torch.randn(4, 3, 2, 2), torch.randn(4)

    def strided(x: Tensor, step: int) -> Tensor:
        return F.conv2d(x, w, bias, step, step - 1, step).relu()

    compiled = simulated(strided, backend, fallback="allow")
    for step in (2, 3, 5):
        x = torch.randn(2, 3, 9, 8)
        torch.testing.assert_close(compiled(x, step), strided(x, step))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_bias_of_a_convolution_whose_geometry_is_symbolic(backend: str) -> None:
    w, bias = torch.randn(4, 3, 2, 2, requires_grad=True), torch.randn(4, requires_grad=True)

    def strided(x: Tensor, step: int) -> Tensor:
        return F.conv2d(x, w, bias, step, step - 1, step).sin()

    compiled = simulated(strided, backend, fallback="allow")
    for step in (2, 3, 5):
        x = torch.randn(2, 3, 9, 8)
        found, wanted = (torch.autograd.grad(f(x, step).sum(), (w, bias)) for f in (compiled, strided))
        torch.testing.assert_close(found, wanted)
        with torch.autocast("cpu", torch.bfloat16):
            found, wanted = (torch.autograd.grad(f(x, step).sum(), (w, bias)) for f in (compiled, strided))
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_symbolic_sizes(backend: str, dtype: torch.dtype) -> None:
    """Hypernetworks make them. Inputs have fixed sizes."""

    def layers(x: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return F.gelu(F.conv2d(x, kernel, bias)), F.gelu(F.linear(x, weight, bias))

    compiled = simulated(layers, backend, fallback="allow")
    x = torch.randn(2, 3, 5, 5, dtype=dtype)
    for width in (4, 7):
        weights = [torch.randn(width, *shape, dtype=dtype) for shape in ((3, 2, 2), (5,), ())]
        for w in weights:
            torch._dynamo.mark_dynamic(w, 0)
        torch.testing.assert_close(compiled(x, *weights), layers(x, *weights), rtol=0.05, atol=0.05)


def test_an_index_out_of_bounds_is_raised_as_in_eager() -> None:
    def lookup(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, table) * 2

    compiled = simulated(lookup, "nvidia_triton")
    table = torch.randn(8, 4)
    assert torch.equal(compiled(table, torch.tensor([7, 0])), lookup(table, torch.tensor([7, 0])))
    with pytest.raises(IndexError):
        compiled(table, torch.tensor([8, 0]))


@pytest.mark.parametrize("width", [16, 2048])
def test_a_single_token_is_embedded(width: int) -> None:
    """A row that is alone has no axes, which a kernel's text once needed: eager ran all of every step of decoding."""
    table, ids = torch.randn(8, width, dtype=torch.bfloat16), torch.tensor([[5]])

    def lookup(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, table).float().sin()

    torch.testing.assert_close(simulated(lookup, "nvidia_triton")(table, ids), lookup(table, ids))


@pytest.mark.parametrize("window", [None, 4], ids=["whole", "a window that slides"])
@torch.no_grad()
def test_steps_of_decoding_with_a_static_cache(window: int | None) -> None:
    """One sequence, a token at a time; every op is lowered, but for writes to the cache, whose order eager keeps."""
    from transformers import MistralConfig, MistralForCausalLM, StaticCache

    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=64,
        sliding_window=window,
    )  # fmt: skip
    model, ids = MistralForCausalLM(config).eval(), torch.randint(2, 60, (1, 8))
    with report.recording() as reports:
        ways = [(fn, StaticCache(config, max_cache_len=16)) for fn in (simulated(model, "nvidia_triton", fallback="allow"), model)]
        for _, cache in ways:
            model(ids[:, :2], past_key_values=cache)
        for token in ids[:, 2:].split(1, dim=1):
            found, wanted = (fn(token, past_key_values=cache).logits for fn, cache in ways)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not [b for r in reports for b in r.bugs] and all(r.count("eager") < r.count("lowered") / 8 for r in reports)


def normed(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x), (x.shape[-1],), scale).softmax(-1)


@pytest.mark.parametrize(("fallback", "stored"), [("error", 0), ("allow", 1)])
def test_where_fallbacks_are_errors_no_plan_is_stored(fallback: str, stored: int) -> None:
    """A plan from the cache would not say which ops eager runs. Every op of this one is lowered."""
    from fusewright.cache import store

    x, _, scale = tensors(5 + stored)
    before = len(store.entries())
    simulated(normed, "nvidia_triton", cache=True, fallback=fallback)(x, scale)
    assert len(store.entries()) == before + stored


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("rocm_triton", {"target": "gfx943"}, r"rocm_triton has no target 'gfx943'; did you mean 'gfx942'\?"),
        ("nvidia_triton", {"target": "gfx942"}, "nvidia_triton has no target 'gfx942'; valid names: sm_100, sm_120"),
        ("nvidia_triton", {"target": 90}, "'target' of nvidia_triton is 90.*give a string"),
        ("nvidia_triton", {"taget": "sm_90"}, "there is no option 'taget'; did you mean 'target'"),
        ("x86_onednn", {}, "backend 'x86_onednn' is unavailable: x86_onednn has no simulated device"),
    ],
)
def test_wrong_options(backend: str, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        simulated(block, backend, **options)(*tensors())


def test_without_triton_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error instead of eager: whoever asks for a simulation wants a check."""
    monkeypatch.setattr("importlib.util.find_spec", _without("triton"))
    with pytest.raises(Exception, match=r"triton is missing. Fix: pip install 'fusewright-triton\[simulate\]'"):
        simulated(block, "rocm_triton")(*tensors())


def _without(package: str) -> Any:
    from importlib.util import find_spec

    return lambda name, *rest: None if name == package else find_spec(name, *rest)


class Blocks(torch.nn.Module):
    """Convolutions with training batch norms between them; a view or a mean turns the images into rows at the end."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(3))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(8) for _ in range(3))
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)) + x)
        return x.view(len(x), -1) if self.view else x.mean((2, 3))


class Separable(torch.nn.Module):
    """A depthwise convolution of padded images, between pointwise ones; a pool follows."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.reduce = (torch.nn.Conv2d(8, 8, 1, bias=False) for _ in range(2))
        self.depthwise = torch.nn.Conv2d(8, 8, 3, stride=2, groups=8, bias=False)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.norms[0](self.expand(x)))
        x = F.relu6(self.norms[1](self.depthwise(F.pad(x, (0, 1, 0, 1)))))
        return F.max_pool2d(self.norms[2](self.reduce(x)), 2).mean((2, 3))


@pytest.mark.parametrize(
    ("made", "last"), [(lambda: Blocks(False), True), (lambda: Blocks(True), False), (Separable, True)],
    ids=["mean", "a view that has no such strides", "depthwise"],
)  # fmt: skip
def test_images_of_training_are_channels_last(made: Callable[[], torch.nn.Module], last: bool) -> None:
    x, steps = torch.randn(4, 8, 12, 12), []
    for compiled in (False, True):
        torch.manual_seed(0)
        module: Any = made()
        run = simulated(module, "nvidia_triton", fallback="allow", cache=False) if compiled else module
        with report.recording(keep=True) as reports, torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(x).float().square().mean()
            loss.backward()
        steps.append((loss.detach(), *(p.grad for p in module.parameters()), module.norms[1].running_var))
    for a, b in zip(*steps, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)
        assert a.stride() == b.stride()
    plans = [r.kept.plan for r in reports if not r.superseded and r.kept is not None]
    images = [s for plan in plans for s in plan.specs.values() if len(s.shape) == 4 and min(s.shape[2:]) > 3]
    found = sum(s.stride[1] == 1 for s in images)
    assert found > 0.9 * len(images) if last else not found


class Listener(torch.nn.Module):
    """A residual stream that starts as a convolution's transposed output, as in speech models: eager keeps it transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.places = torch.nn.Conv1d(8, 16, 3), torch.nn.Parameter(torch.randn(6, 16))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(16) for _ in range(3))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.gelu(self.conv(x)).mT + self.places
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x, self.norms[0](x)


def test_a_transposed_residual_stream_is_turned_once() -> None:
    x, model = torch.randn(2, 8, 8), Listener().eval()
    with report.recording() as reports, torch.no_grad():
        got = simulated(model, "nvidia_triton", fallback="allow", cache=False)(x)
        want = model(x)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
        assert g.stride() == w.stride()
    (plan,) = (r.texts["plan"] for r in reports)
    assert "(96, 16, 1, )" in plan and "(96, 1, 6, )" not in plan, "a kernel writes by columns"


def gathered(x: Tensor, y: Tensor, at: Tensor, dim: int = -1, again: bool = False) -> Any:
    """DeBERTa's scores: relative positions are gathered, scaled on the host and added; a mask and a softmax follow."""
    scale = torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * 3).to(x.dtype)
    found = torch.gather(y, dim, at.expand(x.shape))
    probs = (x + found / scale).masked_fill(x < -1, torch.finfo(x.dtype).min).softmax(-1)
    return (probs, found) if again else probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "again"), [(-1, False), (-2, False), (-1, True)])
def test_a_gather_joins_the_softmax_that_reads_it(dtype: torch.dtype, dim: int, again: bool) -> None:
    x, y = torch.randn(2, 3, 7, 9).to(dtype)
    at = torch.randint(0, 7, (7, 9))
    with report.recording() as reports:
        got = simulated(gathered, "nvidia_triton")(x, y, at, dim, again)
    (r,) = reports
    assert len({o.note for o in r.ops if o.op in ("gather", "softmax")}) == 1
    wanted = gathered(x.double(), y.double(), at, dim, again)
    for g, w in zip(*((v if again else (v,)) for v in (got, wanted)), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=0, atol=1e-6 if dtype == torch.float32 else 4e-3)


def test_positions_of_a_gather_inside_a_softmax_are_checked() -> None:
    x, at = torch.randn(3, 7, 9), torch.zeros(7, 9, dtype=torch.int64)
    fn = simulated(gathered, "nvidia_triton")
    fn(x, x, at)
    at[6, 8] = 9
    with pytest.raises(RuntimeError, match="index 9 is out of bounds for dimension 2 with size 9"):
        fn(x, x, at)


@torch.no_grad()
@pytest.mark.parametrize("aot", [False, True])
def test_handwritten_kernels_are_requested_whatever_captures_the_graph(
    aot: bool, monkeypatch: pytest.MonkeyPatch, thresholds: Callable[..., None]
) -> None:
    """AOTAutograd compiles inside a FakeTensorMode, where a call on meta tensors requested nothing: kernels were built one after
    the other, by their first launches, and were missing in the plan cache."""
    thresholds(product_results=1)
    asked: list[str] = []

    def unsupported(*_: Any) -> Any:
        raise direct.UnsupportedCapture("of this test")

    if aot:
        monkeypatch.setattr(direct, "capture", unsupported)
    monkeypatch.setattr(NvidiaTriton, "_precompile", lambda self, b: asked.extend(o.function for o in orders(b)))
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU()).to(torch.bfloat16).eval()
    x = torch.randn(128, 64, dtype=torch.bfloat16)
    simulated(model, "nvidia_triton", cache=False, fallback="allow")(x)
    assert asked == ["product"]


def test_an_index_that_all_masked_points_share_loads_a_block() -> None:
    def fn(x: Tensor) -> Tensor:
        first = torch.gather(x, 1, torch.zeros_like(x, dtype=torch.int64))
        return torch.hstack([first, x.amax(0, keepdim=True)])

    x = torch.randn(1, 4)
    torch.testing.assert_close(simulated(fn, "nvidia_triton", fallback="allow")(x), fn(x))
