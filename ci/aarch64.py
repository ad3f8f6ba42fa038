"""What `ci/aarch64.sh` leaves to Python: the entry points of this checkout for an interpreter that it is not installed in,
and the tests that run there.

    python ci/aarch64.py metadata FOLDER
    python ci/aarch64.py test EMULATED_PYTHON [PYTEST_ARG...]
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

STARTUP = """import os, sys
sys.executable = os.environ.get("FUSEWRIGHT_EMULATED_PYTHON", sys.executable)
"""
"""`sitecustomize` of the emulated Python: its children run under the emulator, too."""


def metadata(folder: Path) -> None:
    """For each package of the checkout the name, version and entry points that `importlib.metadata` reads."""
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


if __name__ == "__main__":
    if sys.argv[1] == "metadata":
        metadata(Path(sys.argv[2]))
