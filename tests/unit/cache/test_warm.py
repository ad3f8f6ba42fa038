"""Modules that a process must not import if its plans are in the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusewright import registry

CALLS = """
import sys, torch
x, w = torch.ones(64, 64), torch.ones(64, 64, requires_grad=True)
with torch.no_grad():
    torch.compile(lambda x: torch.relu(x + 1).sum(1), backend="x86_onednn")(x)
torch.compile(lambda x: torch.tanh(x * w).sum(), backend="x86_onednn")(x).backward()
print(*(m for m in sys.modules if m.startswith("fusewright")))
"""
LOWERS = (
    "fusewright.stages.rounds", "fusewright.rewrite", "fusewright.toolkit.lower", "fusewright.toolkit.fuse.fuser",
    "fusewright.toolkit.rules.evaluate", "fusewright.toolkit.region", "fusewright_cpu.emit", "fusewright_cpu.kernels.attention",
    "fusewright_cpu.onednn.lowerings",
)  # fmt: skip
MOST = 169
"""Maximum number of our modules; a process that lowers imports about 230."""


@pytest.mark.skipif(not registry.info("x86_onednn").available, reason="needs an x86-64 CPU with AVX2 and ./backends/onednn")
def test_what_lowers_and_emits_is_imported_by_the_first_process_alone(tmp_path: Path) -> None:
    places = {v: str(tmp_path / v) for v in ("FUSEWRIGHT_CACHE_DIR", "FUSEWRIGHT_STATE_DIR")}
    runs = [
        subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, check=True, env={**os.environ, **places})
        for _ in range(2)
    ]
    cold, warm = (set(run.stdout.split()) for run in runs)
    assert cold.issuperset(LOWERS)
    assert not warm.intersection(LOWERS)
    assert len(warm) <= MOST
