"""Build every loop kernel of the suite and every handwritten kernel for every GPU target, without a GPU.

    python -m ci.gpu.build_kernels [--backend rocm_triton] [--models bert,vit] [--targets sm_90,gfx942] [--json out.json]

Each model is compiled with the backend on a simulated device and run on the CPU, in inference and training, where the CPU's emitter
computes the kernels; the kernels that the backend would load are collected. Triton then builds each distinct kernel for each of the
backend's targets, and its registers, scratch memory and shared memory (LDS) are read from the code and compared with the target's
limits; so are those of the handwritten kernels, in the forms of the table `BY_HAND`. Exit code 1 if a kernel does not build or fit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fusewright.bench import suite
from fusewright.errors import OptionError, nearest
from fusewright.interface import KernelCode
from fusewright.toolkit.ir import Kernel, structural_hash
from fusewright_cpu import llvm_loader
from fusewright_triton.backend import NvidiaTriton, RocmTriton, TritonBackend
from fusewright_triton.build import binaries, workers
from fusewright_triton.build.binaries import Binary, Built, Wanted
from fusewright_triton.build.resources import over_limits, resources
from fusewright_triton.emit.operators import Unsupported
from fusewright_triton.emit.schedule import choose
from fusewright_triton.kernels import attention_ops, decode_ops, int8_ops, product_ops, short_sequence_ops
from fusewright_triton.run.handwritten import Order, noting
from fusewright_triton.runtime import first_variant
from fusewright_triton.target import Target

BACKENDS: dict[str, type[TritonBackend]] = {b.name: b for b in (NvidiaTriton, RocmTriton)}
TARGETS: dict[str, Target] = {
    name: (NvidiaTriton.targets | RocmTriton.targets)[name]
    for name in ("sm_80", "sm_90", "gfx90a", "gfx942", "gfx950", "gfx1100")
}
MODELS = tuple(dict.fromkeys([*suite.SUITE, *suite.TRAINABLE]))

_IMAGE, _WINDOW = (64, 64), (14, 14)
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


def _meta(*shape: int, dtype: torch.dtype = _BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(dtype: torch.dtype, dim: int, mask: str, causal: bool, t: Target, sinks: bool = False) -> None:
    if attention_ops.fits(t, dtype, dim):
        q, hides = _meta(4, 16, 4096, dim, dtype=dtype), _MASKS[mask](dtype)
        sink = _meta(16, 1, 1, dtype=dtype) if sinks else None
        attention_ops.attention(q, q, q, hides, sink, causal, None, not sinks, q.stride(), t.arch)


_MASKS: dict[str, Callable[[torch.dtype], torch.Tensor | None]] = {
    "": lambda dtype: None,
    "added": lambda dtype: _meta(1, 16, 4096, 4096, dtype=dtype),
    "boolean": lambda dtype: _meta(4, 1, 1, 4096, dtype=torch.bool).expand(4, 16, 4096, 4096),
}


def _positions(dtype: torch.dtype, dim: int, image: tuple[int, int], t: Target) -> None:
    if attention_ops.fits(t, dtype, dim, image):
        q, (h, w) = _meta(1, 12, image[0] * image[1], dim, dtype=dtype), image
        rows, columns = _meta(12, h, w, h, dtype=dtype), _meta(12, h, w, w, dtype=dtype)
        attention_ops.attention_decomposed(q, q, q, rows, columns, None, q.stride(), t.arch)


def _short_sequence(dtype: torch.dtype, dim: int, keys: int, t: Target) -> None:
    if t.matrix == "wgmma":
        q, k = _meta(64, 12, 197, dim, dtype=dtype), _meta(64, 12, keys, dim, dtype=dtype)
        short_sequence_ops.attention_short_sequence(q, k, k, None, q.stride(), t.arch)


def _few(dtype: torch.dtype, dim: int, mask: torch.dtype | None, t: Target, sinks: bool = False) -> None:
    q, k = _meta(1, 32, 1, dim, dtype=dtype), _meta(1, 8, 1024, dim, dtype=dtype)
    hides = None if mask is None else _meta(1, 1, 1, 1024, dtype=mask)
    sink = _meta(32, 1, 1, dtype=dtype) if sinks else None
    decode_ops.attention_decode(q, k, k, hides, sink, None, None, None, q.stride(), t.arch)


def _int8(rows: int, t: Target) -> None:
    w = _meta(14336, 4096, dtype=torch.int8)
    int8_ops.int8_linear(_meta(rows, 4096), w, _meta(14336), _meta(14336), t.arch)
    int8_ops.int8_mm(_meta(rows, 4096, dtype=torch.int8), w, t.arch)


def _product(dtype: torch.dtype, columns: int, activation: str, t: Target, residual: bool = False) -> None:
    x, w, b = _meta(8192, 768, dtype=dtype), _meta(columns, 768, dtype=dtype), _meta(columns, dtype=dtype)
    more = _meta(8192, columns, dtype=dtype) if residual else None
    product_ops.linear_activation(x, w, b, activation, t.arch, more)


BY_HAND: dict[str, Callable[[Target], None]] = {
    "attention, an added mask, 64, bf16": partial(_attention, _BF16, 64, "added", False),
    "attention, a boolean mask, 128, bf16": partial(_attention, _BF16, 128, "boolean", False),
    "attention, causal, 64, fp16": partial(_attention, _FP16, 64, "", True),
    "attention, causal, 256, bf16": partial(_attention, _BF16, 256, "", True),
    "attention, sinks, 64, bf16": partial(_attention, _BF16, 64, "added", False, sinks=True),
    "attention, an image, 64, bf16": partial(_positions, _BF16, 64, _IMAGE),
    "attention, an image, 80, bf16": partial(_positions, _BF16, 80, _IMAGE),
    "attention, a window, 64, bf16": partial(_positions, _BF16, 64, _WINDOW),
    "attention, a window, 64, fp32": partial(_positions, _FP32, 64, _WINDOW),
    "attention over 197 keys, 64, bf16": partial(_short_sequence, _BF16, 64, 197),
    "attention over 77 keys, 40, fp16": partial(_short_sequence, _FP16, 40, 77),
    "attention of few, 64, bf16": partial(_few, _BF16, 64, None),
    "attention of few, an added mask, 128, fp16": partial(_few, _FP16, 128, _FP16),
    "attention of few, a boolean mask, 256, fp32": partial(_few, _FP32, 256, torch.bool),
    "attention of few, sinks, 64, bf16": partial(_few, _BF16, 64, _BF16, sinks=True),
    "int8 products, 1 row": partial(_int8, 1),
    "int8 products, 512 rows": partial(_int8, 512),
    "product with gelu, bf16": partial(_product, _BF16, 3072, "gelu"),
    "product with a residual, bf16": partial(_product, _BF16, 768, "", residual=True),
    "product, rows of odd length, fp16": partial(_product, _FP16, 30522, ""),
}
"""Handwritten kernels: calls of their operators on meta tensors, as models make them. A call requests nothing if the backend does
not pass such tensors to the kernel."""


@dataclass
class Row:
    """The results of the kernels on one target. The worst of each kind is listed with its function's name."""

    target: str
    kernels: int = 0
    functions: int = 0
    seconds: float = 0.0
    registers: tuple[int, str] = (0, "")
    shared: tuple[int, str] = (0, "")
    scratch: tuple[int, str] = (0, "")
    with_scratch: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, name: str, result: Sequence[Binary] | workers.BuildError, target: Target) -> None:
        """Add one kernel's result."""
        self.kernels += 1
        if isinstance(result, workers.BuildError):
            self.failures.append(f"{name}: {result}")
            return
        for b in result:
            used = resources(b, target)
            self.functions += 1
            self.registers = max(self.registers, (used.registers, b.name))
            self.shared = max(self.shared, (used.shared, b.name))
            self.scratch = max(self.scratch, (used.scratch, b.name))
            self.with_scratch += used.scratch > 0
            self.failures += [f"{b.name}: {why}" for why in over_limits(b, target)]


