"""Conventions of the workspace: one version, the same file names everywhere, a job for every backend."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fusewright
from ci import check_tree, jobs, require_backend

ROOT = Path(__file__).parents[2]
MEMBERS = ["common", "common/native", *(f"backends/{v}" for v in check_tree.VENDORS | check_tree.SHARED)]


def _project(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("folder", [".", *MEMBERS])
def test_one_version_and_one_window_of_pythons(folder: str) -> None:
    project = _project(folder)
    assert project["version"] == fusewright.__version__
    assert project["requires-python"] == ">=3.11,<3.14"
    if folder.startswith("backends/"):
        own = [d for d in project["dependencies"] if d.startswith("fusewright")]
        assert own[0] == f"fusewright=={fusewright.__version__}" and len({d.split("==")[1] for d in own}) == 1


def test_the_root_installs_every_member_and_can_never_be_published() -> None:
    project = _project(".")
    for member in MEMBERS:
        assert any(f"{{root:uri}}/{member}" in d for d in project["dependencies"])
    assert "Private :: Do Not Upload" in project["classifiers"]


@pytest.mark.parametrize(("folder", "package"), check_tree.VENDORS.items())
def test_a_vendor_package_has_the_usual_names(folder: str, package: str) -> None:
    points = _project(f"backends/{folder}")["entry-points"]
    assert points["fusewright.backends"].keys() == points["torch_dynamo_backends"].keys()
    for name in ("__init__.py", "backend.py", "target.py", "py.typed"):
        assert (ROOT / "backends" / folder / package / name).is_file(), name


def test_every_backend_has_a_job_and_ci_runs_the_command_of_the_readme() -> None:
    planned, versions = jobs.read()
    registered = {
        n
        for v in check_tree.VENDORS
        for n in _project(f"backends/{v}")["entry-points"]["fusewright.backends"]
    }
    assert {j.backend for j in planned} == registered | {"fusewright"}
    pin = (ROOT / "ci/constraints.txt").read_text().split("torch==")[1].split()[0]
    assert pin in versions["versions"] and versions["versions"] == sorted(versions["versions"])
    command = "-m pytest -n 2 --dist worksteal -q tests"
    assert command in (ROOT / ".ci/run").read_text() and command in (ROOT / "README.md").read_text()
    assert f"torch=={pin}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("path", "text", "finding"),
    [
        ("common/fusewright/a.py", "x\n" * 801, "801 lines"),
        ("common/fusewright/a.py", "import torch._dynamo\n", "private part of torch"),
        ("common/fusewright/a.py", "from fusewright_mps import target\n", "the host imports no vendor"),
        ("common/fusewright/a.py", "from fusewright_cpu import llvm_loader\n", "the host imports no vendor"),
        ("backends/cpu/fusewright_cpu/a.py", "import fusewright_onednn\n", "no other vendor"),
        ("backends/mps/fusewright_mps/a.py", "import fusewright_acl\n", "no other vendor"),
        (
            "backends/mps/fusewright_mps/a.py",
            "from fusewright import pipeline\n",
            "imports fusewright.pipeline",
        ),
        ("docs/a.md", "see /" + "home/someone/file\n", "path of one machine"),
    ],
)
def test_check_tree_finds_what_breaks_a_rule(path: str, text: str, finding: str) -> None:
    assert any(finding in f for f in check_tree.findings(path, text))


def test_check_tree_is_silent_about_what_is_allowed() -> None:
    assert not list(
        check_tree.findings("backends/mps/fusewright_mps/a.py", "from fusewright_mps import target\n")
    )
    assert not list(check_tree.findings("common/fusewright/_torch_compat.py", "import torch._dynamo\n"))


def test_a_vendor_job_passes_only_on_its_real_device() -> None:
    row = {
        "name": "b",
        "loads": True,
        "device": "cpu x",
        "simulated": False,
        "runs": True,
        "reason": "r",
        "fix": "f",
    }
    assert require_backend.verdict({"rows": [row]}, "b") == ""
    assert "not installed" in require_backend.verdict({"rows": [row]}, "c")
    for change in ({"device": None}, {"simulated": True}, {"runs": False}, {"loads": False}):
        assert require_backend.verdict({"rows": [{**row, **change}]}, "b")
    stand_in = {"rows": [{**row, "simulated": True}]}
    assert require_backend.verdict(stand_in, "b", simulated=True) == ""
    assert require_backend.verdict({"rows": [{**row, "simulated": True, "runs": False}]}, "b", simulated=True)


def test_the_library_imports_neither_click_nor_rich_nor_a_vendor() -> None:
    code = "import sys, json, fusewright.dynamo, fusewright.registry; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tops = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not tops & {"click", "rich", "transformers", "llvmlite", *(check_tree.VENDORS | check_tree.SHARED).values()}


def test_the_host_asks_for_no_compiler_and_for_nothing_of_a_vendor() -> None:
    project = _project("common")
    asked = [*project["dependencies"], *(d for more in project["optional-dependencies"].values() for d in more)]
    names = {d.partition("[")[0].partition(">")[0].strip() for d in asked}
    tools = {"click", "rich", "transformers", "psutil", "pytest", "expecttest", "onnxruntime", "onnxscript"}
    assert names == {"torch", "numpy", "filelock", "platformdirs", "fusewright", *tools}


WITHOUT = """
import sys
for name in ("llvmlite", "fusewright_cpu", "triton", "click", "rich"):
    sys.modules[name] = None
import torch
from fusewright import pipeline, report
from fusewright.capture import capture
from fusewright.config import Options
from fusewright.interface import Device
from fusewright.toolkit.backend.fused import FusedBackend

class Kernels(FusedBackend):
    name, device_type = "kernels", "cpu"
    probe = classmethod(lambda cls: Device("cpu", "any"))

options = Options.parse({"cache": False, "fallback": "error", "strict": True})
def backend(gm, inputs):
    compile_graph = lambda *given: pipeline.compile_graph(Kernels(), options, *given)
    return capture.capture(gm, inputs, compile_graph)

x = torch.randn(4, 8)
with torch.no_grad(), report.recording() as reports:
    got = torch.compile(lambda x: (x * x).relu().softmax(-1), backend=backend)(x)
torch.testing.assert_close(got, (x * x).relu().softmax(-1))
assert "launch" in reports[0].texts["plan"]
"""


def test_without_a_compiler_the_interpreter_runs_kernels() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_check_tree_finds_circles_arrows_that_run_up_and_crowded_folders() -> None:
    circle = {"fusewright.graph.a": "from fusewright.graph import b", "fusewright.graph.b": "from fusewright.graph.a import x"}
    assert any("import each other" in f for f in check_tree.structure(circle))
    up = {"fusewright.errors": "from fusewright import pipeline", "fusewright.pipeline": "from fusewright import errors"}
    assert "fusewright.errors imports fusewright.pipeline, which is in a higher layer" in check_tree.structure(up)
    down = {"fusewright.errors": "", "fusewright.pipeline": "from fusewright import errors"}
    assert not list(check_tree.structure(down))
    many = [f"common/fusewright/a/m{k}.py" for k in range(check_tree.MODULES + 1)]
    assert list(check_tree.crowded(many)) and not list(check_tree.crowded(many[1:]))
    assert list(check_tree.crowded(f"ci/m{k}.py" for k in range(check_tree.MODULES + 1)))
