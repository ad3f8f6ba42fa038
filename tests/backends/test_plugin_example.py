"""A package outside the tree, installed with pip, is found, checked, explained and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "plugin_example"
MODEL = """
import torch
def model():
    class Net(torch.nn.Module):
        def forward(self, x, y):
            return torch.relu(x + y).tanh()
    return Net().eval(), (torch.randn(8, 16), torch.randn(16))
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the package installed."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", target, PACKAGE], check=True, capture_output=True)
    return {**os.environ, "PYTHONPATH": str(target)}


def _run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)


def test_the_whole_package_is_small() -> None:
    files = [p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".toml")]
    assert sum(len(p.read_text().splitlines()) for p in files) < 150


def test_doctor_shows_it_with_a_real_computation(env: dict[str, str]) -> None:
    done = _run(env, "-m", "fusewright", "doctor", "--json")
    (row,) = [r for r in json.loads(done.stdout)["rows"] if r["name"] == "example"]
    assert (row["dist"], row["version"], row["device"]) == ("fusewright-example", "1.2.3", "cpu example")
    assert row["runs"] and row["lowers"] == 2 and row["ms"] > 0


def test_explain_shows_what_it_lowers_and_why_not_the_rest(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    done = _run(env, "-m", "fusewright", "explain", f"{tmp_path / 'net.py'}:model", "--backend", "example")
    assert done.returncode == 0, done.stderr
    assert "fusewright_example::relu" in done.stdout  # the note of the lowering
    assert "tanh" in done.stdout and "no_lowering" in done.stdout


USE = """
import torch

f = lambda x, y: torch.relu(x + y).tanh()
x, y = torch.randn(8, 16), torch.randn(16)
for options in ({}, {"fallback": "allow"}, {"broadcast": False}):  # the last one makes it decline
    torch.compiler.reset()
    assert torch.equal(torch.compile(f, backend="example", options=options)(x, y), f(x, y))
try:
    torch.compiler.reset()
    torch.compile(f, backend="example", options={"brodcast": False})(x, y)
except Exception as e:
    print(e)
"""


def test_torch_compile_finds_it_by_name_and_checks_its_options(env: dict[str, str]) -> None:
    done = _run(env, "-c", USE)
    assert done.returncode == 0, done.stderr
    assert "there is no option 'brodcast'; did you mean 'broadcast'?" in done.stdout
