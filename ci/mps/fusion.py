"""Compare kernels and bytes of Metal with Triton's for the same graphs: `python -m ci.mps.fusion [--models bert,llama]`.

Each model runs once with `rocm_triton` (which has no fused library convolutions) and once with `apple_mps`, both simulated,
with the kernels themselves computed by the CPU's emitter. It counts launches of loop kernels, calls that move memory (torch's
and those of handwritten kernels), and the bytes that both read and write, except weights that calls read. Exit code 1 if
Metal's plan has more launches and calls together, or more bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fusewright import report
from fusewright.bench import suite
from fusewright.interface import KernelCode
from fusewright.toolkit.backend.fused import FusedBackend
from fusewright_cpu import llvm_loader
from fusewright_mps.backend import AppleMps
from fusewright_triton.backend import RocmTriton

BACKENDS: dict[str, type[FusedBackend]] = {"rocm_triton": RocmTriton, "apple_mps": AppleMps}

FREE = frozenset(
    "view reshape alias expand unsqueeze squeeze slice select split split_with_sizes transpose permute t detach as_strided "
    "unbind chunk _unsafe_view diagonal view_as_real view_as_complex real imag".split()
)
"""Calls of torch that (usually) return a view."""


SLACK = 1.01
"""The ratio of bytes that counts as equal: weights that one side has concatenated are read as one tensor."""


@dataclass
class Traffic:
    """The traffic of a model's plans: launches of loop kernels, other calls, and bytes of both."""

    launches: int = 0
    calls: int = 0
    bytes: int = 0

    def above(self, other: Traffic) -> list[str]:
        """Return the names of the counts that are higher here than there."""
        found = {
            "launches and calls": self.launches + self.calls > other.launches + other.calls,
            "bytes": self.bytes > SLACK * other.bytes,
        }
        return [name for name, more in found.items() if more]


@contextmanager
def counting(cls: type[FusedBackend], found: Traffic) -> Iterator[None]:
    """Compute the kernels of a backend with the CPU's emitter, and count their launches."""

    def load(self: FusedBackend, kernels: Mapping[str, Any]) -> Mapping[str, KernelCode]:
        code = llvm_loader(kernels)
        return {h: KernelCode(_counted(c.call, found), kernel=c.kernel) for h, c in code.items()}

    with mock.patch.object(cls, "load", load), mock.patch.object(cls, "store", lambda *_: None):
        yield


def _counted(call: Callable[..., None], found: Traffic) -> Callable[..., None]:
    def run(tensors: Sequence[torch.Tensor], sizes: Sequence[int] = (), scalars: Sequence[Any] = ()) -> None:
        found.launches += 1
        found.bytes += sum(t.nbytes for t in tensors)
        call(tensors, sizes, scalars)

    return run


def calls(plan: str) -> Iterator[int]:
    """Yield the bytes of each call in the text of a plan, results and arguments, except views and prepared values."""
    _, _, text = plan.partition("def run(")
    sizes = {
        name: _bytes(dtype, shape)
        for name, dtype, shape in re.findall(r"^ +(v\d+) = .*# (\w+)\[([\d, ]*)\]", text, re.M)
    }
    for out, space, name, args in re.findall(r"^ +(v\d+)\b.*? = ([a-z]+(?:_triton|_mps)?)_(\w+?)\((.*)\)", text, re.M):
        if space in ("aten", "fusewright_triton", "fusewright_mps") and not _free(name):
            yield sizes.get(out, 0) + sum(sizes.get(v, 0) for v in re.findall(r"v\d+", args))


def _bytes(dtype: str, shape: str) -> int:
    return math.prod(map(int, filter(None, shape.split(", ")))) * getattr(torch, dtype).itemsize


def _free(name: str) -> bool:
    """Return whether a call, by its operator and overload, returns a view."""
    return name.rpartition("_")[0] in FREE or name in FREE


def traffic(model: str, dtype: Any, size: suite.Size, training: bool, backend: str) -> Traffic:
    """Return the traffic of one call of a model, or one training step."""
    torch.compiler.reset()
    found = Traffic()
    options: dict[str, Any] = {"simulate": True, "cache": False, "strict": True}

    def compiled(fn: Any) -> Any:
        return torch.compile(fn, backend=backend, options=options)

    with counting(BACKENDS[backend], found), report.recording() as reports:
        if training:
            step = suite.train_step(model, size, dtype)
            step.compiled = compiled(step.module)
            run: Callable[[], Any] = step.backward
        else:
            built = suite.build(model, size, dtype)
            fn = compiled(built.fn)
            run = torch.no_grad()(lambda: built.run(fn))
        run()  # the first run compares every value, and may plan again
        found.launches = found.bytes = 0
        run()
    moved = [n for r in reports for n in calls(r.texts.get("plan", ""))]
    return Traffic(found.launches, len(moved), found.bytes + sum(moved))


def row(model: str, phase: str, of: Mapping[str, Traffic]) -> str:
    """Return one line of the table."""
    cells = " | ".join(f"{t.launches:4} {t.calls:4} {t.bytes / 1e6:8.3f}" for t in of.values())
    more = of["apple_mps"].above(of["rocm_triton"])
    return f"{model:14} {phase:8} | {cells} | {'more: ' + ', '.join(more) if more else 'equal or less'}"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--models", default=",".join(suite.SUITE))
    p.add_argument("--train", default="", help="models of which a training step is counted")
    p.add_argument("--dtype", default="bf16")
    p.add_argument("--size", default="small", choices=("small", "full"))
    p.add_argument("--json", help="write the table to this file")
    a = p.parse_args(argv)
    todo = [(m, "infer") for m in a.models.split(",") if m] + [(m, "train") for m in a.train.split(",") if m]
    rows: dict[str, dict[str, Traffic]] = {}
    print(f"{'model':14} {'phase':8} | {' | '.join(f'{b:18}' for b in BACKENDS)} |   (launches, calls, MB)")
    for model, phase in todo:
        rows[f"{model} {phase}"] = found = {b: traffic(model, a.dtype, a.size, phase == "train", b) for b in BACKENDS}
        print(row(model, phase, found), flush=True)
    if a.json:
        Path(a.json).write_text(
            json.dumps({n: {b: asdict(t) for b, t in of.items()} for n, of in rows.items()}, indent=1)
        )
    return 1 if any(of["apple_mps"].above(of["rocm_triton"]) for of in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
