"""Speed of built kernels on this GPU beside a device copy and eager: `python -m tests.backends.triton.bandwidth`.

Prints a line per kernel: median time, bandwidth in percent of the copy's, eager's time. Arguments
are parts of kernel names; without any, all kernels run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from fusewright.toolkit.ir import Kernel
from fusewright.toolkit.ir.types import to_torch
from fusewright_triton.runtime import Launch, compile_kernels
from tests.backends.triton import kernels
from tests.backends.triton.test_gpu import here

Functional = torch.nn.functional
Case = tuple[Kernel, list[torch.Tensor], Callable[[], object]]


def median(f: Callable[[], object], repeats: int = 20) -> float:
    """Return milliseconds per call, with L2 flushed before each."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        f()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def data(*shape: int, dtype: str = "bf16") -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(to_torch(dtype))


def norm_case(rows: int, cols: int, dtype: str = "bf16") -> Case:
    x, w, c, out = (
        data(rows, cols, dtype=dtype),
        data(cols, dtype=dtype),
        data(cols, dtype=dtype),
        data(rows, cols, dtype=dtype),
    )
    return kernels.layer_norm(rows, cols, dtype), [x, w, c, out], lambda: Functional.layer_norm(x, (cols,), w, c)


def softmax_case(rows: int, cols: int, dtype: str = "bf16") -> Case:
    x, out = data(rows, cols, dtype=dtype), data(rows, cols, dtype=dtype)
    return kernels.softmax(rows, cols, dtype), [x, out], lambda: x.softmax(-1)


def gelu_case(n: int, dtype: str) -> Case:
    x, y, out = (data(n, dtype=dtype) for _ in range(3))
    return kernels.add_gelu(n, dtype), [x, y, out], lambda: Functional.gelu(x + y)


def column_case(rows: int, cols: int, dtype: str = "bf16") -> Case:
    x, out = data(rows, cols, dtype=dtype), data(cols, dtype="f32")
    return kernels.column_sum(rows, cols, dtype), [x, out], lambda: x.sum(0, dtype=torch.float32)


def transpose_case(rows: int, cols: int) -> Case:
    x, out = data(cols, rows), data(rows, cols)
    return kernels.transpose(rows, cols), [x, out], lambda: x.t().contiguous()


NORMS = (
    (131072, 256), (65536, 768), (65536, 1024), (16384, 4096), (16384, 5120), (8192, 8192), (4096, 16384),
    (2048, 32768), (1024, 65536),
)  # fmt: skip
SOFTMAXES = ((196608, 197), (98304, 512), (32768, 2048), (16384, 4096), (8192, 16384), (2048, 50257), (16, 4194304))
COLUMNS = ((65536, 768), (16384, 4096), (1048576, 64), (8192, 768))

CASES: dict[str, Callable[[], Case]] = {
    "gelu bf16 64M": partial(gelu_case, 1 << 26, "bf16"),
    "gelu f32 32M": partial(gelu_case, 1 << 25, "f32"),
    "gelu bf16 1M": partial(gelu_case, 1 << 20, "bf16"),
    **{f"norm {r}x{c}": partial(norm_case, r, c) for r, c in NORMS},
    **{f"softmax {r}x{c}": partial(softmax_case, r, c) for r, c in SOFTMAXES},
    **{f"column {r}x{c}": partial(column_case, r, c) for r, c in COLUMNS},
    "transpose 8192x8192": partial(transpose_case, 8192, 8192),
    "transpose 4096x30522": partial(transpose_case, 4096, 30522),
}


def overhead(launch: Launch, tensors: list[torch.Tensor]) -> float:
    """Return the host's microseconds per launch."""
    for _ in range(100):
        launch(tensors)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(500):
        launch(tensors)
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / 500 * 1e6


def copy_speed() -> float:
    """Return the GB/s of a device copy, counting bytes read and written."""
    source, sink = data(1 << 29), data(1 << 29)
    return 2 * source.nbytes / median(lambda: sink.copy_(source)) / 1e6


def main(parts: list[str]) -> None:
    speed = copy_speed()
    print(f"device copy {speed:.0f} GB/s; {torch.cuda.get_device_name()}")
    for name, make in CASES.items():
        if parts and not any(p in name for p in parts):
            continue
        kernel, tensors, eager = make()
        launch = compile_kernels([kernel], here()).launcher(kernel)
        launch(tensors)
        ours, theirs = median(lambda: launch(tensors)), median(eager)  # noqa: B023
        moved = sum(t.nbytes for t in tensors) / ours / 1e6
        print(f"{name:24} {ours * 1e3:9.1f} us {100 * moved / speed:5.0f}%   eager {theirs * 1e3:9.1f} us")
    kernel, tensors, _ = gelu_case(4096, "bf16")
    launch = compile_kernels([kernel], here()).launcher(kernel)
    print(f"host time per launch {overhead(launch, tensors):.2f} us")


if __name__ == "__main__":
    main(sys.argv[1:])
