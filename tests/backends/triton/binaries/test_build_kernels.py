"""`ci/gpu/build_kernels.py`: collecting and building a model's kernels, and reasons to fail."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

from ci.gpu import build_kernels as tool
from fusewright.toolkit.ir import Kernel
from fusewright_triton.build import workers
from tests.backends.triton import kernels

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def _own_triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_kernels_of_a_model_build_for_every_target() -> None:
    """Test a few of them, forward and backward."""
    found = tool.kernels_of("bert_small", "rocm_triton", "small", ["bf16"])
    assert any("backward" in k.name for k in found.values())
    some = dict(sorted(found.items())[::12])
    rows = [tool.build(some, t) for t in tool.TARGETS.values()]
    workers.pool().close()
    assert [r.target for r in rows] == ["sm_80", "sm_90", "gfx90a", "gfx942", "gfx950", "gfx1100"]
    for row in rows:
        assert not row.failures and row.kernels == len(some) > 2 and row.registers[0] > 0


def test_what_does_not_fit_or_build_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    h100 = tool.TARGETS["sm_90"]
    softmax = {"k": kernels.softmax()}
    row = tool.build(softmax, dataclasses.replace(h100, thread_registers=8))
    assert len(row.failures) == 1 and "registers a thread, sm_90 has 8" in row.failures[0]
    row = tool.build(softmax, dataclasses.replace(h100, arch="sm_1"))
    assert len(row.failures) == 1 and row.failures[0].startswith("softmax")
    workers.pool().close()

    monkeypatch.setattr(tool, "kernels_of", lambda *a: softmax)
    monkeypatch.setattr(tool, "BY_HAND", {})
    monkeypatch.setattr(tool, "build", lambda k, t: tool.Row(t.arch, len(k), failures=["softmax: too big"]))
    assert tool.main(["--models", "bert", "--targets", "sm_80"]) == 1
    assert "FAILED sm_80 softmax: too big" in capsys.readouterr().out
    monkeypatch.setattr(tool, "build", lambda k, t: tool.Row(t.arch, len(k)))
    assert tool.main(["--models", "bert", "--backend", "rocm_triton"]) == 0
    assert "gfx1100" in (shown := capsys.readouterr().out) and "sm_80" not in shown


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_kernels_written_by_hand_build(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = ("attention, a window, 64, bf16", "product with gelu, bf16", "int8 products, 1 row")
    monkeypatch.setattr(tool, "BY_HAND", {name: tool.BY_HAND[name] for name in forms})
    row = tool.Row(target)
    tool.add_by_hand(row, tool.TARGETS[target])
    workers.pool().close()
    parts = 2 * (target == "gfx942")  # its sums are split into parts, which another kernel adds
    assert not row.failures and row.functions == 4 + parts and row.registers[1].endswith(forms)


def test_a_record_says_what_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "kernels_of", lambda *a: {"k": kernels.softmax()})
    monkeypatch.setattr(tool, "BY_HAND", {})
    monkeypatch.setattr(tool, "build", lambda k, t: tool.Row(t.arch, len(k)))
    record = tmp_path / "built.json"
    assert tool.main(["--models", "bert", "--targets", "gfx942", "--json", str(record)]) == 0
    found = json.loads(record.read_text())
    assert (found["models"], found["targets"], found["dtypes"]) == ("bert", "gfx942", "fp32,bf16")
    assert found["versions"]["triton"] and len(found["date"]) == 10
    assert [(r["target"], r["kernels"]) for r in found["rows"]] == [("gfx942", 1)]


def test_an_empty_collection_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: dict[str, Kernel] = {}
    monkeypatch.setattr(tool, "kernels_of", lambda *a: nothing)
    assert tool.main(["--models", "vit", "--targets", "sm_90"]) == 1


@pytest.mark.parametrize(
    ("argument", "message"), [("--models=vitt", "no model 'vitt'; did you mean 'vit'"), ("--targets=sm_91", "'sm_90'")]
)
def test_wrong_names(argument: str, message: str) -> None:
    with pytest.raises(tool.OptionError, match=message):
        tool.main([argument])
