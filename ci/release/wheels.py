"""Build wheels of every package, install them into an empty environment beside torch, and try them there.

    python -m ci.release.wheels build [FOLDER]              wheels of all packages into FOLDER (default: dist)
    python -m ci.release.wheels try [--torch 2.13.0 ...]    build, install beside each torch, and run the smoke test
    python -m ci.release.wheels try --wheels FOLDER ...     with wheels that are there already
    python -m ci.release.wheels try --keep FOLDER ...       environments stay, as FOLDER/VERSION, to run tests in

The smoke test compiles and runs a small model with every backend that the machine has a device for, simulates the others where
that is possible, reports whether the C++ parts are loaded, and runs the doctor. It needs the package `build` (extra `release`) and
a package index. Each environment is removed after its test; with CUDA builds of torch one takes up to 8 GB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

SMOKE = """
import json, sys
import torch
import fusewright
from fusewright import registry

assert fusewright.__file__.startswith(sys.prefix), f"{fusewright.__file__} is not in {sys.prefix}"
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)).eval()
x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    expected = model(x)

def ran(name, device, **options):
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(model.to(device), backend=name, options={"fallback": "allow", "strict": True, **options})(x.to(device))
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-3)
    model.to("cpu")

found = {}
for info in registry.backends():
    if info.cls is None:
        found[info.name] = f"does not load: {info.device}"
    elif info.available:
        ran(info.name, info.cls.device_type)
        found[info.name] = "runs"
    else:
        simulated = info.cls.simulated(dict(info.cls.options)) if hasattr(info.cls, "simulated") else None
        if getattr(simulated, "simulated", False):
            ran(info.name, "cpu", simulate=True)
            found[info.name] = "runs simulated"
        else:
            found[info.name] = f"not here: {(simulated or info.device).reason}"
from fusewright.plan import native
from fusewright_int8.run import core
parts = {"fusewright_native": native.absent(), "fusewright_int8": core.absent()}
assert not [parts[p] for p in sys.argv[1:] if parts[p]], parts
if parts["fusewright_int8"] is None:
    from fusewright_int8.run.native import linear, pack_linear
    rows, weight = torch.randint(0, 256, (5, 48), dtype=torch.uint8), torch.randint(-127, 128, (6, 48), dtype=torch.int8)
    want = (rows.long() - 3) @ weight.long().T
    torch.testing.assert_close(linear(rows, pack_linear(weight), torch.ones(6), None, 1.0, 3), want.float())
