"""`fusewright bench --int8`: products by torch's engines, Inductor and ours; int8 models beside floating-point ones and
Inductor's int8.

Contenders alternate in one process; the table shows the median of each and its ratio to the first one, or the reason of its
failure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fusewright import _torch_compat as compat
from fusewright.bench import stats, suite
from fusewright.quantization import quantization_of

LINEARS = (
    (128, 768, 3072), (128, 3072, 768), (128, 768, 768), (512, 1024, 1024), (1, 768, 3072), (1, 4096, 4096), (8, 1024, 4096),
    (32, 768, 768),
)  # fmt: skip
"""M, K, N of the suite's linears: BERT and GPT-2 at 128 tokens, a wide one, decoding, small batches."""
CONVS = (
    ((1, 64, 56, 56), (64, 64, 3, 3), 1, 1), ((1, 256, 56, 56), (64, 256, 1, 1), 1, 1), ((1, 512, 14, 14), (512, 512, 3, 3), 1, 1),
    ((1, 3, 224, 224), (64, 3, 7, 7), 2, 1), ((1, 96, 112, 112), (96, 1, 3, 3), 2, 96), ((1, 144, 56, 56), (144, 1, 3, 3), 1, 144),
)  # fmt: skip
"""Input, weight, stride and groups of the suite's convolutions: ResNet-50 and MobileNetV2."""
RECIPES = ("static", "dynamic")
MODELS = ("bert", "gpt2", "resnet50", "mobilenet_v2", "vit")
ENGINES = tuple(sorted(set(torch.backends.quantized.supported_engines) - {"none", "qnnpack"}, key=lambda e: (e != "fbgemm", e)))
"""Torch's engines except the one for phones; the baseline comes first."""
CRASHES = frozenset({("onednn", "linear_dynamic")})
"""Calls that crash the process in some version of torch and are skipped (see `guarded`)."""

Timed = Mapping[str, Callable[[], Any]]


@dataclass
class Row:
    """The seconds of each contender's calls, and why others did not run."""

    name: str
    times: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """Medians."""
        return {who: statistics.median(t) for who, t in self.times.items()}

    def as_json(self, mode: str) -> dict[str, Any]:
        """Convert to a row of a `fusewright bench` document; speed-ups are relative to the first contender, each call is a
        round."""
        summaries = {who: stats.summarize([[t] for t in times]) for who, times in self.times.items()}
        base = next(iter(self.times.values()), [])
        found: dict[str, Any] = {
            who: {"status": "ok", "steady": s.as_json(), "speedup": stats.paired_ratio(base, self.times[who])}
            for who, s in summaries.items()
        }
        found |= {who: {"status": "failed", "reason": why} for who, why in self.failed.items()}
        noise = stats.noise_verdict([s.spread for s in summaries.values()])
        return {"model": self.name, "dtype": "int8", "mode": mode, "noise": noise, "contenders": found}


def interleaved(name: str, contenders: Timed, seconds: float = 1.0) -> Row:
    """Run the contenders alternately, for about `seconds` in all."""
    row, runs = Row(name), dict[str, Callable[[], Any]]()
    for who, run in contenders.items():
        try:
            run(), run()
            runs[who] = run
        except Exception as e:  # a contender's failure is a line of the table
            row.failed[who] = f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0][:120]}"
    times: dict[str, list[float]] = {who: [] for who in runs}
    end = time.perf_counter() + seconds
    while runs and (time.perf_counter() < end or min(map(len, times.values())) < 3):
        for who, run in runs.items():
            start = time.perf_counter()
            run()
            times[who].append(time.perf_counter() - start)
    row.times = times
    return row


# -- shapes


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Switch torch's quantized engine within a block."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def guarded(name: str, op: str) -> None:
    """Raise RuntimeError for a call that would crash the process."""
    if (name, op) in CRASHES:
        raise RuntimeError(f"torch's engine {name!r} crashes the process in {op}: not called")
    if name not in torch.backends.quantized.supported_engines:
        raise RuntimeError(f"this torch has no engine {name!r}")


def _quantized(shape: Sequence[int], dtype: torch.dtype = torch.quint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.rand(tuple(shape)) * 2 - 1, 0.01, 128 if dtype is torch.quint8 else 0, dtype)


def _weight(shape: Sequence[int]) -> torch.Tensor:
    n = shape[0]
    scales, zeros = torch.full((n,), 0.01), torch.zeros(n, dtype=torch.int64)
    return torch.quantize_per_channel(torch.rand(tuple(shape)) - 0.5, scales, zeros, 0, torch.qint8)


def torch_linear(name: str, m: int, k: int, n: int) -> Callable[[], Any]:
    """A static int8 linear, requantized, by one of torch's engines."""
    guarded(name, "linear")
    with engine(name):
        packed = torch.ops.quantized.linear_prepack(_weight((n, k)), torch.zeros(n))
    x = _quantized((m, k))
    return lambda: torch.ops.quantized.linear(x, packed, 0.05, 128)


