"""C0: how the kit simulates a machine without the vendor's libraries."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from fusewright.conformance import isolated
from fusewright.conformance.jobs import levels
from fusewright.conformance.settings import Settings
from fusewright.conformance.verdicts import Verdict


@pytest.mark.parametrize("name", ["imports without the vendor's libraries", "probe is total"])
def test_what_a_family_package_requires_is_no_vendors(name: str) -> None:
    """LLVM comes with `fusewright_cpu`, which the CPU backends depend on."""
    (found,) = levels.perform({"part": "contract", "name": name}, Settings("x86_onednn"))
    assert found.verdict is Verdict.PASSED, found


def test_what_a_backend_requires_itself_is_hidden() -> None:
    code = "from fusewright.conformance import isolated as i; print([*map(i.allowed, ('fusewright_onednn', 'fusewright_triton'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    cpu, gpu = eval(done.stdout)
    assert "llvmlite" in cpu and not {"llvmlite", "triton"} & gpu


def test_hidden_is_as_if_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch calls `find_spec` for Triton when CUDA starts; an error there was blamed on the backend."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "this", raising=False)
    missing = isolated.Missing(frozenset({"json"}))
    missing.install()
    assert importlib.util.find_spec("this") is None and missing.refused == {"this"}
    with pytest.raises(ModuleNotFoundError, match="No module named 'this'"):
        import this  # noqa: F401
    assert importlib.util.find_spec("json.tool") is not None
    missing.on = False
    assert importlib.util.find_spec("this") is not None
