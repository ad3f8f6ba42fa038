"""The XLA example, as far as it needs no JAX: its message if JAX is missing, and the modules it may import.

Its own tests (`examples/xla_cpu/tests`) need the extra `xla`; `ci/xla_cpu.sh` runs them and the conformance kit.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ci.check_tree import PUBLIC, imports
from fusewright.interface import Device, Unavailable

PACKAGE = Path(__file__).parents[2] / "examples/xla_cpu"
SOURCES = sorted((PACKAGE / "fusewright_xla_cpu").rglob("*.py"))


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PACKAGE))
    return importlib.import_module("fusewright_xla_cpu.target")


def test_without_jax_it_says_what_to_install(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.importlib.util, "find_spec", lambda name: None)
    found = target.probe()
    assert isinstance(found, Unavailable) and "jax" in found.reason and found.fix.startswith("pip install")


def test_an_import_hook_that_refuses_is_no_jax_either(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(target.importlib.util, "find_spec", refuse)
    assert isinstance(target.probe(), Unavailable)


def test_with_jax_its_version_is_part_of_the_fingerprint(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(target.importlib.metadata, "version", lambda name: "9.9")
    backend = importlib.import_module("fusewright_xla_cpu.backend").XlaCpu
    found = target.probe()
    assert isinstance(found, Device) and "jaxlib 9.9" in backend(found).fingerprint()


def test_importing_the_class_imports_no_jax() -> None:
    code = "import sys; import fusewright_xla_cpu.backend as b; b.XlaCpu.probe(); sys.exit('jax' in sys.modules)"
    path = [str(PACKAGE), *sys.path]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"], check=False, timeout=300)
    assert done.returncode == 0


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_it_uses_what_every_partner_may_use(source: Path) -> None:
    for module in imports(source.read_text(encoding="utf-8")):
        if module.split(".")[0] == "fusewright":
            assert any(f"{module}.".startswith(f"{p}.") for p in PUBLIC), module
        assert not module.startswith(("torch._", "jax._")), module


def test_its_entry_points_and_the_extra_fit() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    workspace = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["fusewright.backends"] == {"xla_cpu": "fusewright_xla_cpu.backend:XlaCpu"}
    assert [d for d in project["dependencies"] if d.startswith("jax")] == workspace["optional-dependencies"]["xla"]
