"""Compiling on a CPU starts no process: no g++, no cmake, no worker. Watched by Python's audit events in a child of the test."""

from __future__ import annotations

import subprocess
import sys

import pytest

WATCH = """
import sys
started = []
SPAWNS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}
import torch
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Softmax(-1))
sys.addaudithook(lambda event, args: started.append((event, args)) if event in SPAWNS else None)
twin = torch.compile(net, backend="%s", options={"cache": False})
with torch.no_grad():
    twin(torch.randn(4, 8))
twin(torch.randn(4, 8)).sum().backward()
print([str(s)[:200] for s in started])
"""


@pytest.mark.hardware("x86_onednn")
def test_compiling_starts_no_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCH % "x86_onednn"], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.hardware("x86_onednn")
def test_the_watch_sees_processes() -> None:
    """A backend that runs a command is detected, which shows that the test above can fail."""
    spawning = WATCH % "x86_onednn" + "\nimport subprocess\nsubprocess.run(['true'])\nprint(len(started))"
    done = subprocess.run([sys.executable, "-c", spawning], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split()[-1] != "0"
