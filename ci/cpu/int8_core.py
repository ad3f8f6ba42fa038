"""Time the native int8 core against torch's engines, by shape: `python -m ci.cpu.int8_core [--threads 1 2] [--isa avx2]`.

Times are the best of many calls with all candidates in turn, so that a busy machine does not slow only one; rates follow from them.
Products: FBGEMM and oneDNN as torch's quantized linear calls them, and bf16. Few rows: weights larger than any cache, compared with
the bandwidth of reading them (`torch.sum`). `products()` and `few_rows()` return the figures as data.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusewright_int8.run import native

SHAPES = (
    (128, 768, 768), (128, 768, 3072), (128, 3072, 768), (512, 1024, 1024), (197, 768, 3072), (1024, 768, 768), (32, 768, 3072),
    (8, 4096, 4096), (1, 768, 3072), (3136, 64, 256), (784, 512, 128), (196, 1024, 256), (49, 2048, 512),
)  # fmt: skip
"""(m, k, n): linears of BERT, GPT-2 and ViT, and the pointwise convolutions of ResNet-50."""

COLD = 1 << 28
"""Bytes of weights that are read in turn; more than any cache holds."""

Thunk = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Seconds by candidate for one task. `work`: its operations or bytes."""

    name: str
    work: float
    seconds: Mapping[str, float]


def best(candidates: Mapping[str, Sequence[Thunk]], seconds: float) -> dict[str, float]:
    """Return the shortest call of each candidate; the calls of one candidate are made in turn."""
    found = dict.fromkeys(candidates, float("inf"))
    end = time.perf_counter() + seconds
    while True:
        for name, thunks in candidates.items():
            for thunk in thunks:
                start = time.perf_counter()
                thunk()
                found[name] = min(found[name], time.perf_counter() - start)
        if time.perf_counter() > end:
            return found


def weight(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return a weight: int8 [n, k] and fp32 scales."""
    g = torch.Generator().manual_seed(n + k)
    return torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=g), torch.rand(n, generator=g) * 0.01


def engine_linear(name: str, x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor) -> Thunk:
    """Return torch's static quantized linear with one of its engines."""
    qx = torch._make_per_tensor_quantized_tensor(x, 0.05, 7)
    qw = torch._make_per_channel_quantized_tensor(w, w_scale.double(), torch.zeros(len(w), dtype=torch.long), 0)
    before = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = name
        packed = torch.ops.quantized.linear_prepack(qw, bias)
    finally:
        torch.backends.quantized.engine = before
    return lambda: torch.ops.quantized.linear(qx, packed, 1.0, 3)


def product(m: int, k: int, n: int) -> dict[str, Sequence[Thunk]]:
    """Return the candidates for a static product, and our dynamic one."""
    w, w_scale = weight(n, k)
    x, bias, packed = torch.randint(0, 256, (m, k), dtype=torch.uint8), torch.randn(n), native.pack_linear(w)
    floats = torch.randn(m, k)
    x16, w16 = floats.bfloat16(), w.bfloat16()
    found: dict[str, Sequence[Thunk]] = {
        "core": [lambda: native.linear(x, packed, w_scale, bias, 0.05, 7, out_dtype=torch.uint8, out_zero_point=3)],
        "core, fp32 out": [lambda: native.linear(x, packed, w_scale, bias, 0.05, 7)],
        "core, dynamic": [lambda: native.dynamic_linear(floats, packed, w_scale, bias, "row")],
        "bf16": [lambda: torch.nn.functional.linear(x16, w16)],
    }
    for name in ("fbgemm", "onednn"):
        if name in torch.backends.quantized.supported_engines:
            found[name] = [engine_linear(name, x, w, w_scale, bias)]
    return found


def products(seconds: float) -> Iterator[Row]:
    """Measure static products of all shapes, within `seconds` in total."""
    for m, k, n in SHAPES:
        yield Row(f"{m} x {k} x {n}", 2.0 * m * k * n, best(product(m, k, n), seconds / len(SHAPES)))


def few(m: int, packed: Sequence[Tensor], w_scale: Tensor, k: int) -> dict[str, Sequence[Thunk]]:
    """Return the candidates for m rows and each of the weights."""
    x, floats = torch.randint(0, 256, (m, k), dtype=torch.uint8), torch.randn(m, k)
    x16 = floats.bfloat16()
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "int8 x": lambda p: native.linear(x, p, w_scale, None, 0.05, 7),
        "fp32 x": lambda p: native.weight_linear(floats, p, w_scale, None),
        "bf16 x": lambda p: native.weight_linear(x16, p, w_scale, None),
        "dynamic": lambda p: native.dynamic_linear(floats, p, w_scale, None, "row"),
        "read": lambda p: p[: p.numel() // 4 * 4].view(torch.float32).sum(),
    }
    return {name: [functools.partial(call, p) for p in packed] for name, call in calls.items()}


def few_rows(seconds: float, n: int = 4096, k: int = 4096, rows: Sequence[int] = (1, 4, 8, 16, 32)) -> Iterator[Row]:
    """Measure products of a few rows with weights from memory, within `seconds` in total."""
    (w, w_scale), copies = weight(n, k), max(2, COLD // (n * k))
    packed = [native.pack_linear(w.roll(i, 0)) for i in range(copies)]
    for m in rows:
        yield Row(f"{m} x {k} x {n}", n * k, best(few(m, packed, w_scale, k), seconds / len(rows)))


def table(title: str, rows: Sequence[Row], base: str, unit: str) -> str:
    """Return a table of microseconds, rates, and speed-ups over `base`."""
    lines = [f"\n{title}", f"{'':20}" + "".join(f"{name:>24}" for name in rows[0].seconds)]
    for row in rows:
        cells = (
            f"{1e6 * s:9.0f} us {row.work / s / 1e9:6.0f} {row.seconds[base] / s:5.2f}" for s in row.seconds.values()
        )
        lines.append(f"{row.name:20}" + "".join(f"{c:>24}" for c in cells))
    return "\n".join([*lines, f"(time, {unit}, times as fast as {base})"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="for each table and number of threads")
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--isa", help=f"one of {', '.join(native.isas())}")
    args = parser.parse_args()
    native.use_isa(args.isa)
    for threads in args.threads:
        torch.set_num_threads(threads)
        where = f"{native.isa()}, {threads} threads"
        print(table(f"products, {where}", list(products(args.seconds)), "fbgemm", "Gop/s"), flush=True)
        print(table(f"weights from memory, {where}", list(few_rows(args.seconds)), "read", "GB/s"), flush=True)


if __name__ == "__main__":
    main()