# ---------------------------------------------------------------- collecting


@contextmanager
def collecting(found: dict[str, Kernel]) -> Iterator[None]:
    """Collect what Triton backends load into `found`, by structural hash; the CPU's emitter computes it."""

    def collect(self: TritonBackend, kernels: Mapping[str, Any]) -> Mapping[str, KernelCode]:
        found.update(kernels)
        return llvm_loader(kernels)

    with mock.patch.object(TritonBackend, "load", collect):
        yield


def kernels_of(model: str, backend: str, size: suite.Size, dtypes: Sequence[str]) -> dict[str, Kernel]:
    """Return the kernels of a model, by structural hash: inference, and training forward and backward."""
    found: dict[str, Kernel] = {}
    with collecting(found):
        for dtype in dtypes:
            if model in suite.SUITE:
                _infer(model, backend, size, dtype)
            _train(model, backend, size, "amp" if dtype == "bf16" else dtype)
    return found


def _compiled(fn: Any, backend: str) -> Any:
    torch.compiler.reset()
    options: dict[str, Any] = {"simulate": True, "cache": False, "fallback": "allow", "strict": True}
    return torch.compile(fn, backend=backend, options=options)


def _infer(model: str, backend: str, size: suite.Size, dtype: Any) -> None:
    built = suite.build(model, size, dtype)
    with torch.no_grad():
        built.run(_compiled(built.fn, backend))


def _train(model: str, backend: str, size: suite.Size, dtype: Any) -> None:
    """Train a step with the model's own loss if it has one, else with the mean square of its outputs."""
    if model in suite.TRAINABLE:
        step = suite.train_step(model, size, dtype)
        step.compiled = _compiled(step.module, backend)
        step.backward()
        return
    built = suite.build(model, size, dtype)
    assert built.module is not None
    built.module.train()
    outputs = suite.flatten_outputs(built.run(_compiled(built.fn, backend)))
    losses = [t.float().square().mean() for t in outputs if t.requires_grad]
    torch.stack(losses).sum().backward()


# ---------------------------------------------------------------- building


