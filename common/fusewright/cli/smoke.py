"""A real computation through each named backend: `python -m fusewright.cli.smoke [--raise] NAME...`.

Prints a line of JSON before and after each. `doctor` runs it in a child process, so that a backend that crashes the process is
reported instead of ending `doctor`.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright import registry
from fusewright.interface import HOST

ROWS, WIDTH = 16, 64
FLOOR = 1e-6
"""Errors below this are ignored: fp32 rounding for values of about one."""


def block(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Layer norm of the gelu of a linear layer. [ROWS, WIDTH] in and out."""
    return F.layer_norm(F.gelu(F.linear(x, w, b)), (WIDTH,), scale, shift)


def smoke(name: str) -> dict[str, Any]:
    """Compile `block` with the backend on its own device, run it and compare. Times are in milliseconds.

    A backend without a device here runs on a simulated one, if it has that, with tensors on the CPU.
    """
    found = registry.info(name)
    simulate = not found.available
    device = HOST if simulate or found.cls is None else found.cls.device_type
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,)]
    exact = [torch.randn(s, generator=generator, dtype=torch.float64) / 8 for s in shapes]
    inputs = [t.to(device, torch.float32) for t in exact]
    with torch.no_grad():
        compiled = torch.compile(block, backend=name, options={"simulate": True} if simulate else None)
        start = time.perf_counter()
        out = compiled(*inputs).cpu()
        first = time.perf_counter() - start
        truth = block(*(t.double() for t in (i.cpu() for i in inputs)))
        error = (out - truth).abs().max().item()
        allowed = 2 * (block(*inputs).cpu() - truth).abs().max().item() + FLOOR
        times = []
        for _ in range(1 if simulate else 30):
            start = time.perf_counter()
            compiled(*inputs).cpu()
            times.append(time.perf_counter() - start)
    ok = error <= allowed
    why = "" if ok else f"wrong result: error {error:.1e}, allowed {allowed:.1e}"
    return {"ok": ok, "first_ms": first * 1e3, "ms": median(times) * 1e3, "error": why}


def main(names: list[str]) -> None:
    """Run the computation with each backend; with `--raise` the first error ends the run with its traceback."""
    for name in (n for n in names if n != "--raise"):
        print(json.dumps({"name": name, "event": "start"}), flush=True)
        try:
            result = smoke(name)
        except Exception as e:  # whatever a backend raises is its finding
            if "--raise" in names:
                raise
            cause = getattr(e, "inner_exception", e)  # torch.compile wraps what the backend raised
            first_line = str(cause).strip().partition("\n")[0]
            result = {"ok": False, "error": f"{type(cause).__name__}: {first_line}"}
        print(json.dumps({"name": name, "event": "end", **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
