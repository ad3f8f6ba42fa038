"""Handwritten kernels that this Triton cannot build: torch's own calls compute the result, and one warning says why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright import pipeline
from fusewright.errors import BackendCrashError
from fusewright.strict import strictly
from fusewright_triton.build import workers
from fusewright_triton.kernels import attention_ops, decode_ops, int8_ops, product_ops, short_sequence_ops
from fusewright_triton.run import handwritten
from fusewright_triton.run.handwritten import Kernel, Library
from fusewright_triton.target import named

BF16 = torch.bfloat16
ASK = Library.ask
WORDS = "at 12:34:\n  x = tl.dot(q, k)\n      ^\nCompilationError: no such name"
ARCH = "sm_90"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Make the compiler process refuse every request, and CPU tensors count as GPU tensors; return the requests."""
    asked: list[Any] = []

    def submit(request: Any) -> Future[Any]:
        asked.append(request)
        answer: Future[Any] = Future()
        answer.set_exception(workers.BuildError(WORDS))
        return answer

    def launch(self: Kernel, target: Any, programs: int, args: Any, constants: Any, **options: Any) -> None:
        self._run(target, programs, args, constants, options)

    library = Library(named(ARCH))
    monkeypatch.setattr(Library, "ask", ASK)
    monkeypatch.setattr(handwritten, "library", lambda target: library)
    monkeypatch.setattr(handwritten, "_warned", set())
    monkeypatch.setattr(workers, "pool", lambda: SimpleNamespace(submit=submit))
    monkeypatch.setattr(Kernel, "launch", launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield asked


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "fusewright" and r.levelno >= logging.WARNING]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def attention(
    mask: torch.Tensor | None, zero: bool, causal: bool = False, dtype: torch.dtype = torch.float32,
    sink: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    q, (k, v) = randn(2, 4, 9, 16, dtype=dtype), randn(2, 2, 2, 11, 16, dtype=dtype)
    stride = (9 * 4 * 16, 16, 4 * 16, 1)  # queries before heads, as the next product reads them
    return lambda: attention_ops.attention(q, k, v, mask, sink, causal, 0.3, zero, stride, ARCH)


def hidden() -> torch.Tensor:
    """Return a mask that all heads share, with one row that sees no key."""
    mask = torch.rand(2, 1, 9, 11) > 0.3
    mask[0, 0, 3] = False
    return mask


def added(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(2, 1, 9, 11, dtype=dtype).masked_fill(~hidden(), -torch.inf)


def least() -> torch.Tensor:
    """Return transformers' mask: a hidden key gets the least number, so a fully masked row weighs all keys alike."""
    return torch.zeros(2, 1, 9, 11).masked_fill(~hidden(), torch.finfo(torch.float32).min)


def positions(flat: bool) -> Callable[[], torch.Tensor]:
    q, k, v = (x.flatten(0, 1) if flat else x for x in randn(3, 2, 2, 12, 16))
    rel = randn(4, 3, 4, 3), randn(4, 3, 4, 4)
    return lambda: attention_ops.attention_decomposed(q, k, v, *rel, None, q.stride(), ARCH)


def few(rotary: bool, mask: torch.Tensor | None, sink: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
    q, (k, v) = randn(2, 4, 1, 16), randn(2, 2, 2, 70, 16)
    cos, sin = randn(2, 2, 1, 1, 16) if rotary else (None, None)
    return lambda: decode_ops.attention_decode(q, k, v, mask, sink, cos, sin, None, q.stride(), ARCH)


def int8(rows: int, columns: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = (torch.randint(-128, 128, (n, inner), dtype=torch.int8) for n in (rows, columns))
    return x, w


def int8_mm(rows: int, columns: int, inner: int) -> Callable[[], torch.Tensor]:
    x, w = int8(rows, columns, inner)
    return lambda: int8_ops.int8_mm(x, w, ARCH)


def int8_linear(dtype: torch.dtype, factors: bool) -> Callable[[], torch.Tensor]:
    x, (_, w) = randn(5, 40, dtype=dtype), int8(1, 7, 40)
    scale, bias = (randn(7, dtype=dtype) / 100, randn(7, dtype=dtype)) if factors else (None, None)
    return lambda: int8_ops.int8_linear(x, w, scale, bias, ARCH)


def product(activation: str, residual: tuple[int, ...] | None = None) -> Callable[[], torch.Tensor]:
    x, w, b = randn(2, 6, 32, dtype=BF16), randn(24, 32, dtype=BF16), randn(24, dtype=BF16)
    more = None if residual is None else randn(*residual, dtype=BF16)
    return lambda: product_ops.linear_activation(x, w, b, activation, ARCH, more)


CALLS: dict[str, tuple[str, Callable[[], torch.Tensor]]] = {
    "attention": ("attention", attention(None, True)),
    "attention, causal": ("attention", attention(None, True, causal=True)),
    "attention, hidden keys": ("attention", attention(hidden(), True)),
    "attention, hidden keys, NaN": ("attention", attention(hidden(), False)),
    "attention, an added mask": ("attention", attention(added(torch.float32), True)),
    "attention, an added mask, NaN": ("attention", attention(added(torch.float32), False)),
    "attention, bf16 with a mask of fp32": ("attention", attention(least(), False, dtype=BF16)),
    "attention, sinks, hidden keys": ("attention", attention(hidden(), False, sink=randn(2, 4, 9, 1))),
    "attention, sinks, causal, bf16": ("attention", attention(None, False, True, BF16, randn(4, 1, 1, dtype=BF16))),
    "positions": ("attention", positions(False)),
    "positions, heads and batch as one": ("attention", positions(True)),
    "few": ("parts", few(False, None)),
    "few, turned": ("parts", few(True, torch.rand(2, 1, 1, 70) > 0.5)),
    "few, sinks": ("parts", few(False, torch.rand(2, 1, 1, 70) > 0.5, randn(4, 1, 1))),
    "int8 weight": ("blocks", int8_linear(torch.float32, False)),
    "int8 weight, scaled": ("blocks", int8_linear(BF16, True)),
    "int8": ("blocks", int8_mm(3, 5, 37)),
    "int8, whole": ("blocks", int8_mm(32, 16, 64)),
    "product": ("product", product("gelu")),
    "product, a residual": ("product", product("relu", (12, 24))),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_result_is_the_kernels(name: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> None:
    function, call = CALLS[name]
    want = call()  # interpreted
    asked = request.getfixturevalue("refused")
    with caplog.at_level(logging.WARNING, "fusewright"):
        found = [call() for _ in range(3)]
    for got in found:
        # MKL's order of summation depends on its arguments' addresses: errors scale with the largest terms
        rtol, atol = (2e-2, 4e-2) if want.dtype == BF16 else (1e-5, 1e-6 * float(want.nan_to_num().abs().max()))
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
        assert got.stride() == want.stride()
    (line,) = said(caplog)
    assert line.startswith(f"fusewright: the kernel {function} of kernels/")
    assert "torch's own calls run instead" in line and line.endswith("CompilationError: no such name")
    assert len(asked) == 1, "it is not built again at every call"


def test_rows_without_keys_are_compared() -> None:
    """NaN occurs in exactly the cases above that are named for it."""
    for name, (_, call) in CALLS.items():
        assert bool(call().isnan().any()) == name.endswith("NaN"), name


def test_each_kernel_is_named_once(refused: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fusewright"):
        for _, call in CALLS.values():
            call()
    kernels = [line.split(" cannot")[0].partition("the kernel ")[2] for line in said(caplog)]
    assert kernels == [
        "attention of kernels/attention.py", "parts of kernels/decode.py", "blocks of kernels/int8.py",
        "product of kernels/product.py",
    ]  # fmt: skip


def _product_on_hopper(x: torch.Tensor) -> torch.Tensor:
    return product_ops.linear_activation(x, x, None, "", ARCH)


def _short_sequence(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(1, 4, 64, 64)
    return short_sequence_ops.attention_short_sequence(heads, heads, heads, None, heads.stride(), ARCH)


@pytest.mark.parametrize("name", CALLS)
def test_strict_raises_instead(name: str, refused: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """The error names the kernel, the reason and a fix."""
    function, call = CALLS[name]
    with pytest.raises(BackendCrashError) as error, caplog.at_level(logging.WARNING, "fusewright"):
        strictly(lambda args: call())([])
    text = str(error.value)
    assert text.startswith(f"the kernel {function} of kernels/") and WORDS in text
    assert text.endswith(
        "Without 'strict' torch's own calls run instead; else install the triton that your torch wheel asks for "
        "(pip check names it)"
    )
    assert not said(caplog)
    call()
    assert said(caplog), "strict ends with the run"


@pytest.mark.parametrize(
    ("call", "module", "other", "words"),
    [
        (_product_on_hopper, "hopper", "product", "product of kernels/hopper.py cannot be built, and one that is 10 to 30%"),
        (
            _short_sequence, "short_sequence", "attention",
            "attention of kernels/short_sequence.py cannot be built, and the usual one runs",
        ),
    ],
)
def test_what_gluon_cannot_build_another_kernel_computes(
    call: Any, module: str, other: str, words: str,
    refused: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """And torch computes it if that kernel cannot be built either."""
    tried: list[str] = []

    def launch(self: Kernel, target: Any, programs: int, args: Any, constants: Any, **options: Any) -> None:
        tried.append(self.module)
        if self.module == module:
            raise handwritten.Unbuilt(self.order(args, constants, options), workers.BuildError(WORDS))

    monkeypatch.setattr(Kernel, "launch", launch)
    x = torch.empty(256, 64, dtype=BF16, device="meta")
    with caplog.at_level(logging.WARNING, "fusewright"):
        for _ in range(2):
            call(x)
    assert tried == [module, other] * 2
    (line,) = said(caplog)
    assert words in line
    with pytest.raises(BackendCrashError, match=f"kernels/{module}.py cannot be built"):
        strictly(lambda args: call(x))([])
    assert tried[-1] == module, "no other kernel either"


def test_a_compiler_that_dies_is_asked_twice(refused: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two requests are made, so that no later call waits for a crash."""

    def submit(request: Any) -> Future[Any]:
        refused.append(request)
        answer: Future[Any] = Future()
        answer.set_exception(workers.Ended("a compiler process ended with code -11"))
        return answer

    monkeypatch.setattr(workers, "pool", lambda: SimpleNamespace(submit=submit))
    _, call = CALLS["attention"]
    for _ in range(4):
        call()
    assert len(refused) == 2


def small_product(thresholds: Callable[..., None], **options: Any) -> tuple[Any, Any, torch.Tensor]:
    """Return a model whose first linear is a handwritten kernel, the compiled model, and an input."""
    thresholds(product_results=1)
    torch.compiler.reset()
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(BF16).eval()
    options = {"simulate": True, "cache": False, "fallback": "allow", **options}
    fast = torch.compile(model, backend="nvidia_triton", options=options)
    return model, fast, randn(128, 64, dtype=BF16)


@torch.no_grad()
def test_a_compiled_model_gets_eagers_result(
    refused: list[Any], thresholds: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    model, fast, x = small_product(thresholds)
    with caplog.at_level(logging.WARNING, "fusewright"):
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x))
    (line,) = said(caplog)
    assert "product of kernels/product.py cannot be built" in line and len(refused) == 1


@torch.no_grad()
def test_a_model_compiled_with_strict_gets_the_error(
    refused: list[Any], monkeypatch: pytest.MonkeyPatch, thresholds: Callable[..., None], tmp_path: Path
) -> None:
    """Also if its plan is in the cache, stored by a process without `strict`."""
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))
    _, fast, x = small_product(thresholds, strict=True)
    for _ in range(2):
        with pytest.raises(BackendCrashError, match=r"product of kernels/product.py cannot be built"):
            fast(x)
    torch.manual_seed(0)
    model, loose, x = small_product(thresholds, cache=True)
    torch.testing.assert_close(loose(x), model(x))
    torch.compiler.reset()
    monkeypatch.setattr(pipeline, "_compile", None)  # it is found, not compiled
    found = torch.compile(model, backend="nvidia_triton", options={"simulate": True, "strict": True})
    with pytest.raises(BackendCrashError, match=r"product of kernels/product.py cannot be built"):
        found(x)