def torch_conv(name: str, x: Sequence[int], w: Sequence[int], stride: int, groups: int) -> Callable[[], Any]:
    """A static int8 convolution, requantized, by one of torch's engines."""
    guarded(name, "conv2d")
    edges = [stride] * 2, [w[2] // 2] * 2, [1, 1]
    with engine(name):
        packed = torch.ops.quantized.conv2d_prepack(_weight(w), torch.zeros(w[0]), *edges, groups)
    given = _quantized(x).contiguous(memory_format=torch.channels_last)
    return lambda: torch.ops.quantized.conv2d(given, packed, 0.05, 128)


def _within(name: str, make: Callable[..., Callable[[], Any]], *sizes: Any) -> Callable[[], Any]:
    """Build on the first call, and run under its engine, which packed weights store and some operators check."""
    made: list[Callable[[], Any]] = []

    def run() -> Any:
        if not made:
            made.append(make(name, *sizes))
        return made[0]()

    return run


def shapes(backend: str, small: bool = False, seconds: float = 1.0) -> Iterator[Row]:
    """A row for each product: torch's engines, Inductor on the PT2E graph, each of ours, and the chosen one."""
    by = quantization_of(backend)
    for m, k, n in LINEARS[-1:] if small else LINEARS:
        contenders = {e: _within(e, torch_linear, m, k, n) for e in ENGINES}
        contenders |= _graphs(backend, torch.nn.Linear(k, n), (m, k))
        contenders |= {f"ours {e}": run for e, run in by.kernels("linear", (m, k, n)).items()}
        yield interleaved(f"linear {m}x{k}x{n}", contenders, seconds)
    for x, w, stride, groups in CONVS[-1:] if small else CONVS:
        contenders = {e: _within(e, torch_conv, x, w, stride, groups) for e in ENGINES}
        layer = torch.nn.Conv2d(x[1], w[0], w[2:], stride, w[2] // 2, groups=groups)
        contenders |= _graphs(backend, layer, x)
        contenders |= {f"ours {e}": run for e, run in by.kernels("conv", (x, w, stride, groups)).items()}
        yield interleaved(f"conv {'x'.join(map(str, x))} {'x'.join(map(str, w))}/{stride} g{groups}", contenders, seconds)


def _graphs(backend: str, layer: torch.nn.Module, shape: Sequence[int]) -> dict[str, Callable[[], Any]]:
    """The layer between quantization and dequantization, compiled by Inductor (with freezing) and by ours."""
    x, made = torch.randn(tuple(shape)), dict[str, Callable[[], Any]]()
    quantized = quantization_of(backend).quantize(layer.eval(), [x], "static", keep=(), dynamic_batch=False)
    made["inductor pt2e"] = _by_inductor(quantized, x)
    made["ours graph"] = _no_grad(torch.compile(quantized, backend=backend), x)
    return made


def _by_inductor(quantized: torch.nn.Module, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """Compile with Inductor and freezing, without which it does not pack int8 weights. Only the first call compiles."""
    call, context = _no_grad(torch.compile(quantized, backend="inductor"), *args, **kwargs), compat.inductor_freezing()

    def run() -> Any:
        nonlocal context
        with context:
            context = nullcontext()
            return call()

    return run


def _no_grad(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return fn(*args, **kwargs)

    return run


# -- models


def models(
    backend: str, names: Sequence[str] = MODELS, size: Literal["full", "small"] = "full", seconds: float = 10.0,
    floats: str = "fusewright", inductor: bool = True, recipes: Sequence[str] = RECIPES, batch: int = 1,
) -> Iterator[Row]:  # fmt: skip
    """A row for each model: ours in fp32 and bf16, our int8 by each recipe of both, and Inductor's int8 of the first.

    The suite's inputs are repeated `batch` times along their first dimension.
    """
    by = quantization_of(backend)
    for name in names:
        torch.compiler.reset()
        contenders: dict[str, Callable[[], Any]] = {}
        dtype: suite.DType
        for dtype in ("fp32", "bf16"):
            built = suite.repeated(suite.build(name, size, dtype), batch)
            assert built.module is not None
            compiled = torch.compile(built.module.eval(), backend=floats)
            contenders[dtype] = _no_grad(compiled, *built.args, **built.kwargs)
        for dtype in ("fp32", "bf16"):
            built = suite.repeated(suite.build(name, size, dtype), batch)
            assert built.module is not None
            inputs, around = [dict(built.kwargs) if built.kwargs and not built.args else built.args], dtype == "bf16"
            for recipe in recipes:
                quantized = by.quantize(built.module.eval(), inputs, recipe, keep=(), dynamic_batch=False)
                fast = torch.compile(quantized, backend=backend)
                contenders[f"int8 {recipe}{', bf16 around' * around}"] = _no_grad(fast, *built.args, **built.kwargs)
                if inductor and not around:
                    contenders[f"inductor {recipe}"] = _by_inductor(quantized, *built.args, **built.kwargs)
        yield interleaved(name if batch == 1 else f"{name}, batch {batch}", contenders, seconds)


def measure(
    names: Sequence[str], size: Literal["full", "small"], seconds: float, backend: str, inductor: bool = True, batch: int = 1
) -> Iterator[tuple[str, Row]]:
    """Measure everything, or only the named models; yield each row with the table that it belongs to."""
    if not names:
        yield from (("shapes", row) for row in shapes(backend, size == "small", min(seconds, 2.0)))
    rows = models(backend, names or MODELS, size, seconds, inductor=inductor, batch=batch)
    yield from (("models", row) for row in rows)
