"""A fixed sample of torch's OpInfo database through `ci/operators/opinfo.py`, as in CI, and its verdicts on bad backends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ci.operators import opinfo

SAMPLE = """
add addmm all amax arange argmax atan2 baddbmm bernoulli bmm cat chunk clamp clone cumsum diagonal div.floor_rounding
einsum exp expand flip gather index_add index_put isnan linalg.inv log_softmax logsumexp masked_fill matmul
max.reduction_with_dim mean mul nan_to_num nn.functional.batch_norm nn.functional.conv2d
nn.functional.cross_entropy nn.functional.dropout nn.functional.embedding
nn.functional.gelu
nn.functional.interpolate.bilinear nn.functional.layer_norm nn.functional.linear nn.functional.max_pool2d
nn.functional.pad.constant
nn.functional.scaled_dot_product_attention pow prod remainder roll scatter_add scatter_reduce.amax select
softmax sort split std stack sum t topk transpose tril unbind unfold var where
""".split()

ONE_EACH = ("--samples", "1", "--group", "100")
"""One sample of each entry, in one child process: each child imports the database."""

BAD = """
import os
import torch

def wrong(gm, example_inputs):
    def run(*args):
        return [r + 1 if r.is_floating_point() else r for r in gm(*args)]
    return run

def crash(gm, example_inputs):
    if any("exp" in str(n.target) for n in gm.graph.nodes):
        os.kill(os.getpid(), 11)
    return gm.forward
"""


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """Make a folder with an installed package of two bad backends."""
    info = tmp_path / "opinfo_bad-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: opinfo-bad\nVersion: 1\n")
    names = "opinfo_wrong = opinfo_bad:wrong\nopinfo_crash = opinfo_bad:crash\n"
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{names}")
    (tmp_path / "opinfo_bad.py").write_text(BAD)
    return tmp_path


@pytest.mark.hardware("x86_onednn")
def test_sample(tmp_path: Path) -> None:
    names = "^(" + "|".join(map(re.escape, SAMPLE)) + ")$"
    assert opinfo.main([*ONE_EACH, "--backend", "x86_onednn", "--ops", names, "--json", str(tmp_path / "out.json")]) == 0
    found: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {r["entry"] for r in found} == set(SAMPLE)
    assert all(r["checks"] for r in found) and sum(r["lowered"] for r in found) > 20


OTHERS = {
    "symbolic sizes": ("cat roll nn.functional.interpolate.nearest", ["--dynamic"]),
    "other dtypes": ("add index_put", ["--dtypes", "bool,bfloat16"]),
}


@pytest.mark.hardware("x86_onednn")
@pytest.mark.parametrize("name", OTHERS)
def test_sample_of(name: str) -> None:
    entries, options = OTHERS[name]
    names = "^(" + "|".join(map(re.escape, entries.split())) + ")$"
    assert opinfo.main(["--backend", "x86_onednn", "--ops", names, "--samples", "1", "--no-gradients", *options]) == 0


def test_faults_are_found(plugins: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", str(plugins))
    assert opinfo.main(["--backend", "opinfo_wrong", "--ops", "^(exp|argmax)$", "--samples", "1", "--no-gradients"]) == 1
    told = capsys.readouterr().out
    assert "exp float32: sample 0: value: 0 error 1" in told and "argmax" not in told


def test_a_crash_costs_one_entry(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(plugins))
    out = plugins / "out.json"
    options = ["--backend", "opinfo_crash", "--samples", "1", "--ops", "^(cos|exp|sin)$", "--json", str(out)]
    assert opinfo.main(options) == 1
    found = {r["entry"]: r["problems"] for r in json.loads(out.read_text())["results"]}
    assert found == {"cos": [], "exp": ["crash: the process ended with -11"], "sin": []}


def test_nothing_matches() -> None:
    assert opinfo.main(["--backend", "fusewright_null", "--ops", "^no_such_entry$"]) == 2