print(json.dumps({
    "torch": torch.__version__, "python": sys.version.split()[0], "backends": found,
    "in C++": {p: why or "loaded" for p, why in parts.items()},
}))
"""
"""Runs in the environment, from a folder that is not the checkout; its arguments are the packages whose C++ part must be there."""
VERSION = "import importlib.metadata as m; print(m.version('torch'))"


def packages() -> list[Path]:
    """Return the folders of published packages: the host, then those that depend on it."""
    patterns = ("*/pyproject.toml", "common/*/pyproject.toml", "backends/*/pyproject.toml")
    others = {p.parent for pattern in patterns for p in ROOT.glob(pattern)}
    return [ROOT / "common", *sorted(others - {ROOT / "common"})]


def names() -> list[str]:
    """Return their names on the index."""
    return [_project(p)["project"]["name"] for p in packages()]


def native(package: Path) -> bool:
    """Return whether a package has a C++ part, and so a wheel for each Python and platform."""
    return str(_project(package)["build-system"]["build-backend"]).startswith("scikit_build_core")


def _project(package: Path) -> dict[str, Any]:
    return tomllib.loads((package / "pyproject.toml").read_text())


def build(folder: Path, only: Sequence[str] = (), sdist: bool = False) -> list[Path]:
    """Build wheels of the packages, and on request source distributions. Raise CalledProcessError when one does not build."""
    kinds = ["--wheel", "--sdist"] if sdist else ["--wheel"]
    for package in packages():
        if not only or package.name in only:
            print(f"== build {package.relative_to(ROOT)}", flush=True)
            command = [sys.executable, "-m", "build", *kinds, "--outdir", str(folder), str(package)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return sorted(folder.glob("*.whl"))


def problems(wheel: Path) -> list[str]:
    """Return what a wheel lacks, or should not contain."""
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    found = [] if any(f.endswith("/py.typed") for f in files) else ["no py.typed"]
    found += [] if any("licenses/LICENSE" in f for f in files) else ["no LICENSE"]
    tops = {f.split("/")[0] for f in files if not f.split("/")[0].endswith(".dist-info")}
    return found + [f"{top} does not belong there" for top in sorted(tops) if not top.startswith("fusewright")]


def repaired(wheel: Path) -> Path:
    """Tag a wheel with native code for the oldest C library that it runs with (auditwheel); return it."""
    if "-linux_" not in wheel.name:
        return wheel
    subprocess.run([sys.executable, "-m", "auditwheel", "repair", "-w", str(wheel.parent), str(wheel)], check=True)
    wheel.unlink()
    return next(wheel.parent.glob(f"{'-'.join(wheel.name.split('-')[:3])}-*manylinux*"))


def compiled(wheels: Iterable[Path]) -> list[str]:
    """Return packages whose wheels hold native code: without a compiler the same packages are built as pure Python."""
    return [w.name.split("-")[0] for w in wheels if not w.name.endswith("-none-any.whl")]


def tried(wheels: Iterable[Path], torch: str, keep: Path | None = None) -> str:
    """Return the smoke test's output in an environment with that torch ("" for the newest), which is kept at `keep`.
    Raise CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        environment = keep or Path(folder) / "env"
        python = str(environment / "bin/python")
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env |= {"FUSEWRIGHT_CACHE_DIR": f"{folder}/cache", "FUSEWRIGHT_STATE_DIR": f"{folder}/state"}
        exact = f"torch=={torch}" if torch else "torch"

        def run(*command: str) -> str:
            done = subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.PIPE, text=True)
            return done.stdout

        run(sys.executable, "-m", "venv", "--clear", str(environment))
        run(python, "-m", "pip", "install", "-q", "--no-cache-dir", exact)
        pin = f"torch=={run(python, '-c', VERSION).strip()}"
        run(python, "-m", "pip", "install", "-q", *map(str, wheels), pin, "click", "rich")
        run(python, "-m", "pip", "check")
        said = run(python, "-c", SMOKE, *compiled(wheels)).splitlines()[-1]
        run(python, "-m", "fusewright", "doctor")
        return said


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    building, trying = commands.add_parser("build"), commands.add_parser("try")
    building.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    building.add_argument("--only", default="", help="folders of packages, comma-separated: common,int8")
    building.add_argument("--sdist", action="store_true", help="source distributions too")
    building.add_argument("--repair", action="store_true", help="give native wheels a manylinux tag (needs auditwheel)")
    trying.add_argument("--torch", nargs="*", default=["2.13.0"], help='versions; "newest" for the newest release')
    trying.add_argument("--wheels", type=Path, help="use the wheels of this folder")
    trying.add_argument("--keep", type=Path, help="leave the environments in this folder")
    a = parser.parse_args(argv)
    if a.command == "build":
        wheels = build(a.folder, a.only.split(",") if a.only else (), a.sdist)
        return _judged([repaired(w) for w in wheels] if a.repair else wheels)
    with tempfile.TemporaryDirectory() as folder:
        wheels = sorted(a.wheels.resolve().glob("*.whl")) if a.wheels else build(Path(folder))
        status = _judged(wheels)
        for version in a.torch:
            try:
                keep = a.keep.resolve() / version if a.keep else None
                print(f"torch {version}: {tried(wheels, '' if version == 'newest' else version, keep)}", flush=True)
            except subprocess.CalledProcessError as e:
                status = 1
                print(f"torch {version}: FAILED at {e.cmd[-1] if '-c' not in e.cmd else 'the smoke test'}", flush=True)
    return status


def _judged(wheels: Sequence[Path]) -> int:
    wrong = {w.name: found for w in wheels if (found := problems(w))}
    for wheel in wheels:
        print(f"{wheel.name}: {', '.join(wrong.get(wheel.name, ['good']))}", flush=True)
    return 1 if wrong or not wheels else 0


if __name__ == "__main__":
    sys.exit(main())
