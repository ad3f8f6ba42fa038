"""The Python part of `ci/aarch64.sh`: make this checkout's entry points visible to an interpreter where it is not installed,
and run the tests there.

    python -m ci.aarch64.job metadata FOLDER
    python -m ci.aarch64.job test EMULATED_PYTHON [PYTEST_ARG...]
    python -m ci.aarch64.job skipped REASON
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS, SELECTION = "tests/backends/acl", ("-m", "not slow")
KERNELS = tuple(f"tests/backends/cpu/test_aarch64_{name}.py" for name in ("emulated", "int8", "int8_conv", "bf16"))
"""Tests that run in this machine's Python and hand kernels to an emulated one."""
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2")

DOCTOR = """import runpy, sys
from fusewright.cli import checks
checks.SMOKE_SECONDS = 1800
sys.argv[1:] = ["doctor", "--json"]
runpy.run_module("fusewright", run_name="__main__")
"""
"""`fusewright doctor --json` with a time limit for a slow, busy emulated machine."""

STARTUP = """import os, sys
sys.executable = os.environ.get("AARCH64_PYTHON", sys.executable)
"""
"""`sitecustomize` of the emulated Python, so that its child processes run under the emulator too."""


def metadata(folder: Path) -> None:
    """Write the name, version and entry points of each package of the checkout for `importlib.metadata`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(STARTUP)
    for file in (ROOT / "common" / "pyproject.toml", *sorted(ROOT.glob("backends/*/pyproject.toml"))):
        project = tomllib.loads(file.read_text())["project"]
        name, version = project["name"], project["version"]
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = project.get("entry-points", {}).items()
        lines = [line for group, points in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def test(python: str, args: Sequence[str]) -> int:
    """Run doctor, kernels linked far apart, and the backend's tests on the emulated machine; return the exit code. Without `args`,
    also run the tests that hand kernels of other cores to it."""
    start = time.monotonic()
    report = subprocess.run([python, "-c", DOCTOR], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    verdict = [sys.executable, "-m", "ci.require_backend", "graviton_acl"]
    found = subprocess.run(verdict, cwd=ROOT, input=report.stdout, check=False).returncode
    print(f"aarch64: {report.stdout.decode()}" if found else "aarch64: doctor finds graviton_acl", flush=True)
    with tempfile.TemporaryDirectory() as code:
        subprocess.run([sys.executable, "-m", "ci.aarch64.link", "make", code], cwd=ROOT, check=True)
        linked = subprocess.run([python, "-m", "ci.aarch64.link", "run", code], cwd=ROOT, check=False).returncode
    tests = [python, *PYTEST, *SELECTION, *args, TESTS]
    passed = subprocess.run(tests, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
    run = [sys.executable, *PYTEST, *KERNELS]
    kernels = 0 if args else subprocess.run(run, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
    print(f"aarch64: emulated, {time.monotonic() - start:.0f} s", flush=True)
    return found or linked or passed or kernels


def skipped(reason: str) -> None:
    """Announce prominently what is not checked."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *SELECTION, TESTS, *KERNELS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    count = sum("::" in line for line in listed.splitlines())
    line = "!" * 100
    print(f"{line}\n!! graviton_acl was NOT checked on aarch64: {reason}. {count} tests were not run.\n{line}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "metadata":
        metadata(Path(sys.argv[2]))
    elif sys.argv[1] == "skipped":
        skipped(sys.argv[2])
    else:
        sys.exit(test(sys.argv[2], sys.argv[3:]))
