"""Compile ahead of time for a server: an image that ships the plan cache answers its first request without compiling.

    python examples/server_start.py

The first process stands for the image build, the second for a server started from the image. Plans are sealed with a key and bound
to the machine (docs/reliability.md), so build where you run, with the same cache and state directories. Build on an idle machine:
a plan is not kept if noise may have decided one of its measured choices.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REQUEST = "request"


def request() -> None:
    """Start like a server: build the model, compile it, answer a request. Print the seconds of the first answer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2))).eval()
    x = torch.randn(1, 16, 64)
    fast = torch.compile(model, backend="fusewright")
    start = time.perf_counter()
    with torch.no_grad():
        fast(x)
    print(f"{time.perf_counter() - start:.2f}")


def process(folder: Path) -> float:
    """Return the seconds that a new process with these directories takes for its first answer."""
    env = {**os.environ, "FUSEWRIGHT_CACHE_DIR": str(folder / "cache"), "FUSEWRIGHT_STATE_DIR": str(folder / "state")}
    done = subprocess.run([sys.executable, __file__, REQUEST], env=env, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold = process(folder)
        plans = {p for p in (folder / "cache").rglob("*") if p.is_file()}
        warm = process(folder)
        new = {p for p in (folder / "cache").rglob("*") if p.is_file()} - plans
    print(f"first answer: {cold:.2f} s while the image is built, {warm:.2f} s from it")
    print(f"{len(plans)} files shipped, {len(new)} new")


if __name__ == "__main__":
    request() if sys.argv[1:] == [REQUEST] else main()
