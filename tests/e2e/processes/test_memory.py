"""The memory that a process retains for models compiled and dropped, and for shapes seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads resident memory from /proc")

ROOT = Path(__file__).parents[3]

COMMON = """
import ctypes, gc, json, torch
from torch.nn import GELU, LayerNorm, Linear, Sequential
libc = ctypes.CDLL(None)
def resident():
    gc.collect()
    libc.malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
"""

DROPPED = """
from fusewright_cpu.onednn import left_behind
left_behind.MOST = 4
def one(k, backend, train):
    h = 65 + k
    model, x = Sequential(Linear(h, 4 * h), GELU(), LayerNorm(4 * h), Linear(4 * h, h)).train(train), torch.randn(16, h)
    with torch.set_grad_enabled(train):
        y = torch.compile(model, backend=backend, options=None if backend == "aot_eager" else {"cache": False})(x)
    if train:
        y.sum().backward()
def growth(backend, train, first):
    for k in range(4):
        one(first + k, backend, train)
        torch.compiler.reset()
    before = resident()
    for k in range(4, 12):
        one(first + k, backend, train)
        torch.compiler.reset()
    return (resident() - before) / 8
print(json.dumps({f"{backend} {train}": growth(backend, train, first) for first, (backend, train) in
    zip((0, 20, 40, 60), ((b, t) for t in (False, True) for b in ("aot_eager", "x86_onednn")))}))
"""

SHAPES = """
model = Sequential(Linear(64, 128), GELU(), Linear(128, 128), GELU(), Linear(128, 64)).eval()
compiled = torch.compile(model, backend="x86_onednn", dynamic=True)
with torch.no_grad():
    for rows in (3, 5, 1000):
        compiled(torch.randn(rows, 64))
    before = resident()
    for k in range(150):
        compiled(torch.randn(2 + 3 * k, 64))
    print(json.dumps(resident() - before))
"""


def measured(code: str, cache: Path) -> object:
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "FUSEWRIGHT_CACHE_DIR": str(cache)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_model_that_was_dropped_leaves_little_more_than_aot_eager_does(tmp_path: Path) -> None:
    """Megabytes per model: code, plans and constants are freed, and oneDNN's cache does not grow without limit."""
    found = measured(DROPPED, tmp_path)
    assert isinstance(found, dict)
    for train in (False, True):
        assert found[f"x86_onednn {train}"] < found[f"aot_eager {train}"] + 0.3, found


@pytest.mark.slow
def test_shapes_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    """Megabytes for 150 different row counts; oneDNN would keep 200 MB of code."""
    grown = measured(SHAPES, tmp_path)
    assert isinstance(grown, float) and grown < 30, grown