def build(kernels: Mapping[str, Kernel], target: Target) -> Row:
    """Build every kernel for one target, with one process per processor."""
    row, wanted = Row(target.arch), []
    start = time.monotonic()
    for k in kernels.values():
        try:
            order = Wanted(k, choose(k, target), first_variant(k))
            order.source()
            wanted.append(order)
        except Unsupported as e:
            row.add(_name(k), workers.BuildError(f"the emitter refuses it: {e}"), target)
    for order, result in zip(wanted, binaries.build_each(wanted, target), strict=True):
        row.add(_name(order.kernel), result.binaries if isinstance(result, Built) else result, target)
    row.seconds = time.monotonic() - start
    return row


def _name(k: Kernel) -> str:
    return f"{k.name} ({structural_hash(k)[:8]})"


def add_by_hand(row: Row, target: Target) -> None:
    """Build the handwritten kernels in every form that the target uses."""
    start, wanted = time.monotonic(), dict[Order, str]()
    for name, call in BY_HAND.items():
        orders: list[Order] = []
        with noting(orders):
            call(target)
        wanted.update({o: f"{o.function} of {name}" for o in orders})
    answers = workers.build_each([o.request(target) for o in wanted])
    for name, answer in zip(wanted.values(), answers, strict=True):
        if isinstance(answer, workers.BuildError):
            row.add(name, answer, target)
        else:
            row.add(name, [binaries.binary(b, name) for b in answer], target)
    row.seconds += time.monotonic() - start


def table(rows: Sequence[Row]) -> str:
    """Return a table with one line per target."""
    lines = [
        f"{'target':8} {'kernels':>7} {'functions':>9} {'failed':>6} {'seconds':>7}  {'registers':>9}  {'shared':>7}  "
        f"{'scratch':>15}  most registers in"
    ]
    for r in rows:
        scratch = f"{r.scratch[0]} ({r.with_scratch} with)"
        lines.append(
            f"{r.target:8} {r.kernels:7} {r.functions:9} {len(r.failures):6} {r.seconds:7.1f}  {r.registers[0]:9}  "
            f"{r.shared[0]:7}  {scratch:>15}  {r.registers[1]}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    a = _arguments(argv)
    backends = _chosen(a.backend, tuple(BACKENDS), "backend")
    targets = _chosen(a.targets, [t for t in TARGETS if any(t in BACKENDS[b].targets for b in backends)], "target")
    models = _chosen(a.models, MODELS, "model")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # an old build must not hide a kernel that no longer builds
        for backend in backends:
            mine = [TARGETS[t] for t in targets if t in BACKENDS[backend].targets]
            kernels = _collected(backend, models, a) if mine else {}
            for target in mine:
                row = build(kernels, target)
                if kernels:
                    add_by_hand(row, target)
                rows.append(row)
                print(
                    f"{target.arch}: {row.kernels} kernels, {len(row.failures)} failures, {row.seconds:.0f} s",
                    flush=True,
                )
        workers.pool().close()
    print("\n" + table(rows))
    for r in rows:
        for failure in r.failures:
            print(f"FAILED {r.target} {failure.strip().splitlines()[0]}")
    if a.json:
        Path(a.json).write_text(json.dumps(_document(a, rows), indent=1))
    return 1 if not rows or any(r.failures or not r.kernels for r in rows) else 0


def _document(a: argparse.Namespace, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the document to write: the rows and their provenance."""
    chosen = {name: getattr(a, name) for name in ("backend", "models", "targets", "size", "dtypes")}
    versions = {name: metadata.version(name) for name in ("torch", "triton", "transformers")}
    date = datetime.now(UTC).date().isoformat()
    return {"version": 1, "date": date, "versions": versions, **chosen, "rows": [asdict(r) for r in rows]}


def _collected(backend: str, models: Sequence[str], a: argparse.Namespace) -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {}
    for model in models:
        start = time.monotonic()
        found = kernels_of(model, backend, a.size, a.dtypes.split(","))
        new = len(found.keys() - kernels.keys())
        kernels.update(found)
        print(
            f"{backend} {model:14} {len(found):4} kernels, {new:4} of them new, {time.monotonic() - start:5.1f} s",
            flush=True,
        )
    return kernels


def _chosen(text: str, known: Sequence[str], what: str) -> Sequence[str]:
    if text == "all":
        return known
    names = text.split(",")
    for n in names:
        if n not in known:
            raise OptionError(f"there is no {what} {n!r}; {nearest(n, known)}")
    return names


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--backend", default="all", help=f"of {', '.join(BACKENDS)}; comma-separated")
    p.add_argument("--models", default="all", help="names of the suite, comma-separated")
    p.add_argument("--targets", default="all", help=f"of {', '.join(TARGETS)}; comma-separated")
    p.add_argument("--size", choices=("full", "small"), default="full", help="geometry of the models")
    p.add_argument("--dtypes", default="fp32,bf16", help="fp32, bf16 (training: under autocast); comma-separated")
    p.add_argument("--json", help="write the rows to this file")
    return p.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
